"""`tool_choice` of OpenAI's two chat protocols, `allowed_tools` included, and custom tools.

All tools stay in the prompt, so that a cached prefix holds. A custom tool has one argument, a text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from ...chat import Tool
from ...errors import InvalidRequest, bad_field
from ..answer.answer_format import MAX_GRAMMAR_CHARS
from ..fields.body import RAW_INPUT as CUSTOM_INPUT
from ..fields.body import convert, stable_json

PARAM = "tool_choice"


class _Named(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    """A tool as a choice names it: nested in chat completions, not in Responses."""

    type: str
    name: str | None = None
    namespace: str | None = None
    function: _Named | None = None
    custom: _Named | None = None

    @property
    def called(self) -> str:
        nested = self.function or self.custom
        return (nested.name if nested else self.name) or ""


class _Allowed(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class _Choice(NamedTool):
    mode: Literal["auto", "required", None] = None
    tools: list[NamedTool] | None = None
    allowed_tools: _Allowed | None = None


Names = Callable[[NamedTool], "list[str] | None"]
"""Returns the model's names of the tools that a choice means, listed or not. None: no such tool."""


def tool_choice(value: Any, listed: set[str], names: Names) -> tuple[str, tuple[str, ...]]:
    """Return `tool_choice` and `allowed_tools` of a Conversation. `listed`: names of the tools in the prompt.

    A word may be an object's type, as Anthropic has it, whose words are taken too.
    """
    if isinstance(value, dict) and not value.keys() & {"tools", "allowed_tools"}:
        value = {**value, "type": "function"} if value.get("type") == "tool" else value
        value = value["type"] if value.get("type") in ("auto", "none", "required", "any") else value
    value = "required" if value == "any" else value
    if value is None or value in ("auto", "none"):
        return value or "auto", ()
    if value == "required":
        if not listed:
            raise _refused("there are no tools to choose from")
        return value, ()
    if isinstance(value, str):
        raise _refused(f"{value[:40]!r} is none of auto, none, required")
    choice = _parsed(value)
    if choice.type == "allowed_tools":
        allowed = choice.allowed_tools or choice
        return _allowed(allowed.mode or "auto", allowed.tools or [], listed, names)
    if choice.type not in ("function", "custom"):
        raise _refused(
            f"{choice.type[:40]!r} can't be enforced by this server; auto, none, required, allowed_tools and "
            "a function or custom tool of the request can"
        )
    name = _called(choice, names)[0]
    if name not in listed:
        raise _refused(f"{choice.called[:100]!r} is not among the tools that the model is told of at first")
    return f"named:{name}", ()


def _allowed(
    mode: str, tools: list[NamedTool], listed: set[str], names: Names
) -> tuple[str, tuple[str, ...]]:
    if not tools:
        raise _refused("allowed_tools names no tool; use none")
    result: dict[str, None] = {}
    for tool in tools:
        # Tools that run on OpenAI's side are left out of the prompt too.
        if tool.type in ("function", "custom", "namespace"):
            result.update(dict.fromkeys(_called(tool, names)))
    allowed = tuple(name for name in result if name in listed)
    if allowed:
        return mode, allowed
    if mode == "required":
        raise _refused("none of the allowed tools can be called here")
    return "none", ()


def _called(tool: NamedTool, names: Names) -> list[str]:
    result = names(tool)
    if not result:
        raise _refused(f"there is no tool {tool.called[:100]!r}")
    return result


def _parsed(value: Any) -> _Choice:
    try:
        return convert(value, _Choice)
    except msgspec.ValidationError as error:
        if not isinstance(value, dict):
            raise _refused(
                "this can't be enforced by this server; auto, none, required, allowed_tools and a "
                "function or custom tool of the request can"
            ) from None
        raise _refused(str(error).replace("`", "")) from None


def _refused(why: str) -> InvalidRequest:
    return bad_field(PARAM, f"{why}")


class _Format(msgspec.Struct):
    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: str = ""


def custom_tool(name: str, description: str, fields: dict[str, Any] | None, param: str) -> Tool:
    """Return a function with one text, `input`, that follows the format `fields`.

    fields  the format as Responses spells it: `type`, `syntax`, `definition`
    Raises InvalidRequest naming `param`, the field of the format.
    """
    try:
        format = convert(fields or {}, _Format)
    except msgspec.ValidationError as error:
        raise bad_field(param, f"{str(error).replace('`', '')}") from None
    if format.type == "grammar" and (
        not format.syntax or not 0 < len(format.definition) <= MAX_GRAMMAR_CHARS
    ):
        raise bad_field(
            param,
            "a grammar needs a syntax (lark or regex) and a definition of at most "
            f"{MAX_GRAMMAR_CHARS} characters",
        )
    if fields is not None and fields.get("type") not in (None, "text"):
        description = f"{description}\n\nFormat of the input: {stable_json(fields)}".strip()
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
    """Return the text of a custom tool's call, from the JSON of its arguments."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return arguments
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
