"""Makes a folder hang as a dead mount does, in every Python process that has this folder in PYTHONPATH.

While the file $HANGS_WHILE exists, each call of `os` or `open` on something below $HANGING_FOLDER waits.
Python imports a module of this name at its start. Linux: it asks /proc what a descriptor is of.
"""

from __future__ import annotations

import builtins
import fcntl
import functools
import io
import os
import time
from collections.abc import Callable
from typing import Any

FOLDER, FLAG = os.environ.get("HANGING_FOLDER", ""), os.environ.get("HANGS_WHILE", "")
CALLS = (
    *("open", "stat", "lstat", "scandir", "listdir", "mkdir", "rename", "replace", "unlink", "rmdir"),
    *(
        "utime",
        "statvfs",
        "fstatvfs",
        "access",
        "fstat",
        "fsync",
        "pread",
        "preadv",
        "read",
        "write",
        "writev",
    ),
)
PAUSE_S = 0.05
_readlink = os.readlink
_stat = os.stat


def _hangs() -> bool:
    try:
        _stat(FLAG)
    except OSError:
        return False
    return True


def _is_below(place: object) -> bool:
    try:
        path = _readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else os.fspath(place)  # type: ignore[call-overload]
    except (OSError, TypeError):
        return False
    return os.fsdecode(path).startswith(FOLDER)


def _waiting(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wait(*args: Any, **named: Any) -> Any:
        if args and _hangs() and _is_below(getattr(args[0], "fileno", lambda: args[0])()):
            while _hangs():
                time.sleep(PAUSE_S)
        return call(*args, **named)

    return wait


if FOLDER and FLAG:
    for name in CALLS:
        setattr(os, name, _waiting(getattr(os, name)))
    fcntl.flock = _waiting(fcntl.flock)
    builtins.open = io.open = _waiting(io.open)
