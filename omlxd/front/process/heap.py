"""The front gives back memory that requests took: they may come to hundreds of MB, and it holds 45 itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from ...common.heap import give_memory_back
from ..engines.watch import resident

LOOK_S = 15.0
GROWN = 4 << 20
"""Bytes by which the process grew since it was trimmed; less is not worth the time (2 to 10 ms)."""


async def keep_heap_trimmed(
    trim: Callable[[], None] = give_memory_back,
    size: Callable[[], int] = lambda: resident(os.getpid()) or 0,
    look_s: float = LOOK_S,
) -> None:
    """Call `trim` whenever the process has grown by `GROWN` bytes since the last time. Never returns."""
    least = size()
    while True:
        await asyncio.sleep(look_s)
        if size() > least + GROWN:
            await asyncio.to_thread(trim)
        least = size()
