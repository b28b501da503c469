"""Conversations that a `previous_response_id` can go on from. In memory, bounded, gone with the process."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from ..chat import Message

MAX_RESPONSES = 1000
MAX_BYTES = 64 * 1024 * 1024

_decoder = msgspec.msgpack.Decoder(tuple[Message, ...])


class ResponseStore:
    """Response id → its conversation; the least recently used ones go first.

    Each is kept whole and encoded, so that the bound on bytes counts what is really held and none
    depends on another that has gone.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES):
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self.bytes = 0
        """Bytes held, at most `max_bytes`."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, id: str, messages: tuple[Message, ...]) -> None:
        """One that is larger than the whole store is not kept."""
        encoded = msgspec.msgpack.encode(messages)
        if len(encoded) > self._max_bytes:
            return
        self.bytes += len(encoded) - len(self._kept.pop(id, b""))
        self._kept[id] = encoded
        while len(self._kept) > self._max_responses or self.bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.bytes -= len(dropped)

    def messages(self, id: str) -> tuple[Message, ...] | None:
        """None: never kept, or gone."""
        encoded = self._kept.get(id)
        if encoded is None:
            return None
        self._kept.move_to_end(id)
        return _decoder.decode(encoded)
