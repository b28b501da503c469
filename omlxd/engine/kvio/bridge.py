"""Between a sequence's cache and the KV store, in three verbs that the scheduler calls at its moments.

| verb     | when                                           | what                                         |
|----------|------------------------------------------------|----------------------------------------------|
| `match`  | at admission, before each pass of a prompt     | the longest cached prefix becomes its cache  |
| `offer`  | after each pass of a prompt, after each step   | full blocks, and state at a boundary, stay   |
| `finish` | at the end, however it ends                    | the rest stays or is withdrawn, references go |

Runs on the engine thread, but for reads on I/O threads, which cold_reads.py begins.

A sub-agent's sequence pins its parent's blocks: they have a reference while it runs, so nothing that it
computes evicts them. Where that leaves the hot tier no room, its own blocks go to the cold tier alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any, cast

import mlx.core as mx

from ...kv.block import Block
from ...kv.block_pool import BlockTable
from ...kv.checkpoint import checkpoint_name
from ...kv.hashing import BlockHash
from ...kv.layout import KVLayout
from ...kv.store import KVStore
from .. import mlx_adapter
from ..mlx_adapter import LiveSegments
from ..sequence.sequence import Sequence
from .checkpointer import MOST_RESTORES, Checkpointer
from .copier import BlockCopier, Rows
from .payload import MLXPayload, append_blocks
from .reads.cold_reads import ColdReads, MatchPlan
from .reads.peer_reads import PeerReads
from .reads.tail_read import TailRead
from .transport import transport

log = logging.getLogger(__name__)

STAGED_READERS, DIRECT_READERS = max(8, min(12, os.cpu_count() or 8)), max(2, min(4, os.cpu_count() or 4))
"""I/O threads that read block files, for the two kinds of transport: enough to keep an SSD's queue full.

