"""Anthropic's Messages API: a body into a `GenerateRequest`. Answers: anthropic_stream.py.

Lenient where Claude Code needs it and where leniency can't mislead: unknown fields are ignored,
`system` may stand inside `messages`, consecutive messages of one role stay as they are. Transport
noise that carries no meaning for the model is dropped, so that it can't break a prefix: the
billing header, `cache_control`, redacted thinking.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union

import msgspec

from ..chat import (
    AnswerFormat,
    Conversation,
    GenerateRequest,
    Message,
    Part,
    Role,
    Sampling,
    TextPart,
    ThinkingPart,
    Tool,
    ToolCallPart,
    ToolResultPart,
)
from ..errors import InvalidRequest
from .answer_format import ResponseFormat, format_of, only
from .anthropic_server_blocks import FROM_SERVER, FromServer
from .body import MAX_INT64, MAX_TOKENS, ParsedRequest, decode, free_json, session_header, stable_json, stops
from .body import image as image_part

BILLING_PREFIX = "x-anthropic-billing-header:"
"""Claude Code's first system line. Its suffix changes with every conversation and compaction."""


MAX_USER_ID = 4096
"""Characters of `metadata.user_id` that are looked into; Claude Code's has 200."""

# --------------------------------------------------------------------------- the body


class _Block(msgspec.Struct, tag_field="type"):
    pass


class _Text(_Block, tag="text"):
    text: str


class _Thinking(_Block, tag="thinking"):
    thinking: str
    signature: str | None = None


class _RedactedThinking(_Block, tag="redacted_thinking"):
    pass


class _ToolUse(_Block, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class _ToolReference(_Block, tag="tool_reference"):
    tool_name: str


class _Base64Source(_Block, tag="base64"):
    data: str
    media_type: str


class _UrlSource(_Block, tag="url"):
    pass


class _FileSource(_Block, tag="file"):
    pass


class _Image(_Block, tag="image"):
    source: Union[_Base64Source, _UrlSource, _FileSource]


class _ToolResult(_Block, tag="tool_result"):
    tool_use_id: str
    content: Union[str, list[Union[_Text, _Image, _ToolReference]], None] = None
    is_error: bool | None = None


_AnyBlock = Union[_Text, _Thinking, _RedactedThinking, _ToolUse, _Image, _ToolResult, FromServer]


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: Union[str, list[_AnyBlock]]


class _Tool(msgspec.Struct):
    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None
    strict: bool | None = None


class _ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _OutputConfig(msgspec.Struct):
    format: ResponseFormat | None = None
    effort: str | None = None


class _ThinkingConfig(msgspec.Struct):
    type: Literal["enabled", "adaptive", "disabled"]


class _Metadata(msgspec.Struct):
    user_id: str | None = None


class MessagesBody(msgspec.Struct):
    messages: list[_Message]
    model: str | None = None
    system: Union[str, list[_Text], None] = None
    stream: bool | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_INT64)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT64)] | None = None
    stop_sequences: list[str] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _ThinkingConfig | None = None
    metadata: _Metadata | None = None
    output_config: _OutputConfig | None = None
    output_format: ResponseFormat | None = None


_decoder = msgspec.json.Decoder(MessagesBody)


# --------------------------------------------------------------------------- translation


def parse(body: bytes, headers: Mapping[str, str] | None = None) -> ParsedRequest:
    """A body of /v1/messages or /v1/messages/count_tokens. Raises InvalidRequest naming the field."""
    request = decode(_decoder, body)
    if not request.messages:
        raise InvalidRequest("messages: at least one message is required", param="messages")
    tools = _Tools(request.tools or [])
    messages = [_system(request.system)] if request.system else []
    for index, message in enumerate(request.messages):
        messages.extend(_messages(message, tools, f"messages.{index}"))
    conversation = Conversation(
        messages=tuple(message for message in messages if message is not None),
        tools=tools.listed,
        tool_choice=tools.choice(request.tool_choice),
        parallel_calls=not (request.tool_choice and request.tool_choice.disable_parallel_tool_use),
        thinking=None if request.thinking is None else request.thinking.type != "disabled",
    )
    return ParsedRequest(
        model=request.model or "",
        stream=bool(request.stream),
        generate=GenerateRequest(
            prompt=conversation,
            sampling=_sampling(request),
            session=_session(headers or {}, request.metadata),
            parent_agent=session_header(headers or {}, "x-claude-code-parent-agent-id"),
            format=_format(request),
        ),
    )


def _format(request: MessagesBody) -> AnswerFormat | None:
    config = request.output_config
    return only(
        format_of(config.format if config else None, "output_config.format"),
        format_of(request.output_format, "output_format"),
    )


def _sampling(request: MessagesBody) -> Sampling:
    greedy = request.top_p == 0  # The engine's top_p is above 0; the smallest nucleus is one token.
    top_k = None if request.top_k is None else min(max(request.top_k, 0), MAX_TOKENS)
    return Sampling(
        temperature=request.temperature,
        top_p=None if greedy else request.top_p,
        top_k=1 if greedy else top_k,
        max_tokens=None if request.max_tokens is None else min(request.max_tokens, MAX_TOKENS),
        stop=stops(request.stop_sequences, "stop_sequences"),
    )


