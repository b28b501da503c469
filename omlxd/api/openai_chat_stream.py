"""OpenAI's chat completions: events into chunks or a completion. Requests: openai_chat.py."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..chat import Event, Finished, ReasoningDelta, TextDelta, TokenLogprob, ToolCall
from ..errors import OmlxdError
from .errors import error_body
from .openai_fields import FINISH_REASON, ChatLogprobs, UsageBody, chat_logprobs, usage_body
from .sse import DONE, data_event


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    id: str
    function: _Function
    type: Literal["function"] = "function"


class _CallDelta(_Call, kw_only=True):
    index: int


class _Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_CallDelta] | None = None


class _ChunkChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    delta: _Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[_ChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class OpenAIChatStream:
    """`sse.StreamEncoder` of one chat completion. `created`: Unix seconds."""

    def __init__(self, id: str, model: str, created: int, request_id: str, include_usage: bool = False):
        self._id = id
        self._model = model
        self._created = created
        self._request_id = request_id
        # With include_usage every chunk has a usage field, null in all but the last.
        self._usage: UnsetType | None = None if include_usage else UNSET
        self._calls = 0

    def start(self) -> bytes:
        return self._chunk(_Delta(role="assistant", content=""))

    def ping(self) -> bytes:
        # Not an SSE comment: not every client's idle timer counts those.
        return self._chunk(_Delta())

    def error(self, error: OmlxdError) -> bytes:
        # No [DONE] after it: a client that skips the error must not take the answer for whole.
        return data_event(error_body(error, "openai", self._request_id))

    def event(self, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            if not event.text and not event.logprobs:
                return b""
            logprobs = chat_logprobs(event.logprobs) if event.logprobs else None
            return self._chunk(_Delta(content=event.text), logprobs=logprobs)
        if isinstance(event, ReasoningDelta):
            return self._chunk(_Delta(reasoning_content=event.text)) if event.text else b""
        if isinstance(event, ToolCall):
            call = _CallDelta(event.id, _Function(event.name, event.arguments), index=self._calls)
            self._calls += 1
            return self._chunk(_Delta(tool_calls=[call]))
        if isinstance(event, Finished):
            last = self._chunk(_Delta(), finish_reason=FINISH_REASON[event.reason])
            return last + self._usage_chunk(event) + DONE
        return b""

    def _chunk(
        self, delta: _Delta, finish_reason: str | None = None, logprobs: ChatLogprobs | None = None
    ) -> bytes:
        choice = _ChunkChoice(delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return data_event(_Chunk(self._id, self._created, self._model, [choice], self._usage))

    def _usage_chunk(self, finished: Finished) -> bytes:
        if self._usage is UNSET:
            return b""
        return data_event(_Chunk(self._id, self._created, self._model, [], usage_body(finished.usage)))


class _Message(msgspec.Struct):
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[_Call] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str
    logprobs: ChatLogprobs | None
    index: int = 0


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[_Choice]
    usage: UsageBody
    object: Literal["chat.completion"] = "chat.completion"


class OpenAIChatCollector:
    """`sse.Collector` of one chat completion. `created`: Unix seconds."""

    def __init__(self, id: str, model: str, created: int):
        self._id = id
        self._model = model
        self._created = created
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        self._logprobs: list[TokenLogprob] = []
        self._finished: Finished | None = None

    def event(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self._text.append(event.text)
            self._logprobs.extend(event.logprobs)
        elif isinstance(event, ReasoningDelta):
            self._reasoning.append(event.text)
        elif isinstance(event, ToolCall):
            self._calls.append(_Call(event.id, _Function(event.name, event.arguments)))
        elif isinstance(event, Finished):
            self._finished = event

    def response(self) -> bytes:
        assert self._finished is not None, "response before Finished"
        text = "".join(self._text)
        message = _Message(
            # Null only beside tool calls: clients read an answer's content without asking.
            content=None if self._calls and not text else text,
            reasoning_content="".join(self._reasoning) or UNSET,
            tool_calls=self._calls or UNSET,
        )
        choice = _Choice(
            message=message,
            finish_reason=FINISH_REASON[self._finished.reason],
            logprobs=chat_logprobs(tuple(self._logprobs)) if self._logprobs else None,
        )
        usage = usage_body(self._finished.usage)
        return msgspec.json.encode(ChatCompletion(self._id, self._created, self._model, [choice], usage))
