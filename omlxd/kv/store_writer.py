"""Writes blocks to the cold tier in the background, so that no store ever stalls a decode step.

The queue is bounded in bytes. A full queue refuses the newest store, and a disk that fails or
fills is left alone for a while; either is counted, and serving goes on.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from .block_file import BlockKey
from .cold_tier import ColdTier, TempLeft
from .space import Space

log = logging.getLogger(__name__)

PAUSE_S = 30.0
"""After a failed write the disk is left alone this long."""

_ONE_PATH_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
"""Something is wrong with one path (a folder where the file should be), and not with the disk."""


class WritablePayload(Protocol):
    """A payload whose bytes can be read from any thread."""

    @property
    def nbytes(self) -> int: ...

    def buffers(self) -> Sequence[memoryview]:
        """Byte views in file order."""
        ...


@dataclass(slots=True)
class WriterStats:
    """Since the start. A store ends as exactly one of these."""

    written: int = 0
    written_bytes: int = 0
    dropped_full: int = 0
    refused: int = 0
    failed: int = 0


Done = Callable[[bool], None]


@dataclass(slots=True)
class _Store:
    ticket: int
    key: BlockKey
    payload: WritablePayload
    done: Done
    tier: ColdTier


class StoreWriter:
    """`threads` writers over one queue of at most `max_queue_bytes` of payload."""

    def __init__(self, cold: ColdTier, space: Space, *, max_queue_bytes: int, threads: int = 2):
        self._cold = cold
        self._space = space
        self._max_queue_bytes = max_queue_bytes
        self._queue: queue.SimpleQueue[_Store | Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._queued_bytes = 0
        self._last_ticket = 0
        self._unsettled: OrderedDict[int, None] = OrderedDict()  # tickets of stores, oldest first
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()  # (last ticket waited for, action)
        self._jobs = 0  # stores and actions that have not ended
        self._closed = False
        self._paused_until = 0.0
        self.stats = WriterStats()
        self._threads = [
            threading.Thread(target=self._run, name=f"kv-writer-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    def submit(
        self, key: BlockKey, payload: WritablePayload, done: Done, tier: ColdTier | None = None
    ) -> bool:
        """Queue a store. `done(in place?)` runs on a writer thread. False, and no `done`: not taken.

        tier  where to, if not to the writer's own cold tier (another format in the same folder)
        """
        with self._lock:
            if self._closed or time.monotonic() < self._paused_until:
                self.stats.refused += 1
                return False
            if self._queued_bytes and self._queued_bytes + payload.nbytes > self._max_queue_bytes:
                self.stats.dropped_full += 1
                return False
            self._queued_bytes += payload.nbytes
            self._last_ticket += 1
            self._unsettled[self._last_ticket] = None
            self._jobs += 1
            self._queue.put(_Store(self._last_ticket, key, payload, done, tier or self._cold))
        return True

    def after_queued(self, action: Callable[[], None]) -> None:
        """Run `action` on a writer thread once every store queued so far is settled; never if closed."""
        with self._lock:
            if self._closed:
                return
            self._jobs += 1
            if self._unsettled:
                self._waiting.append((self._last_ticket, action))
            else:
                self._queue.put(action)

    def flush(self, deadline_s: float) -> bool:
        """Wait until every store is settled and every action has run. False: the deadline came first."""
        with self._idle:
            return self._idle.wait_for(lambda: self._jobs == 0, timeout=deadline_s)

    def close(self) -> None:
        """Take nothing more, and stop after what is queued."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in self._threads:
                self._queue.put(None)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            self._work(job)
            del job

    def _work(self, job: _Store | Callable[[], None]) -> None:
        if isinstance(job, _Store):
            self._settle(job)
        else:
            _guarded(job)
            self._end_jobs(1)

    def _settle(self, job: _Store) -> None:
        in_place = False
        try:
            in_place = self._store(job.tier, job.key, job.payload)
        except Exception:  # a bug must not end the thread: its block would stay pinned for ever
            log.exception("cold tier: store failed")
            with self._lock:
                self.stats.failed += 1
        _guarded(lambda: job.done(in_place))
        with self._lock:
            self._queued_bytes -= job.payload.nbytes
            del self._unsettled[job.ticket]
            due = self._take_due()
        for action in due:
            _guarded(action)
        self._end_jobs(1 + len(due))

    def _end_jobs(self, count: int) -> None:
        with self._idle:
            self._jobs -= count
            if self._jobs == 0:
                self._idle.notify_all()

    def _take_due(self) -> list[Callable[[], None]]:
        oldest = next(iter(self._unsettled), self._last_ticket + 1)
        due: list[Callable[[], None]] = []
        while self._waiting and self._waiting[0][0] < oldest:
            due.append(self._waiting.popleft()[1])
        return due

    def _store(self, tier: ColdTier, key: BlockKey, payload: WritablePayload) -> bool:
        nbytes = tier.bytes_per_block
        if not self._space.take(nbytes):
            self._pause("refused")
            return False
        try:
            tier.store(key, payload.buffers())
        except TempLeft as error:
            # The temporary file takes the space that was granted, so the grant is kept with it.
            self._pause("failed", error)
            return False
        except _ONE_PATH_ERRORS as error:
            self._space.give_back(nbytes)
            log.warning("cold tier: a store failed: %s", error)
            with self._lock:
                self.stats.failed += 1
            return False
        except OSError as error:
            self._space.give_back(nbytes)
            self._pause("failed", error)
            return False
        except BaseException:
            self._space.give_back(nbytes)
            raise
        self._space.stored(tier.path_of(key.block_hash), nbytes)
        with self._lock:
            self.stats.written += 1
            self.stats.written_bytes += nbytes
        return True

    def _pause(self, outcome: Literal["refused", "failed"], error: OSError | None = None) -> None:
        with self._lock:
            if outcome == "refused":
                self.stats.refused += 1
            else:
                self.stats.failed += 1
            first = time.monotonic() >= self._paused_until
            self._paused_until = time.monotonic() + PAUSE_S
        if first and error is not None:
            log.warning("cold tier: a store failed (%s); no stores for %d s", error, PAUSE_S)


def _guarded(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:
        log.exception("cold tier: a writer's callback failed")
