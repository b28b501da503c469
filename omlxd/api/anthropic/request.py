"""Anthropic's Messages API: a body into a `GenerateRequest`.

Unknown fields are ignored, `system` may stand inside `messages`, and messages of one role in a row stay as
they are. `cache_control` and redacted thinking are dropped. A field that would change what the model reads,
and can't be served, is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union

import msgspec

from ... import chat
from ...errors import InvalidRequest, bad_field
from ..answer.answer_format import ResponseFormat, format_of, only
from ..answer.thinking import ThinkingFields, hides_thinking, thinking_fields
from ..conversation import begun_answer, conversation, tool_result
from ..fields.body import (
    MAX_TOKENS,
    ParsedRequest,
    decode,
    free_json,
    image_url,
    lenient_arguments,
    misplaced,
    not_contacted,
    nucleus,
    refuse,
    session_header,
    stops,
)
from ..fields.text_files import file_part
from ..fields.types import MAX_INT64, Temperature, TopK, TopP
from . import blocks, threads
from .documents import browser_state_text, document_parts, image_block, search_result_text
from .tools import ToolChoice, Tools, as_tool_choice, engine_id

# --------------------------------------------------------------------------- the body


class _Message(msgspec.Struct):
    """A message. `content` may be absent from a system message that only sets something."""

    raw_role: Literal["user", "assistant", "system", "developer"] = msgspec.field(name="role")
    content: Union[str, list[blocks.AnyBlock], None] = None
    clear_at: str | None = None

    @property
    def role(self) -> Literal["user", "assistant", "system"]:
        return "system" if self.raw_role == "developer" else self.raw_role  # OpenAI's word.


class _OutputConfig(msgspec.Struct):
    format: ResponseFormat | None = None
    effort: str | None = None


class _ThinkingConfig(msgspec.Struct):
    """How to think. `between_tools` is no thinking either, at Anthropic too."""

    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    budget_tokens: int | None = None


MAX_USER_ID = 4096
"""Characters of `metadata.user_id` that are searched; Claude Code's has 200."""


class Metadata(ThinkingFields, kw_only=True):
    user_id: str | None = None


class MessagesBody(ThinkingFields, kw_only=True):
    messages: list[_Message]
    model: str | None = None
    system: Union[str, list[blocks.AnyText], None] = None
    stream: bool | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_INT64)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: list[str] | None = None
    tools: list[blocks.ToolParam] | None = None
    tool_choice: ToolChoice | str | None = None
    thinking: _ThinkingConfig | None = None
    metadata: Metadata | None = None
    output_config: _OutputConfig | None = None
    output_format: ResponseFormat | None = None
    thread: threads.Create | threads.Continue | None = None
    compaction: Any = None
    container: Any = None
    mcp_servers: list[Any] | None = None


_decoder = msgspec.json.Decoder(MessagesBody)
_NOTHING_BEGUN = chat.Message("assistant", ())
"""An assistant's message without content, dropped at the end of a conversation."""


# --------------------------------------------------------------------------- translation


def parse(
    body: bytes, headers: Mapping[str, str] | None = None, held: threads.HeldThread = lambda *_: None
) -> ParsedRequest:
    """Read a body of /v1/messages or /v1/messages/count_tokens. Raises InvalidRequest naming the
    field, and ThreadError for a thread.

    held  the threads that are kept
    """
    try:
        request = decode(_decoder, body)
    except InvalidRequest as error:
        raise threads.in_threads_words(error) from None
    if not request.messages:
        raise bad_field("messages", "at least one message is required")
    if request.thread is None:
        return _parsed(request, headers or {})
    owner = threads.owner_of(headers or {})
    fields = threads.conversation_of(body, request.thread, owner, held)
    parsed = _parsed(decode(_decoder, threads.with_conversation(body, fields)), headers or {})
    return threads.ThreadRequest(
        **msgspec.structs.asdict(parsed),
        owner=owner,
        conversation=msgspec.json.encode(fields),
        previous=request.thread.previous_message_id if isinstance(request.thread, threads.Continue) else "",
    )


def _parsed(request: MessagesBody, headers: Mapping[str, str]) -> ParsedRequest:
    _refuse_server_state(request)
    shown = list(_shown(request.messages))
    tools = Tools(request.tools or [], (change for each in shown for change in _changes(*each)))
    messages = _system(request.system or "")
    for index, skip, message in shown:
        messages.extend(_messages(message, tools, f"messages.{index}", skip))
    choice = as_tool_choice(request.tool_choice)
    tool_choice, allowed_tools = tools.choice(choice)
    if messages and messages[-1] == _NOTHING_BEGUN:
        messages.pop()
    prompt = conversation(
        messages,
        tools.listed,
        tool_choice=tool_choice,
        allowed_tools=allowed_tools,
        later_tools=tools.later,
        parallel_calls=not (choice and choice.disable_parallel_tool_use),
        **thinking_fields(request),
    )
    format = _format(request)
    if _ends_in_text(prompt.messages):
        prompt = begun_answer(prompt, format, "messages")
    return ParsedRequest(
        model=request.model or "",
        stream=bool(request.stream),
        generate=chat.GenerateRequest(
            prompt=prompt,
            sampling=_sampling(request),
            session=session_of(headers, request.metadata),
            parent_agent=parent_agent(headers),
            format=format,
            hides_thinking=hides_thinking(request),
        ),
    )


