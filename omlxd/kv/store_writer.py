"""Writes blocks to the cold tier in the background, so that no store ever stalls a decode step.

The queue is bounded in bytes. A full queue refuses the newest store, and a disk that fails or
fills is left alone for a while; either is counted, and serving goes on.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .block_file import BlockKey
from .cold_tier import ColdTier
from .space import Space

log = logging.getLogger(__name__)

PAUSE_S = 30.0
"""After a failed write the disk is left alone this long."""


class WritablePayload(Protocol):
    """A payload whose bytes can be read from any thread."""

    @property
    def nbytes(self) -> int: ...

    def buffers(self) -> Sequence[memoryview]:
        """Byte views in file order."""
        ...


@dataclass(slots=True)
class WriterStats:
    """Since the start. A store ends as exactly one of written, refused, failed."""

    written: int = 0
    written_bytes: int = 0
    dropped_full: int = 0
    refused: int = 0
    failed: int = 0


Done = Callable[[bool], None]


class StoreWriter:
    """`threads` writers over one queue of at most `max_queue_bytes` of payload."""

    def __init__(self, cold: ColdTier, space: Space, *, max_queue_bytes: int, threads: int = 2):
        self._cold = cold
        self._space = space
        self._max_queue_bytes = max_queue_bytes
        self._queue: queue.SimpleQueue[tuple[BlockKey, WritablePayload, Done] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._queued_bytes = 0
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

    def submit(self, key: BlockKey, payload: WritablePayload, done: Done) -> bool:
        """Queue a store. `done(in place?)` runs on a writer thread. False, and no `done`: not taken."""
        with self._lock:
            if time.monotonic() < self._paused_until:
                self.stats.refused += 1
                return False
            if self._queued_bytes and self._queued_bytes + payload.nbytes > self._max_queue_bytes:
                self.stats.dropped_full += 1
                return False
            self._queued_bytes += payload.nbytes
        self._queue.put((key, payload, done))
        return True

    def flush(self, deadline_s: float) -> bool:
        """Wait until the queue is empty. False: the deadline came first."""
        with self._idle:
            return self._idle.wait_for(lambda: self._queued_bytes == 0, timeout=deadline_s)

    def close(self) -> None:
        """Stop after what is queued."""
        for _ in self._threads:
            self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            key, payload, done = item
            try:
                in_place = self._store(key, payload)
            except Exception:  # a bug must not end the thread: its block would stay pinned for ever
                log.exception("cold tier: store failed")
                in_place = False
                self.stats.failed += 1
            nbytes = payload.nbytes
            del payload, item
            done(in_place)
            with self._idle:
                self._queued_bytes -= nbytes
                if self._queued_bytes == 0:
                    self._idle.notify_all()

    def _store(self, key: BlockKey, payload: WritablePayload) -> bool:
        nbytes = self._cold.bytes_per_block
        if not self._space.take(nbytes):
            with self._lock:
                self.stats.refused += 1
                self._paused_until = time.monotonic() + PAUSE_S
            return False
        try:
            self._cold.store(key, payload.buffers())
        except OSError as error:
            self._space.give_back(nbytes)
            with self._lock:
                self.stats.failed += 1
                first = time.monotonic() >= self._paused_until
                self._paused_until = time.monotonic() + PAUSE_S
            if first:
                log.warning("cold tier: a store failed (%s); no stores for %d s", error, PAUSE_S)
            return False
        self._space.stored(self._cold.path_of(key.block_hash), nbytes)
        with self._lock:
            self.stats.written += 1
            self.stats.written_bytes += nbytes
        return True
