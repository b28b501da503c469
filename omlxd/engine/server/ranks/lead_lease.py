"""Space on SSD for ranks: while the disk of one takes nothing, none stores, since no hit would come of it.

Else the others would evict, for blocks that one rank lacks, what all have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....kv.cold.writer import Lease


class LeadLease:
    """A rank's part of the engine's `Lease`. `may_store`: whether the disks of all others work.

    A rank whose own disk fails asks as before, and so finds that it works again.
    """

    def __init__(self, lease: Lease, ranks: int, may_store: Callable[[], bool]):
        self._lease, self._ranks, self._may_store = lease, ranks, may_store

    @property
    def capacity(self) -> int:
        return self._lease.capacity // self._ranks

    def take(self, nbytes: int) -> bool:
        return self._may_store() and self._lease.take(nbytes)

    def stored(self, path: str, nbytes: int) -> None:
        self._lease.stored(path, nbytes)

    def give_back(self, nbytes: int) -> None:
        self._lease.give_back(nbytes)

    def dropped(self, path: str) -> None:
        self._lease.dropped(path)

    def touched(self, paths: Sequence[str]) -> None:
        self._lease.touched(paths)
