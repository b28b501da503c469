"""Messages on the two pipes: requests in, lines out, one JSON object a line.

Each request carries an `id` that its sender chose. Every line out carries the id of the request that it
answers, or null where it answers none. A request is answered by any number of `progress`, `delta` and
`tool_call`, then by exactly one last line:

| op         | further fields                                   | last line      |
|------------|--------------------------------------------------|----------------|
| `load`     | `model` (or `path`): folder, ORG/NAME or name    | `loaded`       |
| `generate` | those of POST /v1/completions: `prompt`, …       | `done`         |
| `chat`     | those of POST /v1/chat/completions: `messages`, … | `done`         |
| `classify` | `labels`, and `prompt` or `messages`             | `classified`   |
| `inspect`  | `prompt` or `messages`, `values`, `query`        | `inspected`    |
| `info`     |                                                  | `info`         |
| `metrics`  |                                                  | `metrics`      |
| `cancel`   | `target`: the id of another request              | `cancelled`    |
| `quit`     |                                                  | `bye`          |

or by an `error`. The last line's `ignored` names the fields of the request that nobody reads; of `load` such
a field is an error. Unasked for come `ready`, first of all, and `bye`, last of all. api/README.md has the
fields of each line out.
"""

from __future__ import annotations

from typing import Annotated, Any, Union

import msgspec

from ... import chat
from ...api.answer.sse import usage_extension
from ...api.fields.body import NO_SUCH_FIELD, decode
from ...api.fields.types import TopLogprobs
from ...api.openai.choices import ids_of
from ...api.openai.fields import chat_logprobs
from ...api.openai.scores import Labels, Scores
from ...errors import InvalidRequest, OmlxdError

PROTOCOL = 1
"""Version of the protocol, which counts up with each incompatible change."""

Id = Union[
    Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)],
    Annotated[str, msgspec.Meta(min_length=1, max_length=200)],
]


# --------------------------------------------------------------------------- in


class Request(msgspec.Struct, frozen=True, tag_field="op"):
    id: Id


class Load(Request, frozen=True, tag="load", forbid_unknown_fields=True):
    """Loads a model; None or "": that of `--model`, else the demo model. `path` is a name of `model`."""

    model: str | None = None
    path: str | None = None

    @property
    def wanted(self) -> str:
        """The model to load. Raises InvalidRequest where the two fields differ."""
        if self.model and self.path and self.model != self.path:
            raise InvalidRequest("path: it is another name of `model`; leave one of them out", param="path")
        return self.model or self.path or ""


class Generate(Request, frozen=True, tag="generate"):
    """Generates from a prompt; `api.openai_completions` reads the other fields."""


class Chat(Request, frozen=True, tag="chat"):
    """Answers a conversation; `api.openai_chat` reads the other fields."""


class Classify(Request, frozen=True, tag="classify"):
    """Scores labels; the other fields are those of `chat` with `messages`, else those of `generate`."""

    labels: Labels
    messages: list[msgspec.Raw] | None = None
    logits: bool = False
    top_logprobs: TopLogprobs = 0


class Inspect(Request, frozen=True, tag="inspect"):
    """Inspects a prompt; `front.owner.inspect` reads the other fields."""


class Info(Request, frozen=True, tag="info"): ...


class Metrics(Request, frozen=True, tag="metrics"): ...


class Cancel(Request, frozen=True, tag="cancel"):
    target: Id


class Quit(Request, frozen=True, tag="quit"): ...


AnyRequest = Union[Load, Generate, Chat, Classify, Inspect, Info, Metrics, Cancel, Quit]
OPS = ("load", "generate", "chat", "classify", "inspect", "info", "metrics", "cancel", "quit")


class _Named(msgspec.Struct):
    id: Id | None = None


_requests = msgspec.json.Decoder(AnyRequest)
_named = msgspec.json.Decoder(_Named)


