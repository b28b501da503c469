"""`GET /omlxd/events`: the status every few seconds as server-sent events, for as long as somebody looks."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ...api.answer.sse import data_event
from ...cli.daemon.owner_api import DaemonStatus
from ...common.units import available_ram, total_ram
from ..http.observe.last_hour import SLOT_S, LastHour, Slot
from ..http.sending.streams import Watched
from .status import Admin

PERIOD_S = 2.0
MOST_VIEWERS = 16


class Look(msgspec.Struct):
    """One event of the stream. `slots`: of the last hour in the first event, then those that may have
    changed.

    slot_s  seconds of a slot
    memory_total, memory_available  bytes of the machine
    """

    status: DaemonStatus
    slots: list[Slot]
    slot_s: int
    memory_total: int
    memory_available: int


class Live:
    """Streams looks. `stopping`: set when the daemon is to stop, which ends all streams."""

    def __init__(self, admin: Admin, last_hour: LastHour, stopping: asyncio.Event):
        self._admin = admin
        self._last_hour = last_hour
        self._streams = Watched(stopping, MOST_VIEWERS, "viewers watch already: close a page.")

    async def events(self, request: Request) -> ASGIApp:
        """Stream the events. Raises Overloaded."""
        since = 0.0

        async def look() -> bytes:
            nonlocal since
            status = await self._admin.daemon_status()
            slots = self._last_hour.since(since)
            since = slots[-1].at if slots else since
            return data_event(Look(status, slots, SLOT_S, total_ram(), available_ram()))

        return self._streams.answer(request, look, PERIOD_S)
