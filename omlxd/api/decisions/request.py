"""Reads bodies of /v1/systemone and /v1/decisions.

| body                                    | of                                      | answered as  |
|-----------------------------------------|-----------------------------------------|--------------|
| /v1/systemone: `state`, named questions | TypeSafe; llama.cpp and Ollama have it  | `systemone`  |
| /v1/decisions: `input`, a list of them  | OpenAI                                  | `openai`     |
| /v1/decisions: `state`, named questions | mlx-vlm                                 | `mlx-vlm`    |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union

import msgspec
from msgspec.structs import replace

from ... import chat
from ...errors import InvalidRequest, bad_field
from ..conversation import conversation
from ..fields.body import ParsedRequest, convert, decode, image_url, json_text, refuse, unsupported
from ..openai.content import KINDS, Content, content_parts
from ..openai.scores import MOST_SCORES, MOST_TEXTS, SAMPLING
from ..responses.items import Item, messages_of
from ..responses.tools import ResponseTools
from . import questions
from .questions import Question

Shape = Literal["systemone", "openai", "mlx-vlm"]
_Free = Union[str, dict[str, Any], list[Any], None]
"""Text, or JSON that is read as text."""
_Body = TypeVar("_Body")
_SOME = "questions.*"
"""Some question of an object, in an error of `decode`."""
_Listing = tuple[Question, tuple[chat.Part, ...]]
"""A question, and what it shows beside its text."""


class NamedQuestion(msgspec.Struct, forbid_unknown_fields=True):
    """A question by its name. `bool` is `noul`.

    criteria  of a noul: `true` and `false`, or a text; of a choice: names and descriptions, or names;
              of a score: levels from the lowest
    """

    type: Literal["noul", "bool", "choice", "score"] = "choice"
    instructions: _Free = None
    criteria: _Free = None


class _Asked(msgspec.Struct, tag_field="type", kw_only=True, forbid_unknown_fields=True):
    instructions: Union[str, list[Content]]
    name: str | None = None


class Predicate(_Asked, tag="predicate"):
    pass


class _Choice(msgspec.Struct, forbid_unknown_fields=True):
    value: Union[str, bool]
    description: str | None = None


class Choice(_Asked, tag="choice", kw_only=True):
    choices: list[_Choice]


class _Level(msgspec.Struct, forbid_unknown_fields=True):
    label: str
    description: str | None = None


class Scale(_Asked, tag="score", kw_only=True):
    levels: list[_Level]


class SystemOneBody(msgspec.Struct):
    """A body of /v1/systemone. `images`: `data:` URLs, beside or in place of `state`."""

    questions: dict[str, NamedQuestion]
    state: _Free = None
    model: str | None = None
    images: list[str] | None = None
    audio: Any = None
    assets: Any = None
    stream: bool | None = None


class DecisionsBody(msgspec.Struct):
    """A body of /v1/decisions: `input` and a list of questions, or `state` and an object of them."""

    questions: Union[list[Union[Predicate, Choice, Scale]], dict[str, NamedQuestion]]
    input: Union[str, list[Item], None] = None
    state: _Free = None
    model: str | None = None
    images: list[str] | None = None
    audio: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    safety_identifier: str | None = None
    stream: bool | None = None


class _Questions(msgspec.Struct):
    questions: dict[str, Any]


_systemone, _decisions = msgspec.json.Decoder(SystemOneBody), msgspec.json.Decoder(DecisionsBody)
_questions = msgspec.json.Decoder(_Questions)


_SYSTEM = "You answer a question about what you are given, with one word."
"""Without it small models tell yes from no less often."""


class DecisionsRequest(ParsedRequest, frozen=True, kw_only=True):
    """A parsed body, with its questions, and as whose its answer is written."""

    questions: tuple[Question, ...]
    shape: Shape


def parse_systemone(body: bytes, headers: Mapping[str, str]) -> DecisionsRequest:
    """Read a body of /v1/systemone. Raises InvalidRequest."""
    asked = _decoded(_systemone, body)
    refuse({"assets": (asked.assets, "send images as data: URLs in `images`")})
    named = [_named(name, question) for name, question in asked.questions.items()]
    return _request(asked, _state(asked), [(question, ()) for question in named], "systemone")


def parse_decisions(body: bytes, headers: Mapping[str, str]) -> DecisionsRequest:
    """Read a body of /v1/decisions. Raises InvalidRequest."""
    asked = _decoded(_decisions, body)
    if isinstance(asked.questions, dict):
        if asked.input is not None:
            raise bad_field("questions", "with `input` they are a list; an object of them goes with `state`")
        named = [_named(name, question) for name, question in asked.questions.items()]
        return _request(asked, _state(asked), [(question, ()) for question in named], "mlx-vlm")
    if asked.state is not None or asked.images:
        raise bad_field(
            "questions", "with `state` they are an object by their names; a list goes with `input`"
        )
    if not asked.input:
        raise bad_field("input", "this field is required")
    if isinstance(asked.input, str):
        messages = (chat.Message("user", (chat.TextPart(asked.input),)),)
    else:
        messages = _messages(asked.input)
    listed = [_listed(question, f"questions.{at}") for at, question in enumerate(asked.questions)]
    return _request(asked, messages, listed, "openai")


def _decoded(decoder: msgspec.json.Decoder[_Body], body: bytes) -> _Body:
    """Decode `body`. Raises InvalidRequest, with the name of the question at fault."""
    try:
        return decode(decoder, body)
    except InvalidRequest as error:
        param = error.param or ""
        if not param.startswith(_SOME):
            raise
        why = error.message.removeprefix(f"{param}: ")
        for name, question in _questions.decode(body).questions.items():
            try:
                convert(question, NamedQuestion)
            except msgspec.ValidationError:
                raise bad_field(param.replace(_SOME, f"questions.{name[:80]}", 1), why) from None
        raise


def _messages(items: list[Item]) -> tuple[chat.Message, ...]:
    """Read an `input` of items. Nothing of it is left out: a decision on half of it looks like any other."""
    calls: set[str | None] = set()
    for at, item in enumerate(items):
        kind, param = item.type or "message", f"input.{at}"
        if kind.endswith("_output"):
            if item.call_id not in calls:
                raise bad_field(f"{param}.call_id", "no call before it has this id")
            if item.output is None:
                raise bad_field(f"{param}.output", "this field is required")
        elif kind.endswith("_call"):
            calls.add(item.call_id)
        elif kind not in ("message", "reasoning", "compaction"):
            raise bad_field(f"{param}.type", f"an item of type {kind!r} is not read here; leave it out")
        _check_kinds(item.content, f"{param}.content")
    return messages_of(items, ResponseTools())


def _check_kinds(content: str | list[Content] | None, param: str) -> None:
    for at, entry in enumerate(content if isinstance(content, list) else ()):
        if entry.type and entry.type not in KINDS:
            raise unsupported(entry.type, f"{param}.{at}.type")


def _request(
    asked: SystemOneBody | DecisionsBody,
    messages: tuple[chat.Message, ...],
    listed: Sequence[_Listing],
    shape: Shape,
) -> DecisionsRequest:
    """Ask each question behind `messages`."""
    refuse({"stream": (asked.stream, "decisions come at once; leave it out")})
    if not 0 < len(listed) <= MOST_TEXTS:
        raise bad_field("questions", f"1 to {MOST_TEXTS} questions are needed, not {len(listed)}")
    if sum(len(question.scored) for question, _ in listed) > MOST_SCORES:
        raise bad_field("questions", f"at most {MOST_SCORES} options are scored in a request; send several")
    prompts = [
        conversation(_asked_behind(messages, (*shown, chat.TextPart(question.text))), (), thinking=False)
        for question, shown in listed
    ]
    keys = range(len(listed)) if shape == "openai" else [question.name for question, _ in listed]
    return DecisionsRequest(
        asked.model or "",
        stream=False,
        generate=chat.GenerateRequest(prompts[0], sampling=SAMPLING),
        more_prompts=tuple(prompts[1:]),
        labels=tuple(question.scored for question, _ in listed),
        fields=tuple({"prompt": f"questions.{key}", "messages": f"questions.{key}"} for key in keys),
        questions=tuple(question for question, _ in listed),
        shape=shape,
    )


def _asked_behind(
    messages: tuple[chat.Message, ...], parts: tuple[chat.Part, ...]
) -> tuple[chat.Message, ...]:
    """Return `messages` with a question: in the last of them where that is the user's, too."""
    if all(message.role != "system" for message in messages):
        messages = (chat.Message("system", (chat.TextPart(_SYSTEM),)), *messages)
    *before, last = messages
    if last.role != "user":
        return (*messages, chat.Message("user", parts))
    return (*before, replace(last, parts=(*last.parts, *parts)))


