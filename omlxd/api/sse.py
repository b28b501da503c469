"""Server-sent events, and what every stream encoder and collector looks like."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from ..chat import Event, Struct, ToolCall, ToolCallCut, ToolCallDelta, Usage
from ..errors import OmlxdError

_encoder = msgspec.json.Encoder()

DONE = b"data: [DONE]\n\n"


def data_event(data: Any) -> bytes:
    """`data: {json}`, as OpenAI streams."""
    return b"data: " + _encoder.encode(data) + b"\n\n"


def named_event(name: bytes, data: Any) -> bytes:
    """`event: name` and `data: {json}`, as Anthropic streams."""
    return b"event: " + name + b"\ndata: " + _encoder.encode(data) + b"\n\n"


class StreamEncoder(Protocol):
    """Events in, SSE bytes out, b"" for nothing: `start`, any `event` and `ping`, or `error` at the end."""

    def start(self) -> bytes: ...
    def event(self, event: Event) -> bytes: ...
    def ping(self) -> bytes: ...
    def error(self, error: OmlxdError) -> bytes: ...


class Collector(Protocol):
    """Events in, one JSON body out, after `Finished` came in."""

    def event(self, event: Event) -> None: ...
    def response(self) -> bytes: ...


class OpenCall:
    """What a stream has sent of the call under way. `id` "": there is none."""

    def __init__(self) -> None:
        self.id = ""
        self._sent = 0

    def take(self, event: ToolCallDelta | ToolCall | ToolCallCut) -> str:
        """The arguments to send now. The open call is over with its ToolCall or ToolCallCut."""
        if isinstance(event, ToolCallDelta):
            self.id = event.id
            self._sent += len(event.text)
            return event.text
        rest = event.arguments[self._sent :]
        self.id, self._sent = "", 0
        return rest


class UsageExtension(Struct, frozen=True):
    """What no protocol has a field for, as `chat.Usage` has it; stands as `omlxd` in usage.

    model_drafted, model_accepted  both, or neither where no draft model guessed
    not_enforced  absent where there is none
    """

    cached_hot: int
    cached_cold: int
    computed: int
    ttft_s: float
    queue_s: float
    restore_s: float
    prefill_s: float
    decode_s: float
    tokens_per_s: float
    drafted: int
    accepted: int
    peak_bytes: int = 0
    model_drafted: int | UnsetType = UNSET
    model_accepted: int | UnsetType = UNSET
    recomputed: int = 0
    not_enforced: tuple[str, ...] | UnsetType = UNSET


def usage_extension(usage: Usage) -> UsageExtension:
    computed = usage.computed_tokens
    left_out = {"computed", "not_enforced"}
    if not usage.model_drafted:
        left_out |= {"model_drafted", "model_accepted"}
    names = [name for name in UsageExtension.__struct_fields__ if name not in left_out]
    figures = {name: round(getattr(usage, name), 6) for name in names}
    return UsageExtension(computed=computed, not_enforced=usage.not_enforced or UNSET, **figures)
