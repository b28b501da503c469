"""The tools of an Anthropic request: those in the prompt's head, and later ones.

For tools that Anthropic defines and the client runs (`bash_…`, `text_editor_…`, `memory_…`) a client sends
the type alone. Here they get their arguments: those of the SDK's types, or of Anthropic's documentation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from ...chat import Tool
from ...errors import bad_field
from ..fields.body import checked_name, free_json, stable_json
from .blocks import ByDefinition, ByName, ToolAddition, ToolChange, ToolParam, ToolRemoval

_ENGINE_ID = re.compile(r"call_([0-9a-f]{24})")
_SHOWN_ID = re.compile(r"toolu_([0-9a-f]{24})")
_KIND = re.compile(r"(bash|text_editor|memory)_(\d{8})")
_LATE_EDITOR = "20250429"
"""First version of the editor without `undo_edit`, with `insert_text` for what it inserts."""


def shown_id(id: str) -> str:
    """Return a call's id as Messages shows it, `toolu_…`. An id that the engine did not make stays."""
    return f"toolu_{match[1]}" if (match := _ENGINE_ID.fullmatch(id)) else id


def engine_id(id: str) -> str:
    """Return the engine's id of a call, which prompts and the turn memory hold."""
    return f"call_{match[1]}" if (match := _SHOWN_ID.fullmatch(id)) else id


def client_tool(type: str, name: str | None, strict: bool) -> Tool | None:
    """Return the tool of that type; None for other types."""
    match = _KIND.fullmatch(type)
    if match is None:
        return None
    kind, date = match[1], match[2]
    if kind == "bash":
        return Tool(name or "bash", _BASH, _object(_BASH_ARGUMENTS), strict=strict)
    if kind == "memory":
        return Tool(name or "memory", _MEMORY, _object(_MEMORY_ARGUMENTS, "command"), strict=strict)
    late = date >= _LATE_EDITOR
    commands = ["view", "create", "str_replace", "insert", *([] if late else ["undo_edit"])]
    arguments = {
        "command": {"type": "string", "enum": commands},
        "path": _text("Absolute path of a file or folder."),
        **_EDITS,
        ("insert_text" if late else "new_str"): _text(
            "insert: the text to put in." if late else "str_replace, insert: the new text."
        ),
    }
    usual = "str_replace_based_edit_tool" if late else "str_replace_editor"
    return Tool(name or usual, _EDITOR, _object(arguments, "command", "path"), strict=strict)


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    return {**schema, "required": list(required)} if required else schema


_BASH = "Run a command in a bash shell that stays open between calls."
_BASH_ARGUMENTS = {
    "command": _text("The command to run. Needed unless `restart` is true."),
    "restart": {"type": "boolean", "description": "True: start the shell anew."},
}

_EDITOR = """\
View, create and edit text files.
`view` shows a file with line numbers, or what is in a folder. `create` writes a whole new file. \
`str_replace` replaces `old_str`, which must be found exactly once, by `new_str`. `insert` puts text behind \
the line `insert_line`; 0 is the beginning of the file."""
_EDITS: dict[str, Any] = {
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "view: first and last line; -1 is the end.",
    },
    "file_text": _text("create: the whole text of the file."),
    "old_str": _text("str_replace: the text to replace."),
    "new_str": _text("str_replace: the new text."),
    "insert_line": {"type": "integer", "description": "insert: the line behind which the text goes."},
}

_MEMORY = """\
Notes that stay between conversations, in files under /memories.
Look at /memories before a task, and write down what will be of use later. `view` shows a file or a folder, \
`create` writes a file, `str_replace` replaces a text in it, `insert` puts text behind a line, `delete` and \
`rename` are of files and folders."""
_MEMORY_ARGUMENTS: dict[str, Any] = {
    "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
    "path": _text("Path under /memories; all commands but rename."),
    **_EDITS,
    "insert_text": _text("insert: the text to put in."),
    "old_path": _text("rename: the path now."),
    "new_path": _text("rename: the new path."),
}


MAX_DESCRIBED = 8 << 20
"""Most characters of descriptions of tools in one prompt: a short reference may stand for a long schema."""


class _Named(msgspec.Struct):
    name: str


class ToolChoice(msgspec.Struct):
    """A choice in Anthropic's words, or in OpenAI's: `required`, `function`."""

    type: Literal["auto", "any", "tool", "none", "required", "function"]
    name: str | None = None
    function: _Named | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def called(self) -> str | None:
        return self.function.name if self.function else self.name


def as_tool_choice(given: ToolChoice | str | None) -> ToolChoice | None:
    """Read a choice that may be a word, as at OpenAI. Raises InvalidRequest."""
    if not isinstance(given, str):
        return given
    if given not in ("auto", "any", "none", "required"):
        raise bad_field("tool_choice", f"{given[:40]!r} is none of auto, any, none")
    return ToolChoice(given)


