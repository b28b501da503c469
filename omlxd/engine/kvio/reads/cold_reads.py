"""What is being read from the cold tier for which sequence, who waits for it, and what is computed instead.

| the model keeps    | reading is fast | it would be slow                                                 |
|--------------------|-----------------|------------------------------------------------------------------|
| KV of tokens alone | `Restore`       | `TailRead`: the end is read, the front computed, until they meet |
| checkpoints too    | `Restore`       | all behind what is in RAM is computed, if that is faster         |

A prompt with images is read in any case.

Slow is what the rates say (rates.py). A restore that turns out to be slow ends early: what it has read is
used, and the rest goes the other way. Runs on the engine thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Set
from collections.abc import Sequence as Seq
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from ....kv.checkpoint import checkpoint_name
from ....kv.hashing import BlockHash
from ....kv.layout import KVLayout
from ....kv.store import KVStore
from ... import mlx_adapter
from ...mlx_adapter import LiveSegments, Segment
from ...sequence.sequence import Sequence
from ..checkpointer import Checkpointer
from ..payload import MLXPayload, copy_blocks, read_payload
from ..transport import transport
from .rates import Rates
from .restore import Restore
from .tail_read import TailRead

log = logging.getLogger(__name__)

STAGED_BYTES = 2 << 30
"""Payloads that restores may have on the device at once; of one alone any number. One is as fast as several,
since its threads read 20 GB/s. Those of eight prompts of 32,000 tokens, 37 GB, filled an H100."""

PROMOTED_BLOCKS = 64
"""Blocks that are copied into the hot tier at a time."""

WARM_UP_S = 5.0
"""For which a reader waits for the others, at most."""

Ready = Callable[[], None]


@dataclass(slots=True)
class _Shared:
    """A read under way: names that it reads, and sequences that wait for it."""

    names: Set[BlockHash]
    waiting: list[Ready] = field(default_factory=list)


class Way(Enum):
    """How a sequence gets what the disk alone has."""

    NONE = auto()  # It lacks nothing.
    WAIT = auto()  # for another sequence's read
    RESTORE = auto()  # All of it is read.
    TAIL = auto()  # Its end is read while the engine computes its front.
    COMPUTE = auto()  # Nothing is read.


@dataclass(slots=True, frozen=True)
class MatchPlan:
    """The way by which a sequence gets its cached prefix.

    cold        names of its blocks, and of its checkpoint, that the disk alone has; all others are hot
    live        segments that running sequences hold, which it begins with, and which nobody reads
    checkpoint  where it is computed: blocks after which it resumes, from a state in RAM
    behind      the read that it waits for
    """

    way: Way = Way.NONE
    cold: Set[BlockHash] = frozenset()
    live: Seq[Segment] = ()
    checkpoint: int = 0
    behind: _Shared | None = None


class ColdReads:
    """As `KVBridge`, whose part it is. `threads`: that read. `recomputed`: tokens, counted at the end.
    `reads_all`: whatever is cached is read, even where computing it would be faster."""

    def __init__(
        self,
        model: Any,
        layout: KVLayout,
        store: KVStore,
        post: Callable[[Callable[[], None]], None],
        states: Checkpointer | None,
        segments: LiveSegments,
        threads: int,
    ):
        self.model, self.layout, self.store, self.post = model, layout, store, post
        self.states, self.segments = states, segments
        self._block = store.block_size
        self.rates = Rates(self._block, layout.nbytes(self._block))
        self.threads = threads
        self.readers: Executor = ThreadPoolExecutor(threads, thread_name_prefix="kv-reader")
        self.recomputed = 0
        self.reads_all = False
        self._under_way: list[_Shared] = []
        self._tails: dict[Sequence, tuple[TailRead[MLXPayload], _Shared]] = {}

    def warm_up(self) -> None:
        """Have each reader make its staging buffer and copy it once, in the background: a first restore of
        4.8 GB behind a start waited 0.1 s for that on an H100."""
        if transport().direct or not self.layout.groups:
            return
        all_there = threading.Barrier(self.threads)

        def read_nothing() -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                all_there.wait(WARM_UP_S)  # So that each thread has one.
            read_payload(self.layout, self._block, lambda views: True)

        for _ in range(self.threads):
            self.readers.submit(read_nothing)

    def close(self) -> None:
        self.readers.shutdown(wait=False, cancel_futures=True)

    # ----------------------------------------------------------------- which way

    def plan(self, sequence: Sequence) -> MatchPlan:
        """How to get what the sequence's table has.

        While another sequence reads some of the same files, this one waits for it, and takes what is hot then
        from RAM. So it does where payloads of several would fill the device's memory before any is joined.
        """
        if not (cold := self._cold_names(sequence)):
            return MatchPlan()
        most = STAGED_BYTES // max(1, self.layout.nbytes(self._block))
        under_way = sum(len(other.names) for other in self._under_way)
        full = not transport().direct and under_way + len(cold) > most
        for other in self._under_way:
            if full or cold & other.names:
                return MatchPlan(Way.WAIT, cold, behind=other)
        if not self._is_slow(sequence, cold):
            assert sequence.kv.table is not None
            hashes = sequence.kv.hashes[: len(sequence.kv.table.blocks)]
            names = self.segments.names(hashes, self._block, sequence.prompt.length)
            return MatchPlan(Way.RESTORE, cold, live=self.segments.find(names))
        if self._splits(sequence):
            return MatchPlan(Way.TAIL, cold)
        return MatchPlan(Way.COMPUTE, cold, checkpoint=self._hot_end(sequence))

    def begin(self, sequence: Sequence, plan: MatchPlan, ready: Ready) -> bool:
        """Begin the reads of `plan`. True: `ready()` follows on the engine thread.

        False: there are none, or some of it is computed, beside a tail (`tail_of`) or instead.
        """
        if plan.cold:
            sequence.stats.recomputed = 0
        if plan.behind is not None:
            plan.behind.waiting.append(lambda: self._again(sequence, ready))
        elif plan.way is Way.RESTORE:
            self._restore(sequence, plan, ready)
        elif plan.way is Way.TAIL:
            self._begin_tail(sequence, _Shared(plan.cold))
        elif plan.way is Way.COMPUTE:
            self._compute_instead(sequence, plan.checkpoint)
        return plan.way in (Way.WAIT, Way.RESTORE)

    def _again(self, sequence: Sequence, ready: Ready) -> None:
        waits = False
        try:
            waits = not sequence.cancelled and self.begin(sequence, self.plan(sequence), ready)
        except Exception:  # It matches again before its next pass, and others wait behind it.
            log.exception("%s: its blocks can't be read", sequence.name)
        if not waits:
            ready()  # What is hot is appended before the next pass.

    def _cold_names(self, sequence: Sequence) -> set[BlockHash]:
        """Names of the matched blocks and the checkpoint that only the disk has."""
        assert sequence.kv.table is not None
        blocks = zip(sequence.kv.hashes, sequence.kv.table.blocks, strict=False)
        names = {name for name, block in blocks if block.payload is None}
        if self.states is not None and sequence.kv.resume_at and self.states.hot(sequence) is None:
            names.add(checkpoint_name(sequence.kv.hashes[sequence.kv.resume_at - 1]))
        return names

    def _splits(self, sequence: Sequence) -> bool:
        """Whether its prefix can be read and computed at once.

        What is read lies in RAM until both meet, so the hot tier must have room for it.
        """
        assert sequence.kv.table is not None
        room = self.store.hot_budget() >= self.layout.nbytes(len(sequence.kv.table.blocks) * self._block)
        return not self.reads_all and self.states is None and sequence.prompt.images is None and room

    def _is_slow(self, sequence: Sequence, names: Set[BlockHash]) -> bool:
        """Whether reading them alone would be."""
        segments = self.segments.names(sequence.kv.hashes, self._block, sequence.prompt.length)
        if not self.rates.read or self.segments.find(segments):
            return False  # What is live is not read.
        states, blocks, hot = self.states, len(names), 0
        nbytes = blocks * self.rates.block_bytes
        if states is not None:
            hot = self._hot_end(sequence)
            if states.hot(sequence) is None:
                nbytes += states.nbytes(sequence.kv.resume_at) - self.rates.block_bytes
        splits = states is None and self._splits(sequence)
        return self.is_slow(sequence, self.rates.read_s(nbytes), blocks, hot, splits=splits)

    def is_slow(self, sequence: Sequence, read_s: float, blocks: int, hot: int = 0, *, splits: bool) -> bool:
        """Whether to compute some of `blocks`, which take `read_s` to read, or all but the first `hot`.

        Any thread. `splits`: as `_splits` says
        """
        if self.states is None:
            return splits and self.rates.both_pay(read_s, blocks)
        return (
            not self.reads_all
            and sequence.prompt.images is None
            and self.rates.computing_pays(read_s, sequence.kv.resume_at - hot)
        )

    # ----------------------------------------------------------------- reading all of it

    def _restore(self, sequence: Sequence, plan: MatchPlan, ready: Ready) -> None:
        splits, shared = self._splits(sequence), _Shared(plan.cold)

        def settled(restore: Restore) -> None:
            if not sequence.cancelled:
                self._promote(sequence)
            try:
                if restore.ended_early and splits and not sequence.cancelled:
                    self._begin_tail(sequence, shared)
            finally:
                if sequence not in self._tails:
                    self._under_way.remove(shared)
                try:
                    ready()
                finally:
                    if sequence not in self._tails:
                        self._wake(shared)

        restore = Restore(self, sequence, plan.live, settled, splits)
        restore.start()
        self._under_way.append(shared)  # Not if that raised: nobody would settle it.

    @staticmethod
    def _wake(shared: _Shared) -> None:
        for start in shared.waiting:
            start()

    def _promote(self, sequence: Sequence) -> None:
        """Copy what has just come from the cold tier into the hot one, as far as there is room.

        Where restoring goes through payloads it has done so already. Raises nothing.
        """
        table, cache = sequence.kv.table, sequence.kv.cache
        if table is None or cache is None or not self.layout.groups or not transport().direct:
            return
        nbytes = self.layout.nbytes(self._block)
        most = min(PROMOTED_BLOCKS, self.store.hot_budget() // nbytes)
        restored = table.blocks[: sequence.kv.length // self._block]
        cold = [index for index, block in enumerate(restored) if block.payload is None]
        try:
            while most and (run := cold[:most]) and self.store.make_room(len(run) * nbytes):
                cold = cold[most:]
                first, last = run[0] * self._block, (run[-1] + 1) * self._block
                tensors = mlx_adapter.token_range(cache, first, last)
                starts = [(index - run[0]) * self._block for index in run]
                for index, payload in zip(
                    run, copy_blocks(self.layout, tensors, starts, self._block), strict=True
                ):
                    self.store.promote(restored[index], sequence.kv.hashes[index], payload)
        except Exception:  # No memory for a copy, most likely: they stay cold.
            log.exception("%s: what it was restored from stays cold", sequence.name)

    # ----------------------------------------------------------------- reading the end of it

    def _begin_tail(self, sequence: Sequence, shared: _Shared) -> None:
        """Read what the sequence's table has behind its KV, from the end."""
        table = sequence.kv.table
        if table is None:
            return
        keys = [sequence.key(index, self._block) for index in range(len(table.blocks))]
        start = sequence.kv.length // self._block
        have: dict[int, MLXPayload] = {}
        lost: set[int] = set()
        for index in range(start, len(keys)):
            block = table.blocks[index]
            if isinstance(block.payload, MLXPayload):
                have[index] = block.payload
            elif block.block_hash != keys[index].block_hash:
                lost.add(index)

        def read(index: int) -> MLXPayload | None:
            key = keys[index]
            return read_payload(self.layout, self._block, lambda views: self.store.load_into(key, views))

        tail = TailRead(
            start,
            len(keys),
            have,
            lost,
            read=read,
            submit=self.readers.submit,
            post=self.post,
            over=lambda: sequence.cancelled,
            rates=self.rates,
            threads=self.threads,
        )
        self._tails[sequence] = tail, shared
        if shared not in self._under_way:
            self._under_way.append(shared)
        log.debug("%s: %d blocks are read or computed", sequence.name, len(keys) - start - len(have))
        tail.pump()

    def tail_of(self, sequence: Sequence) -> TailRead[MLXPayload] | None:
        """The read of its prefix's end that is under way, up to date: what came is in the hot tier."""
        if sequence not in self._tails:
            return None
        tail, _ = self._tails[sequence]
        table = sequence.kv.table
        assert table is not None
        for index, payload in tail.news():
            if payload is None:
                self.store.lose(table.blocks[index], sequence.key(index, self._block))
            else:
                self.store.promote(table.blocks[index], sequence.kv.hashes[index], payload)
        computed = min(sequence.kv.length // self._block, tail.end) - tail.at
        sequence.stats.recomputed += computed * self._block
        tail.at += computed
        return tail

    def known(self, sequence: Sequence) -> int:
        """Blocks whose files need not be written, though the sequence computes some of them."""
        return self._tails[sequence][0].end if sequence in self._tails else 0

    def end_tail(self, sequence: Sequence) -> None:
        """It has met what was computed, or nobody wants it any more; who waits for it is woken soon.

        Before the sequence's table goes. A second call does nothing.
        """
        if sequence not in self._tails:
            return
        tail, shared = self._tails[sequence]
        try:
            self.tail_of(sequence)
        finally:
            tail.stop()
            del self._tails[sequence]
            sequence.kv.compute_to = 0
            self._under_way.remove(shared)
            self.post(lambda: self._wake(shared))

    # ----------------------------------------------------------------- computing instead

    def _hot_end(self, sequence: Sequence) -> int:
        """Blocks up to the deepest checkpoint in RAM that the hot blocks reach."""
        states, table = self.states, sequence.kv.table
        assert states is not None and table is not None
        hot = 0
        while hot < len(table.blocks) and table.blocks[hot].payload is not None:
            hot += 1
        if not self.layout.groups:
            hot = sequence.kv.resume_at
        return states.deepest_hot(sequence, hot)

    def _compute_instead(self, sequence: Sequence, blocks: int) -> None:
        """Compute all behind the checkpoint after `blocks` blocks."""
        assert sequence.kv.table is not None
        sequence.stats.recomputed = (sequence.kv.resume_at - blocks) * self._block
        sequence.kv.resume_at = blocks
        sequence.kv.table.truncate(min(blocks, len(sequence.kv.table.blocks)))
        self.rates.doubt()
