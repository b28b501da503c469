"""The input items of /v1/responses, as messages.

| item                                        | becomes                                          |
|---------------------------------------------|--------------------------------------------------|
| `message` (or no type, with a role)         | a message; `developer` is `system`               |
| `reasoning` with text                       | thinking of the assistant; without text: nothing |
| `function_call`, `custom_tool_call`, `…_call` with a call id | a call of the assistant         |
| `function_call_output`, `…_output` with a call id | a tool result                              |
| `additional_tools`                          | more tools                                       |
| `tool_search_output` with a call id         | a tool result that describes the tools           |
| `item_reference`                            | an earlier item (api/responses/request.py)       |
| any other                                   | nothing: it was for OpenAI's own side            |

Items in a row of the assistant make one message, and so do results. Only references read the ids of items.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import re
from typing import Any, Union

import msgspec

from ... import chat
from ...errors import bad_field
from ..conversation import tool_result
from ..fields.body import convert, free_json, lenient_arguments, stable_json
from ..openai.content import IMAGES, Content, content_parts, runs_of, text_of
from ..openai.tool_choice import CUSTOM_INPUT
from .tools import ResponseTools

SEALED_PREFIX = "omlxd-1:"
"""Prefix of our `encrypted_content`: the text in base64, not encrypted, which Codex echoes."""


class Item(msgspec.Struct):
    """An item of any type, with the fields that are read."""

    type: str | None = None
    id: Any = None
    role: str | None = None
    content: Union[str, list[Content], None] = None
    summary: list[Content] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: Any = None
    action: Any = None
    operation: Any = None
    output: Any = None
    tools: list[Any] | None = None


TRIGGER = "compaction_trigger"
"""Type of the item whose input is to be summarised, and not answered."""
SUMMARY = "Summary of the conversation so far:\n\n{}"


def sealed(text: str) -> str:
    """Encode reasoning or a summary as `encrypted_content`."""
    return SEALED_PREFIX + base64.b64encode(text.encode()).decode()


def messages_of(items: list[Item], tools: ResponseTools) -> tuple[chat.Message, ...]:
    """Turn `items` into messages. Adds to `tools` what items bring. Raises InvalidRequest."""
    for index, item in enumerate(items):
        if item.type in ("additional_tools", "tool_search_output"):
            for at, tool in enumerate(item.tools or []):
                result = item.type == "tool_search_output" and item.call_id is not None
                tools.add(tool, f"input.{index}.tools.{at}", result)
    runs: list[tuple[chat.Role, list[chat.Part]]] = []
    for index, item in enumerate(items):
        message = _message_of(item, tools, f"input.{index}")
        if message is None:
            continue
        for role, parts in runs_of(*message):
            if role in ("assistant", "tool") and runs and runs[-1][0] == role:
                runs[-1][1].extend(parts)
            else:
                runs.append((role, parts))
    return tuple(chat.Message(role, tuple(parts)) for role, parts in runs)


def _message_of(item: Item, tools: ResponseTools, param: str) -> tuple[chat.Role, list[chat.Part]] | None:
    kind = item.type or ("message" if item.role else "")
    if kind == "message":
        return _message(item, param)
    if kind == "reasoning":
        text = _reasoning(item)
        return ("assistant", [chat.ThinkingPart(text)]) if text else None
    if not kind:
        raise bad_field(f"{param}.type", "this field is required")
    if kind == "compaction":
        text = _unsealed(item)  # None can be read of another server's.
        return ("user", [chat.TextPart(SUMMARY.format(text))]) if text else None
    if kind == TRIGGER:
        raise bad_field(f"{param}.type", f"a {kind} stands at the end of input alone")
    if kind.endswith("_output"):
        return None if _must(item, kind, param) is None else ("tool", [_result(item, param)])
    if kind.endswith("_call"):
        return None if _must(item, kind, param) is None else ("assistant", [_call(item, kind, tools, param)])
    return None


def _must(item: Item, kind: str, param: str) -> str | None:
    """Return the call id. Calls that ran on OpenAI's side have none; a function's call can't lack it."""
    if item.call_id is None and kind.startswith(("function_call", "custom_tool_call")):
        raise bad_field(f"{param}.call_id", "this field is required")
    return item.call_id


_ROLES: dict[str, chat.Role] = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}


def _message(item: Item, param: str) -> tuple[chat.Role, list[chat.Part]]:
    role = _ROLES.get(item.role or "")
    if role is None:
        raise bad_field(f"{param}.role", "one of user, assistant, system, developer is needed")
    if item.content is None:
        raise bad_field(f"{param}.content", "this field is required")
    return role, content_parts(item.content, role, f"{param}.content")


def _reasoning(item: Item) -> str:
    """Return the text of a reasoning item, else its summary."""
    if text := text_of(item.content):
        return text
    return _unsealed(item) or "\n\n".join(entry.text for entry in item.summary or [] if entry.text)


def _unsealed(item: Item) -> str:
    """Decode `encrypted_content`; "" if it is not ours, or cut short."""
    if item.encrypted_content and item.encrypted_content.startswith(SEALED_PREFIX):
        with contextlib.suppress(ValueError):
            raw = binascii.a2b_base64(item.encrypted_content[len(SEALED_PREFIX) :], strict_mode=True)
            return raw.decode()
    return ""


def _call(item: Item, kind: str, tools: ResponseTools, param: str) -> chat.ToolCallPart:
    name = tools.flat_name(item.namespace or "", item.name or kind.removesuffix("_call"))
    payload = next(
        (value for value in (item.arguments, item.input, item.action, item.operation) if value is not None),
        {},
    )
    if isinstance(payload, dict):
        arguments = free_json(payload, param)
    elif kind == "custom_tool_call" or not isinstance(payload, str):
        arguments = free_json({CUSTOM_INPUT: payload}, param)
    else:
        arguments = lenient_arguments(payload, param)
    return chat.ToolCallPart(item.call_id or "", name, arguments)


def _result(item: Item, param: str) -> chat.ToolResultPart:
    value = item.output if item.output is not None else item.tools
    if isinstance(value, dict) and value.get("type") in IMAGES:
        value = [value]
    if isinstance(value, str):
        return chat.ToolResultPart(item.call_id or "", value)
    if isinstance(value, list) and item.output is not None:
        try:
            content = convert(value, list[Content])
            parts = content_parts(content, "tool", f"{param}.output")
        except msgspec.ValidationError:
            pass
        else:
            return tool_result(item.call_id or "", parts)
    fitted = free_json({"output": value}, f"{param}.output")["output"]
    return chat.ToolResultPart(item.call_id or "", "" if fitted is None else stable_json(fitted))


_ITEM = re.compile(r"[a-z]+_([0-9a-f]{24})[0-9a-f]{2,}")


def new_response_id() -> str:
    return "resp_" + os.urandom(12).hex()


def item_id(prefix: str, response_id: str, index: int) -> str:
    """Return the id of the item at `index`; the prefix keeps input and output apart."""
    return f"{prefix}_{response_id.removeprefix('resp_')}{index:02x}"


def response_of(item_id: str) -> str | None:
    """Return the response of an item; None for an id that is not ours."""
    match = _ITEM.fullmatch(item_id)
    return f"resp_{match[1]}" if match else None
