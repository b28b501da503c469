"""The few calls of CUDA's driver that MLX has no name for. Without CUDA they say so and do nothing.

libcuda is there wherever MLX's CUDA backend runs; no package is needed. Device 0 is MLX's default.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_PREFERRED_LOCATION, _ACCESSED_BY = 3, 5  # CUmem_advise
_RESERVED, _USED = 5, 7  # CUmemPool_attribute


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


_DEVICE, _HOST = _Location(1, 0), _Location(2, 0)


class DriverError(Exception):
    """The driver is missing, too old, or refused."""


@cache
def _driver() -> tuple[Any, ctypes.c_void_p]:
    """(library, the context that MLX uses). Raises DriverError."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        code = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    except (OSError, AttributeError) as error:
        raise DriverError(str(error)) from error
    if code:
        raise DriverError(f"no context: {code}")
    return cuda, context


def _call(name: str, *args: Any) -> None:
    """On the calling thread, in MLX's context."""
    cuda, context = _driver()
    try:
        code = cuda.cuCtxSetCurrent(context) or getattr(cuda, name)(*args)
    except AttributeError as error:
        raise DriverError(str(error)) from error
    if code:
        raise DriverError(f"{name}: {code}")


def keep_on_host(view: memoryview) -> None:
    """Managed memory `view` is to stay with the host and be mapped by the device. Raises DriverError."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    for advice, location in ((_PREFERRED_LOCATION, _HOST), (_ACCESSED_BY, _DEVICE)):
        _call("cuMemAdvise_v2", ctypes.c_uint64(address), ctypes.c_size_t(view.nbytes), advice, location)


def free_memory() -> int:
    """Bytes of the GPU's memory that no process holds, and of the pool that MLX allocates from those that
    nothing has: the pool keeps what a batch had before it was copied, 45 GB of an H100's 85. Raises
    DriverError."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    pool, reserved, used = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
    _call("cuDeviceGetMemPool", ctypes.byref(pool), 0)
    for attribute, value in ((_RESERVED, reserved), (_USED, used)):
        _call("cuMemPoolGetAttribute", pool, attribute, ctypes.byref(value))
    return free.value + reserved.value - used.value
