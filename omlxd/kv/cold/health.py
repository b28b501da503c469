"""The cold tier's circuit breaker: it logs a line when the disk stops working, and one when it works again.

| state     | stores                       | left by                                                       |
|-----------|------------------------------|---------------------------------------------------------------|
| closed    | are tried                    | one that fails: open; one that gets no space: open, no line   |
| open      | are refused                  | `PAUSE_S` later: half-open                                    |
| half-open | the next one is tried, alone | its success: closed; its failure: open                        |

Reads have a breaker of their own, because a full disk can still be read: after an error that no file
alone causes (`DISK_ERRORS`) none is tried for `PAUSE_S`, and the first that works closes it. Thread-safe.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from typing import Literal

log = logging.getLogger(__name__)

PAUSE_S = 30.0
"""Seconds that the disk is left alone after a failure."""


FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
DISK_ERRORS = frozenset({errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.ETIMEDOUT})


class ColdHealth:
    """The state of the breaker. `clock`: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        self._stores_until: float | None = None  # None: closed
        self._reads_until: float | None = None
        self._probing = False
        self._faults: set[str] = set()
        self._store_error = 0

    @property
    def is_on(self) -> bool:
        """False between the log line that says that the disk failed and the one that says that it works."""
        return not self._faults

    @property
    def is_full(self) -> bool:
        """Whether the disk's only fault is that it is full: reads go on."""
        return self._faults == {"store"} and self._store_error in FULL

    @property
    def stores_on(self) -> bool:
        return self._stores_until is None

    @property
    def refuses(self) -> bool:
        """Whether a store would be refused now."""
        until = self._stores_until
        return until is not None and (self._probing or self._clock() < until)

    # ----------------------------------------------------------------- stores

    def may_store(self) -> Literal["yes", "probe", "no"]:
        """Say whether to try a store. After `probe` the caller must report its end, or call `probe_over`."""
        if self.stores_on:
            return "yes"
        with self._lock:
            until = self._stores_until
            if until is None:  # Since it was last looked at.
                return "yes"
            if self._probing or self._clock() < until:
                return "no"
            self._probing = True
            return "probe"

    def stored(self) -> None:
        if self._stores_until is None:
            return
        with self._lock:
            if not self._probing:
                return  # Begun before the one that failed: it would turn the tier on and off in turn.
            self._stores_until, self._probing = None, False
        self._works("store")

    def store_failed(self, error: OSError) -> None:
        with self._lock:
            self._stores_until, self._probing = self._clock() + PAUSE_S, False
            self._store_error = error.errno or 0
        self._fails("store", error)

    def store_refused(self) -> None:
        """Note that no space was granted: whoever refused it has said why."""
        with self._lock:
            self._stores_until, self._probing = self._clock() + PAUSE_S, False

    def probe_over(self) -> None:
        """End a probe that says nothing about the disk: the next store is one."""
        with self._lock:
            self._probing = False

    # ----------------------------------------------------------------- reads

    def may_read(self) -> bool:
        return self._reads_until is None or self._clock() >= self._reads_until

    def was_read(self) -> None:
        if self._reads_until is not None:
            with self._lock:
                self._reads_until = None
            self._works("read")

    def read_failed(self, error: OSError) -> None:
        if error.errno not in DISK_ERRORS:
            log.warning("cold tier: a file can't be read: %s", error)
            return
        with self._lock:
            self._reads_until = self._clock() + PAUSE_S
        self._fails("read", error)

    def _fails(self, what: str, error: OSError) -> None:
        with self._lock:
            first = not self._faults
            self._faults.add(what)
        if first:
            log.warning("cold tier off: a %s failed (%s); it is tried again every %d s", what, error, PAUSE_S)

    def _works(self, what: str) -> None:
        with self._lock:
            last = self._faults == {what}
            self._faults.discard(what)
        if last:
            log.warning("cold tier on: the disk works again")