def parse_to_answer(
    body: bytes, headers: Mapping[str, str] | None = None, held: threads.HeldThread = lambda *_: None
) -> ParsedRequest:
    """Read a conversation to be answered, not only counted, like `parse`."""
    parsed = parse(body, headers, held)
    prompt = parsed.generate.prompt
    assert isinstance(prompt, chat.Conversation)
    if not prompt.continue_final and prompt.messages and prompt.messages[-1].role == "assistant":
        raise bad_field(
            "messages",
            "the last one is the assistant's and doesn't end in text, so it can't be continued; "
            "end with a user's message or with results",
        )
    return parsed


def _ends_in_text(messages: tuple[chat.Message, ...]) -> bool:
    last = messages[-1] if messages else _NOTHING_BEGUN
    return last.role == "assistant" and bool(last.parts) and isinstance(last.parts[-1], chat.TextPart)


def _refuse_server_state(request: MessagesBody) -> None:
    """Refuse server state: the model would miss what the client thinks it has."""
    refuse(
        {
            "compaction": (
                request.compaction is not None,
                "conversations are not summarised here; leave it out and ask for a summary in a message",
            ),
            "container": (
                isinstance(request.container, dict) and request.container.get("skills"),
                "skills run in containers at Anthropic; leave them out and describe them in system",
            ),
        }
    )
    if request.mcp_servers:
        raise not_contacted("mcp_servers")


def _format(request: MessagesBody) -> chat.AnswerFormat | None:
    config = request.output_config
    return only(
        format_of(config.format if config else None, "output_config.format"),
        format_of(request.output_format, "output_format"),
    )


def _sampling(request: MessagesBody) -> chat.Sampling:
    return chat.Sampling(
        temperature=request.temperature,
        **nucleus(request.top_p, request.top_k),
        max_tokens=None if request.max_tokens is None else min(request.max_tokens, MAX_TOKENS),
        stop=stops(request.stop_sequences, "stop_sequences"),
    )


def session_of(headers: Mapping[str, str], metadata: Metadata | None) -> str:
    """Return the name of the conversation from headers or `metadata`: at most 200 letters, maybe none."""
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


def parent_agent(headers: Mapping[str, str]) -> str:
    """Return the agent whose sub-agent asks; "" if none does."""
    return session_header(headers, "x-claude-code-parent-agent-id")


def _system(system: str | list[blocks.AnyText]) -> list[chat.Message]:
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    parts = tuple(chat.TextPart(text) for text in texts if text)
    return [chat.Message("system", parts)] if parts else []


# --------------------------------------------------------------------------- messages


def _shown(messages: list[_Message]) -> Iterator[tuple[int, int, _Message]]:
    """Yield (place in the request, blocks of it to skip, message) of each message that the model reads.

    Left out are those before the last summary, and system messages for a turn that is over.
    """
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    first, block = _last_compaction(messages)
    for index, message in enumerate(messages[first:], first):
        over = message.clear_at == "next_user_message" and index < last_user
        if not (message.role == "system" and over):
            yield index, block if index == first else 0, message


def _last_compaction(messages: list[_Message]) -> tuple[int, int]:
    """Return (message, block) of the last summary; (0, 0) without one."""
    for index in range(len(messages) - 1, -1, -1):
        content = messages[index].content
        if isinstance(content, list):
            for place in range(len(content) - 1, -1, -1):
                block = content[place]
                if isinstance(block, blocks.Compaction) and block.content:
                    return index, place
    return 0, 0


def _changes(_index: int, skip: int, message: _Message) -> Iterator[blocks.ToolChange]:
    for block in message.content[skip:] if isinstance(message.content, list) else ():
        if isinstance(block, blocks.ToolAddition | blocks.ToolRemoval):
            yield block
        elif isinstance(block, blocks.Compaction):
            yield from block.tool_changes or ()


