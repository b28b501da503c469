"""What is said on the two pipes: requests in, lines out, one JSON object a line.

Each request carries an `id` that its sender chose. Every line out carries the id of the request that it
answers, or null where it answers none. A request is answered by any number of `progress`, `delta` and
`tool_call`, then by exactly one last line:

| op         | further fields                                   | last line      |
|------------|--------------------------------------------------|----------------|
| `load`     | `model`: folder, ORG/NAME or name                | `loaded`       |
| `generate` | those of POST /v1/completions: `prompt`, …       | `done`         |
| `chat`     | those of POST /v1/chat/completions: `messages`, … | `done`         |
| `classify` | `labels`, and `prompt` or `messages`             | `classified`   |
| `info`     |                                                  | `info`         |
| `metrics`  |                                                  | `metrics`      |
| `cancel`   | `target`: the id of another request              | `cancelled`    |
| `quit`     |                                                  | `bye`          |

or by an `error`. Unasked for come `ready`, first of all, and `bye`, last of all.

The engine's events, and errors, as lines.
"""

from __future__ import annotations

from typing import Annotated, Union

import msgspec
from msgspec import UNSET, UnsetType

from ... import chat
from ...api.body import decode
from ...api.openai.fields import ChatLogprob, chat_logprobs
from ...api.openai.scores import Labels, Score, Scores
from ...api.sse import UsageExtension, usage_extension
from ...chat import ErrorCode, FinishReason
from ...cli.owner_api import ColdStatus, ModelStatus
from ...errors import InvalidRequest, OmlxdError
from ...wire import ModelInfo

PROTOCOL = 1
"""Counts up when a program that speaks it would have to change."""

Id = Union[
    Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)],
    Annotated[str, msgspec.Meta(min_length=1, max_length=200)],
]


# --------------------------------------------------------------------------- in


class Request(msgspec.Struct, frozen=True, tag_field="op"):
    id: Id


class Load(Request, frozen=True, tag="load"):
    """`model` "": what `--model` says, else the demo model."""

    model: str = ""


class Generate(Request, frozen=True, tag="generate"):
    """The rest of the line is read by `api.openai_completions`."""


class Chat(Request, frozen=True, tag="chat"):
    """The rest of the line is read by `api.openai_chat`."""


class Classify(Request, frozen=True, tag="classify"):
    """The rest of the line is read as that of `chat` if it has `messages`, else as that of `generate`."""

    labels: Labels
    messages: msgspec.Raw | UnsetType = UNSET


class Info(Request, frozen=True, tag="info"): ...


class Metrics(Request, frozen=True, tag="metrics"): ...


class Cancel(Request, frozen=True, tag="cancel"):
    target: Id


class Quit(Request, frozen=True, tag="quit"): ...


AnyRequest = Union[Load, Generate, Chat, Classify, Info, Metrics, Cancel, Quit]
OPS = ("load", "generate", "chat", "classify", "info", "metrics", "cancel", "quit")


class _Named(msgspec.Struct):
    id: Id | None = None


_requests = msgspec.json.Decoder(AnyRequest)
_named = msgspec.json.Decoder(_Named)


def decode_request(line: bytes) -> AnyRequest:
    """Raises InvalidRequest, whatever the bytes are."""
    try:
        return decode(_requests, line)
    except InvalidRequest as error:
        if error.param == "op":
            raise InvalidRequest(f"op: it must be one of {', '.join(OPS)}", param="op") from None
        raise


def id_of(line: bytes) -> Id | None:
    """The id of a line that is no request; None if it has none."""
    try:
        return _named.decode(line).id
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


# --------------------------------------------------------------------------- out


class Line(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type"):
    id: Id | None


class Ready(Line, frozen=True, tag="ready"):
    version: str
    protocol: int


class Loaded(Line, frozen=True, tag="loaded"):
    model: ModelInfo


class Progress(Line, frozen=True, tag="progress"):
    """`prefilled` of `total` prompt tokens stand; the first one says what the cache had."""

    prefilled: int
    total: int


class Delta(Line, frozen=True, tag="delta"):
    """A piece of the answer, or of the thinking before it; token ids come in lines of their own."""

    text: str = ""
    reasoning: str = ""
    logprobs: list[ChatLogprob] = []
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []


class ToolCall(Line, frozen=True, tag="tool_call"):
    """`arguments`: JSON text of an object. `cut`: it was cut off; these are the complete ones."""

    call_id: str
    name: str
    arguments: str
    cut: bool = False


class Usage(UsageExtension, frozen=True, kw_only=True):
    """Tokens, and seconds. prompt_tokens = cached_hot + cached_cold + computed."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int


class Done(Line, frozen=True, tag="done"):
    """`reason`: as `chat.FinishReason`, or `cancelled`, which has no usage."""

    reason: FinishReason | str
    usage: Usage | None = None
    stop_sequence: str | None = None


class Classified(Line, frozen=True, tag="classified"):
    """`best`: the likeliest label. `scores`: in the order of the request's labels."""

    best: str
    scores: list[Score]
    usage: Usage


class InfoLine(Line, frozen=True, tag="info"):
    """`state`: the model's, as in `omlxd models list`, or `none`."""

    version: str
    state: str
    model: ModelInfo | None = None


class MetricsLine(Line, frozen=True, tag="metrics"):
    model: ModelStatus | None = None
    cold: ColdStatus | None = None


class Cancelled(Line, frozen=True, tag="cancelled", rename={"ended": "found"}):
    """`ended` false: there was nothing to cancel, it may have ended already."""

    ended: bool


class Failure(Line, frozen=True, tag="error"):
    """`param`: the field at fault. `retry_after`: seconds."""

    code: ErrorCode
    message: str
    param: str | None = None
    retry_after: int | None = None


class Bye(Line, frozen=True, tag="bye"):
    """All that was computed is stored."""


def line_of(id: Id, event: chat.Event) -> Line | None:
    """None for an event that says nothing here. Not for the last one."""
    match event:
        case chat.Progress():
            return Progress(id, event.done, event.total)
        case chat.TokenIds():
            return Delta(id, token_ids=list(event.ids), prompt_token_ids=list(event.prompt))
        case chat.ReasoningDelta():
            return Delta(id, reasoning=event.text)
        case chat.TextDelta():
            return Delta(id, event.text, logprobs=chat_logprobs(event.logprobs).content)
        case chat.ToolCall() | chat.ToolCallCut():
            cut = isinstance(event, chat.ToolCallCut)
            return ToolCall(id, event.id, event.name, event.valid_arguments, cut)
        case _:
            return None


def done(id: Id, finished: chat.Finished) -> Done:
    return Done(id, finished.reason, usage_of(finished.usage), finished.stop_sequence)


def classified(id: Id, result: Scores) -> Line:
    (of_prompt,) = result
    if isinstance(of_prompt, OmlxdError):
        return failure(id, of_prompt)
    best = max(of_prompt, key=lambda score: score.logprob)
    return Classified(id, best=best.label, scores=of_prompt, usage=usage_of(result.usage))


def usage_of(usage: chat.Usage) -> Usage:
    return Usage(
        **msgspec.structs.asdict(usage_extension(usage)),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )


def failure(id: Id | None, error: OmlxdError) -> Failure:
    """`api` speaks of a request's body, which is a line here."""
    message = error.message.replace("The request body", "The line", 1)
    return Failure(id, error.code, message, error.param, error.retry_after)
