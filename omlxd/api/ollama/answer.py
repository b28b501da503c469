"""Ollama's chat and generate: events into lines of JSON, or into one object."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
from msgspec import UNSET, UnsetType

from ...chat import Event, Finished, ReasoningDelta, TextDelta, TokenLogprob, ToolCall, ToolCallCut
from ...errors import OmlxdError
from ..answer.sse import UsageExtension, usage_extension
from ..errors import error_body
from ..openai.choices import ChoicesCollector, logprobs_of, text_of
from ..openai.fields import ChatLogprob, chat_logprobs
from .request import OllamaRequest


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


def _answer(
    parsed: OllamaRequest,
    text: str = "",
    thinking: str = "",
    calls: Sequence[ToolCall | ToolCallCut] = (),
    logprobs: tuple[TokenLogprob, ...] = (),
    finished: Finished | None = None,
) -> Answer:
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    answer = Answer(parsed.model, now, finished is not None)
    if parsed.chats:
        answer.message = _Message(text, thinking or UNSET, [_call(call) for call in calls] or UNSET)
    else:
        answer.response, answer.thinking = text, thinking or UNSET
    if logprobs:
        answer.logprobs = chat_logprobs(logprobs).content
    if finished is None:
        return answer
    usage = finished.usage
    queue_ns, ttft_ns = int(usage.queue_s * 1e9), int(usage.ttft_s * 1e9)
    # No time passes from the first token to itself: no rate comes of it.
    answer_ns = int(usage.decode_s * 1e9) if usage.completion_tokens > 1 else 0
    answer.total_duration, answer.load_duration = ttft_ns + answer_ns, queue_ns if parsed.waits else 0
    answer.done_reason = "load" if parsed.loads else "length" if finished.reason == "length" else "stop"
    if not parsed.loads:
        answer.prompt_eval_count, answer.prompt_eval_duration = usage.prompt_tokens, ttft_ns - queue_ns
        answer.eval_count, answer.eval_duration = usage.completion_tokens, answer_ns
        answer.omlxd = usage_extension(usage)
    return answer


def _call(call: ToolCall | ToolCallCut) -> _Call:
    return _Call(call.id, _Function(call.name, msgspec.Raw(call.valid_arguments.encode())))


class OllamaStream:
    """`sse.StreamEncoder`, but of lines of JSON. A call is sent whole."""

    def __init__(self, parsed: OllamaRequest, request_id: str):
        self._parsed = parsed
        self._request_id = request_id

    def start(self) -> bytes:
        return b""

    def ping(self) -> bytes:
        return _line(_answer(self._parsed))

    def error(self, error: OmlxdError) -> bytes:
        return _line(error_body(error, "ollama", self._request_id))

    def event(self, event: Event) -> bytes:
        match event:
            case TextDelta() if event.text or event.logprobs:
                return _line(_answer(self._parsed, event.text, logprobs=event.logprobs))
            case ReasoningDelta() if event.text:
                return _line(_answer(self._parsed, thinking=event.text))
            case ToolCall() | ToolCallCut():
                return _line(_answer(self._parsed, calls=[event]))
            case Finished():
                return _line(_answer(self._parsed, finished=event))
            case _:
                return b""


def _line(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value) + b"\n"


class OllamaCollector(ChoicesCollector):
    """`sse.Collector` of one answer."""

    def __init__(self, parsed: OllamaRequest):
        super().__init__(lambda choices, finished: _answer_of(parsed, choices[0], finished))


def _answer_of(parsed: OllamaRequest, events: list[Event], finished: Finished) -> Answer:
    return _answer(
        parsed,
        text_of(events),
        text_of(events, ReasoningDelta),
        [event for event in events if isinstance(event, ToolCall | ToolCallCut)],
        logprobs_of(events),
        finished,
    )


def unloaded(parsed: OllamaRequest) -> bytes:
    """Return the answer to a request that unloaded its model."""
    answer = _answer(parsed)
    answer.done, answer.done_reason = True, "unload"
    return _line(answer)
