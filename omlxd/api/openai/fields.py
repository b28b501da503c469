"""Fields that OpenAI's two endpoints share: sampling in; usage and log-probabilities out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union

import msgspec
from msgspec import UNSET, UnsetType

from ... import chat
from ...errors import bad_field
from ..answer.answer_format import ResponseFormat, format_of, guided, only
from ..answer.local_fields import DialectFields, session_of
from ..answer.sse import UsageExtension, usage_extension
from ..answer.thinking import hides_thinking, thinking_fields
from ..fields.body import MAX_TOKENS, free_json, nucleus, refuse, session_header, stops
from ..fields.types import MAX_INT64, MinP, Penalty, RepetitionPenalty, Seed, Temperature, TopK, TopP

MAX_CHOICES = 8
MOST_STOP_TOKENS = 128
Limit = Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT64)]
"""Tokens of an answer at most. -1, as LM Studio's and llama.cpp's users write it, is no limit."""
Verbosity = Literal["low", "medium", "high"]
"""The length of an answer, passed to chat templates as `verbosity`; most ignore it."""
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


NOT_SERVED = {
    "use_beam_search": "beams are not supported; leave it out",
    "bad_words": "no word is forbidden here; give its tokens a logit_bias of -100",
    "allowed_token_ids": "tokens can't be chosen here; send guided_choice or guided_regex",
    "logits_processors": "a request brings no code; leave it out",
    "prompt_logprobs": "log-probabilities of the prompt are not supported; leave it out",
    "return_tokens_as_token_ids": "tokens are told as text; return_token_ids tells ids beside it",
    "truncate_prompt_tokens": "a prompt is never cut; send what is to be read",
    "chat_template": "the model's own template is used; send a whole prompt to /v1/completions",
    "mirostat": "this sampler is not there; use temperature, top_p and min_p",
    "dry_multiplier": "this sampler is not there; use repetition_penalty",
    "xtc_probability": "this sampler is not there; use temperature, top_p and min_p",
    "typical_p": "this sampler is not there; use top_p or min_p",
}
"""Fields of vLLM and llama.cpp that would change the answer → why they are refused."""
_ASKS_NOTHING = {"truncate_prompt_tokens": -1, "typical_p": 1}


class NotServed(DialectFields, kw_only=True):
    """Refused fields, of any type: `null`, 0, false and what is empty ask for nothing."""

    use_beam_search: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    logits_processors: Any = None
    prompt_logprobs: Any = None
    return_tokens_as_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    chat_template: Any = None
    mirostat: Any = None
    dry_multiplier: Any = None
    xtc_probability: Any = None
    typical_p: Any = None


class CommonBody(NotServed, kw_only=True):
    """Fields that both bodies have; also vLLM's top_k, min_p, …, mlx-lm's repetition_context_size,
    and llama.cpp's json_schema and grammar."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Limit | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    repetition_context_size: _TokenId | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[_TokenId, _Bias] | None = None
    seed: Seed | None = None
    stop: Union[str, list[str], None] = None
    stop_token_ids: Annotated[list[_TokenId], msgspec.Meta(max_length=MOST_STOP_TOKENS)] | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_INT64)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = None
    grammar: Any = None
    user: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    return_token_ids: bool | None = None
    best_of: int | None = None


class ChatFields(CommonBody, kw_only=True):
    """Further fields of conversations' bodies."""

    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None


def template_fields(body: ChatFields, verbosity: Verbosity | None) -> dict[str, Any]:
    """Return what a Conversation says of thinking, and its `template_args`."""
    fields = thinking_fields(body)
    args = fields["template_args"]
    if verbosity:
        args.setdefault("verbosity", verbosity)
    if body.documents:
        args.setdefault("documents", free_json({"documents": body.documents}, "documents")["documents"])
    return fields


def parsed_fields(body: CommonBody) -> dict[str, Any]:
    """Return fields of a `ParsedRequest`. Raises InvalidRequest for answers that aren't made here."""
    refuse(
        {
            "best_of": (body.best_of not in (None, body.n or 1), "it can only be as many as n"),
            **{name: (_asks(body, name), why) for name, why in NOT_SERVED.items()},
        }
    )
    return {
        "model": body.model or "",
        "stream": bool(body.stream),
        "include_usage": bool(body.stream_options and body.stream_options.include_usage),
        "n": body.n or 1,
    }


def _asks(body: NotServed, name: str) -> bool:
    value = getattr(body, name)
    return bool(value) and value != _ASKS_NOTHING.get(name)


