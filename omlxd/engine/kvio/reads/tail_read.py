"""Read the end of a cached prefix while the engine computes its front."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from .rates import LEAST_SHARE, Rates

log = logging.getLogger(__name__)

FIRST_PASS_S, PASS_S = 0.1, 0.5
"""Seconds of computing that the engine claims at a time, at most: before the first block has come, since the
disk may be faster by now, and later, since other prompts may come between its passes."""

P = TypeVar("P")


@dataclass(slots=True)
class _ReadSeconds:
    """since: when reads began, if any are under way; before: seconds of those before."""

    since: float = 0.0
    before: float = 0.0


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
        self._spent = _ReadSeconds()
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
            self._spent.since = self._clock()
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
            self._spent.before += self._clock() - self._spent.since

    def _wake_if_done(self) -> None:
        with self._lock:
            ready = self._ready
            if ready is None or self._reading:
                return
            self._ready = None
        self._post(ready)

    def _busy_s(self) -> float:
        return self._spent.before + (self._clock() - self._spent.since if self._reading else 0.0)

    def _read_s(self) -> float:
        """Seconds from one block to the next: as told before, until as many have come as are under way."""
        busy, come = self._busy_s(), len(self.come)
        if come >= max(1, len(self._reading)):
            return busy / come
        return max(self._rates.read_s(self._rates.block_bytes), busy / (come + len(self._reading) + 1))
