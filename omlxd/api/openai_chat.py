"""OpenAI's chat completions: a body into a `GenerateRequest`. Answers: openai_chat_stream.py.

What the engine can't honour and what would change the answer (audio, obsolete fields) is refused,
never ignored; unknown fields are ignored, as every OpenAI-compatible server does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union

import msgspec

from ..chat import (
    Conversation,
    GenerateRequest,
    ImagePart,
    Message,
    Part,
    TextPart,
    ThinkingPart,
    Tool,
    ToolCallPart,
    ToolResultPart,
)
from ..errors import InvalidRequest
from .body import ParsedRequest, decode, free_json, image_url, lenient_arguments
from .dialects import effort_of, thinking_of
from .openai_fields import CommonBody, Limit, Verbosity, answer_format, limit_of, sampling, session
from .openai_tool_choice import tool_choice

RESERVED_TEMPLATE_ARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Arguments of apply_chat_template that are not the template's own: a client may not set them."""


# --------------------------------------------------------------------------- the body


class _TextItem(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class _Refusal(msgspec.Struct, tag_field="type", tag="refusal"):
    refusal: str


class _Url(msgspec.Struct):
    url: str


class _ImageItem(msgspec.Struct, tag_field="type", tag="image_url"):
    image_url: Union[_Url, str]


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: Union[str, dict[str, Any], None] = None


class _Call(msgspec.Struct):
    function: _CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Union[str, list[Union[_TextItem, _ImageItem, _Refusal]], None] = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


class _Function(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    type: Literal["function"]
    function: _Function


class ChatBody(CommonBody, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: Limit | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    modalities: list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    verbosity: Verbosity | None = None


_decoder = msgspec.json.Decoder(ChatBody)


# --------------------------------------------------------------------------- translation


def parse(body: bytes, headers: Mapping[str, str] | None = None) -> ParsedRequest:
    """A body of /v1/chat/completions. Raises InvalidRequest naming the field."""
    request = decode(_decoder, body)
    if not request.messages:
        raise InvalidRequest("messages: at least one message is required", param="messages")
    if request.functions:
        raise InvalidRequest("functions: this field is obsolete, use tools", param="functions")
    if request.modalities not in (None, [], ["text"]):
        raise InvalidRequest("modalities: only text is supported", param="modalities")
    tools = tuple(_tool(tool, f"tools.{index}") for index, tool in enumerate(request.tools or []))
    names = {tool.name for tool in tools}
    choice, allowed = tool_choice(
        request.tool_choice, names, lambda given: [given.called] if given.called in names else None
    )
    thinking, template_args = _thinking(request)
    conversation = Conversation(
        messages=tuple(_message(message, f"messages.{i}") for i, message in enumerate(request.messages)),
        tools=tools,
        tool_choice=choice,
        allowed_tools=allowed,
        parallel_calls=request.parallel_tool_calls is not False,
        thinking=thinking,
        template_args=template_args,
    )
    max_tokens = limit_of(request.max_tokens, "max_tokens")
    if request.max_completion_tokens is not None:
        max_tokens = limit_of(request.max_completion_tokens, "max_completion_tokens")
    return ParsedRequest(
        model=request.model or "",
        stream=bool(request.stream),
        generate=GenerateRequest(
            prompt=conversation,
            sampling=sampling(request, max_tokens, _logprobs(request)),
            session=session(request, headers or {}),
            cache_salt=request.cache_salt or "",
            format=answer_format(request),
        ),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        n=request.n or 1,
    )


def _logprobs(request: ChatBody) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise InvalidRequest("top_logprobs: logprobs must be true", param="top_logprobs")
    return None


def _thinking(request: ChatBody) -> tuple[bool | None, dict[str, Any]]:
    """Whether to think, and what else the template is told. The most explicit field wins."""
    args = free_json(request.chat_template_kwargs or {}, "chat_template_kwargs")
    for name in args:
        if name in RESERVED_TEMPLATE_ARGS or name.startswith("_"):
            param = f"chat_template_kwargs.{name}"
            raise InvalidRequest(f"{param}: this can't be set by a request", param=param)
    asked = args.pop("enable_thinking", None)
    if asked is not None and not isinstance(asked, bool):
        param = "chat_template_kwargs.enable_thinking"
        raise InvalidRequest(f"{param}: true or false is needed", param=param)
    effort = effort_of(request)
    if effort:
        args.setdefault("reasoning_effort", effort)
    if request.verbosity:
        args.setdefault("verbosity", request.verbosity)
    if asked is None:
        asked = thinking_of(request)
    if asked is None and effort:
        asked = True
    return request.enable_thinking if request.enable_thinking is not None else asked, args


def _tool(tool: _Tool, param: str) -> Tool:
    function = tool.function
    schema = free_json(function.parameters or {}, f"{param}.function.parameters")
    return Tool(function.name, function.description or "", schema, strict=bool(function.strict))


def _message(message: _Message, param: str) -> Message:
    parts = _content(message, param)
    if message.role == "tool":
        if message.tool_call_id is None:
            where = f"{param}.tool_call_id"
            raise InvalidRequest(f"{where}: this field is required", param=where)
        text = "\n".join(part.text for part in parts if isinstance(part, TextPart))
        images = tuple(part for part in parts if isinstance(part, ImagePart))
        return Message("tool", (ToolResultPart(message.tool_call_id, text, images=images),))
    if message.role != "assistant":
        if message.content is None:
            raise InvalidRequest(f"{param}.content: this field is required", param=f"{param}.content")
        return Message("system" if message.role == "developer" else message.role, tuple(parts))
    if thought := message.reasoning_content or message.reasoning:
        parts.insert(0, ThinkingPart(thought))
    for index, call in enumerate(message.tool_calls or []):
        parts.append(_call(call, index, f"{param}.tool_calls.{index}"))
    return Message("assistant", tuple(parts))


def _content(message: _Message, param: str) -> list[Part]:
    content = message.content
    if content is None:
        content = message.refusal or ""
    if isinstance(content, str):
        return [TextPart(content)] if content else []
    parts: list[Part] = []
    for index, item in enumerate(content):
        where = f"{param}.content.{index}"
        if isinstance(item, _ImageItem):
            if message.role not in ("user", "tool"):
                raise InvalidRequest(
                    f"{where}: an image can't stand in a {message.role} message", param=where
                )
            url = item.image_url if isinstance(item.image_url, str) else item.image_url.url
            parts.append(image_url(url, f"{where}.image_url"))
        elif text := item.text if isinstance(item, _TextItem) else item.refusal:
            parts.append(TextPart(text))
    return parts


def _call(call: _Call, index: int, param: str) -> ToolCallPart:
    given = call.function.arguments
    where = f"{param}.function.arguments"
    arguments = free_json(given, where) if isinstance(given, dict) else lenient_arguments(given or "", where)
    return ToolCallPart(call.id or f"call_{index}", call.function.name, arguments)
