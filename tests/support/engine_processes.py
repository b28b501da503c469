"""`EngineProcess` over a real process (stub_engine.py), and requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from omlxd import wire
from omlxd.chat import Event, GenerateRequest, RawPrompt, TextDelta
from omlxd.front.engines.client import EngineProcess
from omlxd.front.engines.link import EngineLink

STUB = (sys.executable, str(Path(__file__).with_name("stub_engine.py")))
REPO = str(Path(__file__).resolve().parents[2])
AT_ONCE_S = 60.0
"""Far less than what is waited for otherwise, and enough for a machine that does other things."""
STALL_S = 2.0
"""A busy machine may keep a process from running for longer: then patience doubles, and it is tried again."""


@pytest.fixture(autouse=True)
def package_on_the_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", REPO)


async def prepare() -> wire.Load:
    return wire.Load(model_path="/nowhere", model_id="stub", cache=wire.CacheSettings())


@contextlib.asynccontextmanager
async def engine(*flags: str, start: bool = True, **options: object) -> AsyncIterator[EngineProcess]:
    options.setdefault("backoff_s", (0.05,))
    prepare_ = options.pop("prepare", prepare)

    async def spawn() -> tuple[EngineLink, wire.Load]:
        load = await prepare_()  # type: ignore[operator]
        return await EngineLink.spawn((*STUB, *flags)), load

    made = EngineProcess("stub", spawn, **options)
    if start:
        made.supervisor.start()
    try:
        yield made
    finally:
        await asyncio.wait_for(made.close(1.0), 60)


def ask(text: str) -> GenerateRequest:
    return GenerateRequest(prompt=RawPrompt(text=text))


async def collect(made: EngineProcess, text: str) -> list[Event]:
    return [event async for event in made.generate(ask(text))]


async def rest_of(stream: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in stream]


def words(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, TextDelta)]


async def up(made: EngineProcess, text: str = "up") -> None:
    """It answers, whatever the machine made of a start before."""
    for _ in range(5):
        if words(await collect(made, text)) == [word for word in text.split() if word != "gate"]:
            return
    raise AssertionError("it never answered")


async def until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
