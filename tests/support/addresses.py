"""Every way to name an address in a request, and a server that must not be asked."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from omlxd.chat import Struct

PDF = "JVBERi0xLjQK"


@dataclass(slots=True)
class Canary:
    """`url` names a file of a server on loopback that nobody may ask."""

    url: str
    _listening: socket.socket

    def connections(self) -> int:
        count = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                self._listening.accept()[0].close()
                count += 1
        return count


@pytest.fixture
def canary() -> Iterator[Canary]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        yield Canary(f"http://127.0.0.1:{listening.getsockname()[1]}/a.png", listening)


class Case(Struct, frozen=True):
    """`param`: the field that the refusal names."""

    name: str
    path: str
    fields: dict[str, Any]
    param: str


def cases_with(url: str) -> list[Case]:
    schema = {"type": "object", "properties": {"a": {"$ref": url}}, "required": ["a"]}
    return [*_chat(url, schema), *_messages(url, schema), *_responses(url, schema)]


def _chat(url: str, schema: dict[str, Any]) -> list[Case]:
    def user(part: dict[str, Any], role: str = "user", **more: Any) -> dict[str, Any]:
        content = [{"type": "text", "text": "what is it?"}, part]
        return {"messages": [{"role": "user", "content": "hi"}, {"role": role, "content": content, **more}]}

    image = {"type": "image_url", "image_url": {"url": url}}
    at = "messages.1.content.1"
    own = {"name": "s", "schema": schema, "strict": True}
    told = [
        ("an image", user(image), f"{at}.image_url"),
        ("an image, as text", user({"type": "image_url", "image_url": url}), f"{at}.image_url"),
        ("an image of a tool", user(image, "tool", tool_call_id="c"), f"{at}.image_url"),
        ("a file", user({"type": "file", "file": {"file_data": url}}), f"{at}.file.file_data"),
        ("a video", user({"type": "video_url", "video_url": {"url": url}}), f"{at}.type"),
        ("a sound", user({"type": "audio_url", "audio_url": {"url": url}}), f"{at}.type"),
        (
            "a schema",
            {
                "messages": [{"role": "user", "content": "hi"}],
                "response_format": {"type": "json_schema", "json_schema": own},
            },
            "response_format",
        ),
    ]
    return [Case(f"chat: {name}", "/v1/chat/completions", fields, param) for name, fields, param in told]


def _messages(url: str, schema: dict[str, Any]) -> list[Case]:
    def user(block: dict[str, Any]) -> dict[str, Any]:
        content = [{"type": "text", "text": "what is it?"}, block]
        return {"max_tokens": 4, "messages": [{"role": "user", "content": content}]}

    def result(block: dict[str, Any]) -> dict[str, Any]:
        called = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
        answer = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
        told = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [called]},
            {"role": "user", "content": [answer]},
        ]
        return {"max_tokens": 4, "messages": told}

    source = {"type": "url", "url": url}
    image, document = {"type": "image", "source": source}, {"type": "document", "source": source}
    servers = [{"type": "url", "url": url, "name": "x"}]
    hi = {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    at, inside = "messages.0.content.1", "messages.2.content.0.tool_result.content.0"
    told = [
        ("an image", user(image), f"{at}.image.source"),
        ("a document", user(document), f"{at}.document.source"),
        ("an image of a tool", result(image), f"{inside}.image.source"),
        ("a document of a tool", result(document), f"{inside}.document.source"),
        ("a server of tools", {**hi, "mcp_servers": servers}, "mcp_servers"),
        (
            "a schema",
            {**hi, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
            "output_config.format",
        ),
    ]
    return [Case(f"messages: {name}", "/v1/messages", fields, param) for name, fields, param in told]


def _responses(url: str, schema: dict[str, Any]) -> list[Case]:
    def user(*content: dict[str, Any]) -> dict[str, Any]:
        return {"input": [{"role": "user", "content": [{"type": "input_text", "text": "see"}, *content]}]}

    def result(kind: str, output: Any) -> dict[str, Any]:
        called = {"type": kind, "call_id": "c", "name": "f", "arguments": "{}"}
        return {"input": [called, {"type": f"{kind}_output", "call_id": "c", "output": output}]}

    image, file = {"type": "input_image", "image_url": url}, {"type": "input_file", "file_url": url}
    screenshot = {"type": "computer_screenshot", "image_url": url}
    mask = {"type": "image_generation", "input_image_mask": {"image_url": url}}
    server = {"type": "mcp", "server_label": "x", "server_url": url}
    format = {"type": "json_schema", "name": "s", "schema": schema, "strict": True}
    at = "input.0.content.1"
    told = [
        ("an image", user(image), f"{at}.image_url"),
        ("a file", user(file), f"{at}.file_url"),
        ("a file beside a text", user({**file, "type": "input_text", "text": "x"}), f"{at}.file_url"),
        ("an image of a tool", result("function_call", [image]), "input.1.output.0.image_url"),
        ("a file of a tool", result("function_call", [file]), "input.1.output.0.file_url"),
        ("a screenshot", result("computer_call", screenshot), "input.1.output.0.image_url"),
        ("a server of tools", {"input": "hi", "tools": [server]}, "tools.0.server_url"),
        ("a mask", {"input": "hi", "tools": [mask]}, "tools.0.input_image_mask.image_url"),
        ("a schema", {"input": "hi", "text": {"format": format}}, "text.format"),
    ]
    return [Case(f"responses: {name}", "/v1/responses", fields, param) for name, fields, param in told]