def generate_request(
    body: CommonBody,
    prompt: chat.Conversation | chat.RawPrompt,
    max_tokens: int | None,
    logprobs: int | None,
    session: str,
    format: chat.AnswerFormat | None,
    usual_max_tokens: int | None = None,
) -> chat.GenerateRequest:
    """Make a GenerateRequest. Raises InvalidRequest for stop strings that are too many or too long."""
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad_field("min_tokens", f"it is above the most tokens of the answer, {max_tokens}")
    sampling = chat.Sampling(
        temperature=body.temperature,
        **nucleus(body.top_p, body.top_k),
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        repetition_context_size=body.repetition_context_size,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=body.logit_bias or {},
        seed=body.seed,
        max_tokens=None if max_tokens is None else min(max_tokens, MAX_TOKENS),
        usual_max_tokens=usual_max_tokens,
        stop=stops(body.stop, "stop"),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        min_tokens=min(min_tokens, MAX_TOKENS),
        ignore_eos=bool(body.ignore_eos),
        shows_special=body.skip_special_tokens is False,
        shows_stop=bool(body.include_stop_str_in_output),
        logprobs=logprobs,
    )
    return chat.GenerateRequest(
        prompt=prompt,
        sampling=sampling,
        session=session,
        cache_salt=body.cache_salt or "",
        format=format,
        return_token_ids=bool(body.return_token_ids),
        hides_thinking=hides_thinking(body),
    )


def limit_of(limit: int | None, param: str) -> int | None:
    """Return a limit; None: no limit. Raises InvalidRequest for 0."""
    if limit == 0:
        raise bad_field(param, "Expected int >= 1, or -1 for no limit")
    return None if limit == -1 else limit


NO_MODERATION = "nothing is moderated here; leave it out"


def answer_format(body: CommonBody, *further: chat.AnswerFormat | None) -> chat.AnswerFormat | None:
    """Return the answer's format. Raises InvalidRequest for two formats, or an impossible one."""
    refuse({"grammar": (body.grammar, "GBNF can't be enforced here; send guided_grammar, in Lark's syntax")})
    schema = None if body.json_schema is None else ResponseFormat("json_schema", schema=body.json_schema)
    return only(
        format_of(body.response_format, "response_format"),
        format_of(schema, "json_schema"),
        guided(body),
        *further,
    )


_SESSION_HEADERS = ("x-session-affinity", "session-id", "session_id", "x-session-id", "conversation_id")


def session(body: CommonBody, headers: Mapping[str, str]) -> str:
    """Return the first of: a header, `prompt_cache_key`, a field of some dialect, `user`."""
    for name in _SESSION_HEADERS:
        if named := session_header(headers, name):
            return named
    return (body.prompt_cache_key or "")[:200] or session_of(body) or (body.user or "")[:200]


# --------------------------------------------------------------------------- answers


FINISH_REASON: dict[chat.FinishReason, str] = {
    "stop": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
}


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    """Details of usage; `…_prediction_tokens`: draft tokens from `prediction`, accepted and rejected. OpenAI
    counts failed ones as tokens of the completion; omlxd does not.
    """

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageBody(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    omlxd: UsageExtension


def usage_body(usage: chat.Usage) -> UsageBody:
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptDetails(usage.cached_tokens),
        completion_tokens_details=CompletionDetails(
            usage.reasoning_tokens, usage.predicted_accepted, usage.predicted - usage.predicted_accepted
        ),
        omlxd=usage_extension(usage),
    )


class Timings(msgspec.Struct):
    """Figures of llama.cpp. `_n`: tokens, of the prompt the computed ones; `_ms`: milliseconds. Rates of
    `predicted` are without the first token, which the prompt's pass gives.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


def timings_of(usage: chat.Usage) -> Timings | UnsetType:
    """Return the timings; UNSET without any."""
    computed, answered = usage.computed_tokens, usage.completion_tokens
    prefill_s, decode_s = usage.prefill_s, usage.decode_s
    if not prefill_s or not decode_s:
        return UNSET
    return Timings(
        *(usage.cached_tokens, computed, 1e3 * prefill_s, 1e3 * prefill_s / max(1, computed)),
        *(computed / prefill_s, answered, 1e3 * decode_s, 1e3 * decode_s / max(1, answered - 1)),
        usage.tokens_per_s,
    )


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


def top_logprobs(token: chat.TokenLogprob) -> list[TopLogprob]:
    raws = token.top_raw or (b"",) * len(token.top)
    return [
        TopLogprob(text, value, list(raw or text.encode()))
        for (text, value), raw in zip(token.top, raws, strict=True)
    ]


def chat_logprobs(tokens: tuple[chat.TokenLogprob, ...]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatLogprob(
                token=token.token,
                logprob=token.logprob,
                bytes=list(token.raw or token.token.encode()),
                top_logprobs=top_logprobs(token),
            )
            for token in tokens
        ]
    )
