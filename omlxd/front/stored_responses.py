"""GET and DELETE of stored responses."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..errors import InvalidRequest, NotFound
from .response_store import ResponseStore, StoredResponse


class Deleted(msgspec.Struct):
    id: str
    deleted: bool = True
    object: str = "response"


class StoredResponses:
    """Route handlers over one store. They raise NotFound for what is not kept (any more)."""

    def __init__(self, store: ResponseStore):
        self._store = store

    async def get(self, request: Request) -> Response:
        if request.query_params.get("stream", "").lower() in ("true", "1"):
            raise InvalidRequest("stream: a stored response is told whole; leave stream out", param="stream")
        return _json(self._find(request).response)

    async def delete(self, request: Request) -> Response:
        self._find(request)
        self._store.remove(request.path_params["id"])
        return _json(msgspec.json.encode(Deleted(request.path_params["id"])))

    def _find(self, request: Request) -> StoredResponse:
        id = request.path_params["id"]
        if (stored := self._store.find(id)) is None:
            raise NotFound(f"There is no response {id[:100]!r} here (any more).", param="response_id")
        return stored


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
