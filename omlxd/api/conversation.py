"""Makes every protocol's conversation: without transport noise, and with one spelling of each tool.

Noise changes from request to request and would break a prefix: Claude Code's billing line in a system
message, the order of keys in a tool's schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from .. import chat
from ..errors import NotFound, bad_field

History = Callable[[str], "tuple[chat.Message, ...] | None"]
"""Looks up response id → the conversation that it ended; None: unknown."""

_BILLING = re.compile(
    r"(?:(?:x-anthropic-billing-header:[^\n]*+|cch=[0-9a-fA-F]*+;[ \t\r]*+(?=\n|\Z))[\r\n]*+)*+"
)
"""Matches the billing line, whose suffix changes with every conversation and compaction."""

_SCHEMA_KEYS = (
    *("$schema", "$id", "title", "description", "type", "enum", "const", "format", "properties", "items"),
    *("anyOf", "oneOf", "allOf", "$ref", "required", "additionalProperties", "default", "$defs"),
)
"""Schema keys in most authors' order; others follow by the alphabet."""
_RANK = {key: rank for rank, key in enumerate(_SCHEMA_KEYS)}
_NAMED = frozenset({"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"})
"""Keywords whose objects hold schemas by names."""
_LITERAL = frozenset({"default", "const", "enum", "examples", "example"})


def earlier_turns(id: str | None, history: History, instead: str) -> tuple[chat.Message, ...]:
    """Return the conversation that `previous_response_id` names; none without one. Raises NotFound.

    instead  what to do without it, for the error's sentence
    """
    if id is None:
        return ()
    if (earlier := history(id)) is None:
        raise NotFound(
            f"previous_response_id: there is no response {id[:100]!r} here (any more); {instead}",
            param="previous_response_id",
        )
    return earlier


def conversation(
    messages: Iterable[chat.Message], tools: Iterable[chat.Tool], **fields: Any
) -> chat.Conversation:
    """Make a Conversation of `messages` and `tools`. `fields`: its others."""
    kept = tuple(message for message in map(_without_billing, messages) if message is not None)
    return chat.Conversation(
        messages=kept,
        tools=tuple(replace(tool, parameters=one_spelling(tool.parameters)) for tool in tools),
        **fields,
    )


def tool_result(call_id: str, parts: Sequence[chat.Part], is_error: bool = False) -> chat.ToolResultPart:
    """Make the result of a call from texts, images and documents; newlines join texts."""
    return chat.ToolResultPart(
        call_id,
        "\n".join(part.text for part in parts if isinstance(part, chat.TextPart)),
        is_error,
        tuple(part for part in parts if isinstance(part, chat.ImagePart)),
        tuple(part for part in parts if isinstance(part, chat.DocumentPart)),
    )


def begun_answer(
    prompt: chat.Conversation, format: chat.AnswerFormat | None, param: str
) -> chat.Conversation:
    """Make the last message the answer's beginning. Raises InvalidRequest naming `param`."""
    last = prompt.messages[-1] if prompt.messages else None
    if (
        last is None
        or last.role != "assistant"
        or not last.parts
        or not isinstance(last.parts[-1], chat.TextPart)
    ):
        raise bad_field(param, "only an assistant's text at the end of messages can be continued")
    if format is not None:
        raise bad_field(param, f"a begun answer can't be held to {format.param}")
    return replace(prompt, continue_final=True)


def _without_billing(message: chat.Message) -> chat.Message | None:
    """Return a message without its billing line; None if nothing else is left."""
    if message.role != "system":
        return message
    parts = []
    for part in message.parts:
        if isinstance(part, chat.TextPart) and (billing := _BILLING.match(part.text)) and billing.end():
            part = chat.TextPart(part.text[billing.end() :])
            if not part.text:
                continue
        parts.append(part)
    return replace(message, parts=tuple(parts)) if parts or not message.parts else None


def one_spelling(schema: dict[str, Any]) -> dict[str, Any]:
    """Return `schema` with its keys in one order; properties as `required` lists them, then by name."""
    ordered: dict[str, Any] = {}
    for key in sorted(schema, key=lambda key: (_RANK.get(key, len(_RANK)), key)):
        value = schema[key]
        if key in _NAMED and isinstance(value, dict):
            first = schema.get("required") if key == "properties" else None
            ordered[key] = {name: _spelled(value[name]) for name in _names(value, first)}
        else:
            ordered[key] = to_builtins(value, order="sorted") if key in _LITERAL else _spelled(value)
    return ordered


def _names(properties: dict[str, Any], required: Any) -> list[str]:
    first = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return [name for name in dict.fromkeys([*first, *sorted(properties)]) if name in properties]


def _spelled(value: Any) -> Any:
    if isinstance(value, list):
        return [_spelled(item) for item in value]
    return one_spelling(value) if isinstance(value, dict) else value
