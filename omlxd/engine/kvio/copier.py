"""Copies blocks of a sequence's KV into the store, as far as a tier has room for them.

Where neither has, nothing is copied, and the sequence remembers the blocks (`SequenceKV.blocks_to_retry`):
its own KV is as good a source later, and so they are written straight from it as the writer's queue empties.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import mlx.core as mx

from ...kv.block_pool import BlockTable
from ...kv.layout import KVLayout
from ...kv.store import KVStore
from ..sequence.sequence import Sequence as Request
from .payload import copy_blocks

RUN_BLOCKS = 32
"""Blocks that are copied at a time, as many as a chunk of a prompt has: the copies lie beside the KV."""


class Rows(Protocol):
    """Where a sequence's KV is. Arrays are lazy, and valid until the next step."""

    def row_tensors(self, sequence: Request, start: int, stop: int) -> dict[str, mx.array]:
        """KV of tokens `start` to `stop`, by layout name, each (1, heads, stop - start, dim)."""
        ...

    def row_states(self, sequence: Request) -> dict[str, mx.array]:
        """State that exists only at the row's position."""
        ...


class BlockCopier:
    def __init__(self, layout: KVLayout, store: KVStore):
        self._layout, self._store, self._block = layout, store, store.block_size

    def may_again(self, sequence: Request) -> bool:
        """Whether to offer such blocks again: there is room for a run of them, or no writer is busy."""
        if not sequence.kv.blocks_to_retry:
            return False
        flusher, count = self._store.flusher, min(len(sequence.kv.blocks_to_retry), RUN_BLOCKS)
        idle = flusher is not None and not flusher.writer.queued_bytes
        return idle or self._has_room(count, evict=False)

    def put(
        self, sequence: Request, table: BlockTable, indices: Sequence[int], rows: Rows, *, evict: bool
    ) -> None:
        """Copy blocks that the store wants, root first, until it has no room.

        indices  ascending; those that it has no room for become `blocks_to_retry`
        evict    older blocks of the hot tier may go for these
        """
        wanted = (index for index in indices if self._store.wants(sequence.kv.hashes[index], index))
        for run in _runs(wanted):
            while run and (count := self._most(len(run), evict)):
                self._put_run(sequence, table, run[:count], rows)
                del run[:count]
            if run:
                sequence.kv.blocks_to_retry += indices[indices.index(run[0]) :]
                return

    def _put_run(self, sequence: Request, table: BlockTable, run: list[int], rows: Rows) -> None:
        """Neighbours. The copies themselves may take the room that the hot tier had."""
        size, store = self._block, self._store
        tensors = rows.row_tensors(sequence, run[0] * size, (run[-1] + 1) * size)
        payloads = copy_blocks(self._layout, tensors, range(0, len(run) * size, size), size)
        for index, payload in zip(run, payloads, strict=True):
            key, not_kept, refused = sequence.key(index, size), store.stats.not_kept, self._refused()
            had_file = store.put(table, index, key, payload, sequence.prompt.length)
            sequence.kv.stored[key.block_hash] = had_file
            if store.stats.not_kept > not_kept and self._refused() > refused:
                store.stats.not_kept = not_kept
                sequence.kv.blocks_to_retry.append(index)

    def _refused(self) -> int:
        """Blocks for which there was no room, whatever the write policy thought of them."""
        flusher = self._store.flusher
        return self._store.stats.not_kept if flusher is None else flusher.writer.stats.dropped_full

    def _most(self, count: int, evict: bool) -> int:
        """Of `count` blocks, how many may be copied now."""
        while count and not self._has_room(count, evict):
            count //= 2
        return count

    def _has_room(self, count: int, evict: bool) -> bool:
        store, nbytes = self._store, self._layout.nbytes(self._block)
        more = count * nbytes
        hot = store.make_room(more) if evict else store.pool.hot_bytes + more <= store.hot_budget()
        return hot or (store.flusher is not None and store.flusher.writer.has_room(nbytes, count))


def _runs(indices: Iterable[int]) -> Iterator[list[int]]:
    """Neighbours among ascending `indices`, at most `RUN_BLOCKS` together; each when it is asked for."""
    run: list[int] = []
    for index in indices:
        if run and (run[-1] != index - 1 or len(run) == RUN_BLOCKS):
            yield run
            run = []
        run.append(index)
    if run:
        yield run
