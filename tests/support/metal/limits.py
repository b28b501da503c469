"""Apple's limits that running a kernel as C++ does not meet."""

from __future__ import annotations

from math import prod

from .source import Printed

MOST_BUFFERS = 31
MOST_THREADS = 1024


def wrong(source: Printed, threadgroup: tuple[int, int, int]) -> str:
    """Return the first fault, or ""."""
    buffers = sum(parameter.buffer is not None for parameter in source.parameters)
    if buffers > MOST_BUFFERS:
        return f"it has {buffers} buffers, and Metal {MOST_BUFFERS}"
    if prod(threadgroup) > MOST_THREADS:
        return f"a threadgroup of {prod(threadgroup)} threads, and Apple's GPUs have {MOST_THREADS}"
    return ""
