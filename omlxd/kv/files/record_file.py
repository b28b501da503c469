"""Records: small files that belong to a namespace beside its blocks, each read at once and checked.

    16 bytes   FORMAT
    16 bytes   xxh3-128 of name and payload
    payload    whatever its owner wants; this room knows nothing of it

As with blocks, the path is the index and the digest vouches for the bytes: a flip anywhere, another
record's file or another version's is an error, and the file goes. A record counts as its pages, is
evicted like a block, and goes with its namespace, or when nobody has used it for `MOST_AGE_S`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xxhash

from ..hashing import BlockHash
from .block_file import BlockKey
from .fs import (
    FileSystem,
    put_in_place,
    read_all,
    read_in_place,
    touch_in_order,
    unlink,
    write_all,
)
from .paths import disk_bytes, record_path

FORMAT = b"omlxd-record-1\0\0"
HEAD_BYTES = 32
MOST_BYTES = 1 << 20
"""Bytes of a record file at most."""
MOST_AGE_S = 30 * 86400.0


class RecordError(Exception):
    """The file is not what its name says."""


class RecordFiles:
    """The records of one namespace under `root`, the cache dir. I/O on the calling thread, whichever it is.

    A name is a digest of 32 bytes.
    """

    def __init__(self, root: Path, namespace: BlockHash, fs: FileSystem | None = None):
        self._root = str(root)
        self._namespace = namespace
        self.fs = fs or FileSystem()

    def path_of(self, name: BlockHash) -> str:
        """Return the path relative to the cache dir."""
        return record_path(self._namespace, name)

    def full(self, name: BlockHash) -> str:
        return f"{self._root}/{self.path_of(name)}"

    def load(self, name: BlockHash) -> bytes:
        """Read a payload. Raises FileNotFoundError, OSError, or RecordError once the bad file is removed."""
        return read_in_place(self.fs, self.full(name), lambda fd: checked(self.fs, fd, name), RecordError)

    def remove(self, name: BlockHash) -> bool:
        """Remove a record; returns False if it isn't gone. Raises nothing."""
        return unlink(self.full(name), self.fs) is None

    def touch(self, names: Sequence[BlockHash]) -> None:
        """Make records the most recently used, the last one the most."""
        touch_in_order(self.fs, [self.full(name) for name in names])


class Record:
    """A record to be written: payload and tier of a store by StoreWriter."""

    def __init__(self, files: RecordFiles, name: BlockHash, payload: bytes):
        self._files = files
        self._data = FORMAT + _digest(name, payload) + payload
        self.key = BlockKey(name, b"", ())

    @property
    def nbytes(self) -> int:
        return len(self._data)

    def buffers(self) -> Sequence[memoryview]:
        return [memoryview(self._data)]

    @property
    def bytes_per_block(self) -> int:
        """Bytes on disk."""
        return disk_bytes(len(self._data))

    def path_of(self, block_hash: BlockHash) -> str:
        return self._files.path_of(block_hash)

    def store(self, key: BlockKey, buffers: Sequence[memoryview]) -> None:
        """Write the record's file. Raises OSError as `put_in_place` does."""
        fs = self._files.fs
        put_in_place(fs, self._files.full(key.block_hash), lambda fd: write_all(fs, fd, buffers))


def checked(fs: FileSystem, fd: int, name: BlockHash) -> bytes:
    """Read and check the payload of the open record `name`. Raises RecordError, or OSError as reads do."""
    size = fs.size(fd)
    if not HEAD_BYTES <= size <= MOST_BYTES:
        raise RecordError(f"{size} bytes are no record")
    data = bytearray(size)
    if read_all(fs, fd, [memoryview(data)]) != size:
        raise RecordError("ends early")
    head, payload = bytes(data[:HEAD_BYTES]), bytes(data[HEAD_BYTES:])
    if head[: len(FORMAT)] != FORMAT:
        raise RecordError("has another format")
    if head[len(FORMAT) :] != _digest(name, payload):
        raise RecordError("fails its digest")
    return payload


def _digest(name: BlockHash, payload: bytes) -> bytes:
    state = xxhash.xxh3_128(name)
    state.update(payload)
    return state.digest()
