"""Grants of a ledger in the same process."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from .ledger import Ledger


class LedgerLease:
    """A `Lease` (cold/writer.py) of a ledger that lives in this process: an engine by itself has one."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._lock = threading.Lock()

    @property
    def capacity(self) -> int:
        """0 where the disk has all that the limit allows: a store may be given another limit."""
        capacity = self._ledger.capacity()
        return capacity if capacity < self._ledger.cold_cache_bytes else 0

    def take(self, nbytes: int) -> bool:
        with self._lock:
            return self._ledger.reserve(nbytes) == nbytes

    def stored(self, path: str, nbytes: int) -> None:
        with self._lock:
            self._ledger.stored([(path, nbytes)])

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self._ledger.released(nbytes)

    def dropped(self, path: str) -> None:
        with self._lock:
            self._ledger.dropped([path])

    def touched(self, paths: Sequence[str]) -> None:
        with self._lock:
            self._ledger.touched(paths)
