"""What MLX keeps of freed arrays, given back to the system.

`mx.clear_cache` of 0.32.4 waits for every CPU stream and holds Python's lock meanwhile. A stream that
reads by a Python object, as those of blank.py do, waits for that lock, and neither ever goes on. So
the library's own function is called, by ctypes, which lets go of the lock.
"""

from __future__ import annotations

import ctypes

import mlx.core as mx

_clear = ctypes.CDLL(mx.__file__)["_ZN3mlx4core11clear_cacheEv"]
"""`void mlx::core::clear_cache()`, found by its C++ name."""
_clear.argtypes, _clear.restype = (), None


def give_memory_back() -> None:
    """Free what MLX keeps for arrays to come. Waits for what the CPU computes. Any thread."""
    _clear()