def decode_request(line: bytes) -> AnyRequest:
    """Decode a line. Raises InvalidRequest, and nothing else, for any bytes."""
    try:
        return decode(_requests, line)
    except InvalidRequest as error:
        if error.param == "op":
            raise InvalidRequest(f"op: it must be one of {', '.join(OPS)}", param="op") from None
        if error.message.endswith(NO_SUCH_FIELD):
            raise InvalidRequest(f"{error.message}; `load` has model, or path", param=error.param) from None
        raise


def id_of(line: bytes) -> Id | None:
    """Return the id of a line that is no request; None if it has none."""
    try:
        return _named.decode(line).id
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


# --------------------------------------------------------------------------- out


Line = dict[str, Any]


def line_out(id: Id | None, type: str, **fields: Any) -> Line:
    """Format a line out. A field of None, or an empty text or list, is left out."""
    return {"type": type, "id": id, **{name: value for name, value in fields.items() if value not in _NONE}}


_NONE: tuple[Any, ...] = (None, "", [])


def line_of(id: Id, event: chat.Event) -> Line | None:
    """Write an event as a line; None for an event without one. Not for the last event."""
    match event:
        case chat.Progress():
            return line_out(id, "progress", prefilled=event.done, total=event.total)
        case chat.ReasoningDelta():
            return line_out(id, "delta", reasoning=event.text)
        case chat.TextDelta():
            return line_out(id, "delta", text=event.text, logprobs=chat_logprobs(event.logprobs).content)
        case chat.ToolCall() | chat.ToolCallCut():
            cut = True if isinstance(event, chat.ToolCallCut) else None
            fields = {"call_id": event.id, "name": event.name, "arguments": event.valid_arguments}
            return line_out(id, "tool_call", **fields, cut=cut)
        case _:
            return None


class Lines:
    """The lines of one answer. Ids of tokens go with the text that they make, as over HTTP."""

    def __init__(self, id: Id):
        self._id = id
        self._ids: list[chat.Event] = []

    def of(self, event: chat.Event) -> Line | None:
        """Write an event as a line; None for an event without one, or one that waits."""
        if isinstance(event, chat.TokenIds):
            self._ids.append(event)
            return None
        if isinstance(event, chat.Restarted):
            self._ids = []
        line = _done(self._id, event) if isinstance(event, chat.Finished) else line_of(self._id, event)
        if line is None or isinstance(event, chat.Progress):
            return line
        ids, self._ids = ids_of(self._ids), []
        return line | ids


def _done(id: Id, finished: chat.Finished) -> Line:
    usage, stop = usage_of(finished.usage), finished.stop_sequence
    return line_out(id, "done", reason=finished.reason, usage=usage, stop_sequence=stop)


def classified(request: Classify, result: Scores) -> Line:
    (of_prompt,) = result
    if isinstance(of_prompt, OmlxdError):
        return failure(request.id, of_prompt)
    best = max(of_prompt, key=lambda score: score.logprob)
    scores = [msgspec.to_builtins(score) for score in of_prompt]
    if not request.logits:
        scores = [{name: value for name, value in score.items() if name != "logit"} for score in scores]
    top = result.top(0) if request.top_logprobs else []
    fields = {"scores": scores, "top_logprobs": top, "usage": usage_of(result.usage)}
    return line_out(request.id, "classified", best=best.label, **fields)


def usage_of(usage: chat.Usage) -> dict[str, Any]:
    """Return tokens and seconds. prompt_tokens = cached_hot + cached_cold + computed."""
    return {
        **msgspec.to_builtins(usage_extension(usage)),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
    }


def failure(id: Id | None, error: OmlxdError) -> Line:
    """Turn an error of `api`, which speaks of a request's body, into one about a line."""
    message = error.message.replace("The request body", "The line", 1)
    wait = error.retry_after
    return line_out(id, "error", code=error.code, message=message, param=error.param, retry_after=wait)
