"""Reads OpenAI's legacy completions into a `GenerateRequest`, and writes events as chunks or a completion.

The prompt, text or token ids, goes to the model without a template. Choices come in the order of prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ... import chat
from ...errors import OmlxdError, bad_field
from ..answer.thinking import thinking_fields
from ..errors import OpenAIDetail, openai_detail
from ..fields.body import MAX_TOKENS, ParsedRequest, decode
from ..fields.lenient import as_integer
from ..fields.types import TopLogprobs
from .choices import ChoicesCollector, ChoicesStream, ids_of, logprobs_of, text_of
from .fields import (
    FINISH_REASON,
    CommonBody,
    Timings,
    UsageBody,
    answer_format,
    generate_request,
    limit_of,
    parsed_fields,
    session,
    timings_of,
    usage_body,
)

DEFAULT_MAX_TOKENS = 16
"""Default of OpenAI's documentation; a setting of the model goes before it."""
MAX_ANSWERS = 128
"""Answers of one request at most: prompts times `n`. A few run at a time."""


class CompletionsBody(CommonBody, kw_only=True):
    prompt: Any
    echo: bool | None = None
    suffix: str | None = None
    logprobs: TopLogprobs | None = None


_decoder = msgspec.json.Decoder(CompletionsBody)


def parse(body: bytes, headers: Mapping[str, str] | None = None) -> ParsedRequest:
    """Read a body of /v1/completions. Raises InvalidRequest."""
    return parsed_completion(decode(_decoder, body), headers or {})


def parsed_completion(request: CompletionsBody, headers: Mapping[str, str]) -> ParsedRequest:
    """Parse a decoded body. Raises InvalidRequest."""
    if request.suffix:
        raise bad_field("suffix", "inserting text is not supported")
    if request.echo and request.logprobs is not None:
        raise bad_field("logprobs", "log-probabilities of the prompt are not supported")
    max_tokens = request.max_tokens and limit_of(request.max_tokens, "max_tokens")  # 0: the prompt alone.
    usual = DEFAULT_MAX_TOKENS if request.max_tokens is None else None
    thinking_fields(request)  # A raw prompt has no place for them, but wrong ones are told.
    prompt, *more = _prompts(request.prompt, bool(request.echo), request.n or 1)
    return ParsedRequest(
        **parsed_fields(request),
        generate=generate_request(
            request,
            prompt,
            max_tokens,
            request.logprobs,
            session(request, headers),
            answer_format(request),
            usual_max_tokens=usual,
        ),
        more_prompts=tuple(more),
    )


def _prompts(value: Any, echo: bool, n: int) -> list[chat.RawPrompt]:
    """Return the prompts of a text, a list of token ids, or a list of either."""
    several = isinstance(value, list) and value and all(isinstance(one, (str, list)) for one in value)
    prompts = value if several else [value]
    if len(prompts) * n > MAX_ANSWERS:
        raise bad_field(
            "prompt",
            f"{len(prompts)} prompts with {n} answers each are more than {MAX_ANSWERS} answers; send "
            "them in several requests",
        )
    if prompts == [""] or prompts == [[]]:
        raise bad_field("prompt", "it must not be empty")
    # Of several, the engine refuses an empty one: the others are answered.
    return [_prompt(one, echo) for one in prompts]


def _prompt(value: Any, echo: bool) -> chat.RawPrompt:
    if isinstance(value, str):
        return chat.RawPrompt(text=value, echo=echo)
    if isinstance(value, list) and all(map(_is_token, value := [as_integer(one) for one in value])):
        return chat.RawPrompt(tokens=tuple(value), echo=echo)
    raise bad_field("prompt", "a text or a list of token ids is needed, or a list of several of either")


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKENS


# --------------------------------------------------------------------------- answers


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def _logprobs(tokens: tuple[chat.TokenLogprob, ...]) -> _Logprobs | None:
    if not tokens:
        return None
    out = _Logprobs([], [], [], [])
    for token in tokens:
        out.tokens.append(token.token)
        out.token_logprobs.append(token.logprob)
        out.top_logprobs.append(dict(token.top))
        out.text_offset.append(token.at)
    return out


class _Choice(msgspec.Struct):
    text: str
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    index: int = 0
    error: OpenAIDetail | UnsetType = UNSET
    """Error of a choice, with `finish_reason` "error", whose prompt fails while others are answered."""
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


def _failed(failed: chat.Failed, index: int) -> _Choice:
    detail = openai_detail(OmlxdError.from_event(failed), "completions")
    return _Choice("", finish_reason="error", index=index, error=detail)


class Completion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[_Choice]
    usage: UsageBody | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"
    timings: Timings | UnsetType = UNSET


class OpenAICompletionStream(ChoicesStream):
    """`sse.StreamEncoder` of one completion. `created`: Unix seconds."""

    _chunk_type = Completion
    _protocol = "completions"

    def start(self) -> bytes:
        return b"".join(self._chunk(_Choice("", index=index)) for index in range(self._n))

    def ping(self) -> bytes:
        return self._chunk(_Choice(""))

    def _of_choice(self, event: chat.Event, index: int) -> bytes:
        if isinstance(event, chat.TextDelta):
            if not event.text and not event.logprobs:
                return b""
            return self._chunk(_Choice(event.text, _logprobs(event.logprobs), index=index))
        if isinstance(event, chat.ReasoningDelta):
            return self._chunk(_Choice(event.text, index=index)) if event.text else b""
        if isinstance(event, chat.Finished):
            return self._chunk(_Choice("", finish_reason=FINISH_REASON[event.reason], index=index))
        if isinstance(event, chat.Failed):
            return self._chunk(_failed(event, index))
        return b""

    def _chunk(self, choice: _Choice) -> bytes:
        for name, ids in self._take_ids(choice.index).items():
            setattr(choice, name, ids)
        return self._chunk_of([choice], self._usage)


def _choice(events: list[chat.Event], index: int) -> _Choice:
    last = events[-1]
    if isinstance(last, chat.Failed):
        return _failed(last, index)
    assert isinstance(last, chat.Finished), "response before Finished"
    return _Choice(
        text=text_of(events, chat.TextDelta, chat.ReasoningDelta),
        logprobs=_logprobs(logprobs_of(events)),
        finish_reason=FINISH_REASON[last.reason],
        index=index,
        **ids_of(events),
    )


class OpenAICompletionCollector(ChoicesCollector):
    """`sse.Collector` of one completion. `created`: Unix seconds."""

    def __init__(self, id: str, model: str, created: int, n: int = 1):
        def body(choices: list[list[chat.Event]], finished: chat.Finished) -> Completion:
            rows = [_choice(events, index) for index, events in enumerate(choices)]
            usage = usage_body(finished.usage)
            return Completion(id, created, model, rows, usage, timings=timings_of(finished.usage))

        super().__init__(body, n)
