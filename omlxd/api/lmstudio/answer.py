"""LM Studio's `POST /api/v1/chat`: events into a stream or one answer.

A stream is `chat.start`, what is told of the prompt, the items of the output, and `chat.end`, which holds the
answer as it is without a stream; after an `error` too, as far as it came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Union

import msgspec
from msgspec import UNSET, UnsetType

from ... import chat
from ...errors import OmlxdError
from ..answer.sse import UsageExtension, named_event, usage_extension
from ..errors import openai_detail
from .request import ChatRequest

Keep = Callable[[str, tuple[chat.Message, ...]], None]
"""Called at the end: (response id, the conversation with this answer)."""


class Message(msgspec.Struct, tag_field="type", tag="message"):
    content: str


class Reasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    content: str


Item = Union[Message, Reasoning]


class Stats(msgspec.Struct):
    """Figures of an answer. `input_tokens` counts cached ones, too."""

    input_tokens: int
    total_output_tokens: int
    reasoning_output_tokens: int
    tokens_per_second: float
    time_to_first_token_seconds: float
    omlxd: UsageExtension


class ChatAnswer(msgspec.Struct):
    """The answer. `response_id`: absent where it is not stored."""

    model_instance_id: str
    output: list[Item]
    stats: Stats
    response_id: str | UnsetType = UNSET


class _Answer:
    """One answer under way."""

    def __init__(self, id: str, parsed: ChatRequest, keep: Keep):
        self._id, self._parsed, self._keep = id, parsed, keep
        self.output: list[Item] = []

    def add(self, event: chat.Event) -> tuple[Item | None, Item | None]:
        """Add `event`. Returns the item that it adds to, and the one that it ended, if any."""
        if not isinstance(event, chat.TextDelta | chat.ReasoningDelta) or not event.text:
            return None, None
        kind = Message if isinstance(event, chat.TextDelta) else Reasoning
        last = self.output[-1] if self.output else None
        if isinstance(last, kind):
            last.content += event.text
            return last, None
        self.output.append(kind(event.text))
        return self.output[-1], last

    def chat_answer(self, usage: chat.Usage, stored: bool) -> ChatAnswer:
        if stored:
            parts = tuple(
                chat.TextPart(item.content) if isinstance(item, Message) else chat.ThinkingPart(item.content)
                for item in self.output
            )
            turn = (chat.Message("assistant", parts),) if parts else ()
            self._keep(self._id, self._parsed.messages + turn)
        return ChatAnswer(self._parsed.model, self.output, _stats(usage), self._id if stored else UNSET)


def _stats(usage: chat.Usage) -> Stats:
    return Stats(
        input_tokens=usage.prompt_tokens,
        total_output_tokens=usage.completion_tokens,
        reasoning_output_tokens=usage.reasoning_tokens,
        tokens_per_second=usage.tokens_per_s,
        time_to_first_token_seconds=usage.ttft_s,
        omlxd=usage_extension(usage),
    )


def _sent(type: str, **fields: Any) -> bytes:
    return named_event(type.encode(), {"type": type, **fields})


class LMStudioStream:
    """`sse.StreamEncoder` of one chat."""

    def __init__(self, id: str, parsed: ChatRequest, keep: Keep):
        self._answer = _Answer(id, parsed, keep)
        self._parsed = parsed
        self._in_prompt = True

    def start(self) -> bytes:
        begun = _sent("chat.start", model_instance_id=self._parsed.model)
        return begun + _sent("prompt_processing.start")

    def ping(self) -> bytes:
        return b": ping\n\n"

    def event(self, event: chat.Event) -> bytes:
        if isinstance(event, chat.Progress):
            done = event.done / event.total if event.total else 1.0
            return _sent("prompt_processing.progress", progress=done) if self._in_prompt else b""
        if isinstance(event, chat.Finished):
            return self._end_prompt() + self._end(event.usage, self._parsed.store)
        item, ended = self._answer.add(event)
        if item is None or not isinstance(event, chat.TextDelta | chat.ReasoningDelta):
            return b""
        out, kind = self._end_prompt(), _kind(item)
        if ended is not None:
            out += _sent(f"{_kind(ended)}.end")
        if item.content == event.text:
            out += _sent(f"{kind}.start")
        return out + _sent(f"{kind}.delta", content=event.text)

    def error(self, error: OmlxdError) -> bytes:
        detail = openai_detail(error)
        told = {"type": _kind_of(error), "message": detail.message}
        told |= {name: value for name in ("code", "param") if (value := getattr(detail, name))}
        return _sent("error", error=told) + self._end(chat.Usage(), stored=False)

    def _end_prompt(self) -> bytes:
        ended, self._in_prompt = self._in_prompt, False
        return _sent("prompt_processing.end") if ended else b""

    def _end(self, usage: chat.Usage, stored: bool) -> bytes:
        output = self._answer.output
        out = _sent(f"{_kind(output[-1])}.end") if output else b""
        return out + _sent("chat.end", result=self._answer.chat_answer(usage, stored))


def _kind(item: Item) -> Literal["message", "reasoning"]:
    return "message" if isinstance(item, Message) else "reasoning"


def _kind_of(error: OmlxdError) -> str:
    if error.code in ("unavailable", "internal", "overloaded"):
        return "internal_error"
    return "model_not_found" if error.code == "not_found" and error.param == "model" else "invalid_request"


class LMStudioCollector:
    """`sse.Collector` of one chat."""

    def __init__(self, id: str, parsed: ChatRequest, keep: Keep):
        self._answer = _Answer(id, parsed, keep)
        self._parsed = parsed
        self._usage: chat.Usage | None = None

    def event(self, event: chat.Event) -> None:
        self._answer.add(event)
        if isinstance(event, chat.Finished):
            self._usage = event.usage

    def response(self) -> bytes:
        assert self._usage is not None, "response before Finished"
        return msgspec.json.encode(self._answer.chat_answer(self._usage, self._parsed.store))
