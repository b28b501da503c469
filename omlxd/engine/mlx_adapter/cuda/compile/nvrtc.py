"""CUDA source to machine code by NVRTC, which MLX's CUDA backend has loaded.

`mx.fast.cuda_kernel` puts MLX's headers before a source: a kernel then takes 3 to 5 seconds at each start of
an engine (an H100's host; four of ours together 3.9). So sources include nothing.

Each is compiled in a process of its own (nvrtc_child.py): 45 sources of an 8B shape took an H100's host 15 s
in threads of one process.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from functools import cache
from typing import Any

from . import nvrtc_child
from .nvrtc_child import CompileError

__all__ = ["CompileError", "compiled", "release"]

NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")

MOST_S = 120.0
"""For a source, in a process of its own; then this one tries."""


@cache
def _library() -> Any:
    for name in NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CompileError(f"none of {', '.join(NAMES)} can be loaded")


@cache
def _library_file() -> str:
    """Where the library lies that this process has loaded: a child may find none, or another, by its name."""
    _library()
    with open("/proc/self/maps") as maps:
        files = {line.split()[-1] for line in maps if "/libnvrtc.so" in line}
    return min(files)


def release() -> str:
    """NVRTC's version. Raises CompileError."""
    numbers = [ctypes.c_int(), ctypes.c_int()]
    _library().nvrtcVersion(*map(ctypes.byref, numbers))
    return ".".join(str(number.value) for number in numbers)


def compiled(source: str, architecture: str) -> bytes:
    """A cubin. Raises CompileError."""
    try:
        command = [sys.executable, "-I", nvrtc_child.__file__, _library_file(), architecture]
        made = subprocess.run(
            command, input=source.encode(), capture_output=True, timeout=MOST_S, check=False
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return nvrtc_child.compiled(_library(), source.encode(), architecture)
    if made.returncode:
        raise CompileError(made.stderr.decode(errors="replace")[-2000:])
    return made.stdout
