"""Gemini's generateContent: events into chunks or one answer.

A function's call is sent whole. One that never became whole is left out: the finish reason says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ...chat import (
    ChoiceEvent,
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallCut,
    Usage,
)
from ...errors import OmlxdError
from ..answer.sse import UsageExtension, data_event, usage_extension
from ..errors import error_body
from ..openai.choices import ChoicesCollector, logprobs_of
from .body import Proto
from .request import GeminiRequest


class _Call(Proto):
    id: str
    name: str
    args: msgspec.Raw


class _Part(Proto):
    text: str | UnsetType = UNSET
    thought: bool | UnsetType = UNSET
    function_call: _Call | UnsetType = UNSET


class _Content(Proto):
    parts: list[_Part]
    role: str = "model"


class _Token(Proto):
    token: str
    log_probability: float


class _TopTokens(Proto):
    candidates: list[_Token]


class _Logprobs(Proto):
    top_candidates: list[_TopTokens]
    chosen_candidates: list[_Token]


class _Candidate(Proto):
    content: _Content
    finish_reason: str | UnsetType = UNSET
    index: int = 0
    avg_logprobs: float | UnsetType = UNSET
    logprobs_result: _Logprobs | UnsetType = UNSET


class _Usage(Proto):
    prompt_token_count: int
    candidates_token_count: int
    total_token_count: int
    cached_content_token_count: int | UnsetType = UNSET
    thoughts_token_count: int | UnsetType = UNSET
    omlxd: UsageExtension | UnsetType = UNSET


class GenerateContentAnswer(Proto):
    """An answer, or a chunk of one."""

    candidates: list[_Candidate]
    model_version: str
    response_id: str
    usage_metadata: _Usage | UnsetType = UNSET


class TokenCount(Proto):
    total_tokens: int


def _usage(usage: Usage) -> _Usage:
    return _Usage(
        prompt_token_count=usage.prompt_tokens,
        candidates_token_count=usage.completion_tokens - usage.reasoning_tokens,
        total_token_count=usage.prompt_tokens + usage.completion_tokens,
        cached_content_token_count=usage.cached_tokens or UNSET,
        thoughts_token_count=usage.reasoning_tokens or UNSET,
        omlxd=usage_extension(usage),
    )


def _part(event: Event, thoughts: bool) -> _Part | None:
    """Return a content's part for `event`, if any."""
    match event:
        case TextDelta() if event.text or event.logprobs:
            return _Part(text=event.text)
        case ReasoningDelta() if event.text and thoughts:
            return _Part(text=event.text, thought=True)
        case ToolCall():
            arguments = msgspec.Raw(event.valid_arguments.encode())
            return _Part(function_call=_Call(id=event.id, name=event.name, args=arguments))
        case _:
            return None


def _finish_reason(finished: Finished, broken: bool) -> str:
    if finished.reason == "length":
        return "MAX_TOKENS"
    return "MALFORMED_FUNCTION_CALL" if broken else "STOP"


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return the fields of a candidate; {}: not asked for."""
    if not tokens:
        return {}
    tops = [_TopTokens(candidates=[_token(*each) for each in token.top]) for token in tokens]
    chosen = [_token(token.token, token.logprob) for token in tokens]
    average = sum(token.logprob for token in tokens) / len(tokens)
    return {
        "avg_logprobs": average,
        "logprobs_result": _Logprobs(top_candidates=tops, chosen_candidates=chosen),
    }


def _token(text: str, logprob: float) -> _Token:
    return _Token(token=text, log_probability=logprob)


class GeminiStream:
    """`sse.StreamEncoder`: a chunk an event, of SSE, or of one JSON array without `alt=sse`."""

    def __init__(self, id: str, parsed: GeminiRequest, request_id: str, sse: bool = True):
        self._id = id
        self._parsed = parsed
        self._request_id = request_id
        self._sse = sse
        self._began = False
        self._broken = [False] * parsed.answers

    def start(self) -> bytes:
        return b""

    def ping(self) -> bytes:
        # No SSE comment: Google's SDK for JavaScript reads nothing but data. An array may hold blanks.
        return self._chunk([]) if self._sse else b"" if not self._began else b"\n"

    def error(self, error: OmlxdError) -> bytes:
        body = msgspec.json.encode(error_body(error, "gemini", self._request_id))
        if self._sse:
            # Bare, as Google sends it: its SDKs raise it, and take an event with an error for an empty chunk.
            return body + b"\n\n"
        return (b",\n" if self._began else b"[") + body + b"]"

    def event(self, event: Event) -> bytes:
        if isinstance(event, ChoiceEvent):
            return self._of_choice(event.event, event.index)
        if isinstance(event, Finished):
            last = self._of_choice(event, 0) if self._parsed.answers == 1 else self._chunk([], event)
            return last if self._sse else last + b"]"
        return self._of_choice(event, 0)

    def _of_choice(self, event: Event, index: int) -> bytes:
        if isinstance(event, ToolCallCut):
            self._broken[index] = True
            return b""
        if isinstance(event, Finished):
            content = _Content(parts=[_Part(text="")])
            reason = _finish_reason(event, self._broken[index])
            last = _Candidate(content=content, finish_reason=reason, index=index)
            return self._chunk([last], event if self._parsed.answers == 1 else None)
        part = _part(event, self._parsed.thoughts)
        if part is None:
            return b""
        logprobs = _logprobs(event.logprobs) if isinstance(event, TextDelta) else {}
        return self._chunk([_Candidate(content=_Content(parts=[part]), index=index, **logprobs)])

    def _chunk(self, candidates: list[_Candidate], finished: Finished | None = None) -> bytes:
        usage = _usage(finished.usage) if finished else UNSET
        chunk = GenerateContentAnswer(
            candidates=candidates,
            model_version=self._parsed.model,
            response_id=self._id,
            usage_metadata=usage,
        )
        before, self._began = (b",\n" if self._began else b"["), True
        return data_event(chunk) if self._sse else before + msgspec.json.encode(chunk)


class GeminiCollector(ChoicesCollector):
    """`sse.Collector` of one answer or several."""

    def __init__(self, id: str, parsed: GeminiRequest):
        def whole(choices: list[list[Event]], finished: Finished) -> GenerateContentAnswer:
            return GenerateContentAnswer(
                candidates=[_candidate(events, at, parsed.thoughts) for at, events in enumerate(choices)],
                model_version=parsed.model,
                response_id=id,
                usage_metadata=_usage(finished.usage),
            )

        super().__init__(whole, parsed.answers)


def _candidate(events: list[Event], index: int, thoughts: bool) -> _Candidate:
    finished = events[-1]
    assert isinstance(finished, Finished), "response before Finished"
    parts: list[_Part] = []
    for event in events:
        if (part := _part(event, thoughts)) is None or part.text == "":
            continue
        last = parts[-1] if parts else None
        if last and last.text is not UNSET and part.text is not UNSET and last.thought is part.thought:
            last.text += part.text
        else:
            parts.append(part)
    return _Candidate(
        content=_Content(parts=parts),
        finish_reason=_finish_reason(finished, any(isinstance(event, ToolCallCut) for event in events)),
        index=index,
        **_logprobs(logprobs_of(events)),
    )
