"""Weights' digests: another byte is another namespace, and the same files are read once."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from pathlib import Path

import pytest
from daemon import wait_until
from families import build_family
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from kv_machines import QUICK

from omlxd import wire
from omlxd.engine import mlx_adapter
from omlxd.engine.kvio import fingerprint
from omlxd.engine.kvio.fingerprint import file_identities, weight_fingerprints
from omlxd.engine.server.host import EngineHost
from omlxd.errors import ModelError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model-1.safetensors").write_bytes(b"a" * 1000)
    (folder / "model-2.safetensors").write_bytes(b"b" * 1000)
    (folder / "config.json").write_text("{}")
    return folder


def test_every_file_that_decides_counts(model: Path):
    before = weight_fingerprints(model, None)
    assert set(before) == {"model-1.safetensors", "model-2.safetensors", "config.json"}
    for name in before:
        data = bytearray((model / name).read_bytes())
        data[-1] ^= 1
        (model / name).write_bytes(data)
        after = weight_fingerprints(model, None)
        assert [n for n in after if after[n] != before[n]] == [name]
        before = after


def test_files_that_nobody_loads_count_for_nothing(model: Path):
    before = weight_fingerprints(model, None), set(file_identities(model))
    for name in ("._model-1.safetensors", "consolidated.safetensors"):
        (model / name).write_bytes(b"c" * 1000)
    assert (weight_fingerprints(model, None), set(file_identities(model))) == before


def test_a_file_is_read_once_and_again_when_it_changes(model: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(fingerprint, "_SETTLED_S", -1.0)
    memo = tmp_path / "memo"
    memo.mkdir()
    first = weight_fingerprints(model, memo)
    opened: list[str] = []
    whole = open

    def watched(path, *args, **kwargs):
        opened.append(Path(path).name)
        return whole(path, *args, **kwargs)

    monkeypatch.setattr(fingerprint, "open", watched, raising=False)
    assert weight_fingerprints(model, memo) == first
    assert opened == []
    # Same size, and the old modification time put back: the change time still tells.
    path = model / "model-1.safetensors"
    stat = path.stat()

    def rewritten_later() -> bool:
        """A file system's clock ticks some hundred times a second."""
        path.write_bytes(b"c" * 1000)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        return path.stat().st_ctime_ns != stat.st_ctime_ns

    wait_until(rewritten_later)
    assert weight_fingerprints(model, memo)["model-1.safetensors"] != first["model-1.safetensors"]
    assert opened == ["model-1.safetensors"]


def test_a_file_whose_time_is_ahead_of_the_clock_is_read_once_too(model: Path, tmp_path: Path, monkeypatch):
    """It came from a machine whose clock is fast, or the clock was put back."""
    monkeypatch.setattr(fingerprint, "_SETTLED_S", -1.0)
    (memo := tmp_path / "memo").mkdir()
    ahead = time.time() + 86400
    os.utime(model / "model-1.safetensors", (ahead, ahead))
    first = weight_fingerprints(model, memo)
    monkeypatch.delattr(fingerprint.xxhash, "xxh3_128")
    assert weight_fingerprints(model, memo) == first


