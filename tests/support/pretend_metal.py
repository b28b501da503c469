"""A Mac on a CPU's arrays, for `pytest --pretend-metal`: omlxd takes the branches of Metal and of macOS.

| asked                            | answer                                                            |
|----------------------------------|-------------------------------------------------------------------|
| `device.backend()`               | "metal"                                                           |
| `mx.device_info()`               | an M4's keys, beside those of this machine                        |
| `mx.set_wired_limit(n)`          | the limit before; ValueError above the recommended size, as MLX   |
| `sys.platform`, of omlxd alone   | "darwin"                                                          |

MLX computes as ever, so nothing here is as fast, or has the bits, of a Mac. Programs that tests start pretend
as well where their PYTHONPATH is `code_path()`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
SITE = Path(__file__).with_name("pretended_mac")
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
    return os.pathsep.join([*([str(SITE)] if is_installed() else []), str(REPO)])


def is_installed() -> bool:
    return any(isinstance(finder, _Pretending) for finder in sys.meta_path)


def install() -> None:
    """Pretend from now on. Call before omlxd is imported."""
    if not is_installed():
        assert not any(name.partition(".")[0] == "omlxd" for name in sys.modules), "omlxd is imported already"
        sys.meta_path.insert(0, _Pretending())
        sys.path.append(str(SITE))  # Some tests give their path to programs.


class _Darwin(types.ModuleType):
    """`sys`, but for the platform."""

    platform = "darwin"

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


class _Pretending(importlib.abc.MetaPathFinder):
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
    """Changes a module once it has run, and before others get its names."""

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        if vars(module).get("sys") is sys:
            module.sys = _Darwin("sys")  # type: ignore[attr-defined]
        if module.__name__ == "omlxd.engine.mlx_adapter.runtime.device":
            module.backend = lambda: "metal"  # type: ignore[attr-defined]
            _pretend_device()


def _pretend_device() -> None:
    import mlx.core as mx

    own_info = mx.device_info

    def set_wired_limit(limit: int) -> int:
        if limit > DEVICE["max_recommended_working_set_size"]:
            raise ValueError(
                "[metal::set_wired_limit] Setting a wired limit larger than the maximum working set size"
                " is not allowed."
            )
        wired.append(limit)
        return wired[-2]

    mx.device_info = lambda *device: own_info(*device) | DEVICE  # type: ignore[assignment]
    mx.set_wired_limit = set_wired_limit
