"""A cache dir for tests of `omlxd cache`, and what damages its files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kv_fakes import BLOCK, LAYOUT, NAMESPACE, OTHER_NAMESPACE, block_format, chain, payload_of

from omlxd.cli.main import main
from omlxd.kv.checkpoint import CheckpointFiles, checkpoint_name
from omlxd.kv.cold.tier import ColdTier
from omlxd.kv.files.block_file import BlockKey
from omlxd.kv.files.fs import FileSystem
from omlxd.kv.files.namespace import NamespaceInfo, describe_namespace

DAY = 86400
KEYS = chain(range(8 * BLOCK))


def blocks_in(root: Path) -> list[Path]:
    return list(root.rglob("*.safetensors"))


class Cache:
    """A cache dir of two models: `org/tiny` with blocks and a checkpoint, and one without description."""

    def __init__(self, root: Path, model: Path):
        self.root = root
        root.mkdir()
        model.mkdir()
        self.tier = ColdTier(root, block_format())
        for key in KEYS:
            self.tier.store(key, payload_of(key.block_hash).buffers())
        other = chain(range(2 * BLOCK), OTHER_NAMESPACE)
        self.other = ColdTier(root, block_format(OTHER_NAMESPACE))
        for key in other:
            self.other.store(key, payload_of(key.block_hash).buffers())
        at = KEYS[3].block_hash
        self.checkpoint = CheckpointFiles(root, NAMESPACE, lambda position: LAYOUT).at(16)
        buffers = [memoryview(bytes(g.nbytes(1))) for g in LAYOUT.groups]
        self.checkpoint.store(BlockKey(checkpoint_name(at), at, [16]), buffers)
        describe(root, model)

    def path(self, index: int = 0) -> Path:
        return self.root / self.tier.path_of(KEYS[index].block_hash)

    def run(self, *words: str) -> int:
        return main(["cache", *words, "--paged-ssd-cache-dir", str(self.root)])


def describe(root: Path, model: Path, name: str = "org/tiny") -> None:
    describe_namespace(
        root,
        NamespaceInfo(
            model_id=name,
            model_path=str(model),
            model_type="qwen3",
            block_size=BLOCK,
            block_bytes=20480,
            facts_digest=NAMESPACE.hex(),
        ),
        FileSystem(),
    )


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", tmp_path / "model")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("OMLXD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def flip(path: Path, at: int, bits: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bits
    path.write_bytes(data)


def replace(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data and len(old) == len(new)
    path.write_bytes(data.replace(old, new, 1))


HEADER = block_format().header_bytes
