"""The last requests, in memory alone, so that their owner can ask afterwards why one missed.

A prompt kept here leaves the process only in the answer to whoever holds the key; it is never logged.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from operator import attrgetter

import msgspec

from ....chat import Conversation, GenerateRequest, RawPrompt, TextPart, ToolResultPart
from ....common.bounded_map import BoundedMap
from ....common.clients import own_words
from .trace import RequestTrace

MOST, MOST_BYTES = 64, 8 << 20
"""Requests kept, and their bytes. They are kept encoded: as objects they may take thirty times as much."""

OPENING_CHARS = 120
LOOKED_CHARS = 20_000
"""Characters of a part that are searched for the user's own words, behind a client's notes."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(GenerateRequest)


@dataclass(slots=True, frozen=True)
class RecentRequest:
    """A recent request. `model_id`: the engine's; `data`: the request in MessagePack; `began`: seconds since
    1970.

    size     bytes that count for it: of its body, or of itself where that is more
    opening  the first words that its user said
    turns    of the user
    priority as the request has it
    """

    model_id: str
    session: str
    data: bytes
    size: int
    trace: RequestTrace
    began: float
    opening: str
    turns: int = 0
    priority: int = 0

    @property
    def request(self) -> GenerateRequest:
        return _decoder.decode(self.data)

    @property
    def reached(self) -> int:
        """Restored tokens; -1 before the prefill begins, or without one."""
        return self.trace.restored if self.trace.usage is None else self.trace.usage.cached_tokens

    @property
    def recomputed(self) -> int:
        """Computed tokens that lay on SSD."""
        return 0 if self.trace.usage is None else self.trace.usage.recomputed

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; 0: unknown."""
        return (
            max(0, self.trace.prompt_tokens) if self.trace.usage is None else self.trace.usage.prompt_tokens
        )


class RecentRequests:
    """The last requests, newest last; larger ones than `MOST_BYTES` are not kept."""

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES):
        self._kept = BoundedMap[str, RecentRequest](most_bytes, attrgetter("size"), max_items=most)

    def add_request(self, model_id: str, request: GenerateRequest, trace: RequestTrace, nbytes: int) -> None:
        """Add a request. `nbytes`: of its body."""
        if nbytes > self._kept.max_cost:
            return
        try:
            data = _encoder.encode(request)
        except (ValueError, OverflowError, RecursionError, TypeError):
            return  # No engine will take it either, and it is refused for that.
        size = max(nbytes, len(data))
        if size > self._kept.max_cost:
            return
        opening, turns = _said(request.prompt)
        began, priority = time.time(), request.priority
        kept = RecentRequest(model_id, request.session, data, size, trace, began, opening, turns, priority)
        self._kept.put(trace.id, kept)

    def find_request(self, id: str = "", session: str = "") -> RecentRequest | None:
        """Find the request of that id, else the newest of that session, else the newest."""
        if id:
            return self._kept.peek(id)
        for kept in self._kept.values():
            if not session or kept.session == session:
                return kept
        return None

    def newest_first(self) -> list[RecentRequest]:
        return list(self._kept.values())


def _said(prompt: Conversation | RawPrompt) -> tuple[str, int]:
    """Return the user's first own words, and the number of the user's turns."""
    if isinstance(prompt, RawPrompt):
        return prompt.text[:OPENING_CHARS], 1
    turns = [message.parts for message in prompt.messages if message.role == "user"]
    said = (
        own_words(part.text[:LOOKED_CHARS]) for parts in turns for part in parts if isinstance(part, TextPart)
    )
    written = [parts for parts in turns if not all(isinstance(part, ToolResultPart) for part in parts)]
    return next(filter(None, said), "")[:OPENING_CHARS], len(written)
