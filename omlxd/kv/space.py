"""Who grants cold-tier space to a writer. In the daemon the front does (engine/space.py asks it)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from .ledger import Ledger


class Space(Protocol):
    """Called from writer threads; may block."""

    def take(self, nbytes: int) -> bool:
        """Set `nbytes` aside for one file. False: refused."""
        ...

    def stored(self, path: str, nbytes: int) -> None:
        """The file is in place."""
        ...

    def give_back(self, nbytes: int) -> None:
        """The file was not written after all."""
        ...

    def dropped(self, path: str) -> None:
        """A file was removed because its bytes are wrong."""
        ...

    def touched(self, paths: Sequence[str]) -> None:
        """Files that a request used, leaf first."""
        ...


class LedgerSpace:
    """A ledger in the same process: for tests, benchmarks and embedding."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._lock = threading.Lock()

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