# --------------------------------------------------------------------------- a state and named questions


def _state(asked: SystemOneBody | DecisionsBody) -> tuple[chat.Message, ...]:
    refuse({"audio": (asked.audio, "no model here hears; send its text as `state`")})
    parts: list[chat.Part] = [image_url(url, f"images.{at}") for at, url in enumerate(asked.images or [])]
    if text := _text(asked.state, "state"):
        parts.append(chat.TextPart(text + "\n\n"))
    if not parts:
        needed = "this field is required: a str, object or array"
        raise bad_field("state", needed if asked.state is None else "this field is empty")
    return (chat.Message("user", tuple(parts)),)


def _named(name: str, asked: NamedQuestion) -> Question:
    param = f"questions.{name}.criteria"
    criteria, text = asked.criteria, _text(asked.instructions, f"questions.{name}.instructions")
    if asked.type in ("noul", "bool"):
        if isinstance(criteria, list):
            raise bad_field(param, 'descriptions are needed, as {"true": "…", "false": "…"}')
        if not text and not criteria:
            raise bad_field(f"questions.{name}.instructions", "this field is required")
        if not isinstance(criteria, dict):
            return questions.noul(name, text, more=criteria or "")
        if more := criteria.keys() - {"true", "false"}:
            raise bad_field(f"{param}.{min(more)}", "only `true` and `false` are described")
        return questions.noul(name, text, *(_text(criteria.get(side), param) for side in ("true", "false")))
    if asked.type == "score":
        if not isinstance(criteria, list):
            raise bad_field(param, "a list of levels is needed, from the lowest")
        return questions.score(name, text, [(_text(level, param), "") for level in criteria], param)
    if isinstance(criteria, dict):
        options = [(label, _text(told, param)) for label, told in criteria.items()]
    elif isinstance(criteria, list) and all(isinstance(label, str) for label in criteria):
        options = [(label, "") for label in criteria]
    else:
        raise bad_field(param, 'options are needed, as {"name": "description", "other": null}')
    return questions.choice(name, text, options, param)


def _text(value: Any, param: str) -> str:
    """Return text as it is, and JSON as text."""
    if value is None or isinstance(value, str):
        return value or ""
    return json_text(value, param)


# --------------------------------------------------------------------------- a list of questions


def _listed(asked: Predicate | Choice | Scale, param: str) -> _Listing:
    """Return a question, and the parts of its instructions if they are more than text."""
    text, shown = asked.instructions, ()
    if not isinstance(text, str):
        _check_kinds(text, f"{param}.instructions")
        parts = content_parts(text, "user", f"{param}.instructions")
        text = "\n".join(part.text for part in parts if isinstance(part, chat.TextPart))
        shown = tuple(part for part in parts if not isinstance(part, chat.TextPart))
    if not text and not shown:
        raise bad_field(f"{param}.instructions", "this field is empty")
    if isinstance(asked, Predicate):
        return questions.noul(asked.name, f"Is this true? {text}"), shown
    if isinstance(asked, Scale):
        levels = [(level.label, level.description or "") for level in asked.levels]
        return questions.score(asked.name, text, levels, f"{param}.levels"), shown
    options = [(option.value, option.description or "") for option in asked.choices]
    return questions.choice(asked.name, text, options, f"{param}.choices"), shown
