"""Turns contents of the Gemini API into messages.

SDKs keep an answer as they got it, a content a chunk: contents of the model in a row are one message, and
their texts are joined as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import chat
from ...errors import bad_field
from ..conversation import tool_result
from ..fields.body import NOT_FETCHED, free_json, from_base64, image, is_pdf, misplaced, pdf, stable_json
from ..fields.text_files import file_part
from .body import Blob, Content, FunctionCall, FunctionResponse, Part, ResponsePart


def parts_of(content: Content) -> Sequence[Part]:
    return [content.parts] if isinstance(content.parts, Part) else content.parts or ()


def system_of(instruction: Content | str | None) -> list[chat.Message]:
    """Return the system message, if any. Raises InvalidRequest for parts that are no text."""
    if instruction is None:
        return []
    if isinstance(instruction, str):
        texts = [instruction]
    else:
        texts = []
        for index, part in enumerate(parts_of(instruction)):
            if part.inline_data or part.file_data or part.function_call or part.function_response:
                raise misplaced("anything but text", "system", f"systemInstruction.parts.{index}")
            texts.append(part.text or "")
    parts = tuple(chat.TextPart(text) for text in texts if text)
    return [chat.Message("system", parts)] if parts else []


class _Calls:
    """Calls without a result yet. Some clients name ids, others only the function.

    excerpt  a result whose call is elsewhere is the user's text
    """

    def __init__(self, excerpt: bool) -> None:
        self._excerpt = excerpt
        self._waiting: dict[str, str] = {}
        self._answered: dict[str, FunctionResponse] = {}
        self._count = 0

    def call(self, call: FunctionCall, param: str) -> chat.ToolCallPart:
        self._count += 1
        id = call.id or f"call_{self._count}"
        self._waiting[id] = call.name
        return chat.ToolCallPart(id, call.name, free_json(call.args or {}, f"{param}.args"))

    def lacks(self, response: FunctionResponse) -> bool:
        """Return whether the call of `response` lies outside of an excerpt."""
        known = response.id in self._waiting or response.id in self._answered
        return self._excerpt and not known and response.name not in self._waiting.values()

    def answered(self, response: FunctionResponse, param: str) -> str | None:
        """Return the id of the call that `response` answers; it no longer waits. None: a repeated `response`,
        as Gemini CLI sends each twice when it resumes a session.
        """
        found = response.id if response.id in self._waiting else None
        if found is None and response.id and self._answered.get(response.id) == response:
            return None
        if found is None:
            named = (id for id, name in self._waiting.items() if name == response.name)
            found = next(named, None)
        if found is None:
            raise bad_field(
                f"{param}.name",
                f"no functionCall of {response.name[:100]!r} without a result stands before this result",
            )
        del self._waiting[found]
        self._answered[found] = response
        return found


def messages_of(contents: Sequence[Content], *, excerpt: bool = False) -> list[chat.Message]:
    """Make messages. `excerpt`: of a part of a conversation, as when tokens are counted. Raises
    InvalidRequest.

    Raises InvalidRequest naming the part."""
    messages: list[chat.Message] = []
    calls = _Calls(excerpt)
    for index, content in enumerate(contents):
        param = f"contents.{index}.parts"
        if content.role == "model":
            parts = [
                part
                for at, each in enumerate(parts_of(content))
                for part in _said(each, calls, f"{param}.{at}")
            ]
            if messages and messages[-1].role == "assistant":
                parts = [*messages.pop().parts, *parts]
            messages.append(chat.Message("assistant", tuple(_joined(parts))))
            continue
        runs: list[tuple[chat.Role, list[chat.Part]]] = []
        for at, part in enumerate(parts_of(content)):
            role, made = _sent(part, content.role, calls, f"{param}.{at}")
            if made and (not runs or runs[-1][0] != role):
                runs.append((role, []))
            if made:
                runs[-1][1].extend(made)
        messages += [chat.Message(role, tuple(parts)) for role, parts in runs]
    return messages


def _said(part: Part, calls: _Calls, param: str) -> list[chat.Part]:
    """Return parts of the model's own content."""
    if part.function_call is not None:
        return [calls.call(part.function_call, f"{param}.functionCall")]
    if part.function_response is not None:
        raise misplaced("a functionResponse", "model", f"{param}.functionResponse")
    if part.inline_data is not None or part.file_data is not None:
        raise misplaced("a document or an image", "model", f"{param}.inlineData")
    if not part.text:
        return []
    return [chat.ThinkingPart(part.text) if part.thought else chat.TextPart(part.text)]


