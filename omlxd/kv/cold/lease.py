"""Who grants cold-tier space to a writer. In the daemon the front does (engine/kvio/lease.py asks it)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Lease(Protocol):
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
