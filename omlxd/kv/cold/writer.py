"""Writes blocks to the cold tier in the background, so that no store ever stalls a decode step.

The queue is bounded in bytes. A full queue refuses the newest store, and a disk that fails or
fills is left alone for a while (kv/cold/health.py); either is counted, and serving goes on.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..block import Payload
from ..files.block_file import BlockKey
from ..files.fs import TempLeft
from ..hashing import BlockHash
from .health import ColdHealth
from .tier import ColdTier

log = logging.getLogger(__name__)

_ONE_PATH_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
"""Errors of one path (a folder where the file should be), not of the disk."""


MOST_ACTIONS = 1000
"""Touches that wait at most. Behind a disk that hangs they would gather without end."""


class WritablePayload(Payload, Protocol):
    """A payload whose bytes can be read from any thread."""

    def buffers(self) -> Sequence[memoryview]:
        """Return byte views in file order."""
        ...


class Target(Protocol):
    """A place for a store: a cold tier, or a record (record_file.py)."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes on disk that the store takes."""
        ...

    def path_of(self, block_hash: BlockHash) -> str:
        """Return the path relative to the cache dir."""
        ...

    def store(self, key: BlockKey, buffers: Sequence[memoryview]) -> None:
        """Write the payload. Raises OSError, leaving nothing behind, or else TempLeft."""
        ...


class Lease(Protocol):
    """Grants cold-tier space (engine/kvio/lease.py). Called from writer threads; may block."""

    @property
    def capacity(self) -> int:
        """Bytes that the tier's files may take now, whatever its limit; 0: unknown. Any thread."""
        ...

    def take(self, nbytes: int) -> bool:
        """Reserve `nbytes` for one file. False: refused."""
        ...

    def stored(self, path: str, nbytes: int) -> None:
        """Report that the file is in place."""
        ...

    def give_back(self, nbytes: int) -> None:
        """Give back the bytes of a file that was not written."""
        ...

    def dropped(self, path: str) -> None:
        """Report a file that was removed because its bytes are wrong."""
        ...

    def touched(self, paths: Sequence[str]) -> None:
        """Report the files that a request used, leaf first."""
        ...


@dataclass(slots=True)
class WriterStats:
    """Counters since the start. A store ends as exactly one of these."""

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
    tier: Target
    is_probe: bool


