"""A file system that reports a call that hangs: a dead mount never answers.

No thread that waits in the kernel can be called back. An engine whose threads do is ended
(engine/server/service.py), and the next one serves without the SSD cache, which the front has found to hang
(front/engines/ledger/cold_ledger.py). Only looks and reads count: behind writes nobody waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from .fs import Buffer, FileSystem

HANG_S = 10.0
"""Seconds: longer than a sleeping disk takes to wake up."""
SLOWEST = 2_000_000
"""Bytes a second that a slow disk reads beside others: a large read may take longer."""

T = TypeVar("T")


class WatchedFileSystem(FileSystem):
    """A `FileSystem` that notes when each call should be over. `clock`: seconds, monotonic."""

    def __init__(self, lock: str = "", clock: Callable[[], float] = time.monotonic):
        super().__init__(lock)
        self._clock = clock
        self._until: dict[int, float] = {}
        """Thread that waits → when its call should be over."""

    @property
    def hangs(self) -> bool:
        """Whether a call has waited for too long. Any thread."""
        waiting = list(self._until.values())
        return bool(waiting) and min(waiting) < self._clock()

    def _wait(self, call: Callable[[], T], nbytes: int = 0) -> T:
        thread = threading.get_ident()
        self._until[thread] = self._clock() + HANG_S + nbytes / SLOWEST
        try:
            return call()
        finally:
            del self._until[thread]

    def open_read(self, path: str) -> int:
        return self._wait(lambda: super(WatchedFileSystem, self).open_read(path))

    def size(self, fd: int) -> int:
        return self._wait(lambda: super(WatchedFileSystem, self).size(fd))

    def readv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        nbytes = sum(map(len, buffers))
        return self._wait(lambda: super(WatchedFileSystem, self).readv(fd, buffers, offset), nbytes)

    def is_file(self, path: str) -> bool:
        return self._wait(lambda: super(WatchedFileSystem, self).is_file(path))
