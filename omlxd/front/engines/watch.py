"""Watches over an engine process: whether its work makes progress, what its load takes, how often it ends."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ...common.units import human, process_memory
from ...models.footprint import footprint

STALL_S = 120.0
"""Seconds without any progress after which an engine that has work is ended."""
SLOW_CHUNKS = 4.0
"""Longest silences so far that an engine may be silent for: a slow machine's chunks."""

LOAD_LOOK_S = 0.25
LOAD_SPARE_BYTES = 2 << 30
"""Bytes that a load may take beyond twice what the model's files need."""


LOAD_ATTEMPTS = 3
MOST_FAULTS = 3
"""GPU faults in a row, with no request answered between them."""
SMALLER = 4
"""The next process computes passes this many times smaller than the one that failed. A request is sent to two
processes at most, so its second try must go well."""


async def stalled(
    progress: Callable[[], object], stall_s: float, at_half: Callable[[float], None] = lambda silent_s: None
) -> float:
    """Wait until `progress()` stays the same for `stall_s`; returns the seconds of silence.

    at_half   is called with them once half of that is over
    progress  any value that changes while work gets done; None: there is no work. The engine is asked
              nothing: a thread that answers says nothing about the thread that computes.
    """
    pause, seen = min(5.0, stall_s / 8), None
    silent = longest = 0.0
    told = False
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
            silent, seen, told = 0.0, state, False
            continue
        most = max(stall_s, SLOW_CHUNKS * longest)
        if silent >= most:
            return silent
        if silent >= most / 2 and not told:
            told = True
            at_half(silent)


def resident(pid: int | None) -> int | None:
    """Return the bytes of RAM that process `pid` holds; None: no process."""
    with contextlib.suppress(psutil.Error):
        return process_memory(psutil.Process(pid)) if pid is not None else None
    return None


def load_progress(pid: int) -> object:
    """Return a loading process's progress: it sends no events, but computes, reads, or grows."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        with process.oneshot():
            cpu = process.cpu_times()
            return round(cpu.user + cpu.system, 1), process_memory(process)
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
            if (took := process_memory(process)) > 2 * need + LOAD_SPARE_BYTES:
                return f"it took {human(took)} while it loaded; its files need {human(need)}"
            await asyncio.sleep(LOAD_LOOK_S)
    return ""


@dataclass(slots=True)
class Restarts:
    """Decides when a process that ended may start again, and how long the next one may be silent.

    backoff_s  seconds before the first restart, the second, …; the last holds for all further ones
    hold_s     seconds for which a model whose loads failed is refused
    stall_s    seconds without progress after which an engine that has work is ended; 0: never
    faults     GPU faults since a request was answered
    pass_limit  tokens of a prompt that a pass of the next process computes, at most; 0: as suits the device
    limited_at  when the fault was that set it, on the system's clock
    files      of the model when it was tried: what changes with them
    """

    backoffs_s: Sequence[float]
    hold_s: float
    stall_s: float
    ended_at: float = -math.inf
    ends_in_a_row: int = 0
    failed_loads: int = 0
    stalls: int = 0
    faults: int = 0
    pass_limit: int = 0
    limited_at: float = 0.0
    files: tuple[int, ...] = ()

    def record_fault(self, pass_tokens: int, block_size: int) -> None:
        """A GPU fault ended the process, perhaps in a pass of so many tokens (0: in no pass).

        The limit is whole blocks, at least one: what the engine does with it.
        """
        self.faults += 1
        if pass_tokens:
            self.pass_limit = max(1, pass_tokens // SMALLER // block_size) * block_size
            self.limited_at = time.time()

    def record_answer(self) -> None:
        """A request was answered: what ends from now on is the first in a row."""
        self.ends_in_a_row = self.faults = 0

    def forgive(self) -> None:
        """The owner may have mended what failed."""
        self.ended_at = -math.inf
        self.faults = self.pass_limit = 0

    @property
    def is_forgiven(self) -> bool:
        return self.ended_at == -math.inf

    @property
    def backoff_s(self) -> float:
        """Seconds between the last end and the next start."""
        if self.ends_in_a_row == 0:
            return 0.0
        return self.backoffs_s[min(self.ends_in_a_row, len(self.backoffs_s)) - 1]

    @property
    def patience_s(self) -> float:
        """Seconds that the next process may be silent; 0: for ever."""
        return self.stall_s * 2**self.stalls

    @property
    def wait_s(self) -> float:
        """Seconds until the next start; not above 0: at once."""
        return self.ended_at + self.backoff_s - time.monotonic()

    @property
    def hold_left_s(self) -> float:
        """Seconds that requests are refused because loads failed, or GPU faults ended each process; not above
        0: they are not."""
        held = self.failed_loads >= LOAD_ATTEMPTS or self.faults >= MOST_FAULTS
        return self.ended_at + self.hold_s - time.monotonic() if held else 0.0
