"""Matrix products with the bits of the BLAS in MLX's wheel, some ten times faster.

The wheel for Linux CPUs links the reference BLAS, whose loops have no vector code: of the time of tests that
run a tiny model in this process it takes half. They hold on its bits, as a row's do not depend on how many
are computed beside it, which OpenBLAS does not promise. `exact_blas.c` adds in the same order.
tests/engine/test_blas.py compares the two.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from pathlib import Path

from c_library import library

SOURCE = Path(__file__).with_suffix(".c")
FLAGS = ("-O2", "-mavx2", "-ffp-contract=off")


def put_first() -> None:
    """Load the library, compiled once, else leave the wheel's. Call before anything imports MLX."""
    if sys.platform != "linux" or "mlx.core" in sys.modules or " avx2 " not in _processor():
        return
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        ctypes.CDLL(str(library(SOURCE, FLAGS)), mode=os.RTLD_GLOBAL | os.RTLD_NOW)


def _processor() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/cpuinfo").read_text()
    return ""
