"""Block files: any reader opens them, and nothing but the right file, whole, is ever believed."""

from __future__ import annotations

import errno
import json
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fast_or_slow import rest_slow
from faulty_fs import Fault, FaultyFileSystem
from kv_fakes import (
    BLOCK,
    LAYOUT,
    NAMESPACE,
    OTHER_NAMESPACE,
    block_format,
    bytes_of,
    chain,
    empty_payload,
    lone_key,
    payload_of,
    ram_folder,
)
from safetensors.numpy import load_file

import omlxd.kv.files.block_file as block_file
from omlxd.kv.cold.tier import ColdTier
from omlxd.kv.files.block_file import ALIGNMENT, BlockFileError, BlockFormat, BlockKey
from omlxd.kv.files.fs import IOV_MAX, FileSystem
from omlxd.kv.layout import Group, KVLayout

KEYS = chain(range(12))
KEY = KEYS[1]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="omlxd-kv-", dir=ram_folder()) as folder:
        yield Path(folder)


@pytest.fixture
def tier(tmp_path: Path) -> ColdTier:
    return ColdTier(tmp_path, block_format())


def stored(tier: ColdTier, key: BlockKey = KEY) -> Path:
    """Store `key`'s block; its file."""
    tier.store(key, payload_of(key.block_hash).buffers())
    return Path(tier.root) / tier.path_of(key.block_hash)


def load(tier: ColdTier, key: BlockKey = KEY) -> bytes:
    payload = empty_payload()
    tier.load(key, payload.buffers())
    return payload.tobytes()


def refused(tier: ColdTier, path: Path, key: BlockKey = KEY) -> None:
    """Loading is a miss and removes the file."""
    with pytest.raises(BlockFileError):
        load(tier, key)
    assert not os.path.lexists(path)
    with pytest.raises(FileNotFoundError):
        load(tier, key)


def test_what_is_stored_is_loaded(tier):
    stored(tier)
    assert load(tier) == bytes_of(KEY.block_hash)


def test_any_safetensors_reader_opens_it(tier):
    path = stored(tier)
    tensors = load_file(path)
    assert set(tensors) == {"k0", "v0", "k1", "v1", "latent"}
    assert tensors["k0"].shape == (2, BLOCK, 8) and tensors["k0"].dtype == np.float16
    assert tensors["latent"].shape == (1, BLOCK, 6) and tensors["latent"].dtype == np.float32
    joined = b"".join(tensors[name].tobytes() for group in LAYOUT.groups for name in group.names)
    assert joined == bytes_of(KEY.block_hash)


def test_the_header_says_what_the_block_is(tier):
    raw = stored(tier).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    meta = json.loads(raw[8 : 8 + length])["__metadata__"]
    assert meta["format"] == block_file.FORMAT and meta["kind"] == "tokens"
    assert meta["hash"] == KEY.block_hash.hex() and meta["parent"] == KEYS[0].block_hash.hex()
    assert meta["tokens"] == "4,5,6,7"
    assert NAMESPACE.hex().startswith(meta["namespace"])
    assert len(meta["digest"]) == 32


@pytest.mark.parametrize("block_size", [1, 16, 64, 256, 2048])
def test_the_data_starts_on_a_16_kib_boundary(block_size):
    format = BlockFormat(NAMESPACE, LAYOUT, block_size)
    key = BlockKey(KEY.block_hash, KEY.parent, [2**32 - 1] * block_size)
    header = format.header(key, b"0" * 32)
    assert len(header) == format.header_bytes and format.header_bytes % ALIGNMENT == 0
    assert 8 + int.from_bytes(header[:8], "little") == format.header_bytes
    json.loads(header[8:])
    assert format.file_bytes == format.header_bytes + LAYOUT.nbytes(block_size)


def test_a_header_longer_than_one_page_takes_two(tmp_path):
    layout = KVLayout((Group(tuple(f"layer{i}.{kv}" for i in range(200) for kv in "kv"), 1, 2, "F16"),))
    tier = ColdTier(tmp_path, BlockFormat(NAMESPACE, layout, BLOCK))
    assert tier.format.header_bytes == 2 * ALIGNMENT
    data = np.arange(layout.nbytes(BLOCK), dtype=np.uint32).astype(np.uint8)
    tier.store(KEY, [memoryview(data)])
    back = np.zeros_like(data)
    tier.load(KEY, [memoryview(back)])
    assert (back == data).all()
    assert len(load_file(tmp_path / tier.path_of(KEY.block_hash))) == 400


