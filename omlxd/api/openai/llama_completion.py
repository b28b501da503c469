"""llama.cpp's own `POST /completion`: a prompt without a template, in llama.cpp's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ... import chat
from ...errors import OmlxdError, bad_field
from ..answer.sse import UsageExtension, data_event, usage_extension
from ..errors import error_body
from ..fields.body import MAX_TOKENS, ParsedRequest, decode
from ..fields.types import MAX_INT64, RepetitionPenalty
from .choices import ChoicesCollector, ids_of, text_of
from .completions import CompletionsBody, parsed_completion
from .fields import Limit, Timings, timings_of


class LlamaBody(CompletionsBody, kw_only=True):
    """A body. `n_predict`, `repeat_penalty` and `repeat_last_n` rename fields of /v1/completions; a negative
    `seed` is none. Options about slots and caching are ignored.
    """

    n_predict: Limit | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: Annotated[int, msgspec.Meta(ge=-1, le=MAX_TOKENS)] | None = None
    n_probs: Annotated[int, msgspec.Meta(ge=0, le=MAX_INT64)] | None = None
    return_tokens: bool | None = None
    cache_prompt: Any = None
    id_slot: Any = None
    n_keep: Any = None
    samplers: Any = None
    timings_per_token: Any = None


_decoder = msgspec.json.Decoder(LlamaBody)


def parse(body: bytes, headers: Mapping[str, str] | None = None) -> ParsedRequest:
    """Read a body of /completion. Raises InvalidRequest."""
    request = decode(_decoder, body)
    if request.n_probs:
        raise bad_field("n_probs", "/v1/completions gives log-probabilities; send logprobs there")
    if request.max_tokens is None:
        # Without one an answer goes on until the model ends it.
        request.max_tokens = -1 if request.n_predict is None else request.n_predict
    if request.repetition_penalty is None:
        request.repetition_penalty = request.repeat_penalty
    if request.repetition_context_size is None and request.repeat_last_n is not None:
        request.repetition_context_size = max(0, request.repeat_last_n)
        if not request.repeat_last_n:  # Its 0 is no penalty.
            request.repetition_penalty = None
    request.seed = None if request.seed is not None and request.seed < 0 else request.seed
    request.return_token_ids = request.return_tokens
    parsed = parsed_completion(request, headers or {})
    if parsed.answers > 1:
        raise bad_field("prompt", "one prompt is answered here, once; /v1/completions takes several")
    return parsed


class LlamaCompletion(msgspec.Struct):
    """An answer, or a chunk of one: all but its last hold `content` alone."""

    content: str
    stop: bool
    tokens: list[int] = []
    index: int = 0
    id_slot: int = 0
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    model: str | UnsetType = UNSET
    stop_type: Literal["eos", "word", "limit"] | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    omlxd: UsageExtension | UnsetType = UNSET


def _last(
    finished: chat.Finished, model: str, content: str = "", tokens: list[int] | None = None
) -> LlamaCompletion:
    word, usage = finished.stop_sequence or "", finished.usage
    return LlamaCompletion(
        content,
        stop=True,
        tokens=tokens or [],
        tokens_predicted=usage.completion_tokens,
        tokens_evaluated=usage.prompt_tokens,
        tokens_cached=usage.cached_tokens,
        model=model,
        stop_type="limit" if finished.reason == "length" else "word" if word else "eos",
        stopping_word=word,
        truncated=False,
        timings=timings_of(usage),
        omlxd=usage_extension(usage),
    )


class LlamaStream:
    """`sse.StreamEncoder` of one completion."""

    def __init__(self, parsed: ParsedRequest, request_id: str):
        self._model = parsed.model
        self._request_id = request_id
        self._ids: list[int] = []

    def start(self) -> bytes:
        return b""

    def ping(self) -> bytes:
        return data_event(LlamaCompletion("", stop=False))

    def error(self, error: OmlxdError) -> bytes:
        return data_event(error_body(error, "completions", self._request_id))

    def event(self, event: chat.Event) -> bytes:
        match event:
            case chat.TokenIds():
                self._ids += event.ids
                return b""
            case chat.TextDelta() | chat.ReasoningDelta() if event.text:
                ids, self._ids = self._ids, []
                return data_event(LlamaCompletion(event.text, stop=False, tokens=ids))
            case chat.Finished():
                return data_event(_last(event, self._model, tokens=self._ids))
            case _:
                return b""


class LlamaCollector(ChoicesCollector):
    """`sse.Collector` of one completion."""

    def __init__(self, parsed: ParsedRequest):
        def whole(choices: list[list[chat.Event]], finished: chat.Finished) -> LlamaCompletion:
            text = text_of(choices[0], chat.TextDelta, chat.ReasoningDelta)
            return _last(finished, parsed.model, text, ids_of(choices[0]).get("token_ids"))

        super().__init__(whole)
