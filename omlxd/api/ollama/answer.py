"""Ollama's chat and generate: events into lines of JSON, or into one object."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import msgspec
from msgspec import UNSET, UnsetType

from ...chat import Event, Finished, ReasoningDelta, TextDelta, TokenLogprob, ToolCall, ToolCallCut
from ...errors import OmlxdError
from ..errors import error_body
from ..openai.fields import ChatLogprob, chat_logprobs
from ..sse import UsageExtension, usage_extension
from .request import OllamaRequest

_encoder = msgspec.json.Encoder()


class _Function(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


class _Call(msgspec.Struct):
    id: str
    function: _Function


class _Message(msgspec.Struct):
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[_Call] | UnsetType = UNSET
    role: str = "assistant"


class Answer(msgspec.Struct):
    """A line, or all of an answer. Times in nanoseconds; `message` of a chat, `response` of a generate."""

    model: str
    created_at: str
    done: bool
    message: _Message | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    omlxd: UsageExtension | UnsetType = UNSET


class _Writer:
    """Answers to one request, and the time since its first token."""

    def __init__(self, parsed: OllamaRequest):
        self._parsed = parsed
        self._first: int | None = None

    def note(self, event: Event) -> None:
        if self._first is None and isinstance(event, ReasoningDelta | TextDelta):
            self._first = time.monotonic_ns()

    def answer(
        self,
        text: str = "",
        thinking: str = "",
        calls: list[ToolCall | ToolCallCut] | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
        finished: Finished | None = None,
    ) -> Answer:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        answer = Answer(self._parsed.model, now, finished is not None)
        if self._parsed.chats:
            answer.message = _Message(text, thinking or UNSET, [_call(call) for call in calls or []] or UNSET)
        else:
            answer.response, answer.thinking = text, thinking or UNSET
        if logprobs:
            answer.logprobs = chat_logprobs(logprobs).content
        if finished is not None:
            self._finish(answer, finished)
        return answer

    def _finish(self, answer: Answer, finished: Finished) -> None:
        usage = finished.usage
        prompt_ns = int(usage.ttft_s * 1e9)
        answer_ns = time.monotonic_ns() - self._first if self._first is not None else 0
        if usage.completion_tokens < 2:
            answer_ns = 0  # No time passes from the first token to itself: no rate comes of it.
        answer.done_reason = "load" if self._parsed.loads else _REASONS.get(finished.reason, "stop")
        load_ns = 0
        if (since := self._parsed.waiting_since) is not None:
            load_ns = int(max(0.0, time.monotonic() - since - usage.ttft_s - usage.decode_s) * 1e9)
        answer.total_duration, answer.load_duration = load_ns + prompt_ns + answer_ns, load_ns
        if not self._parsed.loads:
            answer.prompt_eval_count, answer.prompt_eval_duration = usage.prompt_tokens, prompt_ns
            answer.eval_count, answer.eval_duration = usage.completion_tokens, answer_ns
            answer.omlxd = usage_extension(usage)


_REASONS = {"length": "length"}


def _call(call: ToolCall | ToolCallCut) -> _Call:
    return _Call(call.id, _Function(call.name, msgspec.Raw(call.valid_arguments.encode())))


class OllamaStream:
    """`sse.StreamEncoder`, but of lines of JSON. A call is sent whole."""

    def __init__(self, parsed: OllamaRequest, request_id: str):
        self._writer = _Writer(parsed)
        self._request_id = request_id

    def start(self) -> bytes:
        return b""

    def ping(self) -> bytes:
        return _line(self._writer.answer())

    def error(self, error: OmlxdError) -> bytes:
        return _line(error_body(error, "ollama", self._request_id))

    def event(self, event: Event) -> bytes:
        self._writer.note(event)
        match event:
            case TextDelta() if event.text or event.logprobs:
                return _line(self._writer.answer(event.text, logprobs=event.logprobs))
            case ReasoningDelta() if event.text:
                return _line(self._writer.answer(thinking=event.text))
            case ToolCall() | ToolCallCut():
                return _line(self._writer.answer(calls=[event]))
            case Finished():
                return _line(self._writer.answer(finished=event))
            case _:
                return b""


def _line(value: msgspec.Struct) -> bytes:
    return _encoder.encode(value) + b"\n"


class OllamaCollector:
    """`sse.Collector` of one answer."""

    def __init__(self, parsed: OllamaRequest):
        self._writer = _Writer(parsed)
        self._events: list[Event] = []

    def event(self, event: Event) -> None:
        self._writer.note(event)
        self._events.append(event)

    def response(self) -> bytes:
        finished = self._events[-1]
        assert isinstance(finished, Finished), "response before Finished"
        texts = [event for event in self._events if isinstance(event, TextDelta)]
        answer = self._writer.answer(
            "".join(event.text for event in texts),
            "".join(event.text for event in self._events if isinstance(event, ReasoningDelta)),
            [event for event in self._events if isinstance(event, ToolCall | ToolCallCut)],
            tuple(token for event in texts for token in event.logprobs),
            finished,
        )
        return _encoder.encode(answer)


def unloaded(parsed: OllamaRequest) -> bytes:
    """The answer to a request by which its model went."""
    answer = _Writer(parsed).answer()
    answer.done, answer.done_reason = True, "unload"
    return _line(answer)
