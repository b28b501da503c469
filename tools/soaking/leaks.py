"""What processes hold that must be gone when they are: sockets, shared memory, files, processes.

Attributed to them, and not counted over the whole machine, where other programs come and go.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import psutil

_SHARED = re.compile(r"(/dev/shm/\S+|/SYSV\S+)")


def sockets_of(process: psutil.Process) -> Counter[str]:
    """How many it has, by kind: `unix`, and for TCP its state (`LISTEN`, `ESTABLISHED`, …)."""
    found: Counter[str] = Counter()
    with contextlib.suppress(psutil.Error):
        for one in process.net_connections(kind="all"):
            found["unix" if one.status == psutil.CONN_NONE else one.status] += 1
    return found


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[str]:
    """Shared memory that they map or have open, POSIX's and System V's; {} where there is no /proc."""
    found: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            found |= set(_SHARED.findall(Path(f"/proc/{process.pid}/maps").read_text()))
            for file in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found |= set(_SHARED.findall(str(file.readlink())))
    return found


def left_of(shared_memory: set[str]) -> list[str]:
    """Those that are there still. System V's name is its key, which the kernel lists in decimal."""
    segments: set[int] = set()
    with contextlib.suppress(OSError):
        lines = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
        segments = {int(line.split()[0]) & 0xFFFFFFFF for line in lines}
    return sorted(
        name
        for name in shared_memory
        if (int(name[5:13], 16) in segments if name.startswith("/SYSV") else Path(name).exists())
    )


def processes_of(home: Path) -> list[psutil.Process]:
    """Living processes that were started with this home, whoever their parent is by now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get("HOME") == str(home):
                found.append(process)
    return found


def temporary_files(cache: Path) -> list[Path]:
    """Block files that nobody finished."""
    return [path for path in cache.rglob("*") if path.name.endswith(".tmp")]
