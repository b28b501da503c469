"""`GET /models/sse` of llama.cpp's router: a model's status as it changes, for as long as somebody listens.

`data: {"model", "event": "status_change", "data": {"status"}}`, the statuses of `GET /models`. What is so
when the stream begins is not told: clients read the list for that, and `unloaded` means that a load failed.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ....api.answer.sse import data_event
from ...engines.pool import EnginePool
from ..routes import Operation
from ..sending.streams import SSE, Watched
from .model_list import router_status

LOOK_S = 0.25
MOST_LISTENERS = 16


class RouterEvent(msgspec.Struct):
    model: str
    data: dict[str, str]
    event: str = "status_change"


class RouterEvents:
    """Streams the models' status. `stopping`: set when the daemon is to stop, which ends all streams."""

    def __init__(self, engines: EnginePool, stopping: asyncio.Event):
        self._engines = engines
        self._streams = Watched(stopping, MOST_LISTENERS, "listeners are there already: close one.")

    def route(self) -> Operation:
        summary = "llama.cpp's router: states as they change"
        return Operation("GET", "/models/sse", self.listen, summary, media=SSE)

    async def listen(self, request: Request) -> ASGIApp:
        """Stream the events. Raises Overloaded."""
        statuses = self._statuses()

        async def look() -> bytes:
            nonlocal statuses
            before, statuses = statuses, self._statuses()
            now = dict.fromkeys(before, "unloaded") | statuses
            changed = [(id, status) for id, status in now.items() if before.get(id, "unloaded") != status]
            return b"".join(data_event(RouterEvent(id, {"status": status})) for id, status in changed)

        return self._streams.answer(request, look, LOOK_S, first=b": statuses\n\n")

    def _statuses(self) -> dict[str, str]:
        return {engine.model_id: router_status(engine.state) for engine in self._engines.models()}
