"""Anthropic's Messages API: events into a stream or a message.

A stream is `message_start`, content blocks, `message_delta`, `message_stop`. `input_tokens` are those that
were computed: with `cache_read_input_tokens` they make the prompt.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from ... import chat
from ...errors import OmlxdError
from ..errors import error_body
from ..sse import OpenCall, UsageExtension, named_event, usage_extension

_STOP_REASON: dict[chat.FinishReason, str] = {
    "stop": "end_turn",
    "stop_sequence": "stop_sequence",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


class _OutputDetails(msgspec.Struct):
    thinking_tokens: int


class _Usage(msgspec.Struct, omit_defaults=True):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: _OutputDetails | None = None
    omlxd: UsageExtension | None = None


def _usage(usage: chat.Usage) -> _Usage:
    return _Usage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        output_tokens_details=_OutputDetails(usage.reasoning_tokens),
        omlxd=usage_extension(usage),
    )


class _Block(msgspec.Struct, tag_field="type"): ...


class _Text(_Block, tag="text"):
    text: str


class _Thinking(_Block, tag="thinking"):
    thinking: str
    signature: str


class _ToolUse(_Block, tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw


class MessageAnswer(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    model: str
    content: list[_Text | _Thinking | _ToolUse]
    stop_reason: str | None
    stop_sequence: str | None
    usage: _Usage
    role: Literal["assistant"] = "assistant"


class TokenCount(msgspec.Struct):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


def _event(type: str, **fields: Any) -> bytes:
    return named_event(type.encode(), {"type": type, **fields})


class _Signature:
    """What stands in for Anthropic's signature: clients want one, echo it, and never check it."""

    def __init__(self):
        self._digest = hashlib.blake2b(digest_size=24, person=b"omlxd-thinking")

    def update(self, text: str) -> None:
        self._digest.update(text.encode())

    def text(self) -> str:
        return base64.b64encode(self._digest.digest()).decode()


Keep = Callable[[str, bytes], None]
"""(id of the message, its blocks as JSON): called once, at its end."""


def _nowhere(id: str, content: bytes) -> None:
    pass


class AnthropicStream:
    """`sse.StreamEncoder` of one message. `message_start` waits for the first event, which has the cached
    tokens.
    """

    def __init__(self, id: str, model: str, request_id: str, keep: Keep | None = None):
        self._kept = None if keep is None else AnthropicCollector(id, model, keep)
        self._id = id
        self._model = model
        self._request_id = request_id
        self._started = False
        self._index = -1
        self._open: Literal["", "text", "thinking", "call"] = ""
        self._call = OpenCall()
        self._signature = _Signature()

    def start(self) -> bytes:
        return b""

    def ping(self) -> bytes:
        return _event("ping")

    def error(self, error: OmlxdError) -> bytes:
        return named_event(b"error", error_body(error, "anthropic", self._request_id))

    def event(self, event: chat.Event) -> bytes:
        if self._kept is not None:
            self._kept.event(event)
        return self._begun(event) + self._encoded(event)

    def _begun(self, event: chat.Event) -> bytes:
        """`message_start`, before anything else."""
        if self._started:
            return b""
        self._started = True
        usage = event.usage if isinstance(event, chat.Finished) else chat.Usage()
        if isinstance(event, chat.Progress):
            usage = chat.Usage(event.total, cached_hot=event.done)
        start = _Usage(usage.prompt_tokens - usage.cached_tokens, 0, usage.cached_tokens, 0)
        message = MessageAnswer(self._id, self._model, [], None, None, start)
        return _event("message_start", message=message)

    def _encoded(self, event: chat.Event) -> bytes:
        if isinstance(event, chat.TextDelta):
            return self._text(event.text) if event.text else b""
        if isinstance(event, chat.ReasoningDelta):
            return self._thinking(event.text) if event.text else b""
        if isinstance(event, (chat.ToolCallDelta, chat.ToolCall, chat.ToolCallCut)):
            return self._tool_call(event)
        if isinstance(event, chat.Finished):
            stop = {"stop_reason": _STOP_REASON[event.reason], "stop_sequence": event.stop_sequence}
            delta = _event("message_delta", delta=stop, usage=_usage(event.usage))
            return self._close() + delta + _event("message_stop")
        return b""

    def _text(self, text: str) -> bytes:
        begin = b"" if self._open == "text" else self._begin("text", _Text(""))
        return begin + self._delta("text_delta", text=text)

    def _thinking(self, text: str) -> bytes:
        begin = b""
        if self._open != "thinking":
            begin = self._begin("thinking", _Thinking("", ""))
            self._signature = _Signature()
        self._signature.update(text)
        return begin + self._delta("thinking_delta", thinking=text)

    def _tool_call(self, call: chat.ToolCallDelta | chat.ToolCall | chat.ToolCallCut) -> bytes:
        out = b""
        if not self._call.id:
            out = self._begin("call", _ToolUse(call.id, call.name, msgspec.Raw(b"{}")))
        if text := self._call.take(call):
            out += self._delta("input_json_delta", partial_json=text)
        return out if isinstance(call, chat.ToolCallDelta) else out + self._close()

    def _begin(self, kind: Literal["text", "thinking", "call"], block: _Text | _Thinking | _ToolUse) -> bytes:
        closed = self._close()
        self._index += 1
        self._open = kind
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, type: str, **fields: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": type, **fields})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = self._open == "thinking"
        signature = self._delta("signature_delta", signature=self._signature.text()) if signed else b""
        self._open = ""
        return signature + _event("content_block_stop", index=self._index)


class AnthropicCollector:
    """`sse.Collector` of one message."""

    def __init__(self, id: str, model: str, keep: Keep = _nowhere):
        self._id = id
        self._model = model
        self._keep = keep
        self._runs: list[tuple[type, list[str]] | chat.ToolCall | chat.ToolCallCut] = []
        self._finished: chat.Finished | None = None

    def event(self, event: chat.Event) -> None:
        if isinstance(event, (chat.TextDelta, chat.ReasoningDelta)):
            if not event.text:
                return
            last = self._runs[-1] if self._runs else None
            if isinstance(last, tuple) and last[0] is type(event):
                last[1].append(event.text)
            else:
                self._runs.append((type(event), [event.text]))
        elif isinstance(event, (chat.ToolCall, chat.ToolCallCut)):
            self._runs.append(event)
        elif isinstance(event, chat.Restarted):
            self._runs.clear()
        elif isinstance(event, chat.Finished):
            self._finished = event
            self._keep(self._id, msgspec.json.encode(self._content()))

    def _content(self) -> list[_Text | _Thinking | _ToolUse]:
        return [_block(run) for run in self._runs]

    def response(self) -> bytes:
        assert self._finished is not None, "response before Finished"
        return msgspec.json.encode(
            MessageAnswer(
                id=self._id,
                model=self._model,
                content=self._content(),
                stop_reason=_STOP_REASON[self._finished.reason],
                stop_sequence=self._finished.stop_sequence,
                usage=_usage(self._finished.usage),
            )
        )


def _block(run: tuple[type, list[str]] | chat.ToolCall | chat.ToolCallCut) -> _Text | _Thinking | _ToolUse:
    if isinstance(run, (chat.ToolCall, chat.ToolCallCut)):
        # As Anthropic's SDKs read a stream that is cut off.
        return _ToolUse(run.id, run.name, msgspec.Raw(run.valid_arguments.encode()))
    text = "".join(run[1])
    if run[0] is chat.TextDelta:
        return _Text(text)
    signature = _Signature()
    signature.update(text)
    return _Thinking(text, signature.text())
