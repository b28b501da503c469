"""One cached prefix on its way from the tiers into a sequence's cache.

`Restore` reads all of it, and ends with the longest prefix whose every block was good. One that turns out to
be slow ends early, with what it has read by then (rates.py). `TailRead` reads its end while the engine
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
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Executor
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from ...kv.layout import KVLayout
from ...kv.store import KVStore
from ..mlx_adapter import LiveSegments, Segment
from ..sequence.sequence import Sequence as Request
from .arrival import DirectArrival, StagedArrival
from .checkpointer import Checkpointer
from .payload import MLXPayload
from .rates import LEAST_S, LEAST_SHARE, Rates
from .transport import transport

log = logging.getLogger(__name__)

FIRST_PASS_S, PASS_S = 0.1, 0.5
"""Seconds of computing that the engine claims at a time, at most: before the first block has come, since the
disk may be faster by now, and later, since other prompts may come between its passes."""

P = TypeVar("P")


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
        self._layout, self._store, self._states = reads.layout, reads.store, reads.states
        self._sequence = sequence
        self._ready = ready
        assert sequence.kv.table is not None
        sequence.kv.restores += 1
        self._block = self._store.block_size
        self._state: MLXPayload | None = None
        self._state_cold = False
        self._live = live
        self._first = sum(segment.tokens for segment in self._live) // self._block
        self._blocks = sequence.kv.table.blocks[self._first :]
        self._cold = [block.payload is None for block in self._blocks]
        self._keys = [sequence.key(self._first + i, self._block) for i in range(len(self._blocks))]
        self._good: list[bool | None] = [None] * len(self._blocks)  # None: not tried.
        self._left = len(self._blocks) + 1
        self._next, self._to_read = itertools.count(), sum(self._cold)
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
                    self._layout, self._reads.segments, capacity, self._block, len(self._blocks)
                )
            else:
                self._arrival = StagedArrival(
                    self._layout, self._reads.segments, self._block, len(self._blocks)
                )
        except Exception:
            log.exception("restore: can't allocate")
            self._reads.post(self._settle)
            return
        self._began = time.perf_counter()
        self._reads.readers.submit(self._fill_state)
        for _ in range(min(self._reads.threads, len(self._blocks))):
            self._reads.readers.submit(self._fill_next)

    def _fill_state(self) -> None:
        try:
            if self._states is not None:
                self._state, self._state_cold = self._states.read(self._sequence)
        except Exception:
            log.exception("restore: a checkpoint failed")
        finally:
            self._one_less()

    def _fill_next(self) -> None:
        """Fill block after block: a task for each would cost more turns at Python's lock."""
        while (index := next(self._next)) < len(self._blocks):
            self._fill(index)

    def _fill(self, index: int) -> None:
        arrival = self._arrival
        assert arrival is not None
        try:
            payload = self._blocks[index].payload
            if isinstance(payload, MLXPayload):
                arrival.put_block(index, payload)
                self._good[index] = True
            elif not (self._sequence.cancelled or self.ended_early):
                self._good[index] = False
                key = self._keys[index]
                self._good[index] = arrival.load_block(index, lambda views: self._store.load_into(key, views))
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
                self._not_joined = error

    def _good_blocks(self) -> int:
        """Blocks before the first that is not there, or not yet."""
        return next((index for index, good in enumerate(self._good) if not good), len(self._good))

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
        if self._states is not None and (good < len(self._good) or self._state is None):
            # A checkpoint serves only the whole prefix that it stands on: match again, shorter.
            good = 0
            sequence.kv.resume_at = 0
        if not (self.ended_early and self._splits):
            table.truncate(self._first + good)
        if arrival is not None and (self._first + good or sequence.kv.resume_at):
            self._take_arrival(arrival, good)

    def _keep_or_lose(self, arrival: DirectArrival | StagedArrival) -> None:
        for block, key, fine in zip(self._blocks, self._keys, self._good, strict=True):
            if fine is False:
                self._store.lose(block, key)
        for block, key, payload in zip(self._blocks, self._keys, arrival.payloads(), strict=False):
            if payload is not None:
                self._store.promote(block, key.block_hash, payload)

    def _take_arrival(self, arrival: DirectArrival | StagedArrival, good: int) -> None:
        """The first `good` blocks, and the state that stands behind them."""
        if self._not_joined is not None:
            raise self._not_joined
        sequence, states = self._sequence, self._states
        blocks = sequence.kv.resume_at or self._first + good
        tokens = blocks * self._block
        sequence.kv.cache = arrival.make_cache(self._reads.model, self._live, sequence, good)
        sequence.kv.length, sequence.kv.offered = tokens, blocks
        cold = sum(self._cold[:good])
        if states is not None and self._state is not None:
            states.put_into(sequence.kv.cache, self._state, tokens)
            if self._state_cold:
                states.keep_hot(sequence, self._state)
            if not good:  # no per-token KV: the state is all that there is
                good, cold = blocks, blocks * self._state_cold
        sequence.stats.restored_cold += cold * self._block
        sequence.stats.restored_hot += (self._first + good - cold) * self._block


