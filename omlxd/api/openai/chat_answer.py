"""OpenAI's chat completions: events into chunks or a completion. Requests: api/openai/chat_request.py."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ... import chat
from ..answer.sse import OpenCall
from .chat_tools import FUNCTIONS, CallShape
from .choices import ChoicesCollector, ChoicesStream, ids_of, logprobs_of, text_of
from .fields import FINISH_REASON, ChatLogprobs, Timings, UsageBody, chat_logprobs, timings_of, usage_body
from .tool_choice import custom_input


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct, tag_field="type", tag="function"):
    id: str
    function: _Function


class _Custom(msgspec.Struct):
    name: str
    input: str


class _CustomCall(msgspec.Struct, tag_field="type", tag="custom"):
    id: str
    custom: _Custom


Delta = dict[str, Any]
"""A chunk's addition to a choice's message."""


class _Chunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: UsageBody | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class OpenAIChatStream(ChoicesStream):
    """`sse.StreamEncoder` of one chat completion. `created`: Unix seconds."""

    _chunk_type = _Chunk

    def __init__(
        self,
        id: str,
        model: str,
        created: int,
        request_id: str,
        include_usage: bool = False,
        n: int = 1,
        shape: CallShape = FUNCTIONS,
    ):
        super().__init__(id, model, created, request_id, include_usage, n)
        self._shape = shape
        self._calls = [_Progress(shape) for _ in range(n)]

    def start(self) -> bytes:
        return b"".join(
            self._chunk({"role": "assistant", "content": ""}, index=index) for index in range(self._n)
        )

    def ping(self) -> bytes:
        # Not an SSE comment: not every client's idle timer counts those.
        return self._chunk({})

    def _of_choice(self, event: chat.Event, index: int) -> bytes:
        if isinstance(event, chat.TextDelta):
            if not event.text and not event.logprobs:
                return b""
            logprobs = chat_logprobs(event.logprobs) if event.logprobs else None
            return self._chunk({"content": event.text}, logprobs=logprobs, index=index)
        if isinstance(event, chat.ReasoningDelta):
            return self._chunk({"reasoning_content": event.text}, index=index) if event.text else b""
        if isinstance(event, (chat.ToolCallDelta, chat.ToolCall, chat.ToolCallCut)):
            delta = self._calls[index].delta(event)
            return self._chunk(delta, index=index) if delta else b""
        if isinstance(event, chat.Finished):
            return self._chunk({}, finish_reason=_finish_reason(event, self._shape), index=index)
        return b""

    def _chunk(
        self,
        delta: Delta,
        finish_reason: str | None = None,
        logprobs: ChatLogprobs | None = None,
        index: int = 0,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if ids := self._take_ids(index):
            choice["token_ids"] = ids.pop("token_ids")
        return self._chunk_of([choice], self._usage, **ids)


class _Progress:
    """The calls of one choice of a stream: their numbers, and the sent part of the open one."""

    def __init__(self, shape: CallShape) -> None:
        self._shape = shape
        self._count = 0
        self._open = OpenCall()

    def delta(self, event: chat.ToolCallDelta | chat.ToolCall | chat.ToolCallCut) -> Delta | None:
        """Return the addition to send now, if any."""
        index = self._count
        if not isinstance(event, chat.ToolCallDelta):
            self._count += 1
        if event.name in self._shape.custom:
            if isinstance(event, chat.ToolCallDelta):
                return None  # Its text comes out of JSON, and can't be sent before that is whole.
            call = {"id": event.id, "custom": _custom(event), "type": "custom", "index": index}
            return {"tool_calls": [call]}
        begins = not self._open.id
        text = self._open.take(event)
        if not begins and not text:
            return None
        function = {"name": event.name, "arguments": text} if begins else {"arguments": text}
        if self._shape.obsolete:
            return {"function_call": function}
        if not begins:
            return {"tool_calls": [{"index": index, "function": function}]}
        return {"tool_calls": [{"id": event.id, "function": function, "type": "function", "index": index}]}


def _custom(event: chat.ToolCall | chat.ToolCallCut) -> _Custom:
    return _Custom(event.name, custom_input(event.valid_arguments))


def _finish_reason(finished: chat.Finished, shape: CallShape) -> str:
    if shape.obsolete and finished.reason == "tool_calls":
        return "function_call"
    return FINISH_REASON[finished.reason]


class _Message(msgspec.Struct):
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[_Call | _CustomCall] | UnsetType = UNSET
    function_call: _Function | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str
    logprobs: ChatLogprobs | None
    index: int = 0
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[_Choice]
    usage: UsageBody
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


def _choice(events: list[chat.Event], index: int, shape: CallShape) -> _Choice:
    finished = events[-1]
    assert isinstance(finished, chat.Finished), "response before Finished"
    calls = [event for event in events if isinstance(event, (chat.ToolCall, chat.ToolCallCut))]
    text, logprobs = text_of(events), logprobs_of(events)
    message = _Message(
        # Null only beside tool calls: clients read an answer's content without asking.
        content=None if calls and not text else text,
        reasoning_content=text_of(events, chat.ReasoningDelta) or UNSET,
    )
    if calls and shape.obsolete:
        message.function_call = _Function(calls[0].name, calls[0].arguments)
    elif calls:
        message.tool_calls = [_call(call, shape) for call in calls]
    return _Choice(
        message=message,
        finish_reason=_finish_reason(finished, shape),
        logprobs=chat_logprobs(logprobs) if logprobs else None,
        index=index,
        token_ids=ids_of(events).get("token_ids", UNSET),
    )


def _call(call: chat.ToolCall | chat.ToolCallCut, shape: CallShape) -> _Call | _CustomCall:
    if call.name in shape.custom:
        return _CustomCall(call.id, _custom(call))
    return _Call(call.id, _Function(call.name, call.arguments))


class OpenAIChatCollector(ChoicesCollector):
    """`sse.Collector` of one chat completion. `created`: Unix seconds."""

    def __init__(self, id: str, model: str, created: int, n: int = 1, shape: CallShape = FUNCTIONS):
        def body(choices: list[list[chat.Event]], finished: chat.Finished) -> ChatCompletion:
            return ChatCompletion(
                *(id, created, model, [_choice(events, at, shape) for at, events in enumerate(choices)]),
                usage_body(finished.usage),
                prompt_token_ids=ids_of(choices[0]).get("prompt_token_ids", UNSET),
                timings=timings_of(finished.usage),
            )

        super().__init__(body, n)