def _joined(parts: Sequence[chat.Part]) -> list[chat.Part]:
    """Join texts in a row, and thoughts."""
    made: list[chat.Part] = []
    for part in parts:
        last = made[-1] if made else None
        if isinstance(part, chat.TextPart) and isinstance(last, chat.TextPart):
            made[-1] = chat.TextPart(last.text + part.text)
        elif isinstance(part, chat.ThinkingPart) and isinstance(last, chat.ThinkingPart):
            made[-1] = chat.ThinkingPart(last.text + part.text)
        else:
            made.append(part)
    return made


def _sent(part: Part, role: str | None, calls: _Calls, param: str) -> tuple[chat.Role, list[chat.Part]]:
    """Return the role and parts of a content that is not the model's."""
    if part.function_call is not None:
        raise misplaced("a functionCall", role or "user", f"{param}.functionCall")
    if part.function_response is not None:
        param += ".functionResponse"
        if calls.lacks(part.function_response):
            return "user", _result_parts(part.function_response, param)[0]
        result = _result(part.function_response, calls, param)
        return "tool", [result] if result else []
    if part.inline_data is not None or part.file_data is not None:
        if role == "system":
            raise misplaced("a document or an image", role, f"{param}.inlineData")
        return "user", [_media(part, param)]
    return "system" if role == "system" else "user", [chat.TextPart(part.text)] if part.text else []


def _result(response: FunctionResponse, calls: _Calls, param: str) -> chat.ToolResultPart | None:
    parts, is_error = _result_parts(response, param)
    id = calls.answered(response, param)
    return tool_result(id, parts, is_error) if id else None


def _result_parts(response: FunctionResponse, param: str) -> tuple[list[chat.Part], bool]:
    """Return the parts of a result, and whether it is an error."""
    text, is_error = _result_text(response.response or {}, param)
    media = [_media(part, f"{param}.parts.{at}") for at, part in enumerate(response.parts or ())]
    return [*([chat.TextPart(text)] if text else []), *media], is_error


def _result_text(response: dict[str, Any], param: str) -> tuple[str, bool]:
    """Return a result's text, and whether it is an error. SDKs use `output`, `result` or `error`."""
    if len(response) == 1:
        key, value = next(iter(response.items()))
        if key in ("output", "result", "error") and isinstance(value, str):
            return value, key == "error"
    fit = free_json(response, f"{param}.response")
    return (stable_json(fit) if fit else ""), "error" in fit and len(fit) == 1


def _media(part: Part | ResponsePart, param: str) -> chat.Part:
    if (blob := part.inline_data) is None:
        raise bad_field(f"{param}.fileData", f"{NOT_FETCHED}; send the file itself as inlineData")
    return _blob(blob, f"{param}.inlineData")


def _blob(blob: Blob, param: str) -> chat.Part:
    kind = (blob.mime_type or "").partition(";")[0].strip().lower()
    if blob.data is None:
        raise bad_field(f"{param}.data", "this field is required")
    if kind.startswith(("audio/", "video/")):
        raise bad_field(
            f"{param}.mimeType", f"{kind!r} is not read here: no model hears or sees films; send text"
        )
    if kind == "application/pdf" or is_pdf(blob.data):
        return pdf(from_base64(blob.data, "document", f"{param}.data"), blob.display_name, param)
    if kind.startswith("image/"):
        return image(blob.data, kind, f"{param}.data")
    return file_part(
        f"data:{kind or 'text/plain'};base64,{blob.data}", blob.display_name, None, None, "user", param
    )