class Tools:
    """Lists the tools in the prompt's head, which another tool would change.

    A deferred tool counts once the model has searched for it, or a system message adds it; it is described in
    that place. Server-side tools run at Anthropic; there is nothing to call here.
    """

    def __init__(self, params: list[ToolParam], changes: Iterable[ToolChange] = ()):
        changes = list(changes)
        later = _added_later(changes)
        self._tools: dict[str, Tool | None] = {}
        """Name → tool; None: it runs at the server."""
        listed = []
        for index, param in enumerate(params):
            tool = _tool(param, f"tools.{index}")
            self._tools[tool.name if tool else param.name or ""] = tool
            if tool and not param.defer_loading and tool.name not in later:
                listed.append(tool)
        self.listed = tuple(listed)
        self._removed: set[str] = set()
        self._room = MAX_DESCRIBED
        self._described: dict[str, Tool] = {}
        for change in changes:
            name, made = _changed(change)
            self._tools[name] = made or self._tools.get(name, Tool(name))
            if isinstance(change, ToolRemoval):
                self._removed.add(name)
            else:
                self._removed.discard(name)

    @property
    def later(self) -> tuple[Tool, ...]:
        """Tools that were described so far and are not in the prompt's head."""
        listed = {tool.name for tool in self.listed}
        return tuple(tool for name, tool in self._described.items() if name not in listed)

    def _at_server(self, name: str) -> bool:
        return name in self._tools and self._tools[name] is None

    def described(self, name: str) -> str:
        """Return the tool as the JSON text with which templates list tools. Raises InvalidRequest."""
        tool = self._described[name] = self._tools.get(name) or Tool(name)
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        text = stable_json({"type": "function", "function": function})
        self._room -= len(text)
        if self._room < 0:
            raise bad_field(
                "messages",
                f"tools are referred to so often that telling them takes over {MAX_DESCRIBED} "
                "characters; refer to each once",
            )
        return text

    def change(self, change: ToolChange) -> str:
        """Describe to the model a tool that comes or goes; "" for a tool that is not here."""
        name, _ = _changed(change)
        if not name or self._at_server(name):
            return ""
        if isinstance(change, ToolRemoval):
            return f"The tool {name} can't be called any more."
        return f"From here on this tool can be called:\n{self.described(name)}"

    def choice(self, choice: ToolChoice | None) -> tuple[str, tuple[str, ...]]:
        """Return (`tool_choice`, `allowed_tools`) of a conversation. Raises InvalidRequest."""
        if choice is None or choice.type == "auto":
            return "auto", ()
        if choice.type == "none":
            return "none" if self._tools else "auto", ()
        if not self._tools:
            raise bad_field("tool_choice", "there are no tools to choose from")
        left = tuple(tool.name for tool in self.listed if tool.name not in self._removed)
        if choice.type in ("any", "required"):
            allowed = left if self._removed else ()
            return ("required", allowed) if left else ("auto", ())
        if choice.called in left:
            return f"named:{choice.called}", ()
        if self._at_server(choice.called or ""):
            return "auto", ()
        if choice.called in self._removed or choice.called not in self._tools:
            raise bad_field("tool_choice.name", f"there is no tool {choice.called!r}")
        raise bad_field(
            "tool_choice.name",
            f"{choice.called!r} is deferred, so the model is not told of it at first and it can't be forced",
        )


def _changed(change: ToolChange) -> tuple[str, Tool | None]:
    """Return a tool's name ("" for an MCP server's), and the tool if `change` holds its definition."""
    if isinstance(change.tool, ByName):
        return change.tool.name, None
    if not isinstance(change.tool, ByDefinition):
        return "", None
    made = _tool(change.tool.definition, "messages.content.tool.definition")
    return (made.name if made else ""), made


def _added_later(changes: list[ToolChange]) -> set[str]:
    """Return the tools whose first change adds them: until then they are absent."""
    first: dict[str, bool] = {}
    for change in changes:
        if isinstance(change.tool, ByName):
            first.setdefault(change.tool.name, isinstance(change, ToolAddition))
    return {name for name, added in first.items() if added}


def _tool(fields: ToolParam, param: str) -> Tool | None:
    """Read a tool; None for a server-side one. Raises InvalidRequest."""
    nested = fields.function is not None
    if fields.function is not None:
        fields, param = fields.function, f"{param}.function"
    strict = bool(fields.strict)
    if fields.name:
        checked_name(fields.name, f"{param}.name")
    schema = fields.parameters if fields.input_schema is None else fields.input_schema
    if schema is None and (nested or fields.type == "function"):
        schema = {}  # OpenAI's function of no parameters.
    if schema is None:
        if fields.type in (None, "custom"):
            raise bad_field(f"{param}.input_schema", "this field is required")
        tool = client_tool(fields.type, fields.name, strict)
        return tool and msgspec.structs.replace(
            tool, description=_description(tool.description, fields.input_examples, param)
        )
    if not fields.name:
        raise bad_field(f"{param}.name", "this field is required")
    schema = free_json(schema, f"{param}.{'input_schema' if fields.parameters is None else 'parameters'}")
    description = _description(fields.description or "", fields.input_examples, param)
    return Tool(fields.name, description, schema, strict=strict)


def _description(description: str, inputs: list[dict[str, Any]] | None, param: str) -> str:
    """Return the description, with the input's examples, for which templates have no other place."""
    examples = [
        msgspec.json.encode(free_json(example, f"{param}.input_examples.{index}")).decode()
        for index, example in enumerate(inputs or [])
    ]
    if not examples:
        return description
    before = [description, ""] if description else []
    return "\n".join([*before, "Examples of its input:", *examples])
