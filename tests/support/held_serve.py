"""`omlxd serve` that stops at one exact moment of its life and waits there, for tests of signals.

    python held_serve.py MOMENT serve --port 0 …

At MOMENT (of MOMENTS, or "python ends") it prints `held` and goes on once it reads a line.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

MOMENTS = {
    "settings": ("omlxd.cli.main", "load_settings"),
    "cache lock": ("omlxd.front.engines.ledger.cold_ledger", "ColdLedger.claim"),
    "drain": ("omlxd.front.engines.client", "EngineProcess.drain"),
    "flush": ("omlxd.front.engines.link", "EngineLink.close"),
    "cache closes": ("omlxd.front.engines.ledger.cold_ledger", "ColdLedger.close"),
    "all has ended": ("omlxd.front.process.serve", "leave"),
    "log closes": ("logging", "shutdown"),
}
"""Held before these are called for the first time; "python ends": before its last function at exit."""


@functools.cache
def _wait() -> None:
    print("held", flush=True)
    sys.stdin.readline()


def _held(function: Callable[..., Any]) -> Callable[..., Any]:
    if asyncio.iscoroutinefunction(function):

        @functools.wraps(function)
        async def later(*args: Any, **named: Any) -> Any:
            await asyncio.to_thread(_wait)
            return await function(*args, **named)

        return later

    @functools.wraps(function)
    def now(*args: Any, **named: Any) -> Any:
        _wait()
        return function(*args, **named)

    return now


def main() -> int:
    moment = sys.argv.pop(1)
    if moment == "python ends":
        atexit.register(_wait)  # The last of all: what was registered first is called last.
    from omlxd.cli import main as cli

    if moment in MOMENTS:
        module, path = MOMENTS[moment]
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        setattr(owner, name, _held(getattr(owner, name)))
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
