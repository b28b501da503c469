"""The tools of a chat completion: their form for the model, and the form of its calls.

| given                        | the model sees                    | its call comes back as              |
|------------------------------|-----------------------------------|-------------------------------------|
| `tools`, type `function`     | a function                        | `tool_calls`, type `function`       |
| `tools`, type `custom`       | a function with one text, `input` | `tool_calls`, type `custom`         |
| `functions` (obsolete)       | functions                         | `function_call`, one at most        |
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ...chat import Struct, Tool
from ...errors import bad_field
from ..fields.body import checked_name, free_json
from .tool_choice import custom_tool, tool_choice

_Name = Annotated[str, msgspec.Meta(min_length=1)]


class Function(msgspec.Struct):
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Custom(msgspec.Struct):
    name: _Name
    description: str | None = None
    format: dict[str, Any] | None = None


class ChatTool(msgspec.Struct):
    """A function or custom tool. Responses has its fields beside the type, Anthropic has no type."""

    type: str | None = None
    function: Function | None = None
    custom: _Custom | None = None
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None

    def read(self, param: str) -> tuple[Function | _Custom, str]:
        """Return the tool's description, and the place of that. Raises InvalidRequest."""
        kind = self.type or ("custom" if self.custom else "function")
        if kind not in ("function", "custom"):
            raise bad_field(
                f"{param}.type", f"a tool of type {kind[:80]!r} is not served; describe it as a function"
            )
        if kind == "custom" and self.input_schema is None:
            if self.custom is not None:
                return self.custom, f"{param}.custom"
            return _Custom(self._name(param, kind), self.description, self.format), param
        if self.function is not None:
            return self.function, f"{param}.function"
        schema = self.parameters if self.input_schema is None else self.input_schema
        return Function(self._name(param, kind), self.description, schema, self.strict), param

    def _name(self, param: str, kind: str) -> str:
        if self.name:
            return self.name
        raise bad_field(f"{param}.{kind}" if self.name is None else f"{param}.name", "this field is required")


class CallShape(Struct, frozen=True):
    """How the client gets calls.

    custom    names of custom tools
    obsolete  the request has `functions`: a call is the message's `function_call`
    """

    custom: frozenset[str] = frozenset()
    obsolete: bool = False


FUNCTIONS = CallShape()
"""Calls that are all functions."""


class ChatTools(Struct, frozen=True):
    """A request's tools; `choice` and `allowed` as in Conversation."""

    tools: tuple[Tool, ...]
    choice: str
    allowed: tuple[str, ...]
    shape: CallShape


def chat_tools(
    tools: list[ChatTool] | None, choice: Any, functions: list[Function] | None, function_call: Any
) -> ChatTools:
    """Read the tools. Raises InvalidRequest."""
    if functions:
        if tools:
            raise bad_field("functions", "send them among the tools, or send no tools")
        listed = tuple(_tool(one, f"functions.{index}") for index, one in enumerate(functions))
        called = _obsolete_choice(function_call, {tool.name for tool in listed})
        return ChatTools(listed, called, (), CallShape(obsolete=True))
    read = [one.read(f"tools.{index}") for index, one in enumerate(tools or [])]
    listed = tuple(_tool(*one) for one in read)
    names = {tool.name for tool in listed}
    named, allowed = tool_choice(choice, names, lambda tool: [tool.called] if tool.called in names else None)
    custom = frozenset(one.name for one, _ in read if isinstance(one, _Custom))
    for one, where in read:
        if isinstance(one, Function) and one.name in custom:
            raise bad_field(f"{where}.name", "a custom tool has this name too; rename one")
    return ChatTools(listed, named, allowed, CallShape(custom))


def _tool(tool: Function | _Custom, param: str) -> Tool:
    checked_name(tool.name, f"{param}.name")
    if isinstance(tool, Function):
        return _function(tool, param)
    where = f"{param}.format"
    format = None if tool.format is None else free_json(tool.format, where)
    # Responses has the grammar's fields beside the type: so told, both make the same prompt.
    if format is not None and isinstance(grammar := format.get("grammar"), dict):
        format = {"type": format.get("type"), **grammar}
    return custom_tool(tool.name, tool.description or "", format, where)


def _function(function: Function, param: str) -> Tool:
    schema = free_json(function.parameters or {}, f"{param}.parameters")
    return Tool(function.name, function.description or "", schema, strict=bool(function.strict))


def _obsolete_choice(choice: Any, names: set[str]) -> str:
    """Return `function_call` as Conversation.tool_choice."""
    if choice is None or choice in ("auto", "none"):
        return choice or "auto"
    name = choice.get("name") if isinstance(choice, dict) else None
    if isinstance(name, str) and name in names:
        return f"named:{name}"
    raise bad_field(
        "function_call", "auto, none, or an object with the name of one of the functions is needed"
    )
