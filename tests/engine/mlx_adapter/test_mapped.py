"""Weights as views of their files: equal, shared, gone with the last array; and what happens to bad files."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import pytest
from daemon import PATIENCE_S, Daemon, wait_until
from families import build_family
from host import Host, finished, raw

from omlxd.common.heap import trim_heap
from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.runtime import mapped
from omlxd.engine.mlx_adapter.runtime.mapped import MappedWeights
from omlxd.errors import ModelError
from omlxd.models import demo
from tools.bench.weights_mmap import align

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it has not been tried"),
    pytest.mark.cpu_rules("weights are mapped on a Linux CPU alone"),
]

ROWS = {"a": ("F32", 300), "b": ("BF16", 100), "c": ("U32", 128), "d": ("F16", 77), "e": ("F32", 40)}
SIZES = {"F32": 4, "BF16": 2, "U32": 4, "F16": 2}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch):
    """A window of any size: arrays of a heap are not given back, and the last test looks at large ones."""
    monkeypatch.setattr(mapped, "LEAST_WINDOW", 1)


def weights(folder: Path, pad: int = 0, rows: int = 64) -> Path:
    """A safetensors file whose tensors begin `pad` bytes behind a multiple of 8."""
    entries, at = {}, 0
    for name, (dtype, columns) in ROWS.items():
        size = rows * columns * SIZES[dtype]
        entries[name] = {"dtype": dtype, "shape": [rows, columns], "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8 + pad)
    file = folder / "model.safetensors"
    values = (mx.random.normal((at // 4,), key=mx.random.key(1))).view(mx.uint8)
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(memoryview(values)))
    return file


def maps(file: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(file))


def read(file: Path, mode: str = "on", float32: bool = False) -> tuple[dict[str, mx.array], MappedWeights]:
    views = MappedWeights(mode, float32)
    with views.reading():
        loaded = mx.load(str(file))
    assert isinstance(loaded, dict)
    return loaded, views


@pytest.fixture
def cache_limit():
    before = mx.set_cache_limit(1 << 30)
    yield mx.set_cache_limit
    mx.set_cache_limit(before)
    mx.clear_cache()


@pytest.mark.parametrize("limit", [0, pytest.param(1 << 40, marks=pytest.mark.slow)])
def test_views_are_what_the_file_holds_and_live_as_long_as_an_array_of_them(
    tmp_path: Path, monkeypatch, cache_limit, limit: int
):
    cache_limit(limit)
    monkeypatch.setattr(mapped, "LEAST_WINDOW", 33 << 20)
    file = weights(tmp_path, rows=40_000)
    trim_heap()  # A window that lies in what earlier tests left free of the heap would stay there.
    plain = mx.load(str(file))
    assert isinstance(plain, dict)
    views, holder = read(file)
    assert holder.nbytes >= 80 << 20 and maps(file) >= 1 and views.keys() == plain.keys()
    for name, array in plain.items():
        assert views[name].dtype == array.dtype and views[name].shape == array.shape
        assert bool(mx.array_equal(views[name].view(mx.uint8), array.view(mx.uint8)))
    views["c"][0, 0] = 7  # A private mapping: no file is written.
    mx.eval(views["c"])
    assert not holder.changed()
    kept = views["d"][5] + 0
    part = views["b"]
    mx.eval(kept)
    del views, array, plain
    gc.collect()
    assert maps(file) >= 1 and part.shape == (40_000, 100)
    del part
    gc.collect()
    wait_until(lambda: maps(file) == 0)  # Whatever MLX's cache keeps of arrays that went.


@pytest.mark.parametrize("pad", range(8))
def test_what_is_not_aligned_is_read(tmp_path: Path, pad: int, caplog):
    file = weights(tmp_path, pad)
    plain = mx.load(str(file))
    assert isinstance(plain, dict)
    with caplog.at_level(logging.WARNING):
        views, holder = read(file)
    for name, array in plain.items():
        assert bool(mx.array_equal(views[name].view(mx.uint8), array.view(mx.uint8)))
    assert (holder.nbytes > 0) == (pad % 2 == 0)
    assert ("is read, not mapped: its tensors are small, or at odd offsets" in caplog.text) == (pad % 2 == 1)


def test_small_weights_and_those_that_become_float32_are_read(tmp_path: Path, monkeypatch, caplog):
    file = weights(tmp_path)
    assert not read(file, "off")[1].nbytes and read(file, "auto")[1].nbytes
    assert not read(file, "auto", float32=True)[1].nbytes and read(file, "on", float32=True)[1].nbytes
    assert "is mapped, and then copied: its weights are made float32" in caplog.text
    monkeypatch.setattr(mapped, "backend", lambda: "metal")
    assert not read(file, "auto")[1].nbytes
    monkeypatch.setattr(mapped, "LEAST_WINDOW", 33 << 20)
    assert not read(file)[1].nbytes


def test_where_dlpack_would_copy_weights_are_read(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr(mapped, "_lays_over", lambda: False)
    file = weights(tmp_path)
    with caplog.at_level(logging.WARNING):
        views, holder = read(file)
    assert not holder.nbytes and views["a"].shape == (64, 300)
    assert "without a copy" in caplog.text and len(caplog.records) == 1


@pytest.mark.parametrize("damage", ["cut", "header", "empty", "offsets"])
def test_a_file_that_is_cut_off_is_refused_before_it_is_mapped(tmp_path: Path, damage: str):
    file = weights(tmp_path)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    file.write_bytes(
        {
            "cut": data[:-5000],
            "header": data[: length // 2],
            "empty": b"",
            "offsets": data[:8] + b'{"a": 3}'.ljust(length) + data[8 + length :],
        }[damage]
    )
    views = MappedWeights("on", False)
    with pytest.raises(ModelError) as caught:
        views._views(str(file))
    assert str(file) in caught.value.message
    with pytest.raises(Exception), views.reading():  # noqa: B017 - MLX's own error comes first.
        mx.load(str(file))


def test_a_file_that_is_written_to_is_told_and_one_that_is_replaced_is_not(tmp_path: Path):
    file = weights(tmp_path)
    views, holder = read(file)
    before = bytes(memoryview(views["e"]))
    other = tmp_path / "other"
    other.write_bytes(file.read_bytes()[:-4] + bytes(4))
    other.replace(file)
    assert not holder.changed() and bytes(memoryview(views["e"])) == before
    _, again = read(file)
    os.utime(file, ns=(1, 1))
    assert again.changed() == str(file) and not holder.changed()


@pytest.mark.slow
def test_a_file_that_is_cut_while_it_is_mapped_ends_the_process_by_sigbus(tmp_path: Path):
    file = weights(tmp_path, rows=40_000)
    code = (
        "import os, sys, mlx.core as mx\n"
        "from omlxd.engine.mlx_adapter.runtime.mapped import MappedWeights\n"
        "views = MappedWeights('on', False)\n"
        "with views.reading():\n"
        "    loaded = mx.load(sys.argv[1])\n"
        "os.truncate(sys.argv[1], 4096)\n"
        "assert views.changed()\n"
        "mx.eval(mx.sum(loaded['a']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True)
    assert done.returncode == -7, done


def test_a_model_of_views_computes_the_same_and_refuses_requests_once_a_file_was_written_to(tmp_path: Path):
    folder = demo.build_demo(tmp_path / "demo")
    for file in folder.glob("*.safetensors"):
        align(file)
    plain, views = (mlx_adapter.load(folder, weights_mmap=mode) for mode in ("off", "on"))
    assert views.mapped.nbytes > views.weight_bytes * 0.9 and not plain.mapped.nbytes
    one, other = (each.model(mx.array([[5, 6, 7]])) for each in (plain, views))
    assert bool(mx.array_equal(one, other))

    host = Host(folder)
    try:
        host.engine.loaded.mapped = views.mapped
        assert finished(host.ask(raw("a", max_tokens=1)))
        os.utime(next(folder.glob("*.safetensors")), ns=(1, 1))
        with pytest.raises(ModelError, match="written to under its mapping; the model is loaded again"):
            host.send(raw("a", max_tokens=1))
    finally:
        host.close()


@pytest.mark.slow
def test_a_daemon_loads_a_file_that_was_written_to_again_and_says_that_one_is_cut(tmp_path: Path):
    large = {"intermediate_size": 50_000, "num_hidden_layers": 1}  # A window has 33 MiB at least.
    (file,) = (folder := build_family("qwen3", tmp_path / "model", changes=large)).glob("*.safetensors")
    align(file)
    with Daemon(tmp_path / "home", "--weights-mmap", "on", model=folder) as daemon:

        def state() -> str:
            (model,) = daemon.http.get("/omlxd/models").json()["models"]
            return model["state"]

        def until_ended() -> None:
            end = time.monotonic() + PATIENCE_S
            while state() == "ready":
                assert time.monotonic() < end, daemon.logged()[-2000:]
                time.sleep(0.1)

        asked = {"prompt": "a kettle", "max_tokens": 1, "temperature": 0}
        first = daemon.http.post("/v1/completions", json=asked)
        os.utime(file, ns=(1, 1))
        until_ended()
        again = daemon.http.post("/v1/completions", json=asked)
        assert again.status_code == 200, again.text
        assert again.json()["choices"] == first.json()["choices"]
        os.truncate(file, file.stat().st_size // 2)
        until_ended()
        cut = daemon.http.post("/v1/completions", json=asked)
        assert cut.status_code == 400 and "is truncated" in cut.text, cut.text
