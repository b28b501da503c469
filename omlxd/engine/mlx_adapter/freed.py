"""What MLX keeps of freed arrays, given back to the system.

`mx.clear_cache` of 0.32.4 waits for every CPU stream and holds Python's lock meanwhile. A stream that
reads by a Python object, as those of blank.py do, waits for that lock, and neither ever goes on. So
the library's own function is called, by ctypes, which lets go of the lock. The wheels for Linux and
macOS have it; a build without it gets nothing back, which is better than standing still.
"""

from __future__ import annotations

import ctypes
import logging

import mlx.core as mx

log = logging.getLogger(__name__)

SYMBOL = "_ZN3mlx4core11clear_cacheEv"
"""`void mlx::core::clear_cache()`, by its C++ name."""

_clear = getattr(ctypes.CDLL(mx.__file__), SYMBOL, None)
if _clear is None:
    log.warning("this build of MLX has no %s: memory that it keeps is not given back", SYMBOL)
else:
    _clear.argtypes, _clear.restype = (), None


MOST = 2 << 30
FIXED, PART = 128 << 20, 4
"""Worth keeping is what a pass takes, which grows with the weights: something fixed, and a part of them."""


def keep_at_most(weights: int, granted: int | None) -> None:
    """Keep fewer freed arrays than a model of `weights` bytes has use for, and than `granted` bytes."""
    most = min(MOST, FIXED + weights // PART)
    most = most if granted is None else min(most, granted)
    mx.set_cache_limit(most)
    if mx.get_cache_memory() > most:
        give_memory_back()


def give_memory_back() -> None:
    """Free what MLX keeps for arrays to come. Waits for what the CPU computes. Any thread."""
    if _clear is not None:
        _clear()
