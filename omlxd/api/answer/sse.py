"""Server-sent events, and the interfaces of stream encoders and collectors."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import asdict

from ...chat import Event, Struct, ToolCall, ToolCallCut, ToolCallDelta, Usage
from ...errors import OmlxdError

_encoder = msgspec.json.Encoder()

DONE = b"data: [DONE]\n\n"


def data_event(data: Any) -> bytes:
    """Format `data: {json}`, as OpenAI streams."""
    return b"data: " + _encoder.encode(data) + b"\n\n"


def named_event(name: bytes, data: Any) -> bytes:
    """Format `event: name` and `data: {json}`, as Anthropic streams."""
    return b"event: " + name + b"\ndata: " + _encoder.encode(data) + b"\n\n"


class StreamEncoder(Protocol):
    """Turns events into SSE bytes, b"" for none: `start`, any `event` and `ping`, or `error` at the end."""

    def start(self) -> bytes: ...
    def event(self, event: Event) -> bytes: ...
    def ping(self) -> bytes: ...
    def error(self, error: OmlxdError) -> bytes: ...


class Collector(Protocol):
    """Turns events into one JSON body, after `Finished`."""

    def event(self, event: Event) -> None: ...
    def response(self) -> bytes: ...


class OpenCall:
    """The sent part of the call under way. `id` "": no call."""

    def __init__(self) -> None:
        self.id = ""
        self._sent = 0

    def take(self, event: ToolCallDelta | ToolCall | ToolCallCut) -> str:
        """Return the arguments to send now. ToolCall and ToolCallCut close the call."""
        if isinstance(event, ToolCallDelta):
            self.id = event.id
            self._sent += len(event.text)
            return event.text
        rest = event.arguments[self._sent :]
        self.id, self._sent = "", 0
        return rest


class UsageExtension(Struct, frozen=True):
    """Figures that no protocol has a field for, from `chat.Usage`, as `omlxd` in usage.

    model_drafted, model_accepted  both, or neither where no draft model guessed
    not_enforced  absent where there is none
    reasoning_ended, answer_ended, repeated_tokens  likewise
    priority, side_request  absent where they are 0 and false
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
    reasoning_ended: str | UnsetType = UNSET
    answer_ended: str | UnsetType = UNSET
    repeated_tokens: int | UnsetType = UNSET
    priority: int | UnsetType = UNSET
    side_request: bool | UnsetType = UNSET


def usage_extension(usage: Usage) -> UsageExtension:
    computed = usage.computed_tokens
    told = {name: value or UNSET for name, value in asdict(usage.limited).items()}
    left_out = {"computed", *told}
    if not usage.model_drafted:
        left_out |= {"model_drafted", "model_accepted"}
    names = [name for name in UsageExtension.__struct_fields__ if name not in left_out]
    figures = {name: round(getattr(usage, name), 6) for name in names}
    return UsageExtension(computed=computed, **told, **figures)
