"""The tools of an Anthropic request: those that the prompt lists, and those that it tells of later."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from ..chat import Tool
from ..errors import InvalidRequest
from .anthropic_blocks import ByDefinition, ByName, ToolAddition, ToolChange, ToolParam, ToolRemoval
from .anthropic_client_tools import client_tool
from .body import free_json, stable_json


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Tools:
    """Listed are those that the model has from the beginning, as listing another changes the prompt's head.

    A deferred tool enters the list of the *request* when the model has searched for it, or a system message
    adds it; what it is, is told in that place. Server-side tools (no `input_schema`, and not run by the
    client) run at Anthropic; there is nothing to call here.
    """

    def __init__(self, given: list[ToolParam], changes: Iterable[ToolChange] = ()):
        changes = list(changes)
        later = _added_later(changes)
        self._known: dict[str, Tool] = {}
        self._names: set[str] = set()
        listed = []
        for index, param in enumerate(given):
            self._names.add(param.name or "")
            tool = _tool(param, f"tools.{index}")
            if tool is None:
                continue
            self._names.add(tool.name)
            self._known[tool.name] = tool
            if not param.defer_loading and tool.name not in later:
                listed.append(tool)
        self.listed = tuple(listed)
        self._removed: set[str] = set()
        self._follow(changes)

    def _follow(self, changes: list[ToolChange]) -> None:
        for change in changes:
            if made := _defined(change):
                self._known[made.name] = made
            name = _name(change)
            self._names.add(name)
            if isinstance(change, ToolRemoval):
                self._removed.add(name)
            else:
                self._removed.discard(name)

    def described(self, name: str) -> str:
        """The tool as the JSON text that templates list tools with."""
        tool = self._known.get(name, Tool(name))
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return stable_json({"type": "function", "function": function})

    def change(self, change: ToolChange) -> str:
        """A tool that comes or goes, as the model is told; "" for what there is not here."""
        name = _name(change)
        if not name:
            return ""
        if isinstance(change, ToolRemoval):
            return f"The tool {name} can't be called any more."
        return f"From here on this tool can be called:\n{self.described(name)}" if name in self._known else ""

    def choice(self, given: ToolChoice | None) -> tuple[str, tuple[str, ...]]:
        """(`tool_choice`, `allowed_tools`) of a conversation. Raises InvalidRequest."""
        if given is None or given.type == "auto" or not self._names:
            return "auto", ()
        if given.type == "none":
            return "none", ()
        left = tuple(tool.name for tool in self.listed if tool.name not in self._removed)
        if given.type == "any":
            allowed = left if self._removed else ()
            return ("required", allowed) if left else ("auto", ())
        if given.name in left:
            return f"named:{given.name}", ()
        if given.name in self._removed or given.name not in self._names:
            raise InvalidRequest(
                f"tool_choice.name: there is no tool {given.name!r}", param="tool_choice.name"
            )
        if given.name in self._known:
            raise InvalidRequest(
                f"tool_choice.name: {given.name!r} is deferred, so the model is not told of it at first and "
                "it can't be forced",
                param="tool_choice.name",
            )
        return "auto", ()


def _name(change: ToolChange) -> str:
    """Of the tool that comes or goes; "" for MCP servers', which are not reached from here."""
    if isinstance(change.tool, ByName):
        return change.tool.name
    made = _defined(change)
    return made.name if made else ""


def _defined(change: ToolChange) -> Tool | None:
    """The tool that the change itself defines."""
    if not isinstance(change.tool, ByDefinition):
        return None
    return _tool(change.tool.definition, "messages.content.tool.definition")


def _added_later(changes: list[ToolChange]) -> set[str]:
    """Names whose first change is that they come: until then they are not there."""
    first: dict[str, bool] = {}
    for change in changes:
        if isinstance(change.tool, ByName):
            first.setdefault(change.tool.name, isinstance(change, ToolAddition))
    return {name for name, added in first.items() if added}


def _tool(given: ToolParam, param: str) -> Tool | None:
    """None for a server-side tool. Raises InvalidRequest."""
    strict = bool(given.strict)
    if given.input_schema is None:
        if given.type in (None, "custom"):
            where = f"{param}.input_schema"
            raise InvalidRequest(f"{where}: this field is required", param=where)
        return client_tool(given.type, given.name, strict)
    if not given.name:
        raise InvalidRequest(f"{param}.name: this field is required", param=f"{param}.name")
    schema = free_json(given.input_schema, f"{param}.input_schema")
    return Tool(given.name, _description(given, param), schema, strict=strict)


def _description(given: ToolParam, param: str) -> str:
    """With the examples of its input, for which templates have no other place."""
    examples = [
        msgspec.json.encode(free_json(example, f"{param}.input_examples.{index}")).decode()
        for index, example in enumerate(given.input_examples or [])
    ]
    told = [given.description] if given.description else []
    return "\n\n".join([*told, "\n".join(["Examples of its input:", *examples])] if examples else told)
