"""Tools that Anthropic defines and the client runs: `bash_…`, `text_editor_…`, `memory_…`.

A client sends only their type, as Claude knows their arguments. Another model is told them here: what the
client's code reads of a call (the SDK's types of the memory tool; Anthropic's documentation of the others).
"""

from __future__ import annotations

import re
from typing import Any

from ..chat import Tool

_KIND = re.compile(r"(bash|text_editor|memory)_(\d{8})")
_LATE_EDITOR = "20250429"
"""From here on the editor has no `undo_edit`, and calls what it inserts `insert_text`."""


def client_tool(type: str, name: str | None, strict: bool) -> Tool | None:
    """The tool of that type; None: it is none of these."""
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
