"""Gives back memory that requests took: hundreds of MB, of 45 that the front needs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from ...common.heap import give_memory_back
from ..engines.watch import resident

LOOK_S = 15.0
GROWN = 4 << 20
"""Bytes over the least size so far; fewer are not worth the time (2 to 10 ms)."""
MOST_SKIPPED = 40
"""Looks skipped between two trims that give nothing: memory in use now may be free later."""


class TrimSchedule:
    """Decides when to trim: while the process is larger than it was, and less often if that does not help.

    size: bytes that it has now."""

    def __init__(self, size: int):
        self._least = self._last = size
        self._skip = self._pause = 0

    def wants_trim(self, size: int) -> bool:
        """Return whether to trim at a look that finds `size` bytes."""
        if size > self._last + GROWN:
            self._skip = self._pause = 0
        self._last, self._least = size, min(self._least, size)
        if size <= self._least + GROWN:
            return False
        self._skip -= 1
        return self._skip < 0

    def trimmed(self, size: int) -> None:
        """Note that a trim left `size` bytes."""
        self._pause = 0 if size < self._last - GROWN else min(2 * self._pause + 1, MOST_SKIPPED)
        self._skip, self._last, self._least = self._pause, size, min(self._least, size)


async def keep_heap_trimmed(
    trim: Callable[[], None] = give_memory_back,
    size: Callable[[], int] = lambda: resident(os.getpid()) or 0,
    look_s: float = LOOK_S,
) -> None:
    """Call `trim` at looks of `look_s` as `TrimSchedule` says. Never returns."""
    schedule = TrimSchedule(size())
    while True:
        await asyncio.sleep(look_s)
        if schedule.wants_trim(size()):
            await asyncio.to_thread(trim)
            schedule.trimmed(size())
