"""The few calls of CUDA's driver that MLX has no name for. Without CUDA they say so and do nothing.

libcuda is there wherever MLX's CUDA backend runs; no package is needed. Device 0 is MLX's default.
"""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache
from pathlib import Path
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


@cache
def architecture() -> int:
    """Compute capability of the GPU, as 90 for 9.0. Raises DriverError."""
    numbers = [ctypes.c_int(), ctypes.c_int()]
    for attribute, number in zip((75, 76), numbers, strict=True):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_…
        _call("cuDeviceGetAttribute", ctypes.byref(number), attribute, 0)
    return numbers[0].value * 10 + numbers[1].value


@cache
def multiprocessors() -> int:
    """Of the GPU. Raises DriverError."""
    number = ctypes.c_int()
    _call("cuDeviceGetAttribute", ctypes.byref(number), 16, 0)  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    return number.value


@cache
def name() -> str:
    """Of the GPU. Raises DriverError."""
    text = ctypes.create_string_buffer(256)
    _call("cuDeviceGetName", text, 256, 0)
    return text.value.decode(errors="replace")


@cache
def release() -> str:
    """The driver's version, as exactly as it is known. Raises DriverError."""
    number = ctypes.c_int()
    _call("cuDriverGetVersion", ctypes.byref(number))
    with contextlib.suppress(OSError):
        return f"{number.value} {Path('/proc/driver/nvidia/version').read_text().splitlines()[0]}"
    return str(number.value)


def wait() -> None:
    """Until the GPU has done all that it was given. Does nothing without CUDA."""
    with contextlib.suppress(DriverError):
        _call("cuCtxSynchronize")


SPARE = 2 << 30
"""Bytes that MLX's pool may keep of what was freed, once memory is short."""

SHORT = 4
"""Memory is short where less than one part of so many is free."""


def _memory() -> tuple[int, int, int, int, ctypes.c_void_p]:
    """(free bytes of the GPU, all, bytes of the pool that MLX allocates from, of these in use, the pool)."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    pool, reserved, used = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
    _call("cuDeviceGetMemPool", ctypes.byref(pool), 0)
    for attribute, value in ((_RESERVED, reserved), (_USED, used)):
        _call("cuMemPoolGetAttribute", pool, attribute, ctypes.byref(value))
    return free.value, total.value, reserved.value, used.value, pool


def free_memory() -> int:
    """Bytes of the GPU's memory that can be had. Raises DriverError.

    The pool that MLX allocates from keeps what was freed. Of what smaller arrays left it makes no large one:
    an H100 with 6.7 GB free and 30 GB in such pieces had no room for 5 GB. So where memory is short the pool
    gives back what it can, and the rest does not count.
    """
    free, total, reserved, used, _ = _memory()
    if free >= total // SHORT:
        return free + reserved - used
    trim_pool()
    return _memory()[0]


def trim_pool() -> None:
    """Have MLX's pool give back what nothing has, where memory is short. Does nothing without CUDA."""
    with contextlib.suppress(DriverError):
        free, total, reserved, used, pool = _memory()
        if free < total // SHORT and reserved - used > SPARE:
            _call("cuCtxSynchronize")  # What was freed on the way counts only then.
            _call("cuMemPoolTrimTo", pool, ctypes.c_size_t(used + SPARE))
