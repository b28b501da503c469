"""CUDA source to machine code by NVRTC, which MLX's CUDA backend has loaded.

`mx.fast.cuda_kernel` puts MLX's headers before a source: a kernel then takes 3 to 5 seconds at each start of
an engine (an H100's host; four of ours together 3.9). So sources include nothing.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from . import cuda_driver

NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")


class CompileError(Exception):
    """There is no NVRTC, or it refused the source."""


@cache
def _library() -> Any:
    for name in NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CompileError(f"none of {', '.join(NAMES)} can be loaded")


def machine_code(source: str) -> bytes:
    """A cubin for this machine's GPU. Raises CompileError, DriverError."""
    return compiled(source, f"sm_{cuda_driver.architecture()}")


def compiled(source: str, architecture: str) -> bytes:
    """A cubin. Raises CompileError."""
    nvrtc, program = _library(), ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"omlxd.cu", 0, None, None):
        raise CompileError("NVRTC made no program")
    try:
        options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
        if nvrtc.nvrtcCompileProgram(program, 1, options):
            raise CompileError(
                _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode()
            )
        return _text(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(program: ctypes.c_void_p, size: Any, get: Any) -> bytes:
    count = ctypes.c_size_t()
    size(program, ctypes.byref(count))
    buffer = ctypes.create_string_buffer(max(1, count.value))
    get(program, buffer)
    return buffer.raw[: count.value]
