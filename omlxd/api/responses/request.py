"""Reads a body of OpenAI's Responses API into a `GenerateRequest`.

Fields that would change the answer and can't be honoured are refused; unknown fields, and tools that run at
OpenAI, are ignored. An `item_reference` names an item of an earlier response: Vercel's AI SDK sends such.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union

import msgspec
from msgspec.structs import replace

from ...chat import Message, TextPart
from ...errors import bad_field
from ..answer.answer_format import ResponseFormat, format_of
from ..conversation import History, conversation, earlier_turns
from ..fields.body import ParsedRequest, decode, free_json, refuse, session_header
from ..fields.types import Count, TopLogprobs
from ..openai.fields import (
    NO_MODERATION,
    ChatFields,
    Verbosity,
    answer_format,
    generate_request,
    limit_of,
    parsed_fields,
    session,
    template_fields,
)
from ..openai.tool_choice import tool_choice
from .items import TRIGGER, Item, messages_of
from .objects import ReasoningEcho, Response
from .tools import ResponseTools, ToolName

ItemLookup = Callable[[str], "bytes | None"]
"""Looks up item id → the item as JSON; None: unknown."""
MAX_BYTES = 32 * 1024 * 1024
"""Bytes of all items that one request refers to: as much as a body may hold."""

_reference_decoder = msgspec.json.Decoder(Item)


def resolved(items: list[Item], item_of: ItemLookup) -> list[Item]:
    """Return `items` with each reference replaced by its item. Raises InvalidRequest."""
    out: list[Item] = []
    left = MAX_BYTES
    for index, item in enumerate(items):
        if not _refers(item):
            out.append(item)
            continue
        param = f"input.{index}.id"
        if not isinstance(item.id, str):
            raise bad_field(param, "this field is required")
        if (meant := item_of(item.id)) is None:
            raise bad_field(
                param, f"there is no item {item.id[:100]!r} here (any more); send the item itself"
            )
        left -= len(meant)
        if left < 0:
            raise bad_field(param, "the items referred to are too large together")
        out.append(_reference_decoder.decode(meant))
    return out


def _refers(item: Item) -> bool:
    """Return whether an item is a reference: without a type it has an id alone."""
    return item.type == "item_reference" or (item.type is None and item.role is None and item.id is not None)


SEALED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"


class _Text(msgspec.Struct):
    format: ResponseFormat | None = None
    verbosity: Verbosity | None = None


class _ContextEdit(msgspec.Struct):
    """Leave to summarise a conversation of more than `compact_threshold` tokens, which is not taken."""

    type: Literal["compaction"]
    compact_threshold: Annotated[int, msgspec.Meta(ge=1)] | None = None


class _Reasoning(ReasoningEcho):
    """Others' fields beside OpenAI's: `max_tokens`, `exclude` and `enabled` (OpenRouter), `budget_tokens`."""

    enabled: Any = None
    budget_tokens: Any = None
    max_tokens: Any = None
    exclude: Any = None


class ResponsesBody(ChatFields, kw_only=True):
    input: Union[str, list[Item], None] = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: _Reasoning | None = None
    text: _Text | None = None
    include: list[str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, Any] | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Union[list[_ContextEdit], dict[str, Any], None] = None
    moderation: Any = None
    top_logprobs: TopLogprobs | None = None
    max_tool_calls: Annotated[int, msgspec.Meta(ge=1)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None


_decoder = msgspec.json.Decoder(ResponsesBody)


class ResponsesRequest(ParsedRequest, frozen=True, kw_only=True):
    """A parsed body, and what its answer needs.

    names     the model's name of a tool → how the client gets its call
    response  the response object before it begins: it repeats fields of the request
    input     its input as JSON, "": it is not stored
    messages  the conversation without `instructions`, which a next response doesn't take over
    sealed    reasoning items carry `encrypted_content`
    compacts  the answer is a summary of the conversation
    """

    names: dict[str, ToolName]
    response: Response
    messages: tuple[Message, ...]
    input: bytes = b""
    sealed: bool = False
    compacts: bool = False


def parse(
    body: bytes,
    headers: Mapping[str, str] | None = None,
    history: History = lambda _: None,
    item_of: ItemLookup = lambda _: None,
) -> ResponsesRequest:
    """Read a body of /v1/responses. Raises InvalidRequest, and NotFound for `previous_response_id`."""
    request = decode(_decoder, body)
    _refuse(request)
    compacts = False
    if isinstance(request.input, list):
        if compacts := bool(request.input) and request.input[-1].type == TRIGGER:
            request.input.pop()
        request.input = resolved(request.input, item_of)
    tools = ResponseTools()
    for index, tool in enumerate(request.tools or []):
        tools.add(tool, f"tools.{index}")
    earlier = earlier_turns(request.previous_response_id, history, "send the whole conversation as input")
    messages = earlier + _messages(request, tools)
    if not messages:
        if request.input is None and "messages" in _any_object.decode(body):
            raise bad_field("input", "it is wanted here; `messages` belongs to /v1/chat/completions")
        raise bad_field("input", "at least one item of a known type is required")
    choice, allowed = tool_choice(request.tool_choice, {tool.name for tool in tools.listed}, tools.called_by)
    if compacts:
        # The tools stay in the prompt, whose cached prefix holds.
        messages, choice, allowed = (*messages, Message("user", (TextPart(COMPACT),))), "none", ()
    system = (Message("system", (TextPart(request.instructions),)),) if request.instructions else ()
    prompt = conversation(
        system + messages,
        tools.listed,
        tool_choice=choice,
        allowed_tools=allowed,
        parallel_calls=request.parallel_tool_calls is not False,
        **template_fields(request, request.text.verbosity if request.text else None),
    )
    max_tokens = request.max_output_tokens or limit_of(request.max_tokens, "max_tokens")
    return ResponsesRequest(
        **parsed_fields(request),
        generate=generate_request(
            request,
            prompt,
            max_tokens,
            _logprobs(request),
            _session(request, headers or {}),
            answer_format(request, format_of(request.text.format if request.text else None, "text.format")),
        ),
        names=tools.names,
        response=_response(request, tools, body),
        messages=messages,
        input=b"" if request.store is False else bytes(msgspec.json.decode(body, type=_InputField).input),
        sealed=SEALED in (request.include or ()),
        compacts=compacts,
    )


def parse_compact(
    body: bytes,
    headers: Mapping[str, str] | None = None,
    history: History = lambda _: None,
    item_of: ItemLookup = lambda _: None,
) -> ResponsesRequest:
    """Read a body of /v1/responses/compact, as if its input ended with the item that asks for a summary."""
    fields = decode(_any_object, body)
    given = fields.get("input") or []
    items = given if isinstance(given, list) else [{"role": "user", "content": given}]
    fields |= {"input": [*items, {"type": TRIGGER}], "stream": False}
    parsed = parse(msgspec.json.encode(fields), headers, history, item_of)
    return replace(parsed, response=replace(parsed.response, object="response.compaction"))


_any_object = msgspec.json.Decoder(dict[str, Any])
COMPACT = (
    "Summarise this conversation, so that you can go on from the summary alone: what was asked, what was "
    "done and found, decisions, names of files and commands that matter, and what comes next. Write nothing "
    "but the summary."
)


def _logprobs(request: ResponsesBody) -> int | None:
    asked = request.top_logprobs is not None or LOGPROBS in (request.include or ())
    return request.top_logprobs or 0 if asked else None


def _refuse(request: ResponsesBody) -> None:
    if request.conversation is not None:
        raise bad_field("conversation", "conversations are not kept here; use previous_response_id")
    refuse(
        {
            "background": (request.background, "this server answers while you wait"),
            "prompt": (request.prompt is not None, "prompt templates are not kept here; use input"),
            "moderation": (request.moderation, NO_MODERATION),
            "return_token_ids": (request.return_token_ids, "/v1/chat/completions returns token ids"),
            "n": ((request.n or 1) > 1, "a response is one answer; /v1/chat/completions gives several"),
        }
    )


def _messages(request: ResponsesBody, tools: ResponseTools) -> tuple[Message, ...]:
    if isinstance(request.input, str):
        return (Message("user", (TextPart(request.input),)),) if request.input else ()
    return messages_of(request.input or [], tools)


def _session(request: ResponsesBody, headers: Mapping[str, str]) -> str:
    """Return the session: a Codex sub-agent is a thread within its parent's."""
    named = session(request, headers)
    thread = session_header(headers, "thread-id")
    return f"{named}/{thread}" if named and thread and thread != named else named or thread


class _InputField(msgspec.Struct):
    input: msgspec.Raw = msgspec.Raw(b"[]")


class _TextField(msgspec.Struct):
    text: dict[str, Any] | None = None


def _text_echo(body: bytes) -> dict[str, Any]:
    """Return `text` as the client sent it, with its format in any case."""
    fields = msgspec.json.decode(body, type=_TextField).text or {}
    return {"format": {"type": "text"}} | {name: value for name, value in fields.items() if value is not None}


_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key"),
    *("prompt_cache_retention", "safety_identifier", "temperature", "top_p", "user"),
)
"""Fields that the response object repeats as they are."""


def _response(request: ResponsesBody, tools: ResponseTools, body: bytes) -> Response:
    return Response(
        **{name: getattr(request, name) for name in _ECHOED},
        model=request.model or "",
        metadata=free_json(request.metadata or {}, "metadata"),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning=ReasoningEcho(request.reasoning.effort, request.reasoning.summary)
        if request.reasoning
        else ReasoningEcho(),
        store=request.store is not False,
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=tools.echo,
        top_logprobs=request.top_logprobs or 0,
        text=_text_echo(body),
    )
