"""Checkpoints: state that exists only at a position (a sliding window, recurrent state).

Such state is large and can't be cut into tokens, so it is kept apart from the token blocks, which
stay small, and only where a later request is likely to go on: the prompt's end, the turn's end,
and every so many blocks. A usable prefix ends where both the chain of blocks reaches and a
checkpoint stands. (vLLM makes blocks of one size serve both, and the incumbent raises its block
size to 4,096 tokens for these models; both lose the tail of every prompt.)

A checkpoint is named by the chain hash of its position, so equal prefixes share one. It lives in
the same pool, budget, writer and folder as the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import cast

from .block import Block, Payload
from .cold.tier import ColdTier
from .cold.writer import WritablePayload
from .files.block_file import READ_BYTES, BlockFormat, BlockKey
from .files.fs import FileSystem
from .hashing import BlockHash
from .layout import KVLayout
from .store import KVStore

KIND = "checkpoint"


def checkpoint_name(block_hash: BlockHash) -> BlockHash:
    """Return the name of the checkpoint at the end of a block."""
    return sha256(block_hash + KIND.encode()).digest()


class CheckpointFiles:
    """Cold tiers of one namespace's checkpoints, whose layout depends on the position.

    layout_at(position)  the tensors of a checkpoint after `position` tokens, read as one-token blocks
    """

    def __init__(
        self,
        root: Path,
        namespace: BlockHash,
        layout_at: Callable[[int], KVLayout],
        fs: FileSystem | None = None,
        read_bytes: int = READ_BYTES,
    ):
        self._root, self._namespace, self._fs = root, namespace, fs
        self._read_bytes = read_bytes
        self._layout_at = layout_at
        self._tiers: dict[KVLayout, ColdTier] = {}
        self._any = self.at(1)

    def at(self, position: int) -> ColdTier:
        layout = self._layout_at(position)
        tier = self._tiers.get(layout)
        if tier is None:
            format = BlockFormat(self._namespace, layout, 1, KIND, self._read_bytes)
            tier = self._tiers[layout] = ColdTier(self._root, format, self._fs)
        return tier

    def has(self, name: BlockHash) -> bool:
        """Return whether the checkpoint has a file. Paths don't depend on the layout."""
        return self._any.has(name)


class Checkpoints:
    """The checkpoints of one store. Engine thread, but for `load_into`. `files` None: hot only."""

    def __init__(self, store: KVStore, files: CheckpointFiles | None):
        self._store = store
        self._files = files
        self.missing = 0
        """Hits that ended before the chain did, for want of a checkpoint."""

    # ----------------------------------------------------------------- looking

    def deepest(self, hashes: Sequence[BlockHash], reach: int) -> int:
        """Count blocks up to the deepest checkpoint within the first `reach` blocks; 0: no
        checkpoint.
        """
        for length in range(reach, 0, -1):
            name = checkpoint_name(hashes[length - 1])
            hot = self.hot(hashes[length - 1]) is not None
            if hot and self._store.flusher is not None:
                self._store.flusher.used(name, len(hashes) * self._store.block_size)
            if hot or self._may_load(name):
                self.missing += length < reach
                self._store.record_use([name])
                return length
        self.missing += reach > 0
        return 0

    def _may_load(self, name: BlockHash) -> bool:
        """Return whether the checkpoint has a file, on a disk that can be read. Any thread."""
        return self._files is not None and self._store.may_read(name) and self._files.has(name)

    def stands(self, block_hash: BlockHash) -> bool:
        """Return whether a checkpoint follows that block, in RAM or on disk. Any thread."""
        return self.hot(block_hash) is not None or self._may_load(checkpoint_name(block_hash))

    def hot(self, block_hash: BlockHash) -> Payload | None:
        """Return the checkpoint after that block if RAM or the write queue has it. Any thread."""
        name = checkpoint_name(block_hash)
        block = self._store.pool.get_cached_block(name)
        if block is not None and block.payload is not None:
            return block.payload
        return self._store.queued(name)

    # ----------------------------------------------------------------- storing and loading

    def put(self, block_hash: BlockHash, position: int, payload: WritablePayload, *, write: bool) -> bool:
        """Keep the state after `position` tokens, the end of that block; `write`: on disk too.

        One that is in RAM already stays, and is what is written.
        True: a file of it was there before, and stays as it is.
        """
        pool, name, flusher = self._store.pool, checkpoint_name(block_hash), self._store.flusher
        payload = self._store.queued(name) or payload
        if write and self._files is not None:
            blocks = position // self._store.block_size
            write = self._store.fits_disk(blocks, self._files.at(position).bytes_per_block)
        had_file = self._may_load(name) and not self._store.distrusts(name)
        block = pool.get_cached_block(name)
        if block is not None and block.payload is None and not had_file:
            pool.forget(block)
            block = None
        own: list[Block] = []
        if block is not None:
            self._store.promote(block, name, payload)
        elif self._store.make_room(payload.nbytes):
            own = [pool.allocate()]
            block = pool.cache(own[0], name, payload)
        if flusher is not None and self._files is not None:
            if block is not None and (had_file or write):
                block.on_disk = had_file  # A file may have been evicted since it was written.
            if had_file:
                flusher.unwritten.pop(name)
            elif write:
                hot = block is not None and block.payload is not None
                kept = cast(WritablePayload, block.payload) if block is not None and hot else payload
                key, tier = self._key(block_hash, position), self._files.at(position)
                flusher.offer(key, kept, block if hot else None, tier, tokens=position)
        pool.free(own)
        return had_file

    def file_at(self, block_hash: BlockHash, position: int) -> tuple[BlockKey, ColdTier]:
        """Return whose file the state after `position` tokens, the end of that block, is. Any thread."""
        assert self._files is not None
        return self._key(block_hash, position), self._files.at(position)

    def load_into(self, block_hash: BlockHash, position: int, buffers: Sequence[memoryview]) -> bool:
        """Read a checkpoint's file into `buffers` and check it. Any thread. False: a miss."""
        assert self._files is not None
        return self._store.load_into(self._key(block_hash, position), buffers, self._files.at(position))

    @staticmethod
    def _key(block_hash: BlockHash, position: int) -> BlockKey:
        return BlockKey(checkpoint_name(block_hash), block_hash, [position])
