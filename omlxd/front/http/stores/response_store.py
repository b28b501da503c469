"""Stored responses: bounded, in memory, read by `previous_response_id`, GET and DELETE."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....api.responses.items import response_of
from ....chat import Message
from ....common.bounded_map import BoundedMap
from ....errors import NotFound, bad_field

MAX_RESPONSES = 1000
MAX_BYTES = 64 * 1024 * 1024

_decoder = msgspec.msgpack.Decoder(tuple[Message, ...])


class _Output(msgspec.Struct):
    output: list[dict[str, Any]] = []


@dataclass(slots=True, frozen=True)
class StoredResponse:
    """conversation  encoded, with the answer at its end
    response      the response object as JSON
    input         of its request, as JSON: a text or items
    """

    conversation: bytes
    response: bytes
    input: bytes = b""

    @property
    def size(self) -> int:
        return len(self.conversation) + len(self.response) + len(self.input)


class ResponseStore:
    """Response id → stored response; the least recently used ones go first. Thread-safe.

    A thread that parses a large body reads it beside the event loop. Each response is kept encoded,
    so that the bound on bytes counts what is held and none depends on another that has gone.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES):
        self._kept = BoundedMap[str, StoredResponse](max_bytes, attrgetter("size"), max_items=max_responses)
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """Bytes held, at most `max_bytes`."""
        return self._kept.cost

    def __len__(self) -> int:
        return len(self._kept)

    def keep(
        self, id: str, messages: tuple[Message, ...], response: bytes = b"{}", input: bytes = b""
    ) -> None:
        """Store a response, unless it is larger than the store."""
        stored = StoredResponse(msgspec.msgpack.encode(messages), response, input)
        if stored.size <= self._kept.max_cost:
            with self._lock:
                self._kept.put(id, stored)

    def find_response(self, id: str) -> StoredResponse | None:
        """Return a stored response; None: never kept, or gone."""
        with self._lock:
            return self._kept.get(id)

    def remove(self, id: str) -> bool:
        """Remove a response; returns whether there was one."""
        with self._lock:
            return self._kept.pop(id) is not None

    def items(self, id: str) -> dict[str, bytes]:
        """Return item id → JSON of a stored response's output; else nothing."""
        if (stored := self.find_response(id)) is None:
            return {}
        output = msgspec.json.decode(stored.response, type=_Output).output
        return {item["id"]: msgspec.json.encode(item) for item in output}

    def messages(self, id: str) -> tuple[Message, ...] | None:
        """Return the conversation that a response ended; None: never kept, or gone."""
        stored = self.find_response(id)
        return None if stored is None else _decoder.decode(stored.conversation)


def item_finder(store: ResponseStore) -> Callable[[str], bytes | None]:
    """Find items' JSON for one request, reading each response once. None: never kept, or gone."""
    items = functools.cache(store.items)

    def find(id: str) -> bytes | None:
        response = response_of(id)
        return None if response is None else items(response).get(id)

    return find


class Deleted(msgspec.Struct):
    id: str
    deleted: bool = True
    object: str = "response"


class InputItems(msgspec.Struct):
    """A page of the items of one request."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


MOST_ITEMS = 100
"""Items of one page at most, as OpenAI's."""


def input_items(stored: StoredResponse, id: str) -> list[dict[str, Any]]:
    """Return the items of a response's input, each with an `id`, and messages in parts."""
    given = msgspec.json.decode(stored.input or b"[]")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given or []
    return [_spelled_out(item, f"{id}_{index}") for index, item in enumerate(items)]


def _spelled_out(item: dict[str, Any], id: str) -> dict[str, Any]:
    item = {"id": id, **{name: value for name, value in item.items() if value is not None}}
    if isinstance(item.get("role"), str):
        item = {"type": "message", "status": "completed", **item}
        if isinstance(content := item.get("content"), str):
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": content}]
    return item


class StoredResponses:
    """Handlers over one store. They raise NotFound for what is not kept (any more)."""

    def __init__(self, store: ResponseStore):
        self._store = store

    async def get(self, request: Request) -> Response:
        if request.query_params.get("stream", "").lower() in ("true", "1"):
            raise bad_field("stream", "a stored response is not streamed; leave stream out")
        return Response(self._find(request).response, media_type="application/json")

    async def items(self, request: Request) -> InputItems:
        """List a response's input, newest first unless `order` is `asc`. `after`: an item's id."""
        asked, id = request.query_params, request.path_params["id"]
        items = input_items(self._find(request), id)
        limit = asked.get("limit", "20")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MOST_ITEMS):
            raise bad_field("limit", f"a number from 1 to {MOST_ITEMS} is needed")
        if asked.get("order", "desc") not in ("asc", "desc"):
            raise bad_field("order", "asc or desc is needed")
        if asked.get("order", "desc") == "desc":
            items.reverse()
        if after := asked.get("after"):
            ids = [item["id"] for item in items]
            if after not in ids:
                raise bad_field("after", f"the input of this response has no item {after[:100]!r}")
            items = items[ids.index(after) + 1 :]
        page = items[: int(limit)]
        ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return InputItems(page, *ends, has_more=len(items) > len(page))

    async def delete(self, request: Request) -> Deleted:
        self._find(request)
        self._store.remove(request.path_params["id"])
        return Deleted(request.path_params["id"])

    def _find(self, request: Request) -> StoredResponse:
        id = request.path_params["id"]
        if (stored := self._store.find_response(id)) is None:
            raise NotFound(f"There is no response {id[:100]!r} here (any more).", param="response_id")
        return stored