Staged: beside an H100 on 16 cores 4, 6, 8, 10 and 12 give 11.5, 13.4, 19.4, 21.0 and 24.1 GB/s with a task
for each reader; 8 and 16 gave 12.9 and 8.6 with one for each block (480 blocks of 9.4 MB, page cache warm, by
a script that is not kept). Direct reads scatter and digest each piece, and each lets go of the interpreter:
on those 16 cores 1, 2, 4 and 8 threads give 4.0, 5.7, 9.3 and 7.0 GB/s (tools/bench/block_files.py, page
cache warm, read 256 KiB at a time; plain reads 4.4, 9.1, 17.9, 26.9), and on 2 cores 1, 2 and 4 give
11.1, 15.0 and 13.0 (tools/bench/restore.py, 1 MiB at a time; page cache dropped 1.4, 1.6 and 1.6).
One digest over a mapping of the file needs far fewer such steps (2 cores: 13 to 15 GB/s where these gave
10 to 13), but an I/O error in a mapping is a signal that ends the engine, and the bytes that were checked
would not be those that were put in place."""


OFFER_TOKENS = 256
"""Output tokens between two offers of a decoding row: each waits for the step in flight."""


class _OwnCache:
    """`Rows` of a sequence that is in no batch."""

    def row_tensors(self, sequence: Sequence, start: int, stop: int) -> dict[str, mx.array]:
        assert sequence.kv.cache is not None
        return mlx_adapter.token_range(sequence.kv.cache, start, stop)

    def row_states(self, sequence: Sequence) -> dict[str, mx.array]:
        assert sequence.kv.cache is not None
        return mlx_adapter.state_tensors(sequence.kv.cache)


OWN_CACHE = _OwnCache()


class KVBridge:
    """One engine's traffic with its store. `post(f)` runs `f` on the engine thread.

    states    for a model that also keeps state which exists only at a position; else None
    segments  of the model's running sequences; None: they share none
    """

    def __init__(
        self,
        model: Any,
        layout: KVLayout,
        store: KVStore,
        post: Callable[[Callable[[], None]], None],
        states: Checkpointer | None = None,
        readers: int | None = None,
        segments: LiveSegments | None = None,
    ):
        self._model = model
        self.segments = LiveSegments() if segments is None else segments
        self._layout = layout
        self.states = states
        self.weights_changed: Callable[[], str] = lambda: ""
        self.on_match: Callable[[], None] = lambda: None
        """Called before a sequence is matched for the first time."""
        self.store = store
        self._block = store.block_size
        self._copier = BlockCopier(layout, store)
        readers = readers or (DIRECT_READERS if transport().direct else STAGED_READERS)
        self.reads = ColdReads(model, layout, store, post, states, self.segments, readers)
        self.peer: PeerReads | None = None
        """Whom it asks for what neither tier has; None: nobody."""

    # ----------------------------------------------------------------- into the store

    def offer(self, sequence: Sequence, batch: Rows | None = None) -> None:
        """Keep what has been computed since the last call, if it is time. Raises nothing.

        batch  whose row the sequence is; None: its own cache holds a part of its prompt, or all of it
        """
        if sequence.kv.table is None or (batch is None and sequence.kv.cache is None):
            return
        if batch is None:
            self._offer_blocks(sequence, OWN_CACHE)
            if self.states is not None:
                last = sequence.last_boundary(self._block)
                self.states.after_chunk(sequence, last, lambda: OWN_CACHE.row_states(sequence))
            return
        self._hold_state(sequence, batch)
        due = sequence.kv.length - sequence.kv.offered * self._block >= OFFER_TOKENS
        if due or self._copier.may_again(sequence):
            self._offer_blocks(sequence, batch)

    def finish(self, sequence: Sequence, batch: Rows | None = None, *, spoiled: bool = False) -> None:
        """Keep the rest, make the chain recent in both tiers, and give references back. Raises nothing.

        A second call does nothing.

        batch    as for `offer`
        spoiled  the logits are not finite: what the sequence has stored since its last good token, or its
                 match, is withdrawn instead
        """
        table = sequence.kv.table
        if table is None:
            return
        try:
            self.reads.end_tail(sequence)
            if spoiled:
                sequence.kv.last_checkpoint = None
                self._withdraw(sequence)
            elif batch is not None or sequence.kv.cache is not None:
                rows = OWN_CACHE if batch is None else batch
                self._offer_blocks(sequence, rows, last=True)
                if sequence.kv.length < len(sequence.tokens):  # Else it goes, and would push one out before.
                    self._hold_state(sequence, rows)
            self._record_end(sequence, table)
        except Exception:
            log.exception("%s: its end is not kept", sequence.name)
        sequence.kv.table = None
        table.free()
        self._unpin(sequence)

    def _record_end(self, sequence: Sequence, table: BlockTable) -> None:
        used = sequence.kv.hashes[: len(table.blocks)]
        self.reads.recomputed += sequence.stats.recomputed
        if sequence.stats.first_token_s and not sequence.carried:
            self.store.count_match(
                sequence.prompt.length, sequence.stats.restored_hot, sequence.stats.restored_cold
            )
        if self.states is not None:
            held = sequence.kv.last_checkpoint
            if held is not None and held[0] * self._block >= len(sequence.tokens):
                held = None  # As with blocks: nobody has looked at the logits after it.
            sequence.kv.last_checkpoint = held
            if held is not None:
                self.store.stats.new_state_bytes += held[1].nbytes
            # Before its chain, so the most recent: without it the chain is worth nothing.
            used = [*self.states.finish(sequence), *used]
        self.store.stats.not_kept += len(sequence.kv.blocks_to_retry)
        hot = [block.on_disk and block.payload is not None for block in table.blocks]
        clean = [sequence.key(index, self._block) for index in range(len(hot)) if hot[index]]
        self.store.record_use(used, clean)

    def _hold_state(self, sequence: Sequence, rows: Rows) -> None:
        if self.states is not None and sequence.kv.length % self._block == 0:
            self.states.at_boundary(sequence, lambda: rows.row_states(sequence))

    def _offer_blocks(self, sequence: Sequence, rows: Rows, *, last: bool = False) -> None:
        """Offer every full block that the store has not been offered yet, or had no room for.

        Those evict others only if they are offered for the `last` time: they may have made room for a prompt.

        Not a block that holds the newest token: it may have been put through the model, but nobody has
        looked at the logits. Without memory for copies the blocks are not kept, and the answer goes on.
        """
        table = sequence.kv.table
        if table is None or not self._layout.groups or self.weights_changed():
            return
        full = min(sequence.kv.length, len(sequence.tokens) - 1) // self._block
        table.append(full - len(table.blocks))
        sequence.hash_output(full, self._block)
        again: list[int] = []
        if last or self._copier.may_again(sequence):
            again, sequence.kv.blocks_to_retry = sorted(sequence.kv.blocks_to_retry), []
        try:
            self._copier.put(sequence, table, again, rows, evict=last)
            self._copier.put(sequence, table, range(sequence.kv.offered, full), rows, evict=True)
        except Exception:
            log.exception("%s: blocks up to %d are not kept", sequence.name, full)
        new = max(0, full - max(sequence.kv.offered, self.reads.known(sequence)))
        self.store.stats.new_token_bytes += new * self._layout.nbytes(self._block)
        sequence.kv.offered = max(sequence.kv.offered, full)  # Those that failed are not tried again.

    def _withdraw(self, sequence: Sequence) -> None:
        """Remove what the sequence has stored since its last good token or its match.

        Before the first token also what it was restored from, as far as that is not finite: a process that
        was killed may have left it.
        """
        self.segments.forget(sequence.kv.hashes)
        names = {**dict.fromkeys(self._not_finite(sequence), False), **sequence.kv.stored}
        sequence.kv.stored = {}
        if names:
            log.warning("%s: %d blocks without finite logits are removed", sequence.name, len(names))
            self.store.withdraw(names)

    def _not_finite(self, sequence: Sequence) -> list[BlockHash]:
        """Names of matched blocks, and of the checkpoint resumed from, that hold NaN or infinity."""
        if sequence.generated:
            return []
        if sequence.kv.cache is None:  # In a batch, whose rows are not looked at: all that was restored goes.
            reached = sequence.stats.restored_hot + sequence.stats.restored_cold + sequence.stats.recomputed
            return list(sequence.kv.hashes[: reached // self._block])
        full = sequence.kv.length // self._block
        good = mx.full((full,), True)
        held = mlx_adapter.token_range(sequence.kv.cache, 0, full * self._block) if full else {}
        for array in held.values():
            if mx.issubdtype(array.dtype, mx.floating):
                finite = mx.isfinite(array[0]).all(axis=(0, 2))
                good = good & finite.reshape(full, self._block).all(axis=1)
        names = [
            name
            for name, fine in zip(sequence.kv.hashes, cast(list[bool], good.tolist()), strict=False)
            if not fine
        ]
        if self.states is not None and sequence.kv.resume_at and not self.states.is_finite(sequence):
            names.append(checkpoint_name(sequence.kv.hashes[sequence.kv.resume_at - 1]))
        return names

    # ----------------------------------------------------------------- out of the store

    def match(self, sequence: Sequence, ready: Callable[[], None]) -> bool:
        """Make the longest cached prefix the sequence's cache.

        Where only the disk has some of it, I/O threads read it first, or its end while the scheduler computes
        up to `sequence.kv.compute_to` (cold_reads.py). True: the scheduler waits, and `ready()` follows on
        the engine thread.
        """
        first = sequence.kv.table is None
        if first:
            self._admit(sequence)
            if self.peer is not None and self.peer.begin(sequence, self._limit(sequence), ready):
                return True  # It is matched once that is over.
        waits = self.reads.begin(sequence, self._plan(sequence), ready)
        if not (waits or first):  # Before the first pass, so what others compute until then is a hit too.
            if tail := self.reads.tail_of(sequence):
                waits = self._advance(sequence, tail, ready)
            else:
                self._catch_up(sequence)
        return waits

    def _admit(self, sequence: Sequence) -> None:
        self.on_match()
        sequence.kv.table = self.store.new_table()
        self._pin(sequence)

    def _plan(self, sequence: Sequence) -> MatchPlan:
        """Take the longest cached prefix into the table of a sequence that has nothing; say how to get it."""
        if sequence.kv.length or self.reads.tail_of(sequence):
            return MatchPlan()
        assert sequence.kv.table is not None
        table, limit = sequence.kv.table, self._limit(sequence)
        if self._layout.groups:
            self.store.extend_match(table, sequence.kv.hashes, limit)
            limit = len(table.blocks)
        if self.states is not None:
            table.truncate(self.states.match(sequence, limit))
        elif sequence.kv.restores >= MOST_RESTORES:
            table.truncate(sum(1 for _ in takewhile(lambda block: block.payload is not None, table.blocks)))
        return self.reads.plan(sequence)

    def look_again(self, sequence: Sequence) -> None:
        """Before a sequence's first pass: take what others have computed since into its table."""
        table, begun = sequence.kv.table, sequence.kv.length or sequence.kv.compute_to or sequence.kv.restores
        if table is not None and not begun and self.states is None:
            self.store.extend_match(table, sequence.kv.hashes, self._limit(sequence))

    def adopt(self, sequence: Sequence, cache: mlx_adapter.Cache, tokens: int) -> None:
        """Go on behind `cache`, which holds the prompt's first `tokens` and is verified; keep its blocks."""
        self.on_match()
        sequence.kv.table = self.store.new_table()
        sequence.kv.cache, sequence.kv.length = cache, tokens
        self.offer(sequence)

    def take_copy(self, sequence: Sequence, cache: mlx_adapter.Cache) -> None:
        """Go on behind `cache`, which holds all of its prompt, as another sequence computed it.

        For models without states at a position.
        """
        sequence.kv.cache, sequence.kv.length = cache, sequence.prompt.length
        if (table := sequence.kv.table) is not None:
            self.store.extend_match(table, sequence.kv.hashes, self._limit(sequence))
            sequence.kv.offered = len(table.blocks)
            sequence.stats.restored_hot = len(table.blocks) * self._block - sequence.stats.restored_cold

    def _pin(self, sequence: Sequence) -> None:
        """Take references to the blocks of `sequence.prompt.pins` that are cached."""
        blocks = (self.store.pool.get_cached_block(name) for name in sequence.prompt.pins)
        sequence.kv.pinned = [block for block in blocks if block is not None]
        self.store.pool.touch(sequence.kv.pinned)

    def _unpin(self, sequence: Sequence) -> None:
        """Give them back, more recent than what the sequence has used: call it after that."""
        pinned, sequence.kv.pinned = sequence.kv.pinned, []
        if sequence.prompt.pins:
            self.store.pool.free(pinned)
            self.store.record_use(list(sequence.prompt.pins))

    def _limit(self, sequence: Sequence) -> int:
        """Blocks that a hit may cover: at least one token is left to compute."""
        return sequence.last_boundary(self._block) // self._block

    def _advance(self, sequence: Sequence, tail: TailRead[MLXPayload], ready: Callable[[], None]) -> bool:
        """Append what has come of the prefix's end, if it follows; say up to where to compute. As `match`."""
        start = tail.at
        if payloads := tail.take():
            self._append(sequence, payloads)
            cold = sum(index in tail.come for index in range(start, tail.at)) * self._block
            sequence.stats.restored_hot -= cold
            sequence.stats.restored_cold += cold
        if tail.at == tail.end:
            self.reads.end_tail(sequence)
            self._catch_up(sequence)
            return False
        if count := tail.claim():
            sequence.kv.compute_to = (tail.at + count) * self._block
        else:
            tail.wait(ready)
        return not count

    def _catch_up(self, sequence: Sequence) -> None:
        """Append blocks that are hot by now and follow what the sequence has: engine thread, one copy.

        This includes blocks that another request has computed meanwhile.
        """
        table = sequence.kv.table
        if self.states is not None:
            self._catch_up_to_checkpoint(sequence, self.states)
        elif table is not None and sequence.kv.length % self._block == 0:
            have = sequence.kv.length // self._block
            assert len(table.blocks) >= have
            if len(table.blocks) == have:
                self.store.extend_match(table, sequence.kv.hashes, self._limit(sequence))
            payloads = _hot_payloads(table.blocks[have:])
            table.truncate(have + len(payloads))
            if payloads:
                self._append(sequence, payloads)

    def _append(self, sequence: Sequence, payloads: list[MLXPayload]) -> None:
        """Hot blocks at the end of what the sequence has; none for a model without per-token KV."""
        capacity = sequence.capacity
        if sequence.kv.cache is None:
            sequence.kv.cache = mlx_adapter.new_cache(self._model, capacity)
        start, count = sequence.kv.length, len(payloads) * self._block
        while payloads:
            payloads = payloads[self._append_some(sequence, payloads) :]
        assert sequence.kv.length == start + count
        length = sequence.prompt.length  # Others find it now, however long this one waits for its last pass.
        self.segments.cut(sequence.kv.cache, sequence.kv.hashes, self._block, length, capacity, last=False)
        sequence.stats.restored_hot += count
        sequence.kv.offered = max(sequence.kv.offered, sequence.kv.length // self._block)

    def _append_some(self, sequence: Sequence, payloads: list[MLXPayload]) -> int:
        """Append the first blocks: at most up to where a segment ends, and by a live one if there is one.

        Returns their number.
        """
        assert sequence.kv.cache is not None
        segments, start, most = self.segments, sequence.kv.length, len(payloads)
        length, capacity = sequence.prompt.length, sequence.capacity
        if segments.tokens:
            segments.cut(sequence.kv.cache, sequence.kv.hashes, self._block, length, capacity, last=False)
            names = segments.names(sequence.kv.hashes, self._block, length)
            stop = start + most * self._block
            name, end = next(((n, end) for n, end in names.items() if start < end <= stop), (b"", stop))
            most = (end - start) // self._block
            if start == mlx_adapter.segmented_layers(sequence.kv.cache)[0].base:
                if live := segments.find([name]):
                    mlx_adapter.add_segment(sequence.kv.cache, live[0])
                    sequence.kv.length = end
                    return most
                capacity = end if name else capacity
        append_blocks(self._layout, sequence.kv.cache, payloads[:most], start, self._block, capacity)
        sequence.kv.length += most * self._block
        return most

    def _catch_up_to_checkpoint(self, sequence: Sequence, states: Checkpointer) -> None:
        """As `_catch_up`, for a sequence that has nothing yet and whose match is hot, state and all."""
        table, blocks = sequence.kv.table, sequence.kv.resume_at
        if table is None or sequence.kv.length or not blocks:
            return
        payloads, state = _hot_payloads(table.blocks), states.hot(sequence)
        if state is None or len(payloads) != len(table.blocks):
            table.truncate(0)
            sequence.kv.resume_at = 0
            return
        sequence.kv.cache = mlx_adapter.new_cache(self._model, sequence.capacity)
        states.put_into(sequence.kv.cache, state, blocks * self._block)
        self._append(sequence, payloads)
        if not payloads:
            sequence.kv.length = sequence.stats.restored_hot = blocks * self._block

    def close(self, deadline_s: float) -> bool:
        """Flush what is queued. False: the deadline came first."""
        self.reads.close()
        if self.peer is not None:
            self.peer.close()
        return self.store.close(deadline_s)


def _hot_payloads(blocks: Iterable[Block]) -> list[MLXPayload]:
    """Those of the first blocks, up to one that is not in RAM."""
    payloads: list[MLXPayload] = []
    for block in blocks:
        if not isinstance(block.payload, MLXPayload):
            break
        payloads.append(block.payload)
    return payloads
