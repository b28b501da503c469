"""A request's blocks in order, append-only. Only the last may be partly filled; it is never shared."""

from __future__ import annotations

from collections.abc import Sequence

from .block import Block, Payload
from .block_pool import BlockPool
from .hashing import BlockHash


class BlockTable:
    """`block_size` in tokens. Holds one reference to each of its blocks."""

    __slots__ = ("_block_size", "_pool", "blocks", "num_tokens")

    def __init__(self, pool: BlockPool, block_size: int):
        self._pool = pool
        self._block_size = block_size
        self.blocks: list[Block] = []
        self.num_tokens = 0

    @property
    def num_full(self) -> int:
        """Full blocks."""
        return self.num_tokens // self._block_size

    def extend_cached(self, blocks: Sequence[Block]) -> None:
        """Append full cached blocks, a hit: each gets a reference."""
        assert self.num_tokens % self._block_size == 0, "a hit can only follow full blocks"
        self._pool.touch(blocks)
        self.blocks.extend(blocks)
        self.num_tokens += len(blocks) * self._block_size

    def append(self, count: int) -> None:
        """Make room for `count` more tokens: fill the last block, then take new ones."""
        size = self._block_size
        while count > 0:
            used = self.num_tokens % size
            if used == 0:
                self.blocks.append(self._pool.allocate())
            take = min(count, size - used)
            self.blocks[-1].num_tokens = used + take
            self.num_tokens += take
            count -= take

    def cache(self, index: int, block_hash: BlockHash, payload: Payload | None) -> Block:
        """Name the full block at `index`; see `BlockPool.cache`. Returns the name's owner."""
        assert index < self.num_full, "only full blocks have names"
        return self._pool.cache(self.blocks[index], block_hash, payload)

    def free(self) -> None:
        """Give every reference back. The table is empty afterwards."""
        self._pool.free(self.blocks)
        self.blocks = []
        self.num_tokens = 0
