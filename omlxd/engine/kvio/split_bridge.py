"""The bridge of a rank that holds a share of its model: a hit is the least that all ranks have verified.

So a prefix is put into the cache before anybody computes, whole and at once: no rank computes a part that
another one reads. `restore` may be called again, with a smaller limit, until all agree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ..sequence.sequence import Sequence
from .bridge import KVBridge

log = logging.getLogger(__name__)


class SplitBridge(KVBridge):
    """A `KVBridge` whose matches end at a limit. Engine thread."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.reads.reads_all = True
        self._limits: dict[Sequence, int] = {}

    def restore(self, sequence: Sequence, limit: int, done: Callable[[], None]) -> None:
        """Have `sequence` hold its longest cached prefix of at most `limit` blocks, however much it holds
        now. `done()` follows, at once or later: then `sequence.kv.length` says how much it is.

        Raises nothing: what can't be read is a miss.
        """
        if sequence.kv.table is not None and sequence.kv.length == limit * self._block:
            done()
            return
        self._reset(sequence)
        self._limits[sequence] = limit

        def go_on(times: int = 0) -> None:
            try:
                waits = KVBridge.match(self, sequence, lambda: go_on(times + 1))
                if not waits and not times:
                    waits = KVBridge.match(self, sequence, lambda: go_on(times + 1))
            except Exception:
                log.exception("%s: its cached prefix can't be restored", sequence.name)
                self._reset(sequence)
                self._admit(sequence)
                waits = False
            if not waits:
                done()

        go_on()

    def _reset(self, sequence: Sequence) -> None:
        """Forget what was restored."""
        kv, stats = sequence.kv, sequence.stats
        if kv.table is not None:
            kv.table.free()
            kv.table = None
            self._unpin(sequence)
        kv.cache = None
        kv.length = kv.offered = kv.resume_at = kv.divergence = kv.unreached = 0
        stats.restored_hot = stats.restored_cold = 0

    def _limit_of_prompt(self, sequence: Sequence) -> int:
        return super()._limit(sequence)

    def _limit(self, sequence: Sequence) -> int:
        return min(self._limit_of_prompt(sequence), self._limits.get(sequence, 0))

    def finish(self, sequence: Sequence, *args: Any, **kwargs: Any) -> None:
        super().finish(sequence, *args, **kwargs)
        self._limits.pop(sequence, None)
