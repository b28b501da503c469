"""Answers that come piece by piece, or late: their work ends when their client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ....errors import Overloaded
from ..observe.trace import trace_of

SSE = "text/event-stream"
STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # Else nginx holds events back.
]
PING_S = 15.0


def as_json(value: msgspec.Struct) -> Response:
    """Make `value` a JSON response."""
    return Response(msgspec.json.encode(value), media_type="application/json")


class Streamed:
    """An ASGI response of `first` and then `pieces`, which are closed at its end."""

    def __init__(self, pieces: AsyncGenerator[bytes, None], content_type: str, first: bytes = b""):
        self._pieces, self._first = pieces, first
        self._headers = [(b"content-type", content_type.encode()), *STREAM_HEADERS]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._pieces):
            await unless_disconnected(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Awaited:
    """An ASGI response with the result of `work`, as JSON. Raises what it raises."""

    def __init__(self, work: Callable[[], Awaitable[msgspec.Struct]]):
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        made: list[Response] = []

        async def work() -> None:
            made.append(as_json(await self._work()))

        if await unless_disconnected(receive, work()):
            await made[0](scope, receive, send)
        else:
            trace_of(scope).outcome = "disconnected"


class Watched:
    """Streams of events without an end, which end once `stopping` is set: the daemon is to stop."""

    def __init__(self, stopping: asyncio.Event, most: int, full: str):
        self._stopping, self._most, self._full = stopping, most, full
        self._streams = 0

    def answer(
        self, request: Request, look: Callable[[], Awaitable[bytes]], period_s: float, first: bytes = b""
    ) -> ASGIApp:
        """Stream `first`, then the results of `look` every `period_s` seconds, or a ping now and then.

        Raises Overloaded.
        """
        if request.method == "HEAD":
            return Response(headers={"content-type": SSE})
        if self._streams >= self._most:
            raise Overloaded(f"{self._most} {self._full}", retry_after=10)
        return Streamed(self._looks(look, period_s), SSE, first)

    async def _looks(
        self, look: Callable[[], Awaitable[bytes]], period_s: float
    ) -> AsyncGenerator[bytes, None]:
        self._streams += 1
        said_at = time.monotonic()
        try:
            while not self._stopping.is_set():
                said = await look()
                if not said and time.monotonic() - said_at >= PING_S:
                    said = b": ping\n\n"
                if said:
                    said_at = time.monotonic()
                    yield said
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(period_s):
                        await self._stopping.wait()
        finally:
            self._streams -= 1


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`, raising what it raises. False when the client went away first; it is then stopped."""
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            return False
        worker.result()
        return True
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
