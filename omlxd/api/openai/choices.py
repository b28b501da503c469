"""Streams and collects one answer or several, of chats and texts.

With n > 1 each choice's events are `ChoiceEvent`s, its own Finished among them; one Finished of all follows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ... import chat
from ...errors import OmlxdError
from ..answer.sse import DONE, data_event
from ..errors import Protocol, error_body
from .fields import Timings, UsageBody, timings_of, usage_body


def ids_of(events: Iterable[chat.Event]) -> dict[str, Any]:
    """Return vLLM's requested fields of a choice: `token_ids`, and at its beginning `prompt_token_ids`."""
    parts = [event for event in events if isinstance(event, chat.TokenIds)]
    prompt = {"prompt_token_ids": list(parts[0].prompt)} if parts and parts[0].prompt else {}
    return {"token_ids": [id for part in parts for id in part.ids], **prompt} if parts else {}


class ChoicesStream(ABC):
    """`sse.StreamEncoder` but for what a choice's events say. `created`: Unix seconds."""

    _chunk_type: Callable[..., Any]
    """Struct of one chunk: (id, created, model, choices, usage)."""
    _protocol: Protocol = "openai"

    def __init__(
        self, id: str, model: str, created: int, request_id: str, include_usage: bool = False, n: int = 1
    ):
        self._id = id
        self._model = model
        self._created = created
        self._request_id = request_id
        # With include_usage every chunk has a usage field, null in all but the last.
        self._usage: UnsetType | None = None if include_usage else UNSET
        self._n = n
        self._timings: Timings | UnsetType = UNSET
        self._ids: list[list[chat.Event]] = [[] for _ in range(n)]

    @abstractmethod
    def _of_choice(self, event: chat.Event, index: int) -> bytes:
        """Write `event` for the client of the choice at `index`."""

    def error(self, error: OmlxdError) -> bytes:
        # No [DONE] after it: a client that skips the error must not take the answer for whole.
        return data_event(error_body(error, self._protocol, self._request_id))

    def _take_ids(self, index: int) -> dict[str, Any]:
        """Take the `ids_of` since the choice's last chunk, which go with their text, as vLLM's."""
        taken, self._ids[index] = ids_of(self._ids[index]), []
        return taken

    def event(self, event: chat.Event) -> bytes:
        if isinstance(event, chat.ChoiceEvent):
            if isinstance(event.event, chat.TokenIds):
                self._ids[event.index].append(event.event)
                return b""
            return self._of_choice(event.event, event.index)
        if isinstance(event, chat.TokenIds):
            self._ids[0].append(event)
            return b""
        if isinstance(event, chat.Finished):
            self._timings = timings_of(event.usage)
            # Of several choices each has finished by itself; this is of them all.
            last = self._of_choice(event, 0) if self._n == 1 else b""
            if self._usage is None:
                last += self._chunk_of([], usage_body(event.usage))
            return last + DONE
        return self._of_choice(event, 0)

    def _chunk_of(self, choices: list[Any], usage: UsageBody | UnsetType | None, **more: Any) -> bytes:
        fields = self._id, self._created, self._model, choices, usage
        return data_event(type(self)._chunk_type(*fields, timings=self._timings, **more))


class ChoicesCollector:
    """`sse.Collector` of one answer or several.

    body  makes its struct of each choice's events, Finished or Failed among them, and the Finished of all
    """

    def __init__(self, body: Callable[[list[list[chat.Event]], chat.Finished], msgspec.Struct], n: int = 1):
        self._body = body
        self._events: list[list[chat.Event]] = [[] for _ in range(n)]
        self._finished: chat.Finished | None = None

    def event(self, event: chat.Event) -> None:
        if isinstance(event, chat.ChoiceEvent):
            if isinstance(event.event, chat.Restarted):
                self._events[event.index].clear()
            self._events[event.index].append(event.event)
            return
        if isinstance(event, chat.Finished):
            self._finished = event
        if len(self._events) == 1:
            self._events[0].append(event)

    def response(self) -> bytes:
        assert self._finished is not None, "response before Finished"
        return msgspec.json.encode(self._body(self._events, self._finished))


def text_of(events: Iterable[chat.Event], *kinds: type[chat.TextDelta | chat.ReasoningDelta]) -> str:
    """Return the text of a choice, or of its events of `kinds`."""
    return "".join(event.text for event in events if isinstance(event, kinds or chat.TextDelta))


def logprobs_of(events: Iterable[chat.Event]) -> tuple[chat.TokenLogprob, ...]:
    return tuple(each for event in events if isinstance(event, chat.TextDelta) for each in event.logprobs)
