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
from ..answer.sse import OpenCall, UsageExtension, named_event, usage_extension
from ..errors import error_body
from .tools import shown_id

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


def _signature(thought: str) -> str:
    """Return a stand-in for Anthropic's signature: clients want one, echo it, and never check it."""
    digest = hashlib.blake2b(thought.encode(), digest_size=24, person=b"omlxd-thinking").digest()
    return base64.b64encode(digest).decode()


Keep = Callable[[str, bytes], None]
"""Called at a message's end: (id of the message, its blocks as JSON)."""


class AnthropicStream:
    """`sse.StreamEncoder` of one message. Its `message_start` waits for the cached tokens."""

    def __init__(self, id: str, model: str, request_id: str, keep: Keep | None = None):
        self.message = MessageAnswer(id, model, [], None, None, _Usage(0, 0, 0, 0))
        """The message so far."""
        self._request_id = request_id
        self._keep = keep
        self._started = False
        self._index = -1
        self._open: Literal["", "text", "thinking", "call"] = ""
        self._said: list[str] = []  # of the open block
        self._call = OpenCall()

    def start(self) -> bytes:
        return b""

    def ping(self) -> bytes:
        return _event("ping")

    def error(self, error: OmlxdError) -> bytes:
        return named_event(b"error", error_body(error, "anthropic", self._request_id))

    def event(self, event: chat.Event) -> bytes:
        return self._begun(event) + self._encoded(event)

    def _begun(self, event: chat.Event) -> bytes:
        """Return `message_start`, before anything else."""
        if self._started:
            return b""
        self._started = True
        usage = event.usage if isinstance(event, chat.Finished) else chat.Usage()
        if isinstance(event, chat.Progress):
            usage = chat.Usage(event.total, cached_hot=event.done)
        self.message.usage = _Usage(usage.prompt_tokens - usage.cached_tokens, 0, usage.cached_tokens, 0)
        return _event("message_start", message=self.message)

    def _encoded(self, event: chat.Event) -> bytes:
        match event:
            case chat.TextDelta() if event.text:
                begin = b"" if self._open == "text" else self._begin("text", _Text(""))
                self._said.append(event.text)
                return begin + self._delta("text_delta", text=event.text)
            case chat.ReasoningDelta() if event.text:
                begin = b"" if self._open == "thinking" else self._begin("thinking", _Thinking("", ""))
                self._said.append(event.text)
                return begin + self._delta("thinking_delta", thinking=event.text)
            case chat.ToolCallDelta() | chat.ToolCall() | chat.ToolCallCut():
                return self._tool_call(event)
            case chat.Finished():
                return self._finish(event)
            case chat.Restarted():
                closed, self.message.content = self._close(), []
                return closed
            case _:
                return b""

    def _finish(self, finished: chat.Finished) -> bytes:
        closed, message = self._close(), self.message
        message.stop_reason, message.stop_sequence = _STOP_REASON[finished.reason], finished.stop_sequence
        message.usage = _usage(finished.usage)
        if self._keep is not None:
            self._keep(message.id, msgspec.json.encode(message.content))
        stop = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        delta = _event("message_delta", delta=stop, usage=message.usage)
        return closed + delta + _event("message_stop")

    def _tool_call(self, call: chat.ToolCallDelta | chat.ToolCall | chat.ToolCallCut) -> bytes:
        out = b""
        if not self._call.id:
            out = self._begin("call", _ToolUse(shown_id(call.id), call.name, msgspec.Raw(b"{}")))
        if text := self._call.take(call):
            out += self._delta("input_json_delta", partial_json=text)
        if isinstance(call, chat.ToolCallDelta):
            return out
        # As Anthropic's SDKs read a stream that is cut off.
        self._said.append(call.valid_arguments)
        return out + self._close()

    def _begin(self, kind: Literal["text", "thinking", "call"], block: _Text | _Thinking | _ToolUse) -> bytes:
        closed = self._close()
        self.message.content.append(block)
        self._open, self._said = kind, []
        self._index += 1
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, type: str, **fields: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": type, **fields})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open, said, signed = "", "".join(self._said), b""
        block = self.message.content[-1]
        if isinstance(block, _Text):
            block.text = said
        elif isinstance(block, _Thinking):
            block.thinking, block.signature = said, _signature(said)
            signed = self._delta("signature_delta", signature=block.signature)
        else:
            block.input = msgspec.Raw(said.encode())
        return signed + _event("content_block_stop", index=self._index)


class AnthropicCollector:
    """`sse.Collector` of one message."""

    def __init__(self, id: str, model: str, keep: Keep | None = None):
        self._stream = AnthropicStream(id, model, "", keep)

    def event(self, event: chat.Event) -> None:
        self._stream.event(event)

    def response(self) -> bytes:
        assert self._stream.message.stop_reason is not None, "response before Finished"
        return msgspec.json.encode(self._stream.message)
