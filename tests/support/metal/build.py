"""Builds shared libraries by the machine's C++ compiler, once for each content."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
COMMON = ["-std=c++20", "-shared", "-fPIC", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=0", "-fno-exceptions"]
RUNTIME = [*COMMON, "-O2"]
KERNEL = [
    *COMMON,
    *("-O1", "-g1", "-w", "-march=native", "-ffp-contract=off", "-fsingle-precision-constant", "-fno-rtti"),
    *("-fvisibility=hidden", "-fno-gnu-unique", "-ftrivial-auto-var-init=pattern"),
    # Indices beyond arrays of a thread, addresses that are not aligned, division by 0.
    *("-fsanitize=bounds,alignment,integer-divide-by-zero", "-fsanitize-undefined-trap-on-error"),
    # Each access and each step is a call of runtime.cpp's, and of no library. Code stays once: where threads
    # wait for each other is known by its address.
    *("-fsanitize=thread", "-fsanitize-coverage=trace-pc", "-nodefaultlibs"),
    *("-fno-thread-jumps", "-fno-tree-dominator-opts"),
]
LIBRARIES = ["-lm", "-lc", "-lgcc"]


class CompileError(Exception):
    """The C++ compiler refuses a kernel."""


def compiler() -> str | None:
    return shutil.which("g++")


def missing() -> str:
    """Return why no kernel can run here, or ""."""
    if platform.system() != "Linux":
        return "kernels run as C++ on Linux"
    return "" if compiler() else "no C++ compiler (g++)"


def folder() -> Path:
    where = Path(tempfile.gettempdir()) / f"omlxd-metal-{os.getuid()}"
    where.mkdir(mode=0o700, exist_ok=True)
    if where.stat().st_uid != os.getuid():
        raise PermissionError(f"{where} is another user's")
    return where


@functools.cache
def _machine() -> str:
    """What `-march=native` and the compiler's version depend on."""
    version = subprocess.run([compiler() or "g++", "--version"], capture_output=True, text=True).stdout
    cpu = Path("/proc/cpuinfo").read_text().split("\n\n")[0] if Path("/proc/cpuinfo").exists() else ""
    flags = next((line for line in cpu.splitlines() if line.startswith(("flags", "Features"))), "")
    return version + flags


def built(text: str, flags: Iterable[str]) -> Path:
    """Return the library of this C++. Several processes may ask at once."""
    flags = list(flags)
    headers = "".join((HERE / name).read_text() for name in ("msl_on_cpu.h", "races.h", "runtime.h"))
    name = hashlib.sha256("\0".join([text, headers, *flags, _machine()]).encode()).hexdigest()[:24]
    library = folder() / f"{name}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder()) as own:
            file, out = Path(own) / "kernel.cpp", Path(own) / "kernel.so"
            file.write_text(text)
            made = subprocess.run(
                [compiler() or "g++", *flags, f"-I{HERE}", str(file), "-o", str(out), *LIBRARIES],
                capture_output=True,
                text=True,
            )
            if made.returncode:
                raise CompileError(made.stderr.replace(own + "/", ""))
            out.replace(library)
    return library


@functools.cache
def runtime() -> ctypes.CDLL:
    """What schedules the threads of a kernel: built once, shared by all."""
    return ctypes.CDLL(str(built((HERE / "runtime.cpp").read_text(), RUNTIME)), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _loaded(library: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(library))


def kernel_of(cpp: str) -> tuple[ctypes.CDLL, Path]:
    runtime()
    library = built(cpp, KERNEL)
    return _loaded(library), library
