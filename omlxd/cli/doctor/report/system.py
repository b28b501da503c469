"""The machine: chip, memory, versions, limits, by what the system itself says."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import subprocess
import sys
import sysconfig
from pathlib import Path

import psutil

import omlxd

from ....common.units import available_ram, human, total_ram

ABSENT = "not on this system"
TOOL_S = 5.0
_CHIP = ("machdep.cpu.brand_string", "hw.model", "hw.perflevel0.physicalcpu", "hw.perflevel1.physicalcpu")
_GPU = ("iogpu.wired_limit_mb", "iogpu.rsrc_limit", "iogpu.disable_wired_collector", "iogpu.wired_lwm_mb")
_PRESSURE = ("kern.memorystatus_level", "kern.memorystatus_vm_pressure_level")
_PAGES = ("File-backed pages", "Pages occupied by compressor", "Pages purgeable")

Lines = list[tuple[str, str]]


def sysctl(*names: str) -> dict[str, str]:
    """Return the values that macOS has of `names`; {} elsewhere."""
    return dict(re.findall(r"^([\w.]+): (.+)$", said_by("/usr/sbin/sysctl", *names), re.M))


def said_by(*command: str) -> str:
    """Return what a tool of macOS prints; "" elsewhere, and if it does not answer."""
    if sys.platform != "darwin":
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TOOL_S
        ).stdout
    return ""


def machine() -> Lines:
    """Name the chip, its cores, the memory, the system."""
    told = sysctl(*_CHIP)
    cores = f"{psutil.cpu_count(logical=False) or os.cpu_count()} cores"
    if fast := told.get(_CHIP[2]):
        cores += f" ({fast} fast, {told.get(_CHIP[3], 0)} efficient)"
    if sys.platform == "darwin":
        chip = f"{told.get(_CHIP[0], 'unknown')} ({told.get(_CHIP[1], 'unknown')})"
        build = sysctl("kern.osversion").get("kern.osversion", "unknown")
        system = f"macOS {platform.mac_ver()[0]} ({build}), Darwin {platform.release()}"
    else:
        chip, system = _cpu_of_linux(), f"Linux {platform.release()}"
        with contextlib.suppress(OSError, KeyError):
            system = f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {system}"
    return [
        ("machine", f"{chip}, {cores}, {human(total_ram())}"),
        ("system", f"{system}, {platform.machine()}"),
    ]


def _cpu_of_linux() -> str:
    with contextlib.suppress(OSError):
        if model := re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M):
            return model[1]
    return platform.processor() or platform.machine()


def programs() -> Lines:
    """Name omlxd's version and commit, and the Python that runs it."""
    commit = _commit(Path(omlxd.__file__).parents[1] / ".git")
    base = sys.base_prefix
    origin = next(
        (name for part, name in _ORIGINS if part in base),
        "framework" if sysconfig.get_config_var("PYTHONFRAMEWORK") else "of the system or its own",
    )
    venv = "in a virtual environment" if sys.prefix != base else "no virtual environment"
    version = f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}"
    return [
        ("omlxd", f"{omlxd.__version__}{f', commit {commit}' if commit else ''}"),
        ("Python", f"{version}, {origin}, {venv}"),
    ]


_ORIGINS = (
    ("/opt/homebrew", "Homebrew"),
    ("/uv/python/", "uv"),
    ("/Library/Frameworks/", "python.org"),
    ("/Xcode", "Xcode"),
    ("/CommandLineTools", "Xcode's tools"),
    ("conda", "conda"),
)


def _commit(git: Path) -> str:
    """Return the checkout's commit, by its log: `git` itself may ask a Mac's user to install it."""
    try:
        return (git / "logs" / "HEAD").read_text().splitlines()[-1].split()[1][:10]
    except (OSError, IndexError):
        return ""


def memory() -> Lines:
    """Compare what psutil, the system and omlxd say is free."""
    held = psutil.virtual_memory()._asdict()
    names = ("total", "available", "free", "active", "inactive", "wired", "cached")
    said = ", ".join(f"{name} {human(held[name])}" for name in names if name in held)
    pressure, pages = sysctl(*_PRESSURE), said_by("/usr/bin/vm_stat")
    size = int(found[1]) if (found := re.search(r"page size of (\d+)", pages)) else 0
    more = [f"{name} {value}" for name, value in pressure.items()]
    if level := pressure.get(_PRESSURE[0]):
        more.append(f"so {human(total_ram() * int(level) // 100)} are free by memory_pressure")
    more += [
        f"{name} {human(int(count) * size)}"
        for name, count in re.findall(r"^([\w -]+):\s+(\d+)\.$", pages, re.M)
        if name in _PAGES
    ]
    return [
        ("memory", f"psutil: {said}; swap {human(psutil.swap_memory().used)}"),
        ("pressure", ", ".join(more) or ABSENT),
        ("free", f"omlxd counts {human(available_ram())} as free"),
    ]


def limits() -> Lines:
    """Say what the system lets a GPU wire, and a process open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    words = ["unlimited" if each == resource.RLIM_INFINITY else f"{each:,}" for each in (soft, hard)]
    gpu = ", ".join(f"{name} {value}" for name, value in sysctl(*_GPU).items())
    return [("GPU limits", gpu or ABSENT), ("open files", f"{words[0]}, up to {words[1]}")]


def wired() -> int | None:
    """Return the bytes that macOS can't page out; None elsewhere."""
    return getattr(psutil.virtual_memory(), "wired", None)
