"""Read a cached prefix from the tiers into a sequence's cache.

`Restore` reads all of it, and ends with the longest prefix whose every block was good. One that turns out to
be slow ends early, with what it has read by then (rates.py). tail_read.py reads its end while the engine
computes its front. Which one: cold_reads.py; where blocks arrive: arrival.py.

Through the whole daemon over HTTP, H100, 8B shape, page cache warm, ms to the first token (medians of
two, tools/bench/serve.py):

    prompt      computed     hot     after kill -9
     4,096           584      79               159
    16,384           905     127               290
    32,768         1,407     191               377
    98,304         7,973     388             1,068
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

from ....kv.block import Block
from ....kv.files.block_file import BlockKey
from ....kv.layout import KVLayout
from ....kv.store import KVStore
from ...mlx_adapter import LiveSegments, Segment, end_if_fault
from ...sequence.sequence import Sequence as Request
from ..checkpointer import Checkpointer
from ..payload import MLXPayload
from ..transport import transport
from .arrival import DirectArrival, StagedArrival
from .rates import LEAST_S, Rates

log = logging.getLogger(__name__)


class Reads(Protocol):
    """What a restore asks of those that it is one of (cold_reads.py)."""

    model: Any
    layout: KVLayout
    store: KVStore
    states: Checkpointer | None
    segments: LiveSegments
    readers: Executor
    threads: int
    rates: Rates
    post: Callable[[Callable[[], None]], None]

    def is_slow(self, sequence: Request, read_s: float, blocks: int, hot: int = 0, *, splits: bool) -> bool:
        """Whether to compute some of `blocks`, which take `read_s` to read. Any thread."""
        ...


@dataclass(slots=True)
class _Piece:
    """A block of the prefix. good: whether it came; None: it was not tried."""

    block: Block
    key: BlockKey
    cold: bool
    good: bool | None = None


class Restore:
    """One of `reads`: begun and settled on the engine thread, where `ready`, which gets it, ends it.

    live    segments that its prefix begins with and that running sequences hold: blocks are those behind
    splits  if it ends early, the rest is read and computed at once: the sequence's table keeps it
    """

    def __init__(
        self,
        reads: Reads,
        sequence: Request,
        live: Seq[Segment],
        ready: Callable[[Restore], None],
        splits: bool,
    ):
        self._reads, self._splits = reads, splits
        self._began, self._read = 0.0, 0
        self.ended_early = False
        self._sequence = sequence
        self._ready = ready
        assert sequence.kv.table is not None
        sequence.kv.restores += 1
        self._block = self._reads.store.block_size
        self._state: MLXPayload | None = None
        self._state_cold = False
        self._live = live
        self._first = sum(segment.tokens for segment in self._live) // self._block
        self._pieces = [
            _Piece(block, sequence.key(index, self._block), block.payload is None)
            for index, block in enumerate(sequence.kv.table.blocks[self._first :], self._first)
        ]
        self._left = len(self._pieces) + 1
        self._next, self._to_read = itertools.count(), sum(piece.cold for piece in self._pieces)
        self._lock = threading.Lock()
        self._arrival: DirectArrival | StagedArrival | None = None
        self._tried: Counter[int] = Counter()  # Blocks of each run.
        self._not_joined: Exception | None = None

    def start(self) -> None:
        self._reads.readers.submit(self._allocate)

    def _allocate(self) -> None:
        try:
            capacity = self._sequence.capacity - self._first * self._block
            if transport().direct:
                self._arrival = DirectArrival(
                    self._reads.layout, self._reads.segments, capacity, self._block, len(self._pieces)
                )
            else:
                self._arrival = StagedArrival(
                    self._reads.layout, self._reads.segments, self._block, len(self._pieces)
                )
        except Exception:
            log.exception("restore: can't allocate")
            self._reads.post(self._settle)
            return
        self._began = time.perf_counter()
        self._reads.readers.submit(self._fill_state)
        for _ in range(min(self._reads.threads, len(self._pieces))):
            self._reads.readers.submit(self._fill_next)

    def _fill_state(self) -> None:
        try:
            if self._reads.states is not None:
                self._state, self._state_cold = self._reads.states.read(self._sequence)
        except Exception:
            log.exception("restore: a checkpoint failed")
        finally:
            self._one_less()

    def _fill_next(self) -> None:
        """Fill block after block: a task for each would cost more turns at Python's lock."""
        while (index := next(self._next)) < len(self._pieces):
            self._fill(index)

    def _fill(self, index: int) -> None:
        arrival = self._arrival
        assert arrival is not None
        try:
            piece, store = self._pieces[index], self._reads.store
            if isinstance(payload := piece.block.payload, MLXPayload):
                arrival.put_block(index, payload)
                piece.good = True
            elif not (self._sequence.cancelled or self.ended_early):
                piece.good = False
                piece.good = arrival.load_block(index, lambda views: store.load_into(piece.key, views))
                self._count_read()
        except Exception:
            log.exception("restore: block %d failed", index)
        finally:
            if run := arrival.run:
                with self._lock:
                    self._tried[index // run] += 1
                    ends_run = self._tried[index // run] == run
                if ends_run:
                    self._reads.post(self._join)
            self._one_less()

    def _count_read(self) -> None:
        with self._lock:
            self._read += 1
            took, left = time.perf_counter() - self._began, self._to_read - self._read
            if took > LEAST_S and left:
                self.ended_early = self.ended_early or self._reads.is_slow(
                    self._sequence, took / self._read * left, left, splits=self._splits
                )

    def _one_less(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._reads.post(self._settle)

    def _join(self) -> None:
        """On the engine thread: what came is joined while the rest is read."""
        arrival, sequence = self._arrival, self._sequence
        if isinstance(arrival, StagedArrival) and not (sequence.cancelled or self._not_joined):
            try:
                arrival.join(self._reads.model, self._live, sequence, self._good_blocks())
            except Exception as error:  # The end tells: until then threads fill in payloads.
                end_if_fault(error)
                self._not_joined = error

    def _good_blocks(self) -> int:
        """Blocks before the first that is not there, or not yet."""
        return next((i for i, piece in enumerate(self._pieces) if not piece.good), len(self._pieces))

    def _settle(self) -> None:
        """On the engine thread: what came becomes the sequence's, or nothing does and it is computed."""
        try:
            self._accept()
        except Exception:  # out of memory, most likely
            log.exception("restore: can't fill a cache")
            sequence = self._sequence
            sequence.kv.cache, sequence.kv.length, sequence.kv.offered, sequence.kv.resume_at = None, 0, 0, 0
            if sequence.kv.table is not None:
                sequence.kv.table.truncate(0)
        self._ready(self)

    def _accept(self) -> None:
        """The good prefix becomes the sequence's cache."""
        sequence, table, arrival = self._sequence, self._sequence.kv.table, self._arrival
        assert table is not None
        self._arrival = None
        good = self._good_blocks()
        if arrival is not None:
            rates, took = self._reads.rates, time.perf_counter() - self._began
            rates.record_read(self._read * rates.block_bytes, took, ended_early=self.ended_early)
            self._keep_or_lose(arrival)
        if self._reads.states is not None and (good < len(self._pieces) or self._state is None):
            # A checkpoint serves only the whole prefix that it stands on: match again, shorter.
            good = 0
            sequence.kv.resume_at = 0
        if not (self.ended_early and self._splits):
            table.truncate(self._first + good)
        if arrival is not None and (self._first + good or sequence.kv.resume_at):
            self._take_arrival(arrival, good)

    def _keep_or_lose(self, arrival: DirectArrival | StagedArrival) -> None:
        for piece in self._pieces:
            if piece.good is False:
                self._reads.store.lose(piece.block, piece.key)
        for piece, payload in zip(self._pieces, arrival.payloads(), strict=False):
            if payload is not None:
                self._reads.store.promote(piece.block, piece.key.block_hash, payload)

    def _take_arrival(self, arrival: DirectArrival | StagedArrival, good: int) -> None:
        """The first `good` blocks, and the state that stands behind them."""
        if self._not_joined is not None:
            raise self._not_joined
        sequence, states = self._sequence, self._reads.states
        blocks = sequence.kv.resume_at or self._first + good
        tokens = blocks * self._block
        sequence.kv.cache = arrival.make_cache(self._reads.model, self._live, sequence, good)
        sequence.kv.length, sequence.kv.offered = tokens, blocks
        cold = sum(piece.cold for piece in self._pieces[:good])
        if states is not None and self._state is not None:
            states.put_into(sequence.kv.cache, self._state, tokens)
            if self._state_cold:
                states.keep_hot(sequence, self._state)
            if not good:  # no per-token KV: the state is all that there is
                good, cold = blocks, blocks * self._state_cold
        sequence.stats.restored_cold += cold * self._block
        sequence.stats.restored_hot += (self._first + good - cold) * self._block
