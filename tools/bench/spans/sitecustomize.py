"""Notes when functions begin and end, in each process of a daemon that has this folder in its PYTHONPATH.

    SPANS       `module:name` or `module:Class.method`, with spaces between
    SPANS_FILE  gets a line a call: thread, module:name, began, ended, processor seconds of the thread, and
                the first argument if that is a short text

Times are of `time.perf_counter`, which on Linux all processes share. A coroutine has no processor time.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_names: dict[str, list[str]] = {}
for _each in os.environ.get("SPANS", "").split():
    _names.setdefault(_each.partition(":")[0], []).append(_each.partition(":")[2])


def _note(name: str, began: float, cpu_s: float, args: tuple[Any, ...]) -> None:
    thread, ended = threading.current_thread().name.replace(" ", "_"), time.perf_counter()
    first = args[0] if args and isinstance(args[0], str) and len(args[0]) < 60 else ""
    line = f"{thread} {name} {began:.6f} {ended:.6f} {cpu_s:.6f} {first.replace(' ', '_')}"
    os.write(_file, f"{line.strip()}\n".encode())


def _timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    async def coroutine(*args: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return await call(*args, **named)
        finally:
            _note(name, began, 0.0, args)

    @functools.wraps(call)
    def function(*args: Any, **named: Any) -> Any:
        began, cpu = time.perf_counter(), time.thread_time()
        try:
            return call(*args, **named)
        finally:
            _note(name, began, time.thread_time() - cpu, args)

    return coroutine if inspect.iscoroutinefunction(call) else function


def _watch(module: ModuleType) -> None:
    for name in _names[module.__name__]:
        *path, last = name.split(".")
        holder: Any = functools.reduce(getattr, path, module)
        setattr(holder, last, _timed(f"{module.__name__}:{name}", getattr(holder, last)))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of `_names` as others would, and watches each once it is imported."""

    def __init__(self) -> None:
        self._finding: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _names or fullname in self._finding:
            return None
        self._finding.add(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_watch(module: ModuleType) -> None:
                run(module)
                _watch(module)

            spec.loader.exec_module = run_and_watch  # type: ignore[method-assign]
        return spec


if _names:
    _file = os.open(os.environ["SPANS_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    sys.meta_path.insert(0, _Finder())
