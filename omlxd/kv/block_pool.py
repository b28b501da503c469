"""The block pool: records, hash map, free queue, and the hot tier's byte budget.

No I/O, no MLX, no clock: pure bookkeeping, every operation O(1) a block. The terms are vLLM's
(v1/core/block_pool.py): get_cached_block, touch, free, ref_cnt, eviction at allocation.

Where it differs from vLLM's: a block's payload is a copy that it owns, not a page that attention
reads, so a pool of any size costs only its records, it grows on demand, and the budget is in bytes
of payload instead of in blocks. The free queue is two: blocks with a name, in eviction order, and
spare records, so that neither allocation nor eviction ever steps over the other's. Invariants
(checked by the state machine in tests/kv/test_state_machine.py):

    in a free queue    <=>  ref_cnt == 0; in that of cached blocks <=> it also has a name
    in hash map as h   <=>  block_hash == h
    payload held        =>  block_hash set
    hot_bytes          ==   sum of payload bytes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .block import Block, FreeQueue, Payload
from .hashing import BlockHash


class BlockPool:
    """Records of blocks. `initial_blocks`: records made at once; more are made when none is free."""

    def __init__(self, initial_blocks: int = 256, max_records: int = 1 << 20):
        self._blocks = [Block(i) for i in range(initial_blocks)]
        self._cached = FreeQueue()
        self._spare = FreeQueue()
        for block in self._blocks:
            self._spare.append(block)
        self._by_hash: dict[BlockHash, Block] = {}
        self._max_records = max_records
        self.on_leaving: Callable[[Block], None] | None = None
        """Called with a block that is evicted and whose payload is nowhere else, before it goes."""
        self.hot_bytes = 0
        """Bytes of payload in RAM."""
        self.evicted = 0

    # ----------------------------------------------------------------- lookup and references

    def __len__(self) -> int:
        """Count the records of any state."""
        return len(self._blocks)

    @property
    def num_cached(self) -> int:
        """Blocks with a name."""
        return len(self._by_hash)

    def get_cached_block(self, block_hash: BlockHash) -> Block | None:
        """Return the block of that name, or None. Takes no reference."""
        return self._by_hash.get(block_hash)

    def touch(self, blocks: Iterable[Block]) -> None:
        """Take a reference to each block: a hit."""
        cached, spare = self._cached, self._spare
        for block in blocks:
            if block.ref_cnt == 0:
                (spare if block.block_hash is None else cached).remove(block)
            block.ref_cnt += 1

    def free(self, blocks: Sequence[Block]) -> None:
        """Give back a reference to each block. Pass a chain in order: it is queued leaf first.

        So a parent is younger than its child, and eviction takes leaves first. `KVStore.record_use` says
        later how recent the chain is.
        """
        cached, spare = self._cached, self._spare
        for block in reversed(blocks):
            block.ref_cnt -= 1
            if block.ref_cnt > 0:
                continue
            assert block.ref_cnt == 0, f"{block} freed more often than taken"
            (spare if block.block_hash is None else cached).append(block)

    # ----------------------------------------------------------------- allocation

    def allocate(self) -> Block:
        """Take an empty block with one reference: a spare record, else a new one, else the oldest cached."""
        block = self._spare.popleft()
        if block is None and len(self._blocks) >= self._max_records:
            block = self._cached.popleft()
            if block is not None:
                self._leave(block)
        if block is None:
            block = Block(len(self._blocks))
            self._blocks.append(block)
        block.ref_cnt = 1
        return block

    def cache(self, block: Block, block_hash: BlockHash, payload: Payload | None) -> Block:
        """Name a computed block. Returns the block that holds the name: `block`, or an earlier twin.

        The twin of a block computed twice keeps the name and gets the payload if it has none.
        """
        owner = self._by_hash.setdefault(block_hash, block)
        if owner is block:
            block.block_hash = block_hash
        if payload is not None and owner.payload is None:
            self.set_payload(owner, payload)
        return owner

    def set_payload(self, block: Block, payload: Payload) -> None:
        """Keep `payload` as the hot copy of a named block that has none."""
        assert block.block_hash is not None and block.payload is None
        block.payload = payload
        self.hot_bytes += payload.nbytes

    def drop_payload(self, block: Block) -> None:
        """Drop a block's payload from the hot tier; the record and its name stay."""
        if block.payload is not None:
            self.hot_bytes -= block.payload.nbytes
            block.payload = None

    # ----------------------------------------------------------------- eviction

    def evict(self, nbytes: int) -> int:
        """Evict cached blocks, oldest first, until `nbytes` are gone. Returns bytes freed.

        May free fewer bytes if all remaining blocks are referenced.
        """
        freed = 0
        while freed < nbytes and (block := self._cached.popleft()) is not None:
            freed += block.payload.nbytes if block.payload is not None else 0
            self._leave(block)
            self._spare.append(block)
        return freed

    def _leave(self, block: Block) -> None:
        if not block.on_disk and block.payload is not None and self.on_leaving is not None:
            self.on_leaving(block)
        self._forget(block)
        self.evicted += 1

    def forget(self, block: Block) -> None:
        """Take a name out of the map, since its bytes proved wrong or are gone. References stay valid."""
        if block.block_hash is None:
            return
        if block.ref_cnt == 0:
            self._cached.remove(block)
            self._spare.append(block)
        self._forget(block)

    def _forget(self, block: Block) -> None:
        assert block.block_hash is not None
        del self._by_hash[block.block_hash]
        self.drop_payload(block)
        block.block_hash = None
        block.on_disk = False


class BlockTable:
    """A request's blocks in order; it holds one reference to each."""

    __slots__ = ("_pool", "blocks")

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self.blocks: list[Block] = []

    def extend_cached(self, blocks: Sequence[Block]) -> None:
        """Append cached blocks, a hit: each gets a reference."""
        self._pool.touch(blocks)
        self.blocks.extend(blocks)

    def append(self, count: int = 1) -> None:
        """Take `count` new blocks."""
        self.blocks.extend(self._pool.allocate() for _ in range(count))

    def cache(self, index: int, block_hash: BlockHash, payload: Payload | None) -> Block:
        """Name the block at `index` (`BlockPool.cache`). Returns the name's owner."""
        return self._pool.cache(self.blocks[index], block_hash, payload)

    def truncate(self, length: int) -> None:
        """Give back the blocks past the first `length`."""
        self._pool.free(self.blocks[length:])
        del self.blocks[length:]

    def free(self) -> None:
        """Give every reference back."""
        self.truncate(0)
