"""Reads a message's content, in chat completions, Responses or Ollama's chat.

Clients that speak several protocols mix them: LiteLLM sends Anthropic's `thinking` to chat completions,
Cursor the parts of Responses. One struct has the fields of all of them.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec

from ... import chat
from ...errors import bad_field
from ..conversation import tool_result
from ..fields.body import free_json, image, image_url, json_text, lenient_arguments, misplaced, unsupported
from ..fields.text_files import file_part


class Url(msgspec.Struct):
    url: str
    detail: str | None = None


class File(msgspec.Struct):
    file_data: str | None = None
    filename: str | None = None
    file_id: str | None = None


class Source(msgspec.Struct):
    """The source of an image or a document, as Anthropic's."""

    type: str | None = None
    data: str | None = None
    media_type: str | None = None
    url: str | None = None


class Content(File):
    """One entry of a content list, or of a reasoning item's `content` or `summary`."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    thinking: Union[str, list[Content], None] = None
    signature: str | None = None
    image_url: Union[str, Url, None] = None
    detail: str | None = None
    file: File | None = None
    file_url: Any = None
    source: Source | None = None
    title: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: Union[str, list[Content], None] = None
    is_error: bool | None = None
    data: Any = None


_THOUGHTS = ("thinking", "reasoning", "reasoning_text", "summary_text")
_SEALED = ("redacted_thinking", "encrypted_content")
"""Kinds of content that only their server reads."""
IMAGES = ("image_url", "input_image", "computer_screenshot", "image")
_FILES = ("file", "input_file", "document")
_TEXTS = ("text", "input_text", "output_text", "refusal")
KINDS = frozenset((*IMAGES, *_FILES, *_TEXTS, *_THOUGHTS, *_SEALED, "tool_use", "tool_result", "input_json"))
"""Types of content that are read as what they are; any other's text is read too."""


def content_parts(content: str | list[Content] | None, role: str, param: str) -> list[chat.Part]:
    """Read the parts of a message of `role`. `param`: the field that `content` is. Raises InvalidRequest."""
    if isinstance(content, str):
        return [chat.TextPart(content)] if content else []
    parts = (content_part(entry, role, f"{param}.{index}") for index, entry in enumerate(content or []))
    return [part for part in parts if part is not None]


def content_part(entry: Content, role: str, param: str) -> chat.Part | None:
    """Read one entry; None: the model reads nothing of it."""
    kind = entry.type or ""
    if kind in IMAGES or entry.image_url is not None:
        return _image(entry, role, param)
    if kind in _FILES or entry.file_url is not None:
        return _file(entry, role, param)
    if kind == "tool_use":
        return _call(entry, role, param)
    if kind == "tool_result":
        return _result(entry, role, param)
    if kind in _THOUGHTS:
        thought = entry.text or text_of(entry.thinking)
        if role != "assistant" and thought:
            raise misplaced(f"content of type {kind!r}", role, param)
        return chat.ThinkingPart(thought, entry.signature or "") if thought else None
    if kind in _SEALED:
        return None
    if kind == "input_json":
        if entry.data is None:
            raise bad_field(f"{param}.data", "this field is required")
        return chat.TextPart(json_text(entry.data, f"{param}.data"))
    text = entry.text if entry.text is not None else entry.refusal
    if text is None:
        if kind in _TEXTS:
            name = "refusal" if kind == "refusal" else "text"
            raise bad_field(f"{param}.{name}", "this field is required")
        raise unsupported(kind or "none", f"{param}.type")
    return chat.TextPart(text) if text else None


def _image(entry: Content, role: str, param: str) -> chat.ImagePart:
    if role not in ("user", "tool"):
        raise misplaced("an image", role, param)
    source = entry.source
    if source is not None and source.data is not None:
        return image(source.data, source.media_type or "", f"{param}.source")
    given, where = entry.image_url, f"{param}.image_url"
    if given is None and source is not None and source.url is not None:
        given, where = source.url, f"{param}.source"
    if given is None:
        if entry.file_id is not None:
            raise bad_field(f"{param}.file_id", "no files are kept here; send image_url")
        raise bad_field(
            f"{param}.{'source' if entry.type == 'image' else 'image_url'}", "this field is required"
        )
    given = Url(given) if isinstance(given, str) else given
    return image_url(given.url, where, entry.detail or given.detail)


def _file(entry: Content, role: str, param: str) -> chat.Part:
    file, where = (entry.file, f"{param}.file") if entry.file is not None else (entry, param)
    if (source := entry.source) is not None:
        if source.type == "text":
            return chat.TextPart(source.data or "")
        return file_part(source.data, entry.title, None, source.url, role, f"{param}.source")
    if entry.type == "file" and entry.file is None and entry.file_data is None:
        raise bad_field(where + ".file", "this field is required")
    return file_part(file.file_data, file.filename, file.file_id, entry.file_url, role, where)


def _call(entry: Content, role: str, param: str) -> chat.ToolCallPart:
    if role != "assistant":
        raise misplaced("content of type 'tool_use'", role, param)
    for name in ("id", "name"):
        if not getattr(entry, name):
            raise bad_field(f"{param}.{name}", "this field is required")
    value = {} if entry.input is None else entry.input
    where = f"{param}.input"
    arguments = lenient_arguments(value, where) if isinstance(value, str) else free_json(value, where)
    return chat.ToolCallPart(entry.id or "", entry.name or "", arguments)


def _result(entry: Content, role: str, param: str) -> chat.ToolResultPart:
    if role not in ("user", "tool"):
        raise misplaced("content of type 'tool_result'", role, param)
    if not entry.tool_use_id:
        raise bad_field(f"{param}.tool_use_id", "this field is required")
    parts = content_parts(entry.content, "tool", f"{param}.content")
    return tool_result(entry.tool_use_id, parts, bool(entry.is_error))


def runs_of(role: chat.Role, parts: list[chat.Part]) -> list[tuple[chat.Role, list[chat.Part]]]:
    """Split a user's message, as of Anthropic's, into results and runs of parts, a message each."""
    runs: list[tuple[chat.Role, list[chat.Part]]] = []
    for part in parts:
        of_part = "tool" if isinstance(part, chat.ToolResultPart) else role
        if not runs or runs[-1][0] != of_part:
            runs.append((of_part, []))
        runs[-1][1].append(part)
    return runs or [(role, [])]


def text_of(content: str | list[Content] | None) -> str:
    if isinstance(content, str):
        return content
    return "".join(entry.text or "" for entry in content or [])