class TailRead(Generic[P]):
    """Blocks up to `end`, of which `have` are there already (as those in RAM), by index.

    The engine computes them from the front while I/O threads read them from the end, until both meet:

          computed        in the pass     nobody's yet       being read, or come
        |---------------|--------------|------------------|------------------------|
        0               at             front              low                      end

    Blocks between `front` and `low` go to whoever comes first, and none to both. Near the end each side
    leaves to the other what that gets sooner: the reader begins no block that the engine reaches before it
    would be there, and the engine waits where reading the rest takes less time than its share of it. Both go
    by the rates of this very read as far as it has come: a wrong estimate is put right while it runs.

    A block that can't be read is computed when the engine gets there, and what came behind it is used.

    Made and used on the engine thread, but for `_fill`.

    read     a block by its index; None: it can't be read. Runs on any thread
    submit   runs a call on an I/O thread
    post     runs a call on the engine thread
    over     whether nobody wants the blocks any more
    threads  reads at a time
    """

    def __init__(
        self,
        start: int,
        end: int,
        have: Mapping[int, P],
        lost: set[int],
        *,
        read: Callable[[int], P | None],
        submit: Callable[[Callable[[], None]], object],
        post: Callable[[Callable[[], None]], None],
        over: Callable[[], bool],
        rates: Rates,
        threads: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.end = end
        self.at = self._front = start
        self.low = end
        self._have, self._lost = dict(have), set(lost)
        self._read, self._submit, self._post, self._over = read, submit, post, over
        self._rates, self._threads, self._clock = rates, threads, clock
        self._lock = threading.Lock()
        self._reading: set[int] = set()
        self._ready: Callable[[], None] | None = None
        self._stopped = False
        self._since = self._busy = 0.0  # When reads began, if any are under way; seconds of those before.
        self._news: list[tuple[int, P | None]] = []
        self.come: set[int] = set()
        """Blocks that were read."""

    # ----------------------------------------------------------------- the engine's side

    def news(self) -> list[tuple[int, P | None]]:
        """Blocks that have come since the last call; None: could not be read."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def take(self) -> list[P]:
        """The blocks that follow what the engine has, as far as they have come; it has them then."""
        taken: list[P] = []
        with self._lock:
            while (payload := self._have.pop(self.at, None)) is not None:
                taken.append(payload)
                self.at += 1
        return taken

    def claim(self) -> int:
        """How many blocks the engine is to compute next; 0: it is to wait for the reader (`wait`)."""
        with self._lock:
            count = self._lost_run() or self._share()
            self._front = self.at + count
        self.pump()
        return count

    def _lost_run(self) -> int:
        count = 0
        while self.at + count in self._lost:
            count += 1
        return count

    def _share(self) -> int:
        """How many of the blocks that are nobody's are the engine's."""
        stop = min((index for index in self._have if index > self.at), default=self.end)
        most = min(stop, self.low) - self.at
        if most <= 0:
            return 0
        nobodys = self.low - self.at - sum(self.at < index < self.low for index in self._have)
        read_s, compute_s = self._read_s(), self._rates.compute_s(1)
        if not compute_s:
            return 1
        share = read_s / (read_s + compute_s)
        if share < LEAST_SHARE / 2:
            return 0
        most = min(most, max(1, int((PASS_S if self.come else FIRST_PASS_S) / compute_s)))
        return min(most, round(share * (nobodys + len(self._reading))))

    def wait(self, ready: Callable[[], None]) -> None:
        """The reader gets all that is nobody's; `ready()` on the engine thread once it has come or failed.

        Also once nobody wants it any more, and the I/O threads have let go.
        """
        with self._lock:
            self._front = self.at
            self._ready = ready
        self.pump()
        self._wake_if_done()

    def pump(self) -> None:
        """Begin reads, as many as pay."""
        with self._lock:
            claimed: list[int] = []
            while (index := self._next()) is not None:
                claimed.append(index)
        for index in claimed:
            try:
                self._submit(partial(self._fill, index))
            except RuntimeError:  # The I/O threads are being ended, and so is the engine.
                with self._lock:
                    self._stopped = True
                    self._let_go(index)

    def stop(self) -> None:
        """No more is read. What was read is known for the next time."""
        with self._lock:
            self._stopped = True
            self._ready = None
            self._rates.record_read(len(self.come) * self._rates.block_bytes, self._busy_s())

    # ----------------------------------------------------------------- the reader's side

    def _next(self) -> int | None:
        """The block to read next, which is being read from now on."""
        while self.low > self._front and (self.low - 1 in self._have or self.low - 1 in self._lost):
            self.low -= 1
        if self._stopped or self._over() or self.low <= self._front or len(self._reading) >= self._threads:
            return None
        if self._ready is None:
            there_s = self._rates.compute_s(self.low - self._front)
            if there_s and there_s < self._read_s() * (len(self._reading) + 1):
                return None
        self.low -= 1
        if not self._reading:
            self._since = self._clock()
        self._reading.add(self.low)
        return self.low

    def _fill(self, index: int) -> None:
        payload: P | None = None
        wanted = not (self._stopped or self._over())
        try:
            payload = self._read(index) if wanted else None
        except Exception:
            log.exception("block %d of a prefix can't be read", index)
        with self._lock:
            self._let_go(index)
            if payload is not None:
                self._have[index] = payload
                self.come.add(index)
            elif wanted:
                self._lost.add(index)
            if wanted:
                self._news.append((index, payload))
        self.pump()
        self._wake_if_done()

    def _let_go(self, index: int) -> None:
        self._reading.discard(index)
        if not self._reading:
            self._busy += self._clock() - self._since

    def _wake_if_done(self) -> None:
        with self._lock:
            ready = self._ready
            if ready is None or self._reading:
                return
            self._ready = None
        self._post(ready)

    def _busy_s(self) -> float:
        return self._busy + (self._clock() - self._since if self._reading else 0.0)

    def _read_s(self) -> float:
        """Seconds from one block to the next: as told before, until as many have come as are under way."""
        busy, come = self._busy_s(), len(self.come)
        if come >= max(1, len(self._reading)):
            return busy / come
        return max(self._rates.read_s(self._rates.block_bytes), busy / (come + len(self._reading) + 1))
