"""Who holds a cache dir: asked without touching the lock, or taken for a moment.

Even a shared lock held for a moment would make a daemon that starts then believe that the folder
is another's. So verbs that only look read the number in the lock file, and ask the system about it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ..kv.files.paths import LOCK_NAME

_PROC_LOCKS = Path("/proc/locks")


class DaemonRuns(Exception):
    """A daemon holds the cache dir. `pid` 0: of unknown number."""

    def __init__(self, root: Path, pid: int):
        who = f"a daemon (process {pid})" if pid else "a daemon"
        super().__init__(f"{who} is using {root}; stop it first")
        self.pid = pid


def holder(root: Path) -> int | None:
    """Process id of the daemon that holds the folder; 0: one of unknown number; None: nobody.

    Where the system doesn't list locks (macOS), a living process of the number that the last daemon
    left counts as that daemon.
    """
    path = root / LOCK_NAME
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
        inode = path.stat().st_ino
    except OSError:
        return None
    pid = int(text) if text.isdigit() and len(text) < 11 else 0
    try:
        lines = _PROC_LOCKS.read_text().splitlines()
    except OSError:
        return pid if pid and _is_alive(pid) else None
    # "1: FLOCK ADVISORY WRITE 10244 fe:00:2146918 0 EOF"; some file systems give another device than stat.
    held = any("FLOCK" in line and f":{inode} " in line for line in lines)
    return pid if held else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # It is somebody else's.
    return True


@contextlib.contextmanager
def exclusive(root: Path) -> Iterator[None]:
    """Hold the folder: no daemon can use it meanwhile. Raises DaemonRuns, or OSError.

    Keep it short: a daemon that starts now waits a moment for it, and then takes it for another daemon.
    """
    fd = os.open(root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DaemonRuns(root, holder(root) or 0) from None
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
        yield
    finally:
        os.close(fd)
