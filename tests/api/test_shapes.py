"""A shape that one door knows is known at every door, and means the same: parts, tools, choices, roles."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from omlxd import chat
from omlxd.api.anthropic import request as messages
from omlxd.api.ollama import request as ollama
from omlxd.api.openai import chat_request
from omlxd.api.responses import request as responses

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(40)).decode()
TEXT = base64.b64encode(b"hello").decode()
PDF = base64.b64encode(b"%PDF-1.7").decode()
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}

Parse = Callable[[bytes], Any]
DOORS: dict[str, tuple[Parse, str]] = {
    "chat": (chat_request.parse, "messages"),
    "responses": (responses.parse, "input"),
    "messages": (messages.parse, "messages"),
    "ollama": (ollama.parse_chat, "messages"),
}
"""How each reads a body, and which of its fields holds messages."""


def prompt(door: str, said: list[Any], **more: Any) -> chat.Conversation:
    parse, field = DOORS[door]
    read = parse(json.dumps({"model": "m", field: said, **more}).encode()).generate.prompt
    assert isinstance(read, chat.Conversation)
    return read


def said(door: str, part: Any, role: str = "user") -> list[chat.Part]:
    """What the model reads of a part of a message of that role, between two others."""
    said = [
        {"role": "user", "content": "a"},
        {"role": role, "content": [part]},
        {"role": "user", "content": "b"},
    ]
    return [part for message in prompt(door, said).messages[1:-1] for part in message.parts]


def kinds(parts: list[chat.Part]) -> list[tuple[Any, ...]]:
    """What does not depend on where a part stood in the body."""
    told: list[tuple[Any, ...]] = []
    for part in parts:
        match part:
            case chat.ImagePart() | chat.DocumentPart():
                told.append((type(part), part.data))
            case chat.ToolResultPart():
                told.append((type(part), part.call_id, part.text, part.is_error))
            case _:
                told.append((part,))
    return told


IMAGE = [(chat.ImagePart, base64.b64decode(PNG))]
FILE = [(chat.TextPart("<file>\nhello\n</file>"),)]
DOCUMENT = [(chat.DocumentPart, base64.b64decode(PDF))]
HI = [(chat.TextPart("hi"),)]
USER = [
    ({"type": "text", "text": "hi"}, HI),
    ({"type": "input_text", "text": "hi"}, HI),
    ({"type": "output_text", "text": "hi"}, HI),
    *(
        (part, IMAGE)
        for url in (
            f"data:image/png;base64,{PNG}",
            f"data:;base64,{PNG}",
            f"DATA:;charset=utf-8;base64,{PNG}",
            PNG,
        )
        for part in (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image_url", "image_url": url},
            {"type": "input_image", "image_url": url, "detail": "auto"},
        )
    ),
    ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}, IMAGE),
    ({"type": "image", "source": {"type": "base64", "media_type": "", "data": PNG}}, IMAGE),
    ({"type": "image", "source": {"type": "url", "url": f"data:;base64,{PNG}"}}, IMAGE),
    ({"type": "file", "file": {"file_data": TEXT}}, FILE),
    ({"type": "file", "file": {"file_data": f"data:;base64,{TEXT}"}}, FILE),
    ({"type": "input_file", "file_data": TEXT}, FILE),
    ({"type": "input_file", "file_data": f"data:;base64,{PDF}"}, DOCUMENT),
    (
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PDF}},
        DOCUMENT,
    ),
]
THOUGHT = [(chat.ThinkingPart("mm", "s"),)]
ASSISTANT = [
    ({"type": "thinking", "thinking": "mm", "signature": "s"}, THOUGHT),
    ({"type": "redacted_thinking", "data": "eA=="}, []),
    (
        {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
        [(chat.ToolCallPart("t", "f", {"a": 1}),)],
    ),
    (
        {"type": "tool_use", "id": "t", "name": "f", "input": '{"a": 1}'},
        [(chat.ToolCallPart("t", "f", {"a": 1}),)],
    ),
]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("part", "meant"), USER, ids=lambda value: str(value)[:60])
def test_parts_of_a_user(door: str, part: Any, meant: list[Any]):
    assert kinds(said(door, part)) == meant


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("part", "meant"), ASSISTANT, ids=lambda value: str(value)[:60])
def test_parts_of_an_assistant(door: str, part: Any, meant: list[Any]):
    assert kinds(said(door, part, "assistant")) == meant


@pytest.mark.parametrize("door", DOORS)
def test_results_in_a_users_message(door: str):
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [{"type": "text", "text": "42"}],
        "is_error": True,
    }
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
    ]
    read = prompt(door, turns).messages
    assert [message.role for message in read] == ["user", "assistant", "tool", "user"]
    assert read[2].parts == (chat.ToolResultPart("t", "42", True),) and read[3].parts == (
        chat.TextPart("go on"),
    )


@pytest.mark.parametrize("door", DOORS)
def test_a_developer_is_the_system(door: str):
    read = prompt(door, [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "a"}])
    assert read.messages[0] == chat.Message("system", (chat.TextPart("be brief"),))


FIELDS = {"name": "f", "description": "d"}
TOOLS = {
    "nested": {"type": "function", "function": {**FIELDS, "parameters": SCHEMA}},
    "flat": {"type": "function", **FIELDS, "parameters": SCHEMA},
    "without type": {**FIELDS, "input_schema": SCHEMA},
    "custom with a schema": {"type": "custom", **FIELDS, "input_schema": SCHEMA},
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("spelled", TOOLS)
def test_tools(door: str, spelled: str):
    read = prompt(door, [{"role": "user", "content": "a"}], tools=[TOOLS[spelled]])
    (tool,) = read.tools
    assert (tool.name, tool.description, tool.parameters) == ("f", "d", SCHEMA) and not tool.input_grammar


CHOICES: list[tuple[Any, str]] = [
    ("auto", "auto"),
    ({"type": "auto"}, "auto"),
    ("none", "none"),
    ({"type": "none"}, "none"),
    ("required", "required"),
    ({"type": "required"}, "required"),
    ("any", "required"),
    ({"type": "any"}, "required"),
    ({"type": "function", "function": {"name": "f"}}, "named:f"),
    ({"type": "function", "name": "f"}, "named:f"),
    ({"type": "tool", "name": "f"}, "named:f"),
]


@pytest.mark.parametrize("door", ["chat", "responses", "messages"])
@pytest.mark.parametrize("spelled", TOOLS)
def test_choices(door: str, spelled: str):
    for choice, meant in CHOICES:
        turns = [{"role": "user", "content": "a"}]
        read = prompt(door, turns, tools=[TOOLS[spelled]], tool_choice=choice)
        assert read.tool_choice == meant, choice


@pytest.mark.parametrize("door", ["chat", "ollama"])
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_beside_the_content(door: str, field: str):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", field: "mm"}]
    read = prompt(door, [*turns, {"role": "user", "content": "c"}]).messages[1]
    assert read.parts == (chat.ThinkingPart("mm"), chat.TextPart("b"))