_BOTH = (blocks.Text, blocks.Compaction, *blocks.FROM_SERVER)
_ALLOWED: dict[str, tuple[type, ...]] = {
    "user": (
        *_BOTH,
        blocks.Image,
        blocks.ImageUrl,
        blocks.File,
        blocks.InputFile,
        blocks.Document,
        blocks.SearchResult,
        blocks.ToolResult,
        blocks.ContainerUpload,
    ),
    "assistant": (*_BOTH, blocks.Thinking, blocks.RedactedThinking, blocks.ToolUse, blocks.ContainerUpload),
    "system": (blocks.Text, blocks.ToolAddition, blocks.ToolRemoval),
}


def _messages(message: _Message, tools: Tools, param: str, skip: int) -> list[chat.Message]:
    """Turn one message into several: results and summaries are their own. `skip`: blocks left out."""
    content = [blocks.Text(message.content)] if isinstance(message.content, str) else message.content
    if content is None:
        if message.role == "system":
            return []
        raise bad_field(f"{param}.content", "this field is required")
    runs: list[tuple[chat.Role, list[chat.Part]]] = []
    for index, block in enumerate(content[skip:], skip):
        where = f"{param}.content.{index}"
        if not isinstance(block, _ALLOWED[message.role]):
            kind = block.__struct_config__.tag
            raise misplaced(f"content of type {kind!r}", message.role, where)
        role = _role(block, message.role)
        if not runs or runs[-1][0] != role:
            runs.append((role, []))
        runs[-1][1].extend(_parts(block, tools, where))
    if not runs:
        runs.append((message.role, []))
    return [chat.Message(role, tuple(parts)) for role, parts in runs]


def _role(block: blocks.AnyBlock, role: chat.Role) -> chat.Role:
    if isinstance(block, blocks.ToolResult):
        return "tool"
    return "user" if isinstance(block, blocks.Compaction) and block.content else role


def _parts(
    block: blocks.AnyBlock | blocks.ToolReference | blocks.BrowserState, tools: Tools, param: str
) -> list[chat.Part]:
    if isinstance(block, blocks.Thinking):
        return [chat.ThinkingPart(block.thinking, block.signature or "")]
    if isinstance(block, blocks.ToolUse):
        where = f"{param}.input"
        given = block.input
        arguments = lenient_arguments(given, where) if isinstance(given, str) else free_json(given, where)
        return [chat.ToolCallPart(engine_id(block.id), block.name, arguments)]
    if isinstance(block, blocks.Image):
        # Named as Anthropic's errors name it: Claude Code then takes the image out, and goes on.
        return [image_block(block, f"{param}.image")]
    if isinstance(block, blocks.ImageUrl):
        given = blocks.Url(block.image_url) if isinstance(block.image_url, str) else block.image_url
        return [image_url(given.url, f"{param}.image_url", block.detail or given.detail)]
    if isinstance(block, blocks.File):
        file = block.file
        return [file_part(file.file_data, file.filename, file.file_id, None, "user", f"{param}.file")]
    if isinstance(block, blocks.InputFile):
        return [file_part(block.file_data, block.filename, block.file_id, block.file_url, "user", param)]
    if isinstance(block, blocks.Document):
        return [*document_parts(block, f"{param}.document")]
    if isinstance(block, blocks.ToolResult):
        return [_tool_result(block, tools, param)]
    text = _text(block, tools, param)
    return [chat.TextPart(text)] if text else []


def _text(
    block: blocks.AnyBlock | blocks.ToolReference | blocks.BrowserState, tools: Tools, param: str
) -> str:
    """Return the text that the model reads of a block; "" for none."""
    if isinstance(block, blocks.Text):
        return block.text
    if isinstance(block, blocks.SearchResult):
        return search_result_text(block)
    if isinstance(block, blocks.ToolReference):
        return tools.described(block.tool_name)
    if isinstance(block, blocks.BrowserState):
        return browser_state_text(block, param)
    if isinstance(block, blocks.ToolAddition | blocks.ToolRemoval):
        return tools.change(block)
    if isinstance(block, blocks.Compaction):
        return _summary(block, tools)
    if isinstance(block, blocks.ContainerUpload):
        raise bad_field(param, "files are not kept here; send the file's text as a document block")
    return ""


def _summary(block: blocks.Compaction, tools: Tools) -> str:
    if not block.content:
        return ""
    summary = f"This is a summary of the conversation so far:\n<summary>\n{block.content}\n</summary>"
    return "\n".join([summary, *filter(None, map(tools.change, block.tool_changes or ()))])


def _tool_result(block: blocks.ToolResult, tools: Tools, param: str) -> chat.ToolResultPart:
    content = [blocks.Text(block.content)] if isinstance(block.content, str) else block.content or []
    parts: list[chat.Part] = []
    for index, item in enumerate(content):
        parts += _parts(item, tools, f"{param}.tool_result.content.{index}")
    return tool_result(engine_id(block.tool_use_id), parts, bool(block.is_error))
