"""Which blocks in RAM give way to the KV of a prompt that begins, and in which order.

| blocks                                                    | they go                                    |
|-----------------------------------------------------------|--------------------------------------------|
| that nobody uses                                          | first, least recently used before others   |
| of a running sequence that has copied them                | next, ends first: it goes on without them  |
| that a waiting sequence will use                          | last                                       |
| that a running one has still to copy, or pins             | not yet                                    |
| that the disk's writer has                                | not yet: their bytes stay until it is done |

A block that is not on disk loses its name with its bytes. Where a running sequence has its KV, the bridge
copies that again once a tier has room, or at the sequence's end (`SequenceKV.blocks_to_retry`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ...kv.block import Block
from ...kv.store import KVStore
from ..sequence.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of hot blocks.

    now      of those that can't go now
    coming   of others that waiting sequences will use, while `copying`
    copying  a running sequence has still to copy some; soon they can go
    """

    now: int
    coming: int
    copying: bool


class HotBlocks:
    """Of all stores of an engine. `store_of`: a sequence's own, or None."""

    def __init__(
        self, stores: Callable[[], list[KVStore]], store_of: Callable[[Sequence], KVStore | None]
    ) -> None:
        self._stores = stores
        self._store_of = store_of

    @property
    def nbytes(self) -> int:
        return sum(store.pool.hot_bytes for store in self._stores())

    def of(self, sequence: Sequence) -> list[Block]:
        """Hot blocks that `sequence`, which waits, will use; in order."""
        if (store := self._store_of(sequence)) is None:
            return []
        names = sequence.kv.hashes[: (sequence.prompt.length - 1) // store.block_size]
        blocks = (store.pool.get_cached_block(name) for name in names)
        return [block for block in blocks if block is not None and block.payload is not None]

    def held(self, running: list[Sequence], waiting: Iterable[Sequence]) -> Held:
        uncopied = {id(block): block for sequence in running for block in self._uncopied(sequence)}
        held = uncopied | {id(block): block for sequence in running for block in sequence.kv.pinned}
        for store in self._stores():
            for name in store.flusher.writing if store.flusher is not None else ():
                if (block := store.pool.get_cached_block(name)) is not None:
                    held[id(block)] = block
        # Not looked up else: who waits is asked for with every step that others decode.
        coming = {id(block): block for sequence in waiting for block in self.of(sequence)} if uncopied else {}
        others = (block for key, block in coming.items() if key not in held)
        return Held(nbytes_of(held.values()), nbytes_of(others), bool(uncopied))

    def free(self, nbytes: int, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Free `nbytes`, if there are so many. The first of `waiting` is the prompt's own sequence."""
        kept = [(self._store_of(sequence), self.of(sequence)) for sequence in waiting]
        names: set[Any] = set()
        for store, blocks in kept:
            if store is not None:
                store.pool.touch(blocks)
                names.update(block.block_hash for block in blocks)
        nbytes = self._evict(nbytes)
        for sequence, index, block in self._copied(running):
            if nbytes > 0 and block.block_hash not in names:
                nbytes -= self._drop(sequence, index, block)
        for store, blocks in reversed(kept):
            if store is not None:
                store.pool.free(blocks)
            nbytes = self._evict(nbytes)

    def _evict(self, nbytes: int) -> int:
        """Evict blocks that no sequence uses. Returns what of `nbytes` is left to free."""
        for store in self._stores():
            writer = store.flusher.writer if store.flusher is not None else None
            while nbytes > 0:
                before = writer.queued_bytes if writer else 0
                if not (freed := store.pool.evict(nbytes)):
                    break
                # What a writer takes to the disk as it leaves the tier is not free yet.
                nbytes -= freed - max(0, (writer.queued_bytes if writer else 0) - before)
        return nbytes

    def _drop(self, sequence: Sequence, index: int, block: Block) -> int:
        """Free a block that `sequence` has copied. Returns its bytes."""
        store = self._store_of(sequence)
        assert store is not None and block.block_hash is not None
        nbytes = nbytes_of([block])
        if block.on_disk:
            store.pool.drop_payload(block)
            return nbytes
        if store.flusher is not None:
            store.flusher.unwritten.pop(block.block_hash)
        store.pool.forget(block)
        sequence.kv.blocks_to_retry.append(index)
        return nbytes

    def _own(self, sequence: Sequence) -> int:
        """Blocks of its table that `sequence`, which runs, has KV of."""
        if sequence.kv.table is None or (store := self._store_of(sequence)) is None:
            return 0
        has_kv = sequence.kv.cache is not None or sequence.state is State.DECODING
        return min(len(sequence.kv.table.blocks), sequence.kv.length // store.block_size) if has_kv else 0

    def _uncopied(self, sequence: Sequence) -> list[Block]:
        """Blocks that `sequence`, which runs, has still to copy."""
        return sequence.kv.table.blocks[self._own(sequence) :] if sequence.kv.table is not None else []

    def _copied(self, running: list[Sequence]) -> Iterator[tuple[Sequence, int, Block]]:
        """(sequence, index, block) of those that only later requests need."""
        needed = {id(b) for sequence in running for b in (*self._uncopied(sequence), *sequence.kv.pinned)}
        for sequence in running:
            store, table = self._store_of(sequence), sequence.kv.table
            writing = store.flusher.writing if store is not None and store.flusher is not None else ()
            for index in range(self._own(sequence) - 1, -1, -1):
                block = table.blocks[index] if table is not None else None
                if block is None or block.payload is None or id(block) in needed:
                    continue
                if block.block_hash not in writing:
                    yield sequence, index, block


def nbytes_of(blocks: Iterable[Block]) -> int:
    """Bytes of the payloads of `blocks`."""
    return sum(block.payload.nbytes for block in blocks if block.payload is not None)
