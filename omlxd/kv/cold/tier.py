"""The cold tier: one file a block, named by its hash, written beside and renamed into place.

Never serve wrong bytes; losing the newest unwritten block is allowed. So a store is atomic (a
temporary file, then rename) but not synced, and a load checks everything (`BlockFormat.read`).
Methods do I/O on the calling thread and may run on any number of threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..files.block_file import BlockFileError, BlockFormat, BlockKey
from ..files.fs import FileSystem, put_in_place, read_in_place, touch_in_order, unlink, write_all
from ..files.paths import block_path, disk_bytes
from ..hashing import BlockHash


class ColdTier:
    """Files of one namespace under `root`, the cache dir."""

    def __init__(self, root: Path, format: BlockFormat, fs: FileSystem | None = None):
        self.root = str(root)
        self.format = format
        self._fs = fs or FileSystem()

    @property
    def bytes_per_block(self) -> int:
        """Bytes on disk of one block."""
        return disk_bytes(self.format.file_bytes)

    def path_of(self, block_hash: BlockHash) -> str:
        """Return the file's path relative to the cache dir."""
        return block_path(self.format.namespace, block_hash)

    def _full(self, block_hash: BlockHash) -> str:
        return f"{self.root}/{self.path_of(block_hash)}"

    def has(self, block_hash: BlockHash) -> bool:
        """Return whether a file of that name exists; `load` alone checks it."""
        return self._fs.is_file(self._full(block_hash))

    def store(self, key: BlockKey, buffers: Sequence[memoryview]) -> None:
        """Put a block's file in place. Raises OSError, leaving nothing behind, or else TempLeft."""
        put_in_place(
            self._fs,
            self._full(key.block_hash),
            lambda fd: self.format.write(self._fs, fd, key, buffers),
        )

    def store_file(self, block_hash: BlockHash, buffers: Sequence[memoryview]) -> None:
        """Put a whole file in place, which `format.is_file_of` has checked. Raises as `store`."""

        def write(fd: int) -> None:
            write_all(self._fs, fd, buffers)

        put_in_place(self._fs, self._full(block_hash), write)

    def load(self, key: BlockKey, buffers: Sequence[memoryview]) -> None:
        """Read a block into `buffers`. Raises FileNotFoundError, OSError, or BlockFileError.

        A file that fails its check is removed before BlockFileError is raised.
        """
        read_in_place(
            self._fs,
            self._full(key.block_hash),
            lambda fd: self.format.read(self._fs, fd, key, buffers),
            BlockFileError,
        )

    def remove(self, block_hash: BlockHash) -> OSError | None:
        """Remove a file; returns None once it is gone, else why it isn't."""
        return unlink(self._full(block_hash), self._fs)

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """Make files the most recently used, the last one the most: pass leaves first."""
        touch_in_order(self._fs, [self._full(block_hash) for block_hash in hashes])
