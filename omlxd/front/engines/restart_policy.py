"""When an engine that ended may start again, and how long one may be silent before it is ended.

A model that loads stands back from those that answer: its process gets less of a busy processor.

Only where it can be undone, or the engine would be slow for good: raising a priority again needs a
right that root has, or that RLIMIT_NICE gives. Elsewhere, on Linux, the batch policy, which everybody
may leave: it keeps what loads from pushing itself before what wakes up to answer.
"""
# MERGED: docstrings of restart_policy.py, priority.py (join by hand)

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
LOAD_ATTEMPTS = 3
HOLD_S = 60.0
"""Clients give up at once on a retry-after above 60."""
MOST_STALLS = 4
"""Each end for want of progress doubles the patience, up to 2 to the power of this."""


class RestartPolicy:
    """`backoff_s`: seconds before the first restart, the second, …; the last holds for all further ones.

    hold_s   how long a model whose loads failed is refused
    stall_s  seconds without progress after which an engine that has work is ended; 0: never
    stalls   ends for want of progress in a row, as far as they count
    """

    def __init__(self, backoff_s: Sequence[float], hold_s: float, stall_s: float):
        self._backoff_s = tuple(backoff_s)
        self._hold_s = hold_s
        self._stall_s = stall_s
        self._failed_loads = 0
        self._ends_in_a_row = 0
        self._ended_at = -math.inf
        self.stalls = 0

    # ----------------------------------------------------------------- what happens

    def ended(self) -> None:
        """The process ended, or never started."""
        self._ended_at = time.monotonic()
        self._ends_in_a_row += 1

    def load_failed(self) -> bool:
        """True: it has failed too often in a row, give up for a while."""
        self._failed_loads += 1
        return self._failed_loads >= LOAD_ATTEMPTS

    def loaded(self) -> None:
        self._failed_loads = 0

    def finished(self) -> None:
        """A request got its whole answer."""
        self._ends_in_a_row = 0

    def life_over(self, *, stalled: bool) -> None:
        self.stalls = min(self.stalls + 1, MOST_STALLS) if stalled else 0

    # ----------------------------------------------------------------- what follows

    @property
    def backoff_s(self) -> float:
        """Seconds between the last end and the next start."""
        if self._ends_in_a_row == 0:
            return 0.0
        return self._backoff_s[min(self._ends_in_a_row, len(self._backoff_s)) - 1]

    @property
    def patience_s(self) -> float:
        """Seconds that the next process may be silent; 0: for ever."""
        return self._stall_s * 2**self.stalls

    @property
    def wait_s(self) -> float:
        """Seconds from now until it may start; not above 0: at once."""
        return self._ended_at + self.backoff_s - time.monotonic()

    @property
    def hold_left_s(self) -> float:
        """Seconds for which a model that was given up is still refused."""
        return self._ended_at + self._hold_s - time.monotonic()

    def retry_after(self, *, given_up: bool) -> int:
        """Whole seconds that a client is told to wait, 1 to 60."""
        return max(1, min(60, math.ceil(self._hold_s if given_up else self.backoff_s)))


NICE = 10


def lower(pid: int) -> None:
    """Of the process and all that it will start."""
    with contextlib.suppress(OSError):
        if _may_raise():
            os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
        elif sys.platform == "linux":
            os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))


def restore(pid: int) -> None:
    """Of all its threads, which each have their own on Linux."""
    for thread in _threads(pid):
        with contextlib.suppress(OSError):
            if _may_raise():
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, 0))
            elif sys.platform == "linux":
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def _may_raise() -> bool:
    if os.geteuid() == 0:
        return os.getpriority(os.PRIO_PROCESS, 0) >= 0
    limit = getattr(resource, "RLIMIT_NICE", None)
    # The limit is 20 less the best nice value that may be set.
    return limit is not None and resource.getrlimit(limit)[0] >= 20


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(Path("/proc") / str(pid) / "task")]
    except OSError:
        return [pid]
