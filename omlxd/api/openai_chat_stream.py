"""OpenAI's chat completions: events into chunks or a completion. Requests: openai_chat.py."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..chat import (
    ChoiceEvent,
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallCut,
    ToolCallDelta,
)
from ..errors import OmlxdError
from .errors import error_body
from .openai_fields import FINISH_REASON, ChatLogprobs, UsageBody, chat_logprobs, usage_body
from .sse import DONE, OpenCall, data_event


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    id: str
    function: _Function
    type: Literal["function"] = "function"


class _CallDelta(_Call, kw_only=True):
    index: int


class _Arguments(msgspec.Struct):
    arguments: str


class _ArgumentsDelta(msgspec.Struct):
    """More of a call that a `_CallDelta` began."""

    index: int
    function: _Arguments


class _Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_CallDelta | _ArgumentsDelta] | None = None


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

    def __init__(
        self, id: str, model: str, created: int, request_id: str, include_usage: bool = False, n: int = 1
    ):
        self._id = id
        self._model = model
        self._created = created
        self._request_id = request_id
        # With include_usage every chunk has a usage field, null in all but the last.
        self._usage: UnsetType | None = None if include_usage else UNSET
        self._choices = [_Progress() for _ in range(n)]

    def start(self) -> bytes:
        whole = range(len(self._choices))
        return b"".join(self._chunk(_Delta(role="assistant", content=""), index=index) for index in whole)

    def ping(self) -> bytes:
        # Not an SSE comment: not every client's idle timer counts those.
        return self._chunk(_Delta())

    def error(self, error: OmlxdError) -> bytes:
        # No [DONE] after it: a client that skips the error must not take the answer for whole.
        return data_event(error_body(error, "openai", self._request_id))

    def event(self, event: Event) -> bytes:
        if isinstance(event, ChoiceEvent):
            return self._of_choice(event.event, event.index)
        if isinstance(event, Finished):
            # Of several choices each has finished by itself; this is of them all.
            last = self._of_choice(event, 0) if len(self._choices) == 1 else b""
            return last + self._usage_chunk(event) + DONE
        return self._of_choice(event, 0)

    def _of_choice(self, event: Event, index: int) -> bytes:
        if isinstance(event, TextDelta):
            if not event.text and not event.logprobs:
                return b""
            logprobs = chat_logprobs(event.logprobs) if event.logprobs else None
            return self._chunk(_Delta(content=event.text), logprobs=logprobs, index=index)
        if isinstance(event, ReasoningDelta):
            return self._chunk(_Delta(reasoning_content=event.text), index=index) if event.text else b""
        if isinstance(event, (ToolCallDelta, ToolCall, ToolCallCut)):
            calls = self._choices[index].calls(event)
            return self._chunk(_Delta(tool_calls=calls), index=index) if calls else b""
        if isinstance(event, Finished):
            return self._chunk(_Delta(), finish_reason=FINISH_REASON[event.reason], index=index)
        return b""

    def _chunk(
        self,
        delta: _Delta,
        finish_reason: str | None = None,
        logprobs: ChatLogprobs | None = None,
        index: int = 0,
    ) -> bytes:
        choice = _ChunkChoice(delta=delta, logprobs=logprobs, finish_reason=finish_reason, index=index)
        return data_event(_Chunk(self._id, self._created, self._model, [choice], self._usage))

    def _usage_chunk(self, finished: Finished) -> bytes:
        if self._usage is UNSET:
            return b""
        return data_event(_Chunk(self._id, self._created, self._model, [], usage_body(finished.usage)))


class _Progress:
    """The calls of one choice of a stream: their numbers, and what was sent of the open one."""

    def __init__(self) -> None:
        self._count = 0
        self._open = OpenCall()

    def calls(self, event: ToolCallDelta | ToolCall | ToolCallCut) -> list[_CallDelta | _ArgumentsDelta]:
        begins = not self._open.id
        text = self._open.take(event)
        index = self._count
        if not isinstance(event, ToolCallDelta):
            self._count += 1
        if begins:
            return [_CallDelta(event.id, _Function(event.name, text), index=index)]
        return [_ArgumentsDelta(index, _Arguments(text))] if text else []


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

    def __init__(self, id: str, model: str, created: int, n: int = 1):
        self._id = id
        self._model = model
        self._created = created
        self._choices = [_Collected() for _ in range(n)]
        self._finished: Finished | None = None

    def event(self, event: Event) -> None:
        if isinstance(event, ChoiceEvent):
            self._choices[event.index].event(event.event)
            return
        if isinstance(event, Finished):
            self._finished = event
        if len(self._choices) == 1:
            self._choices[0].event(event)

    def response(self) -> bytes:
        assert self._finished is not None, "response before Finished"
        choices = [choice.told(index) for index, choice in enumerate(self._choices)]
        usage = usage_body(self._finished.usage)
        return msgspec.json.encode(ChatCompletion(self._id, self._created, self._model, choices, usage))


class _Collected:
    """One choice of an answer."""

    def __init__(self) -> None:
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
        elif isinstance(event, (ToolCall, ToolCallCut)):
            self._calls.append(_Call(event.id, _Function(event.name, event.arguments)))
        elif isinstance(event, Finished):
            self._finished = event

    def told(self, index: int) -> _Choice:
        assert self._finished is not None, "response before Finished"
        text = "".join(self._text)
        message = _Message(
            # Null only beside tool calls: clients read an answer's content without asking.
            content=None if self._calls and not text else text,
            reasoning_content="".join(self._reasoning) or UNSET,
            tool_calls=self._calls or UNSET,
        )
        return _Choice(
            message=message,
            finish_reason=FINISH_REASON[self._finished.reason],
            logprobs=chat_logprobs(tuple(self._logprobs)) if self._logprobs else None,
            index=index,
        )