def test_a_hub_blob_has_its_names_digest_until_it_is_written_anew(model: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(fingerprint, "_SETTLED_S", -1.0)
    name = hashlib.sha256(b"weights").hexdigest()
    blob = tmp_path / "blobs" / name
    blob.parent.mkdir()
    blob.write_bytes(b"weights")
    os.utime(blob, (1e9, 1e9))
    (model / "model-3.safetensors").symlink_to(blob)
    (memo := tmp_path / "memo").mkdir()
    for _ in range(2):
        assert weight_fingerprints(model, memo)["model-3.safetensors"] == name
    blob.write_bytes(b"WEIGHTS")  # The same inode, size and name.
    assert weight_fingerprints(model, memo)["model-3.safetensors"] == hashlib.sha256(b"WEIGHTS").hexdigest()


@pytest.mark.parametrize("content", ["", "not json", "[1, 2]", '{"a": 1}'])
def test_a_damaged_memo_is_made_anew(model: Path, tmp_path: Path, content: str):
    memo = tmp_path / "memo"
    memo.mkdir()
    (memo / "fingerprints.json").write_text(content)
    assert weight_fingerprints(model, memo) == weight_fingerprints(model, None)


def test_a_memo_that_cannot_be_written_is_no_fault(model: Path, tmp_path: Path):
    taken = tmp_path / "file"
    taken.write_text("")
    assert weight_fingerprints(model, taken / "sub") == weight_fingerprints(model, None)


def replace(path: Path, data: bytes) -> None:
    path.with_name("new").write_bytes(data)
    path.with_name("new").replace(path)


class ModelMachine(RuleBasedStateMachine):
    """Weight files are replaced at any moment: before a load, between load and digest, amid a digest."""

    @initialize()
    def start(self) -> None:
        self.tmp = tempfile.TemporaryDirectory()
        self.memo, self.model = Path(self.tmp.name) / "memo", Path(self.tmp.name) / "model"
        self.memo.mkdir()
        self.model.mkdir()
        self.content = 0
        for name in ("config.json", "model.safetensors"):
            (self.model / name).write_bytes(b"0" * 1000)
        self.namespaces: dict[str, bytes] = {}

    @rule(in_place=st.booleans())
    def change(self, in_place: bool = False) -> None:
        self.content += 1
        data = f"{self.content:04}".encode() * 250
        path = self.model / "model.safetensors"
        path.write_bytes(data) if in_place else replace(path, data)

    @rule(
        when=st.sampled_from(["never", "after load", "amid digest", "after digest"]), in_place=st.booleans()
    )
    def load(self, when: str, in_place: bool) -> None:
        files = file_identities(self.model)
        loaded = (self.model / "model.safetensors").read_bytes()
        if when == "after load":
            self.change(in_place)
        whole, once = fingerprint.xxhash.xxh3_128, iter([True])  # Files are digested side by side.

        def digest(*data: bytes):
            if when == "amid digest" and not data and next(once, False):
                self.change(in_place)
            return whole(*data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fingerprint, "_SETTLED_S", -1.0)
            patch.setattr(fingerprint.xxhash, "xxh3_128", digest)
            namespace = weight_fingerprints(self.model, self.memo)["model.safetensors"]
        if when == "after digest":
            self.change(in_place)
        if file_identities(self.model) == files:
            assert self.namespaces.setdefault(namespace, loaded) == loaded, "one namespace, two weights"

    def teardown(self) -> None:
        if hasattr(self, "tmp"):
            self.tmp.cleanup()


def test_weights_replaced_at_any_moment_never_share_a_namespace():
    run_state_machine_as_test(ModelMachine, settings=settings(QUICK, max_examples=40, stateful_step_count=12))


def test_a_file_changed_a_moment_ago_is_not_remembered(model: Path, tmp_path: Path):
    weight_fingerprints(model, tmp_path)
    assert not (tmp_path / "fingerprints.json").exists()


def test_a_memo_folder_that_is_gone_is_not_made(model: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(fingerprint, "_SETTLED_S", -1.0)
    weight_fingerprints(model, tmp_path / "gone")
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_file_replaced_between_load_and_digest_refuses_the_load(tmp_path: Path, monkeypatch, name: str):
    folder = build_family("qwen3", tmp_path / "qwen3")
    whole = mlx_adapter.load

    def load(path: Path, *_: object):
        loaded = whole(path)
        replace(folder / name, (folder / name).read_bytes())
        return loaded

    monkeypatch.setattr(mlx_adapter, "load", load)
    with pytest.raises(ModelError, match="changed while the model was being loaded"):
        EngineHost(wire.Load(model_path=str(folder), model_id="m", cache=wire.CacheSettings()), None, None)  # type: ignore[arg-type]
