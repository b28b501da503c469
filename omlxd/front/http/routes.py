"""Routes, with what GET /openapi.json says of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from ...api.fields.body import decode, mended
from .sending.streams import Awaited, as_json


class Operation(Route):
    """One method of one path. `body`, `answer`: structs; `answer` None: no JSON. `stream`: type of a stream.

    unready  the answer of status 503, where it is not an error
    queues   its requests wait in line, by their priority
    """

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Callable[..., Any],
        summary: str,
        *,
        body: Any = None,
        answer: Any = None,
        stream: str = "",
        media: str = "application/json",
        unready: Any = None,
        queues: bool = False,
    ):
        super().__init__(path, endpoint, methods=[method])
        self.method, self.summary = method.lower(), summary
        self.body, self.answer, self.unready = body, answer, unready
        self.stream, self.media, self.queues = stream, media, queues


def json_route(
    method: str,
    path: str,
    work: Callable[..., Awaitable[msgspec.Struct]],
    summary: str,
    *,
    answer: Any = None,
    while_connected: bool = False,
) -> Operation:
    """Make a route that answers with the struct that `work` returns.

    A parameter of `work` that is annotated with Request is that, one with a struct what the body holds.

    answer           of the document, where the annotation does not say it
    while_connected  `work` ends when the client goes away
    """
    types = get_type_hints(work)
    returned = types.pop("return")
    body = next((kind for kind in types.values() if kind is not Request), None)
    decoder = msgspec.json.Decoder(body)

    async def endpoint(request: Request) -> ASGIApp:
        given = [
            request if kind is Request else decode(decoder, mended(await request.body()))
            for kind in types.values()
        ]
        if while_connected:
            return Awaited(lambda: work(*given))
        return as_json(await work(*given))

    return Operation(method, path, endpoint, summary, body=body, answer=answer or returned)


get, post = partial(json_route, "GET"), partial(json_route, "POST")
