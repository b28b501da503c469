"""What macOS alone says of its memory, by its C library: no process is started for a figure.

Each function returns None elsewhere; `units.py` says what counts instead. A test may replace any of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from functools import cache
from typing import Any

RUSAGE_INFO_V0 = 0
_FIELDS = (
    "user_time system_time pkg_idle_wkups interrupt_wkups pageins wired_size resident_size phys_footprint "
    "proc_start_abstime proc_exit_abstime"
)


class _Usage(ctypes.Structure):
    """`struct rusage_info_v0` of <sys/resource.h>."""

    _fields_ = [("uuid", ctypes.c_uint8 * 16), *((name, ctypes.c_uint64) for name in _FIELDS.split())]


def sysctl_int(name: str) -> int | None:
    """Return the integer that `sysctl NAME` prints; None: there is none of this name."""
    value, size = ctypes.c_int64(), ctypes.c_size_t(8)
    with contextlib.suppress(AttributeError):
        if not _library().sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0):
            # It writes 4 bytes or 8; macOS's processors are little-endian.
            return value.value if size.value == 8 else ctypes.c_int32(value.value).value
    return None


def phys_footprint(pid: int) -> int | None:
    """Return the bytes that macOS charges to process `pid`, as Activity Monitor shows them.

    With compressed pages and Metal's buffers, which the resident size leaves out; without mapped files.
    None: the process has ended, or is another user's.
    """
    usage = _Usage()
    with contextlib.suppress(AttributeError):
        if not _library().proc_pid_rusage(pid, RUSAGE_INFO_V0, ctypes.byref(usage)):
            return usage.phys_footprint or None  # An ended one that nobody has waited for has 0.
    return None


@cache
def _library() -> Any:
    """macOS's C library; None, without any function, elsewhere."""
    if sys.platform != "darwin":
        return None
    library = ctypes.CDLL(None)
    library.sysctlbyname.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 3, ctypes.c_size_t]
    library.proc_pid_rusage.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    return library
