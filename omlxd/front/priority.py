"""A model that loads stands back from those that answer: its process gets less of a busy processor.

Only where it can be undone, or the engine would be slow for good: raising a priority again needs a
right that root has, or that RLIMIT_NICE gives. Elsewhere, on Linux, the batch policy, which everybody
may leave: it keeps what loads from pushing itself before what wakes up to answer.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path

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
