"""Custom tools of OpenAI's two chat protocols: a tool whose one argument is text, maybe of a grammar."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ..chat import Tool
from ..errors import InvalidRequest
from .answer_format import MAX_GRAMMAR_CHARS
from .body import RAW_INPUT as CUSTOM_INPUT
from .body import stable_json


class _Format(msgspec.Struct):
    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: str = ""


def custom_tool(name: str, description: str, given: dict[str, Any] | None, param: str) -> Tool:
    """A function with one text, `input`: the model is told of its format, and held to it.

    given  the format as Responses spells it: `type`, `syntax`, `definition`

    Raises InvalidRequest naming `param`, the field of the format.
    """
    try:
        format = msgspec.convert(given or {}, _Format)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{param}: {str(error).replace('`', '')}", param=param) from None
    if format.type == "grammar" and (
        not format.syntax or not 0 < len(format.definition) <= MAX_GRAMMAR_CHARS
    ):
        raise InvalidRequest(
            f"{param}: a grammar needs a syntax (lark or regex) and a definition of at most "
            f"{MAX_GRAMMAR_CHARS} characters",
            param=param,
        )
    if given is not None and given.get("type") not in (None, "text"):
        description = f"{description}\n\nFormat of the input: {stable_json(given)}".strip()
    text: dict[str, Any] = {"type": "string"}
    if format.syntax == "regex":
        text["pattern"] = f"^(?:{format.definition})$"
    schema = {
        "type": "object",
        "properties": {CUSTOM_INPUT: text},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    lark = format.definition if format.syntax == "lark" else ""
    return Tool(name, description, schema, strict=format.syntax == "regex", input_grammar=lark)


def custom_input(arguments: str) -> str:
    """The text that a custom tool's call gives, from the JSON of its arguments."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return arguments
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