def test_a_payload_may_be_scattered_over_more_pieces_than_one_call_takes(tmp_path):
    pieces = IOV_MAX * 2 + 5
    layout = KVLayout((Group(("k",), 1, pieces, "U8"),))
    tier = ColdTier(tmp_path, BlockFormat(NAMESPACE, layout, BLOCK))
    data = np.random.default_rng(0).integers(0, 256, BLOCK * pieces, np.uint8)
    tier.store(KEY, [memoryview(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK)])
    # Into pieces of another size, of a larger array: as a restore into a sequence's final arrays is.
    final = np.zeros((pieces, BLOCK + 3), np.uint8)
    tier.load(KEY, [memoryview(row[1 : 1 + BLOCK]) for row in final])
    assert (final[:, 1 : 1 + BLOCK].ravel() == data).all()
    assert not final[:, 0].any() and not final[:, 1 + BLOCK :].any()


def test_a_payload_of_the_wrong_size_is_not_stored(tier, tmp_path):
    for buffers in ([memoryview(b"short")], [*payload_of(KEY.block_hash).buffers(), memoryview(b"more")]):
        with pytest.raises(OSError):
            tier.store(KEY, buffers)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_buffers_of_the_wrong_size_are_not_the_files_fault(tier):
    path = stored(tier)
    right = empty_payload().buffers()
    for buffers in (right[:1], [*right, memoryview(bytearray(1))], []):
        with pytest.raises(ValueError):
            tier.load(KEY, buffers)
    assert path.exists() and load(tier) == bytes_of(KEY.block_hash)


@pytest.mark.parametrize("size", [1, 7, 512, 703, 704, 705, 1 << 20])
def test_any_batch_size_reads_the_same_and_sees_the_same(tier, monkeypatch, size):
    monkeypatch.setattr(block_file, "READ_BYTES", size)
    path = stored(tier)
    assert load(tier) == bytes_of(KEY.block_hash)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    refused(tier, path)


# --------------------------------------------------------------------- damage


@pytest.mark.parametrize("every", rest_slow([8, 1], 8))
def test_every_flipped_header_byte_is_a_miss(tier, every):
    path = stored(tier)
    raw = bytearray(path.read_bytes())
    size = tier.format.header_bytes
    flips = random.Random(1)
    for at in range(0, size, every):
        raw[at] ^= (flip := 1 << flips.randrange(8))
        path.write_bytes(raw)
        with pytest.raises(BlockFileError):
            load(tier)
        assert not path.exists(), f"byte {at}"
        raw[at] ^= flip
    path.write_bytes(raw)
    assert load(tier) == bytes_of(KEY.block_hash)


def test_every_bit_of_the_digest_matters(tier):
    path = stored(tier)
    raw = bytearray(path.read_bytes())
    start = raw.index(b'"digest":"') + len(b'"digest":"')
    for at in range(start, start + 32):
        for bit in range(8):
            raw[at] ^= 1 << bit
            path.write_bytes(raw)
            refused(tier, path)
            raw[at] ^= 1 << bit


def test_every_flipped_payload_byte_is_a_miss(tier):
    path = stored(tier)
    raw = bytearray(path.read_bytes())
    for at in range(tier.format.header_bytes, len(raw)):
        raw[at] ^= 1 << (at % 8)
        path.write_bytes(raw)
        refused(tier, path)
        raw[at] ^= 1 << (at % 8)


def test_swapped_tensors_are_a_miss(tier):
    path = stored(tier)
    raw = path.read_bytes()
    at, each = tier.format.header_bytes, LAYOUT.groups[0].nbytes(BLOCK) // 4
    path.write_bytes(raw[:at] + raw[at + each : at + 2 * each] + raw[at : at + each] + raw[at + 2 * each :])
    refused(tier, path)


def test_truncation_anywhere_is_a_miss(tier):
    path = stored(tier)
    raw = path.read_bytes()
    header, end = tier.format.header_bytes, len(raw)
    group = header + LAYOUT.groups[0].nbytes(BLOCK)
    near = {at + d for at in (0, 8, header, group, end) for d in (-1, 0, 1)}
    pages, sampled = range(0, end, 512), random.Random(2).sample(range(end), 200)
    for size in sorted({s for s in (*near, *pages, *sampled) if 0 <= s < end}):
        path.write_bytes(raw[:size])
        refused(tier, path)


@pytest.mark.parametrize("more", [1, 511, 4096])
def test_a_longer_file_is_a_miss(tier, more):
    path = stored(tier)
    with path.open("ab") as file:
        file.write(bytes(more))
    refused(tier, path)


def test_a_file_of_zeros_of_the_right_size_is_a_miss(tier):
    path = stored(tier)
    path.write_bytes(bytes(tier.format.file_bytes))
    refused(tier, path)


