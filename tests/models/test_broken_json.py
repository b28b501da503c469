"""JSON of model folders that is no UTF-8, too deep or absurd: an error that names the file.

No other model is in trouble for it. What the loader takes, the check takes.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from daemon import demo_model

from omlxd.errors import ModelError, OmlxdError
from omlxd.front.engines.pool import EnginePool
from omlxd.models import demo
from omlxd.models.adapters import check_adapter
from omlxd.models.catalog import describe
from omlxd.models.footprint import footprint
from omlxd.models.resolve import check_folder

BROKEN = {
    "no UTF-8": b'{"a": "\xff"}',
    "no UTF-8 in a name": b'{"\xc3": 1}',
    "too deep": b"[" * 200_000,
    "deep object": b'{"a":' * 100_000,
    "too many digits": b'{"a": ' + b"9" * 5000 + b"}",
}
NAMES = [
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("preprocessor_config.json", "chat_template.json", "model.safetensors.index.json"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_model(), tmp_path / "model"))


def look_at(folder: Path) -> None:
    """What lists of models read of each."""
    footprint(folder), footprint(folder, float32=True), describe(folder)


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("name", NAMES)
def test_the_error_names_the_file(folder: Path, name: str, data: bytes):
    (folder / name).write_bytes(data)
    look_at(folder)
    with pytest.raises(ModelError, match=name):
        check_folder(folder)


@pytest.mark.parametrize("name", ["omlxd_import.json", "omlxd_demo.json", "tokenizer_config.json"])
@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_what_lists_read_is_left_out(folder: Path, name: str, data: bytes):
    (folder / name).write_bytes(data)
    look_at(folder)
    assert demo.is_demo(folder) is (name != "omlxd_demo.json")


ABSURD = [b"1e999", b"-1", b"9" * 400, b"null", b"[]", b"{}", b"1e300", b'"x"', b"true", b"NaN", b"-Infinity"]


@pytest.mark.parametrize("value", ABSURD, ids=lambda value: value[:9].decode())
def test_absurd_values_of_a_config(folder: Path, value: bytes):
    config = json.loads((folder / "config.json").read_bytes())
    for name in config:
        text = json.dumps({**config, name: "@"}).encode().replace(b'"@"', value)
        (folder / "config.json").write_bytes(text)
        look_at(folder)
        try:
            check_folder(folder)
        except OmlxdError as error:
            assert "config.json" in error.message


def test_each_flipped_bit_of_a_weight_header(folder: Path):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    for at in range(0, 8 + length, max(1, length // 20)):
        for bit in (0, 7):
            broken = bytearray(whole)
            broken[at] ^= 1 << bit
            file.write_bytes(broken)
            look_at(folder)
            try:
                check_folder(folder)
            except OmlxdError as error:
                assert "model.safetensors" in error.message


def test_a_broken_adapter_is_named(tmp_path: Path):
    (tmp_path / "adapters.safetensors").write_bytes(b"")
    for data in (b'{"fine_tune_type": "\xff"}', BROKEN["too deep"], b'{"num_layers": 1e999}'):
        (tmp_path / "adapter_config.json").write_bytes(data)
        with pytest.raises(OmlxdError, match=r"adapter_config\.json"):
            check_adapter(tmp_path)


def test_each_folder_is_measured_by_itself(caplog: pytest.LogCaptureFixture):
    measured: list[str] = []

    def model(name: str, error: Exception | None = None) -> Any:
        def measure() -> None:
            if error:
                raise error
            measured.append(name)

        return SimpleNamespace(model_id=name, measure=measure)

    pool: Any = SimpleNamespace(_unreadable=set())
    for each in 2 * [model("a"), model("broken", UnicodeDecodeError("utf-8", b"", 0, 1, "x")), model("b")]:
        EnginePool._measure(pool, each)
    assert measured == 2 * ["a", "b"]
    assert [record.message.split(":")[0] for record in caplog.records] == ["broken"]  # Said once.


def test_a_model_of_ours_is_its_owners_alone(tmp_path: Path):
    built = demo.build_demo(tmp_path / "models" / "demo")
    modes = {path.stat().st_mode & 0o777 for path in built.iterdir()}
    assert modes == {0o600} and {p.stat().st_mode & 0o777 for p in (built, built.parent)} == {0o700}


# --------------------------------------------------------------------------- a stale index


def index_of(folder: Path, *files: str) -> None:
    names = {f"weight.{number}": file for number, file in enumerate(files)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]


def test_a_stale_index_beside_whole_weights(folder: Path):
    """mlx-lm loads each model*.safetensors, whatever the index says."""
    index_of(folder, *SHARDS)
    check_folder(folder)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(ModelError, match="truncated"):
        check_folder(folder)


def test_a_stale_index_beside_whole_shards(folder: Path):
    for shard in SHARDS:
        shutil.copy(folder / "model.safetensors", folder / shard)
    (folder / "model.safetensors").unlink()
    index_of(folder, *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)))
    check_folder(folder)


@pytest.mark.parametrize("named", [[], SHARDS[:1], ["model.safetensors"]])
def test_half_of_the_weights_is_half_written(folder: Path, named: list[str]):
    """What the index names, and a shard without its others, are no whole weights."""
    if named != ["model.safetensors"]:
        (folder / "model.safetensors").rename(folder / SHARDS[0])
    missing = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index_of(folder, *named, *missing)
    with pytest.raises(ModelError, match="half-written"):
        check_folder(folder)
