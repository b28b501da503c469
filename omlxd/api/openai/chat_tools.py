"""The tools of a chat completion: what the model sees, and how its calls are told.

| given                        | the model sees                    | its call comes back as              |
|------------------------------|-----------------------------------|-------------------------------------|
| `tools`, type `function`     | a function                        | `tool_calls`, type `function`       |
| `tools`, type `custom`       | a function with one text, `input` | `tool_calls`, type `custom`         |
| `functions` (obsolete)       | functions                         | `function_call`, one at most        |
"""

from __future__ import annotations

from typing import Annotated, Any, Union

import msgspec

from ...chat import Struct, Tool
from ...errors import bad_field
from ..body import free_json
from .tool_choice import custom_tool, tool_choice

_Name = Annotated[str, msgspec.Meta(min_length=1)]


class Function(msgspec.Struct):
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _FunctionTool(msgspec.Struct, tag_field="type", tag="function"):
    function: Function


class _Custom(msgspec.Struct):
    name: _Name
    description: str | None = None
    format: dict[str, Any] | None = None


class _CustomTool(msgspec.Struct, tag_field="type", tag="custom"):
    custom: _Custom


ChatTool = Union[_FunctionTool, _CustomTool]


class CallShape(Struct, frozen=True):
    """How the client gets calls.

    custom    names of custom tools
    obsolete  the request has `functions`: a call is the message's `function_call`
    """

    custom: frozenset[str] = frozenset()
    obsolete: bool = False


FUNCTIONS = CallShape()
"""All of them as functions."""


class ChatTools(Struct, frozen=True):
    """What a request says of tools; `choice` and `allowed` as in Conversation."""

    tools: tuple[Tool, ...]
    choice: str
    allowed: tuple[str, ...]
    shape: CallShape


def chat_tools(
    tools: list[ChatTool] | None, choice: Any, functions: list[Function] | None, function_call: Any
) -> ChatTools:
    """Raises InvalidRequest naming the field."""
    if functions:
        if tools:
            raise bad_field("functions", "send them among the tools, or send no tools")
        listed = tuple(_function(one, f"functions.{index}") for index, one in enumerate(functions))
        called = _obsolete_choice(function_call, {tool.name for tool in listed})
        return ChatTools(listed, called, (), CallShape(obsolete=True))
    listed = tuple(_tool(one, f"tools.{index}") for index, one in enumerate(tools or []))
    names = {tool.name for tool in listed}
    named, allowed = tool_choice(choice, names, lambda tool: [tool.called] if tool.called in names else None)
    custom = frozenset(one.custom.name for one in tools or [] if isinstance(one, _CustomTool))
    for index, one in enumerate(tools or []):
        if isinstance(one, _FunctionTool) and one.function.name in custom:
            raise bad_field(f"tools.{index}.function.name", "a custom tool has this name too; rename one")
    return ChatTools(listed, named, allowed, CallShape(custom))


def _tool(tool: ChatTool, param: str) -> Tool:
    if isinstance(tool, _FunctionTool):
        return _function(tool.function, f"{param}.function")
    where = f"{param}.custom.format"
    format = None if tool.custom.format is None else free_json(tool.custom.format, where)
    # Responses has the grammar's fields beside the type: so told, both make the same prompt.
    if format is not None and isinstance(grammar := format.get("grammar"), dict):
        format = {"type": format.get("type"), **grammar}
    return custom_tool(tool.custom.name, tool.custom.description or "", format, where)


def _function(function: Function, param: str) -> Tool:
    schema = free_json(function.parameters or {}, f"{param}.parameters")
    return Tool(function.name, function.description or "", schema, strict=bool(function.strict))


def _obsolete_choice(choice: Any, names: set[str]) -> str:
    """`function_call` as Conversation.tool_choice."""
    if choice is None or choice in ("auto", "none"):
        return choice or "auto"
    name = choice.get("name") if isinstance(choice, dict) else None
    if isinstance(name, str) and name in names:
        return f"named:{name}"
    raise bad_field(
        "function_call", "auto, none, or an object with the name of one of the functions is needed"
    )
