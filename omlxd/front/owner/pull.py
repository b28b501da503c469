"""`POST /omlxd/models/pull`: the owner has a model downloaded, and sees how far it is.

The answer is a stream of events: `{"done", "total"}` in bytes (0: not known), at last `{"id", "folder"}` or
`{"error"}`. Whoever goes away ends the download; the next one goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ...api.body import decode
from ...cli.owner_api import PullModel
from ...errors import InvalidRequest, OmlxdError, Overloaded
from ...models.resolve import DEFAULT_ID, fetch_default_model, fetch_from_hub, is_local
from ..engines.pool import EnginePool
from ..http.generation import STREAM_HEADERS, unless_disconnected

TELL_S = 1.0
MOST_AT_ONCE = 2

_PULL = msgspec.json.Decoder(PullModel)


class Pulling:
    def __init__(self, pool: EnginePool):
        self._pool = pool
        self._under_way: set[str] = set()

    async def pull(self, request: Request) -> _Stream:
        """Raises OmlxdError."""
        model = decode(_PULL, await request.body()).model
        if model != DEFAULT_ID and is_local(model):
            raise InvalidRequest(
                f"{model[:200]!r} is no hub id: write ORG/NAME, or {DEFAULT_ID}.", param="model"
            )
        if model in self._under_way or len(self._under_way) >= MOST_AT_ONCE:
            raise Overloaded("A download is under way already; wait for its end.", retry_after=10)
        return _Stream(self, model)

    async def write(self, model: str, send: Send) -> None:
        """Write events until the download has ended; cancelled, it ends the download."""
        headers = [(b"content-type", b"text/event-stream"), *STREAM_HEADERS]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        far = [0, 0]
        work = asyncio.create_task(self._fetch(model, far), name=f"pull {model}")
        self._under_way.add(model)
        try:
            while not (await asyncio.wait({work}, timeout=TELL_S))[0]:
                await _tell(send, {"done": far[0], "total": far[1]})
            try:
                folder = work.result()
                await self._pool.look_for_models(afresh=True)
                await _tell(send, {"id": model, "folder": str(folder)})
            except OmlxdError as error:
                await _tell(send, {"error": {"message": error.message}})
        finally:
            self._under_way.discard(model)
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, OmlxdError):
                await work
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fetch(self, model: str, far: list[int]) -> Path:
        if model == DEFAULT_ID:
            return await fetch_default_model(self._pool.catalog.settings.base_path)

        def note(done: int, total: int) -> None:
            far[:] = max(far[0], done), max(far[1], total)  # Of several bars one moves.

        return await fetch_from_hub(model, note)


async def _tell(send: Send, event: dict[str, Any]) -> None:
    data = b"data: " + msgspec.json.encode(event) + b"\n\n"
    await send({"type": "http.response.body", "body": data, "more_body": True})


class _Stream:
    """An ASGI response."""

    def __init__(self, pulling: Pulling, model: str):
        self._pulling = pulling
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._pulling.write(self._model, send))
