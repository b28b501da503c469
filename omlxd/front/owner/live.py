"""`GET /omlxd/events`: the status every few seconds as server-sent events, for as long as somebody looks."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ...cli.owner_api import DaemonStatus
from ...errors import Overloaded
from ..http.generation import STREAM_HEADERS, unless_disconnected
from ..http.last_hour import SLOT_S, LastHour, Slot
from .status import Admin

PERIOD_S = 2.0
MOST_VIEWERS = 16


class Look(msgspec.Struct):
    """One event. `slots`: of the last hour in the first event, then those that may have changed.

    slot_s  seconds of a slot
    memory_total, memory_available  bytes of the machine
    """

    status: DaemonStatus
    slots: list[Slot]
    slot_s: int
    memory_total: int
    memory_available: int


class Live:
    """`stopping`: set when the daemon is to stop, which ends all streams."""

    def __init__(self, admin: Admin, last_hour: LastHour, stopping: asyncio.Event):
        self._admin = admin
        self._last_hour = last_hour
        self._stopping = stopping
        self.viewers = 0

    async def events(self, request: Request) -> ASGIApp:
        """Raises Overloaded."""
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if self.viewers >= MOST_VIEWERS:
            raise Overloaded(f"{MOST_VIEWERS} viewers watch already: close a page.", retry_after=10)
        return _Stream(self)

    async def write(self, send: Send) -> None:
        """Write events until the daemon stops, or this is cancelled."""
        headers = [(b"content-type", b"text/event-stream"), *STREAM_HEADERS]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        since = 0.0
        while not self._stopping.is_set():
            look = await self._look(since)
            since = look.slots[-1].at if look.slots else since
            data = b"data: " + msgspec.json.encode(look) + b"\n\n"
            await send({"type": "http.response.body", "body": data, "more_body": True})
            try:
                async with asyncio.timeout(PERIOD_S):
                    await self._stopping.wait()
            except TimeoutError:
                continue
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _look(self, since: float) -> Look:
        import psutil

        memory = psutil.virtual_memory()
        status = await self._admin.daemon_status()
        return Look(status, self._last_hour.since(since), SLOT_S, memory.total, memory.available)


class _Stream:
    """An ASGI response."""

    def __init__(self, live: Live):
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._live.viewers += 1
        try:
            await unless_disconnected(receive, self._live.write(send))
        finally:
            self._live.viewers -= 1
