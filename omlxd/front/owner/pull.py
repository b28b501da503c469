"""`POST /omlxd/models/pull` and Ollama's `POST /api/pull`: download a model, and report progress.

The first answers with a stream of events: `{"done", "total"}` in bytes (0: not known), at last `{"id",
"folder"}` or `{"error"}`; the second with Ollama's lines. Whoever goes away ends the download; the next one
goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ...api.answer.sse import data_event
from ...api.errors import OllamaError
from ...api.fields.body import decode
from ...cli.daemon.owner_api import PullModel
from ...errors import InvalidRequest, NotFound, OmlxdError, Overloaded
from ...models.resolve import DEFAULT_ID, fetch_default_model, fetch_from_hub, is_local, no_hub_id
from ..engines.pool import EnginePool
from ..http.listing.discovery import OllamaModelBody, OllamaStatus
from ..http.routes import Operation
from ..http.sending.streams import SSE, Awaited, Streamed

Event = dict[str, Any]

TELL_S = 1.0
MOST_AT_ONCE = 2

_PULL = msgspec.json.Decoder(PullModel)
_OLLAMA = msgspec.json.Decoder(OllamaModelBody)
_PULLED = OllamaStatus("success")
_LINES = "application/x-ndjson"
_HUB = re.compile(r"^(https?://)?(hf\.co|huggingface\.co)/")
"""Matches the prefix that Ollama's users write before a hub id."""


class Pulling:
    def __init__(self, pool: EnginePool):
        self._pool = pool
        self._under_way: set[str] = set()

    def routes(self) -> list[Operation]:
        return [
            Operation("POST", "/omlxd/models/pull", self.pull, "Download a model", body=PullModel, media=SSE),
            Operation(
                *("POST", "/api/pull", self.ollama, "Ollama: download a model"),
                body=OllamaModelBody,
                answer=OllamaStatus,
                stream=_LINES,
            ),
        ]

    async def pull(self, request: Request) -> Streamed:
        """Download a model. Raises OmlxdError."""
        model = decode(_PULL, await request.body()).model
        return Streamed(_written(self._begin(model), data_event), SSE)

    async def ollama(self, request: Request) -> ASGIApp:
        """Download a model for Ollama's clients. Raises OmlxdError. A model that is here has been pulled."""
        asked = decode(_OLLAMA, await request.body())
        name = _HUB.sub("", asked.named()).removesuffix(":latest")
        with contextlib.suppress(NotFound):
            await self._pool.find_engine(name)
            done = msgspec.json.encode(_PULLED)
            return Response(done + b"\n" * (asked.stream is not False), media_type=_LINES)
        events = self._begin(name)
        if asked.stream is False:
            return Awaited(lambda: _pulled(events))
        return Streamed(_written(events, partial(_line, name)), _LINES)

    def _begin(self, model: str) -> AsyncGenerator[Event, None]:
        if model != DEFAULT_ID and is_local(model):
            raise InvalidRequest(no_hub_id(model), param="model")
        self._check_room(model)
        return self._events(model)

    def _check_room(self, model: str) -> None:
        if model in self._under_way or len(self._under_way) >= MOST_AT_ONCE:
            raise Overloaded("A download is under way already; wait for its end.", retry_after=10)

    async def _events(self, model: str) -> AsyncGenerator[Event, None]:
        """Yield events until the download has ended; closing them ends it. Raises OmlxdError."""
        self._check_room(model)  # Again: another may have begun since the answer was promised.
        far = [0, 0]
        work = asyncio.create_task(self._fetch(model, far), name=f"pull {model}")
        self._under_way.add(model)
        try:
            while not (await asyncio.wait({work}, timeout=TELL_S))[0]:
                yield {"done": far[0], "total": far[1]}
            folder = work.result()
            await self._pool.look_for_models(afresh=True)
            yield {"id": model, "folder": str(folder)}
        finally:
            self._under_way.discard(model)
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, OmlxdError):
                await work

    async def _fetch(self, model: str, far: list[int]) -> Path:
        if model == DEFAULT_ID:
            return await fetch_default_model(self._pool.catalog.settings.base_path)

        def note(done: int, total: int) -> None:
            far[:] = max(far[0], done), max(far[1], total)  # Of several bars one moves.

        return await fetch_from_hub(model, note)


async def _written(
    events: AsyncGenerator[Event, None], write: Callable[[Event], bytes]
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(events):
        try:
            async for event in events:
                yield write(event)
        except OmlxdError as error:
            yield write({"error": {"message": error.message}})


async def _pulled(events: AsyncGenerator[Event, None]) -> OllamaStatus:
    """Wait until the download has ended. Raises OmlxdError."""
    async with contextlib.aclosing(events):
        async for _ in events:
            pass
    return _PULLED


def _line(model: str, event: Event) -> bytes:
    """Write a line of Ollama's. Its clients show a bar for each `digest`, named by what follows `sha256:`."""
    if "error" in event:
        told: Any = OllamaError(event["error"]["message"])
    elif event.get("total"):
        bar = {"digest": f"models:{model}", "total": event["total"], "completed": event["done"]}
        told = {"status": f"pulling {model}", **bar}
    else:
        told = _PULLED if "id" in event else OllamaStatus(f"pulling {model}")
    return msgspec.json.encode(told) + b"\n"
