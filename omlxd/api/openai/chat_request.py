"""OpenAI's chat completions: a body into a `GenerateRequest`.

What can't be honoured and would change the answer (audio) is refused; unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Union

import msgspec

from ... import chat
from ...errors import bad_field
from ..conversation import begun_answer, conversation, tool_result
from ..fields.body import ParsedRequest, decode, free_json, lenient_arguments, refuse
from ..fields.types import TopLogprobs
from .chat_tools import FUNCTIONS, CallShape, ChatTool, Function, chat_tools
from .content import Content, content_parts, runs_of, text_of
from .fields import (
    NO_MODERATION,
    ChatFields,
    Limit,
    Verbosity,
    answer_format,
    generate_request,
    limit_of,
    parsed_fields,
    session,
    template_fields,
)
from .tool_choice import CUSTOM_INPUT

# --------------------------------------------------------------------------- the body


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: Union[str, dict[str, Any], None] = None


class _CalledCustom(msgspec.Struct):
    name: str
    input: str


class _Call(msgspec.Struct):
    """A call, with `function` or `custom`."""

    function: _CalledFunction | None = None
    custom: _CalledCustom | None = None
    id: str | None = None
    type: Literal["function", "custom"] | None = None


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Union[str, list[Content], None] = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    function_call: _CalledFunction | None = None
    prefix: bool | None = None
    """Whether the answer begins with this message (DeepSeek, Mistral)."""


class _Prediction(msgspec.Struct, tag_field="type", tag="content"):
    content: Union[str, list[Content]]

    @property
    def text(self) -> str:
        return text_of(self.content)


class ChatBody(ChatFields, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: Limit | None = None
    tools: list[ChatTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Function] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    moderation: Any = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    echo: Any = None
    web_search_options: Any = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    verbosity: Verbosity | None = None
    prediction: _Prediction | None = None


class ChatRequest(ParsedRequest, frozen=True, kw_only=True):
    """A parsed body, and the form of its calls."""

    calls: CallShape = FUNCTIONS


_decoder = msgspec.json.Decoder(ChatBody)


# --------------------------------------------------------------------------- translation


def parse(body: bytes, headers: Mapping[str, str] | None = None) -> ChatRequest:
    """Read a body of /v1/chat/completions. Raises InvalidRequest."""
    request = decode(_decoder, body)
    if not request.messages:
        raise bad_field("messages", "at least one message is required")
    refuse(
        {
            "modalities": (request.modalities not in (None, [], ["text"]), "only text is supported"),
            "moderation": (request.moderation, NO_MODERATION),
            "echo": (request.echo, "an answer does not repeat the last message; leave it out"),
            "web_search_options": (
                request.web_search_options is not None,
                "nothing is searched here; leave it out",
            ),
        }
    )
    tools = chat_tools(request.tools, request.tool_choice, request.functions, request.function_call)
    prompt = conversation(
        _messages(request.messages),
        tools.tools,
        tool_choice=tools.choice,
        allowed_tools=tools.allowed,
        parallel_calls=request.parallel_tool_calls is not False and not tools.shape.obsolete,
        **template_fields(request, request.verbosity),
    )
    format = answer_format(request)
    if asked_by := _continues(request):
        prompt = begun_answer(prompt, format, asked_by)
    max_tokens = limit_of(request.max_tokens, "max_tokens")
    if request.max_completion_tokens is not None:
        max_tokens = limit_of(request.max_completion_tokens, "max_completion_tokens")
    generate = generate_request(
        request, prompt, max_tokens, _logprobs(request), session(request, headers or {}), format
    )
    if request.prediction is not None:
        generate = msgspec.structs.replace(generate, prediction=request.prediction.text)
    return ChatRequest(
        **parsed_fields(request),
        generate=generate,
        calls=tools.shape,
    )


def _continues(request: ChatBody) -> str:
    """Return the field that asks to continue the last message; "" if none does. Raises InvalidRequest."""
    last = len(request.messages) - 1
    for index, message in enumerate(request.messages):
        if message.prefix and (index < last or message.role != "assistant"):
            raise bad_field(
                f"messages.{index}.prefix", "only the last message, the assistant's, can be a prefix"
            )
    if request.continue_final_message:
        if request.add_generation_prompt:
            raise bad_field("add_generation_prompt", "continue_final_message is asked for; one of them only")
        return "continue_final_message"
    if request.add_generation_prompt is False:
        return "add_generation_prompt"
    return f"messages.{last}.prefix" if request.messages[last].prefix else ""


def _logprobs(request: ChatBody) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise bad_field("top_logprobs", "logprobs must be true")
    return None


def _messages(messages: list[_Message]) -> tuple[chat.Message, ...]:
    out: list[chat.Message] = []
    asked = ""
    """Id of the last `function_call`: such calls and results have none, and alternate."""
    for index, message in enumerate(messages):
        if message.function_call is not None:
            asked = f"function_{index}"
        out += _message(message, asked, f"messages.{index}")
    return tuple(out)


def _message(message: _Message, asked: str, param: str) -> list[chat.Message]:
    parts = _content(message, param)
    if message.role in ("tool", "function"):
        answered = message.tool_call_id if message.role == "tool" else asked or None
        if answered is None:
            where, what = f"{param}.tool_call_id", "this field is required"
            if message.role == "function":
                where, what = f"{param}.role", "no message before this one has a function_call"
            raise bad_field(where, what)
        return [chat.Message("tool", (tool_result(answered, parts),))]
    if message.role != "assistant":
        if message.content is None:
            raise bad_field(f"{param}.content", "this field is required")
        role: chat.Role = "user" if message.role == "user" else "system"
        return [chat.Message(each, tuple(those)) for each, those in runs_of(role, parts)]
    thought = message.reasoning_content or message.reasoning or message.thinking
    if thought and not any(isinstance(part, chat.ThinkingPart) for part in parts):
        parts.insert(0, chat.ThinkingPart(thought))
    for index, call in enumerate(message.tool_calls or []):
        parts.append(_call(call, index, f"{param}.tool_calls.{index}"))
    if message.function_call is not None:
        parts.append(_called(message.function_call, asked, f"{param}.function_call"))
    return [chat.Message("assistant", tuple(parts))]


def _content(message: _Message, param: str) -> list[chat.Part]:
    content = message.refusal if message.content is None else message.content
    return content_parts(content, message.role, f"{param}.content")


def _call(call: _Call, index: int, param: str) -> chat.ToolCallPart:
    id = call.id or f"call_{index}"
    if call.custom is not None:
        return chat.ToolCallPart(id, call.custom.name, {CUSTOM_INPUT: call.custom.input})
    if call.function is None:
        raise bad_field(f"{param}.{call.type or 'function'}", "this field is required")
    return _called(call.function, id, f"{param}.function")


def _called(function: _CalledFunction, id: str, param: str) -> chat.ToolCallPart:
    value, where = function.arguments, f"{param}.arguments"
    arguments = free_json(value, where) if isinstance(value, dict) else lenient_arguments(value or "", where)
    return chat.ToolCallPart(id, function.name, arguments)
