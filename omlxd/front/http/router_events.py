"""`GET /models/sse` of llama.cpp's router: a model's status as it changes, for as long as somebody listens.

`data: {"model", "event": "status_change", "data": {"status"}}`, the statuses of `GET /models`. What is so
when the stream begins is not told: clients read the list for that, and `unloaded` means that a load failed.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ...api.sse import data_event
from ...errors import Overloaded
from ..engines.protocol import Engines
from .generation import STREAM_HEADERS, unless_disconnected
from .model_list import router_status

LOOK_S = 0.25
PING_S = 15.0
MOST_LISTENERS = 16


class RouterEvent(msgspec.Struct):
    model: str
    data: dict[str, str]
    event: str = "status_change"


class RouterEvents:
    """stopping  set when the daemon is to stop, which ends all streams."""

    def __init__(self, engines: Engines, stopping: asyncio.Event):
        self._engines, self._stopping = engines, stopping
        self._listeners = 0

    async def listen(self, request: Request) -> RouterEvents:
        """Raises Overloaded."""
        if self._listeners >= MOST_LISTENERS:
            raise Overloaded(f"{MOST_LISTENERS} listeners are there already: close one.", retry_after=10)
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._listeners += 1
        try:
            await unless_disconnected(receive, self._write(send))
        finally:
            self._listeners -= 1

    async def _write(self, send: Send) -> None:
        async def say(text: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": text, "more_body": more})

        headers = [(b"content-type", b"text/event-stream"), *STREAM_HEADERS]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await say(b": statuses\n\n")
        known, told = self._statuses(), time.monotonic()
        while not self._stopping.is_set():
            now = self._statuses()
            gone = {model: "unloaded" for model in known if model not in now}
            for model, status in (now | gone).items():
                if known.get(model, "unloaded") != status:
                    await say(data_event(RouterEvent(model, {"status": status})))
                    told = time.monotonic()
            if time.monotonic() - told >= PING_S:
                await say(b": ping\n\n")
                told = time.monotonic()
            known = now
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._stopping.wait()
            except TimeoutError:
                continue
        await say(b"", more=False)

    def _statuses(self) -> dict[str, str]:
        return {engine.model_id: router_status(engine.state) for engine in self._engines.models()}
