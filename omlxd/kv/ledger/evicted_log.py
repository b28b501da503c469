"""A bounded log of files that are gone, for whoever asks why a prompt missed.

Only this process's: after a restart a file that was evicted before looks as if it had never been.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ...common.bounded_map import BoundedMap
from ..files.paths import SUFFIX, file_kind

MOST = 32768
"""Names of files in the log. An entry takes about 200 bytes, so all of them 6 MB."""


@dataclass(slots=True, frozen=True)
class Removal:
    """A file that is gone. `what`: `evicted`, `damaged` (removed as its bytes were wrong) or `cleared` (by
    the owner).

    when  seconds since 1970
    """

    what: str
    when: float


class EvictedLog:
    """The newest `most` files that are gone. Asking is safe from any thread."""

    def __init__(self, most: int = MOST):
        self._gone = BoundedMap[int, Removal](max_items=most)

    def note(self, path: str, what: str) -> None:
        """Note a removal. `path`: of a block's file, relative to the cache dir."""
        key = _key(path)
        if key is not None:  # A temporary file is nobody's miss.
            self._gone.put(key, Removal(what, time.time()))

    def of(self, path: str) -> Removal | None:
        key = _key(path)
        return None if key is None else self._gone.peek(key)


def _key(path: str) -> int | None:
    """Return the first 8 bytes of the hash in a block file's name: names are as good as random."""
    if file_kind(path.rpartition("/")[2]) != "block":
        return None
    return int(path[-len(SUFFIX) - 64 : -len(SUFFIX) - 48], 16)
