"""Reads a body of LM Studio's `POST /api/v1/chat` into a `GenerateRequest`.

A body holds one turn of the user's; `previous_response_id` names the answer that it follows. No servers of
tools are asked, so `integrations` are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Union

import msgspec

from ... import chat
from ...errors import bad_field
from ..answer.thinking import ThinkingFields, hides_thinking, thinking_fields
from ..conversation import History, conversation, earlier_turns
from ..fields.body import MAX_TOKENS, ParsedRequest, decode, image_url, nucleus, refuse, session_header
from ..fields.types import Count, LocalTemperature, MinP, RepetitionPenalty, TopK, TopP
from ..openai.content import Content, content_part


class InputItem(Content):
    """An input. LM Studio's own hold `content` or `data_url`; parts of the other protocols are read too."""

    data_url: str | None = None


class ChatBody(ThinkingFields, kw_only=True):
    input: Union[str, list[InputItem]]
    model: str | None = None
    system_prompt: str | None = None
    integrations: list[Any] | None = None
    stream: bool | None = None
    temperature: LocalTemperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repeat_penalty: RepetitionPenalty | None = None
    max_output_tokens: Count | None = None
    reasoning: Literal["off", "low", "medium", "high", "on"] | None = None
    context_length: Count | None = None
    store: bool | None = None
    previous_response_id: str | None = None


class ChatRequest(ParsedRequest, frozen=True, kw_only=True):
    """A parsed body. `messages`: the conversation, a system prompt included; `store`: whether it is kept."""

    messages: tuple[chat.Message, ...]
    store: bool = True


_decoder = msgspec.json.Decoder(ChatBody)


def parse(
    body: bytes, headers: Mapping[str, str] | None = None, history: History = lambda _: None
) -> ChatRequest:
    """Read a body of /api/v1/chat. Raises InvalidRequest, and NotFound for `previous_response_id`."""
    request = decode(_decoder, body)
    refuse(
        {
            "integrations": (
                request.integrations,
                "plugins and MCP servers are not asked here: call them yourself, and give their tools as "
                "functions to /v1/responses or /v1/chat/completions",
            )
        }
    )
    parts = _parts(request.input)
    if not parts:
        raise bad_field("input", "a text or an image is required")
    messages = (*_before(request, history), chat.Message("user", parts))
    limit = request.max_output_tokens
    sampling = chat.Sampling(
        temperature=request.temperature,
        **nucleus(request.top_p, request.top_k),
        min_p=request.min_p,
        repetition_penalty=request.repeat_penalty,
        max_tokens=None if limit is None else min(limit, MAX_TOKENS),
    )
    return ChatRequest(
        model=request.model or "",
        stream=bool(request.stream),
        generate=chat.GenerateRequest(
            prompt=conversation(messages, (), **thinking_fields(request)),
            sampling=sampling,
            session=session_header(headers or {}, "x-session-affinity", "x-session-id"),
            hides_thinking=hides_thinking(request),
            context_limit=min(request.context_length or 0, MAX_TOKENS),
        ),
        messages=messages,
        store=request.store is not False,
    )


def _parts(given: str | list[InputItem]) -> tuple[chat.Part, ...]:
    items = [InputItem(type="text", text=given)] if isinstance(given, str) else given
    parts = (_part(item, f"input.{index}") for index, item in enumerate(items))
    return tuple(part for part in parts if part is not None)


def _part(item: InputItem, param: str) -> chat.Part | None:
    if item.data_url is not None:
        return image_url(item.data_url, f"{param}.data_url")
    if item.type in ("message", "text") and item.text is None:
        if not isinstance(item.content, str):
            raise bad_field(f"{param}.content", "a text is required")
        item = InputItem(type="text", text=item.content)
    return content_part(item, "user", param)


def _before(request: ChatBody, history: History) -> tuple[chat.Message, ...]:
    """Return the earlier turns; a system prompt of this turn replaces theirs."""
    earlier = earlier_turns(request.previous_response_id, history, "begin a new chat without it")
    if not (said := request.system_prompt):
        return earlier
    return (
        chat.Message("system", (chat.TextPart(said),)),
        *(message for message in earlier if message.role != "system"),
    )
