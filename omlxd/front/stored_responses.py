"""GET and DELETE of stored responses, and of the items that were their input."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..errors import InvalidRequest, NotFound
from .response_store import ResponseStore, StoredResponse

MAX_ITEMS = 100


class ItemList(msgspec.Struct):
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


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

    async def items(self, request: Request) -> Response:
        """In pages: `limit` (20), `order` (desc) and `after`, an item's id."""
        items = self._store.input_items(request.path_params["id"], self._find(request))
        query = request.query_params
        if query.get("order", "desc") == "desc":
            items.reverse()
        limit = query.get("limit", "20")
        if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= MAX_ITEMS:
            raise InvalidRequest(f"limit: a number from 1 to {MAX_ITEMS} is needed", param="limit")
        ids = [str(item.get("id", "")) for item in items]
        start = ids.index(query["after"]) + 1 if query.get("after") in ids else 0
        page = items[start : start + int(limit)]
        shown = ids[start : start + int(limit)]
        more = start + len(page) < len(items)
        listed = ItemList(page, shown[0] if shown else None, shown[-1] if shown else None, more)
        return _json(msgspec.json.encode(listed))

    def _find(self, request: Request) -> StoredResponse:
        id = request.path_params["id"]
        if (stored := self._store.find(id)) is None:
            raise NotFound(f"There is no response {id[:100]!r} here (any more).", param="response_id")
        return stored


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