class StoreWriter:
    """`threads` writers over one queue of at most `max_queue_bytes` of payload; `queued_bytes` are in it."""

    def __init__(
        self,
        cold: ColdTier,
        lease: Lease,
        *,
        max_queue_bytes: int,
        threads: int = 2,
        health: ColdHealth | None = None,
    ):
        self.health = health or ColdHealth()
        self._cold = cold
        self._lease = lease
        self._max_queue_bytes = max_queue_bytes
        self._queue: queue.SimpleQueue[_Store | Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self.queued_bytes = 0
        self._last_ticket = 0
        self._unsettled: OrderedDict[int, None] = OrderedDict()  # tickets of stores, oldest first
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()  # (last ticket waited for, action)
        self._jobs = 0  # stores and actions that have not ended
        self._actions = 0  # those of them that are actions
        self._closed = False
        self.stats = WriterStats()
        self._threads = [
            threading.Thread(target=self._run, name=f"kv-writer-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: BlockKey, payload: WritablePayload, done: Done, tier: Target | None = None) -> bool:
        """Queue a store. `done(in place?)` runs on a writer thread. False, and no `done`: not taken.

        tier  where to, if not to the writer's own cold tier (another format, or a record)
        """
        with self._lock:
            if self._closed:
                self.stats.refused += 1
                return False
            if self.queued_bytes and self.queued_bytes + payload.nbytes > self._max_queue_bytes:
                self.stats.dropped_full += 1
                return False
            if (may := self.health.may_store()) == "no":
                self.stats.refused += 1
                return False
            self.queued_bytes += payload.nbytes
            self._last_ticket += 1
            self._unsettled[self._last_ticket] = None
            self._jobs += 1
            job = _Store(self._last_ticket, key, payload, done, tier or self._cold, may == "probe")
            self._queue.put(job)
        return True

    def has_room(self, nbytes: int, count: int = 1) -> bool:
        """Return whether the queue takes `count` payloads of `nbytes` now; an empty queue takes one of any
        size.
        """
        first = count == 1 and not self.queued_bytes
        return first or self.queued_bytes + count * nbytes <= self._max_queue_bytes

    def wait_for_room(self, nbytes: int, timeout_s: float) -> bool:
        """Wait until the queue has that room. False: not in time."""
        with self._room:
            return self._room.wait_for(lambda: self.has_room(nbytes), timeout=timeout_s)

    def after_queued(self, action: Callable[[], None], *, must: bool = False) -> None:
        """Run `action` on a writer thread once every queued store is settled.

        must  also where the writer is closed (then the caller may run it), or `MOST_ACTIONS` wait already
        """
        with self._lock:
            if not must and (self._closed or self._actions >= MOST_ACTIONS):
                return
            self._jobs += 1
            self._actions += 1
            if self._unsettled:
                self._waiting.append((self._last_ticket, action))
                return
            if not self._closed:
                self._queue.put(action)
                return
        self._work(action)

    def remove(self, names: Collection[BlockHash], done: Callable[[Collection[BlockHash]], None]) -> None:
        """Remove files once every store queued so far is settled; no bound and no close drops this.

        `done(those that are gone)` runs on a writer thread.
        """

        def remove_all() -> None:
            errors = {name: error for name in names if (error := self._remove(name)) is not None}
            if errors:
                log.warning(
                    "cold tier: %d files can't be removed: %s", len(errors), next(iter(errors.values()))
                )
            done([name for name in names if name not in errors])

        self.after_queued(remove_all, must=True)

    def _remove(self, name: BlockHash) -> OSError | None:
        error = self._cold.remove(name)
        if error is None:
            self._lease.dropped(self._cold.path_of(name))
        return error

    def flush(self, deadline_s: float) -> bool:
        """Wait until every store is settled and every action has run. False: the deadline came first."""
        with self._idle:
            return self._idle.wait_for(lambda: self._jobs == 0, timeout=deadline_s)

    def close(self) -> None:
        """Refuse new stores, and stop after the queued ones."""
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
            self._end_jobs(actions=1)

    def _settle(self, job: _Store) -> None:
        in_place = False
        try:
            in_place = self._store(job)
        except Exception:  # a bug must not end the thread: its block would stay pinned for ever
            log.exception("cold tier: store failed")
            with self._lock:
                self.stats.failed += 1
        if job.is_probe and not in_place:
            self.health.probe_over()
        _guarded(lambda: job.done(in_place))
        with self._room:
            self.queued_bytes -= job.payload.nbytes
            self._room.notify_all()
            del self._unsettled[job.ticket]
            due = self._take_due()
        for action in due:
            _guarded(action)
        self._end_jobs(stores=1, actions=len(due))

    def _end_jobs(self, stores: int = 0, actions: int = 0) -> None:
        with self._idle:
            self._jobs -= stores + actions
            self._actions -= actions
            if self._jobs == 0:
                self._idle.notify_all()

    def _take_due(self) -> list[Callable[[], None]]:
        oldest = next(iter(self._unsettled), self._last_ticket + 1)
        due: list[Callable[[], None]] = []
        while self._waiting and self._waiting[0][0] < oldest:
            due.append(self._waiting.popleft()[1])
        return due

    def _store(self, job: _Store) -> bool:
        if not (job.is_probe or self.health.stores_on):
            with self._lock:  # The disk has failed since it was queued.
                self.stats.refused += 1
            return False
        tier, nbytes = job.tier, job.tier.bytes_per_block
        if not self._lease.take(nbytes):
            self.health.store_refused()
            with self._lock:
                self.stats.refused += 1
            return False
        error = self._write(job, nbytes)
        with self._lock:
            if error is None:
                self.stats.written += 1
                self.stats.written_bytes += nbytes
            else:
                self.stats.failed += 1
        if error is None:
            self._lease.stored(tier.path_of(job.key.block_hash), nbytes)
            self.health.stored()
        elif isinstance(error, _ONE_PATH_ERRORS):
            log.warning("cold tier: a store failed: %s", error)
        else:
            self.health.store_failed(error)
        return error is None

    def _write(self, job: _Store, nbytes: int) -> OSError | None:
        """Put the file in place, or give its space back."""
        try:
            job.tier.store(job.key, job.payload.buffers())
        except TempLeft as error:
            # The temporary file takes the space that was granted, so the grant is kept with it.
            return error
        except OSError as error:
            self._lease.give_back(nbytes)
            return error
        except BaseException:
            self._lease.give_back(nbytes)
            raise
        return None


def _guarded(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:
        log.exception("cold tier: a writer's callback failed")