def _session(headers: Mapping[str, str], metadata: _Metadata | None) -> str:
    named = session_header(headers, "x-claude-code-session-id", "x-claude-code-agent-id")
    if named or metadata is None or not metadata.user_id:
        return named
    if len(metadata.user_id) > MAX_USER_ID:
        return metadata.user_id[:200]
    try:
        user = msgspec.json.decode(metadata.user_id, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        user = {}
    session = user.get("session_id")
    return (session if isinstance(session, str) and session else metadata.user_id)[:200]


_BILLING = re.compile(rf"(?:{BILLING_PREFIX}[^\n]*+\n*+)*+")


def _without_billing(text: str) -> str:
    found = _BILLING.match(text)
    return text[found.end() :] if found else text


def _texts(blocks: str | list[_Text]) -> list[str]:
    return [blocks] if isinstance(blocks, str) else [block.text for block in blocks]


def _system(system: str | list[_Text]) -> Message | None:
    kept = [text for text in map(_without_billing, _texts(system)) if text]
    return Message("system", tuple(map(TextPart, kept))) if kept else None


_ALLOWED: dict[str, tuple[type, ...]] = {
    "user": (_Text, _Image, _ToolResult),
    "assistant": (_Text, _Thinking, _RedactedThinking, _ToolUse, *FROM_SERVER),
    "system": (_Text,),
}


def _messages(message: _Message, tools: _Tools, param: str) -> list[Message]:
    """One message, or several: tool results stand in messages of their own, order kept."""
    content = [_Text(message.content)] if isinstance(message.content, str) else message.content
    runs: list[tuple[Role, list[Part]]] = []
    for index, block in enumerate(content):
        where = f"{param}.content.{index}"
        if not isinstance(block, _ALLOWED[message.role]):
            kind = block.__struct_config__.tag
            raise InvalidRequest(
                f"{where}: a {kind} block can't stand in a {message.role} message", param=where
            )
        role: Role = "tool" if isinstance(block, _ToolResult) else message.role
        if not runs or runs[-1][0] != role:
            runs.append((role, []))
        part = _part(block, tools, where, system=role == "system")
        if part is not None:
            runs[-1][1].append(part)
    if not runs:
        runs.append((message.role, []))
    return [Message(role, tuple(parts)) for role, parts in runs]


def _part(block: _AnyBlock, tools: _Tools, param: str, system: bool) -> Part | None:
    if isinstance(block, _Text):
        text = _without_billing(block.text) if system else block.text
        return TextPart(text) if text else None
    if isinstance(block, _Thinking):
        return ThinkingPart(block.thinking, block.signature or "")
    if isinstance(block, _ToolUse):
        return ToolCallPart(block.id, block.name, free_json(block.input, f"{param}.input"))
    if isinstance(block, _Image):
        return _image(block, param)
    if isinstance(block, _ToolResult):
        return _tool_result(block, tools, param)
    return None


def _image(block: _Image, param: str):
    if not isinstance(block.source, _Base64Source):
        kind = block.source.__struct_config__.tag
        raise InvalidRequest(
            f"{param}.source: images of type {kind!r} are not fetched; send base64", param=f"{param}.source"
        )
    return image_part(block.source.data, block.source.media_type, f"{param}.source")


def _tool_result(block: _ToolResult, tools: _Tools, param: str) -> ToolResultPart:
    content = [_Text(block.content)] if isinstance(block.content, str) else block.content or []
    texts, images = [], []
    for index, item in enumerate(content):
        if isinstance(item, _Image):
            images.append(_image(item, f"{param}.content.{index}"))
        else:
            texts.append(item.text if isinstance(item, _Text) else tools.described(item.tool_name))
    return ToolResultPart(block.tool_use_id, "\n".join(texts), bool(block.is_error), tuple(images))


class _Tools:
    """The tools of a request: those to list in the prompt, and those only referred to.

    A deferred tool enters the list of the *request* when the model has searched for it. Listing it
    in the prompt would change its head, so its schema is told where the reference stands.
    Server-side tools (no `input_schema`) run at Anthropic; there is nothing to call here.
    """

    def __init__(self, given: list[_Tool]):
        self._known: dict[str, Tool] = {}
        self._names: set[str] = set()
        listed = []
        for index, tool in enumerate(given):
            param = f"tools.{index}"
            self._names.add(tool.name or "")
            if tool.input_schema is None:
                if tool.type in (None, "custom"):
                    raise InvalidRequest(
                        f"{param}.input_schema: this field is required", param=f"{param}.input_schema"
                    )
                continue
            if not tool.name:
                raise InvalidRequest(f"{param}.name: this field is required", param=f"{param}.name")
            schema = free_json(tool.input_schema, f"{param}.input_schema")
            self._known[tool.name] = Tool(tool.name, tool.description or "", schema, strict=bool(tool.strict))
            if not tool.defer_loading:
                listed.append(self._known[tool.name])
        self.listed = tuple(listed)

    def described(self, name: str) -> str:
        """The tool as the JSON text that templates list tools with."""
        tool = self._known.get(name, Tool(name))
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return stable_json({"type": "function", "function": function})

    def choice(self, given: _ToolChoice | None) -> str:
        if given is None or given.type == "auto" or not self._names:
            return "auto"
        if given.type == "none":
            return "none"
        if given.type == "any":
            return "required" if self.listed else "auto"
        if given.name not in self._names:
            raise InvalidRequest(
                f"tool_choice.name: there is no tool {given.name!r}", param="tool_choice.name"
            )
        if any(tool.name == given.name for tool in self.listed):
            return f"named:{given.name}"
        if given.name in self._known:
            raise InvalidRequest(
                f"tool_choice.name: {given.name!r} is deferred, so the model is not told of it at first and "
                "it can't be forced",
                param="tool_choice.name",
            )
        return "auto"