def test_a_file_that_ends_while_it_is_read_is_a_miss(tier, tmp_path):
    path = stored(tier)

    class Shrinking(FileSystem):
        def size(self, fd: int) -> int:
            size = super().size(fd)
            os.truncate(path, size - 100)
            return size

    refused(ColdTier(tmp_path, block_format(), Shrinking()), path)


# --------------------------------------------------------------------- the wrong file in the right place


def misplaced(tier: ColdTier, writer: ColdTier, written: BlockKey) -> Path:
    """`writer`'s file of `written`, moved to where `tier` looks for KEY."""
    source = stored(writer, written)
    target = Path(tier.root) / tier.path_of(KEY.block_hash)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.rename(source, target)
    return target


def test_another_blocks_file_is_a_miss(tier):
    refused(tier, misplaced(tier, tier, lone_key(9)))


def test_another_namespaces_file_is_a_miss(tier, tmp_path):
    other = ColdTier(tmp_path, block_format(OTHER_NAMESPACE))
    refused(tier, misplaced(tier, other, KEY))


def test_other_tokens_under_the_same_hash_are_a_miss(tier):
    refused(tier, misplaced(tier, tier, BlockKey(KEY.block_hash, KEY.parent, [4, 5, 6, 8])))


def test_another_parent_is_a_miss(tier):
    refused(tier, misplaced(tier, tier, BlockKey(KEY.block_hash, KEYS[2].block_hash, KEY.tokens)))


@pytest.mark.parametrize("version", ["omlxd-kv-2", "omlxd-kv-0", "omlxd-kv-10"])
def test_another_format_version_is_a_miss(tier, tmp_path, monkeypatch, version):
    monkeypatch.setattr(block_file, "FORMAT", version)
    path = stored(ColdTier(tmp_path, block_format()))
    monkeypatch.undo()
    assert version.encode() in path.read_bytes()
    refused(tier, path)


def test_another_layout_of_the_same_size_is_a_miss(tier, tmp_path):
    first, second = LAYOUT.groups
    renamed = KVLayout((Group(("v0", "k0", "k1", "v1"), first.heads, first.dim, first.dtype), second))
    assert renamed.nbytes(BLOCK) == LAYOUT.nbytes(BLOCK)
    refused(tier, misplaced(tier, ColdTier(tmp_path, BlockFormat(NAMESPACE, renamed, BLOCK)), KEY))


# --------------------------------------------------------------------- things that are not files


def test_a_symlink_is_not_followed(tier, tmp_path):
    path = stored(tier)
    elsewhere = tmp_path / "elsewhere"
    os.rename(path, elsewhere)
    path.symlink_to(elsewhere)
    assert not tier.has(KEY.block_hash)
    with pytest.raises(OSError) as raised:
        load(tier)
    assert raised.value.errno == errno.ELOOP
    assert elsewhere.exists()
    stored(tier)
    assert not path.is_symlink() and load(tier) == bytes_of(KEY.block_hash)


def test_a_folder_in_a_files_place_is_a_miss(tier):
    path = Path(tier.root) / tier.path_of(KEY.block_hash)
    path.mkdir(parents=True)
    assert not tier.has(KEY.block_hash)
    with pytest.raises((BlockFileError, OSError)):
        load(tier)
    with pytest.raises(IsADirectoryError):
        stored(tier)
    assert os.listdir(path.parent) == [path.name], "no temporary file stays"


def test_a_pipe_in_a_files_place_does_not_block(tier):
    path = Path(tier.root) / tier.path_of(KEY.block_hash)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert not tier.has(KEY.block_hash)
    refused(tier, path)


def test_an_empty_file_is_a_miss(tier):
    path = stored(tier)
    path.write_bytes(b"")
    refused(tier, path)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE, errno.ENOMEM])
@pytest.mark.parametrize("operation", [1, 2, 3])
def test_a_file_that_cannot_be_read_raises_and_stays(tmp_path, operation, number):
    """Open, size and read in turn: the disk's trouble is not the file's fault, so it is kept."""
    path = stored(ColdTier(tmp_path, block_format()))
    fs = FaultyFileSystem(Fault(operation, "error", number))
    tier = ColdTier(tmp_path, block_format(), fs)
    with pytest.raises(OSError) as raised:
        load(tier)
    assert raised.value.errno == number
    assert path.exists() and load(tier) == bytes_of(KEY.block_hash)


def test_short_reads_are_made_up_for(tmp_path):
    stored(ColdTier(tmp_path, block_format()))
    for at in range(1, 6):
        tier = ColdTier(tmp_path, block_format(), FaultyFileSystem(Fault(at, "short")))
        assert load(tier) == bytes_of(KEY.block_hash)
