"""A Mac on a CPU's arrays, for `pytest --pretend-metal`: omlxd takes the branches of Metal and of macOS.

| asked                            | answer                                                            |
|----------------------------------|-------------------------------------------------------------------|
| `device.backend()`               | "metal"                                                           |
| `mx.device_info()`               | an M4's keys, beside those of this machine                        |
| `mx.set_wired_limit(n)`          | the limit before; ValueError above the recommended size, as MLX;  |
|                                  | "PID n" is appended to the file that $PRETENDED_WIRED names       |
| `sys`, `platform`, in omlxd      | "darwin", "arm64", macOS 15.6                                     |
| functions of macOS's C library   | pretended_mac/libsystem.c                                         |
| `F_NOCACHE`, `F_FULLFSYNC`       | no error                                                          |
| a program of /usr/bin that a     | the one of its name in pretended_mac/                             |
| module names                     |                                                                   |
| what attention takes             | the same each time: no test depends on this machine's             |
| what a kernel takes              | half of MLX's own time                                            |
| a call of a kernel               | support/metal/pretended.py: a stand-in's, or its C++              |

MLX computes as ever, so nothing here is as fast, or has the bits, of a Mac. Programs that tests start pretend
as well where their PYTHONPATH is `code_path()`.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import fcntl
import importlib.abc
import importlib.machinery
import os
import platform
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from c_library import library

REPO = Path(__file__).resolve().parents[2]
MAC = Path(__file__).with_name("pretended_mac")
GB = 1 << 30
DEVICE = {
    "device_name": "Apple M4",
    "architecture": "applegpu_g16g",
    "max_buffer_length": 9 * GB,
    "max_recommended_working_set_size": 12 * GB,
    "memory_size": 16 * GB,
    "resource_limit": 499_000,
}

wired = [0]
"""Limits that `mx.set_wired_limit` has been given."""


def code_path() -> str:
    """PYTHONPATH of a program that tests start: it pretends where this process does."""
    return os.pathsep.join([*([str(MAC)] if is_installed() else []), str(REPO)])


def is_installed() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install() -> None:
    """Pretend from now on. Call before omlxd is imported."""
    if is_installed():
        return
    assert not any(name.partition(".")[0] == "omlxd" for name in sys.modules), "omlxd is imported already"
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # macOS's functions may be missing, too.
        ctypes.CDLL(str(library(MAC / "libsystem.c")), mode=os.RTLD_GLOBAL)
    for name in ("F_NOCACHE", "F_FULLFSYNC"):
        setattr(fcntl, name, fcntl.F_GETFD)  # Which changes nothing.
    sys.meta_path.insert(0, _Finder())
    sys.path.append(str(MAC))  # Some tests give their path to programs.


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules of omlxd for `_Loader`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "omlxd":
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if found is not None and isinstance(found.loader, importlib.machinery.SourceFileLoader):
            found.loader = _Loader(found.loader.name, found.loader.path)
        return found


class _Loader(importlib.machinery.SourceFileLoader):
    """Gives a module macOS's `sys` while it runs, and changes the rest before others get its names."""

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": _import}
        super().exec_module(module)
        for name, value in list(vars(module).items()):
            if isinstance(value, str) and value.startswith("/usr/bin/") and (MAC / Path(value).name).exists():
                setattr(module, name, str(MAC / Path(value).name))
        _CHANGES.get(module.__name__, lambda module: None)(module)


class _Changed(types.ModuleType):
    """A module, but for what is given."""

    def __init__(self, module: types.ModuleType, **given: Any):
        super().__init__(module.__name__)
        vars(self).update(given, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)


_MODULES = {
    "sys": _Changed(sys, platform="darwin"),
    "platform": _Changed(platform, machine=lambda: "arm64", mac_ver=lambda: ("15.6", ("", "", ""), "arm64")),
}


def _import(name: str, *how: Any, **more: Any) -> types.ModuleType:
    return _MODULES.get(name) or builtins.__import__(name, *how, **more)


def _pretend_device(device: Any) -> None:
    import mlx.core as mx

    device.backend = lambda: "metal"

    own_info = mx.device_info

    def set_wired_limit(limit: int) -> int:
        if limit > DEVICE["max_recommended_working_set_size"]:
            raise ValueError(
                "[metal::set_wired_limit] Setting a wired limit larger than the maximum working set size"
                " is not allowed."
            )
        wired.append(limit)
        if notes := os.environ.get("PRETENDED_WIRED"):
            with open(notes, "a") as file:
                file.write(f"{os.getpid()} {limit}\n")
        return wired[-2]

    mx.device_info = lambda *device: own_info(*device) | DEVICE  # type: ignore[assignment]
    mx.set_wired_limit = set_wired_limit


def _pretend_costs(row_costs: Any) -> None:
    """Rows attend together up to some 200 tokens, and then by themselves: tests meet both, and the change."""
    sizes = (4, 8), (64, 512)
    joint, alone = (10e-6, 40e-6, 20e-6, 80e-6), (20e-6, 30e-6, 40e-6, 60e-6)
    costs = row_costs.Costs(*(row_costs.Seconds(*sizes, taken) for taken in (joint, alone)))
    measured = row_costs.measured
    row_costs.measured = lambda *how: (
        costs if len(how) == 3 else measured(*how)
    )  # With a clock it is asked so.


def _pretend_ratios(rule: Any) -> None:
    """Each kernel is faster."""
    own = rule.times_of
    rule.times_of = lambda timed, clock=time.perf_counter: (
        (0.5e-3, 1e-3) if clock is time.perf_counter else own(timed, clock)
    )


def _pretend_kernels(kernel: Any) -> None:
    from metal import pretended

    kernel.run = pretended.run


def _pretend_samples(install: Any) -> None:
    """Products that a CPU computes soon: 4,096 × 4,096 in 16 bits take one a minute."""
    install.SAMPLE, install.SAMPLE_EXPERTS = (128, 64), (64, 32, 4)


_CHANGES = {
    "omlxd.engine.mlx_adapter.runtime.device": _pretend_device,
    "omlxd.engine.mlx_adapter.attention.row_costs": _pretend_costs,
    "omlxd.engine.mlx_adapter.metal.rule": _pretend_ratios,
    "omlxd.engine.mlx_adapter.metal.products.install": _pretend_samples,
    "omlxd.engine.mlx_adapter.metal.kernel": _pretend_kernels,
}
"""By the names of modules, as soon as they have run."""
