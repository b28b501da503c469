"""The response object and its items, as the openai SDK's types define them."""

from __future__ import annotations

from typing import Any, Literal, Union

import msgspec
from msgspec import UNSET, UnsetType

from ... import chat
from ..answer.sse import UsageExtension, usage_extension
from ..openai.fields import ChatLogprob

Status = Literal["in_progress", "completed", "incomplete", "failed"]


# --------------------------------------------------------------------------- items


class _Tagged(msgspec.Struct, tag_field="type"): ...


class OutputText(_Tagged, tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: list[ChatLogprob] = []


class ReasoningText(_Tagged, tag="reasoning_text"):
    text: str


class Message(_Tagged, tag="message"):
    id: str
    content: list[OutputText] = []
    status: Status = "in_progress"
    role: Literal["assistant"] = "assistant"


class Reasoning(_Tagged, tag="reasoning"):
    id: str
    content: list[ReasoningText] = []
    encrypted_content: str | None = None
    status: Status = "in_progress"
    summary: tuple[()] = ()


class FunctionCall(_Tagged, tag="function_call"):
    """A call. `arguments`: JSON text."""

    id: str
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET
    status: Status = "completed"


class Compaction(_Tagged, tag="compaction"):
    """The summary that replaces an earlier conversation."""

    id: str
    encrypted_content: str


class CustomCall(_Tagged, tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET
    status: Status = "completed"


Item = Union[Message, Reasoning, FunctionCall, CustomCall, Compaction]


# --------------------------------------------------------------------------- the response


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class UsageBody(msgspec.Struct):
    """Usage of a response. `input_tokens` counts cached ones, too."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    omlxd: UsageExtension


def usage_body(usage: chat.Usage) -> UsageBody:
    return UsageBody(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        omlxd=usage_extension(usage),
    )


class Problem(msgspec.Struct):
    code: str
    message: str


class Incomplete(msgspec.Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ReasoningEcho(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class Response(msgspec.Struct, kw_only=True):
    """The response object. `created_at`, `completed_at`: Unix seconds. Fields after `usage` repeat the
    request.
    """

    id: str = ""
    object: Literal["response", "response.compaction"] = "response"
    created_at: int = 0
    completed_at: int | None = None
    status: Status = "in_progress"
    model: str
    output: list[Item] = []
    error: Problem | None = None
    incomplete_details: Incomplete | None = None
    usage: UsageBody | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningEcho
    store: bool
    temperature: float | None
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    user: str | None
    text: dict[str, Any]
    max_tool_calls: int | None
    safety_identifier: str | None
    prompt_cache_retention: str | None
    service_tier: str = "default"
    background: bool = False
    truncation: Literal["disabled"] = "disabled"
