"""`python nvrtc_child.py LIBRARY ARCHITECTURE`: CUDA source from stdin, machine code to stdout, or exit 1.

NVRTC compiles one program of a process at a time, whatever thread asks. This file imports none of omlxd, so
that a child starts in 30 ms.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any


class CompileError(Exception):
    """There is no NVRTC, or it refused the source."""


def compiled(nvrtc: Any, source: bytes, architecture: str) -> bytes:
    """A cubin, by the library `nvrtc`. Raises CompileError."""
    program = ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"omlxd.cu", 0, None, None):
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


if __name__ == "__main__":
    os.nice(10)  # Weights are read meanwhile, and MLX compiles what nobody else can.
    try:
        sys.stdout.buffer.write(compiled(ctypes.CDLL(sys.argv[1]), sys.stdin.buffer.read(), sys.argv[2]))
    except (CompileError, OSError) as error:
        sys.exit(str(error))
