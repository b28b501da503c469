"""Watches over an engine process: whether its work makes progress, and what memory its load takes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from ...common.units import human
from ...models.footprint import footprint

STALL_S = 120.0
"""Seconds without any progress after which an engine that has work is ended."""
SLOW_CHUNKS = 4.0
"""An engine may also be silent for this many times its longest silence so far: a slow machine's chunks."""

LOAD_LOOK_S = 0.25
LOAD_SPARE_BYTES = 2 << 30
"""Bytes that a load may take beyond twice what the model's files need."""


async def stalled(progress: Callable[[], object], stall_s: float) -> float:
    """Wait until `progress()` stays the same for `stall_s`; returns the seconds of silence.

    progress  any value that changes while work gets done; None: there is no work. The engine is asked
              nothing: a thread that answers says nothing about the thread that computes.
    """
    pause, seen = min(5.0, stall_s / 8), None
    silent = longest = 0.0
    looked_at = time.monotonic()
    while True:
        await asyncio.sleep(pause)
        now, state = time.monotonic(), progress()
        # While this process itself did not run (the machine slept, or was busy), it heard nothing.
        silent += min(now - looked_at, 2 * pause)
        looked_at = now
        if state is None or state != seen:
            if state is not None and seen is not None:
                longest = max(longest, silent)
            silent, seen = 0.0, state
        elif silent >= max(stall_s, SLOW_CHUNKS * longest):
            return silent


def resident(pid: int | None) -> int | None:
    """Bytes of RAM that process `pid` holds; None: there is none."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).memory_info().rss if pid is not None else None
    return None


def load_progress(pid: int) -> object:
    """A loading process sends no events; but it computes, or reads, or grows."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        with process.oneshot():
            cpu = process.cpu_times()
            return round(cpu.user + cpu.system, 1), process.memory_info().rss
    return None


async def overgrown(pid: int, folder: Path, loads: Callable[[], bool], float32: bool = False) -> str:
    """Watch the memory of process `pid` while it `loads` the model in `folder`.

    Returns a clause once it takes far more than the files need, "" once it has ended or loads no more.
    The engine can't watch itself: a tokenizer may hold Python's lock.
    """
    need = (await asyncio.to_thread(footprint, folder, float32)).loading()
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        while loads():
            if (took := process.memory_info().rss) > 2 * need + LOAD_SPARE_BYTES:
                return f"it took {human(took)} while it loaded; its files need {human(need)}"
            await asyncio.sleep(LOAD_LOOK_S)
    return ""
