"""Bodies of the Gemini API, as its proto messages are written in JSON: names in camelCase or snake_case."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar, Union

import msgspec

from ...errors import InvalidRequest
from ..fields.body import check_shape, decode
from ..fields.types import Count, Penalty, Seed, Temperature, TopK, TopLogprobs, TopP
from ..openai.fields import MAX_CHOICES

T = TypeVar("T")


class Proto(msgspec.Struct, rename="camel", kw_only=True):
    """A message whose fields may all be absent or null."""


class Blob(Proto):
    mime_type: str | None = None
    data: str | None = None
    display_name: str | None = None


class FunctionCall(Proto):
    name: str
    id: str | None = None
    args: dict[str, Any] | None = None


class ResponsePart(Proto):
    inline_data: Blob | None = None
    file_data: Any = None


class FunctionResponse(Proto):
    name: str
    id: str | None = None
    response: dict[str, Any] | None = None
    parts: list[ResponsePart] | None = None
    scheduling: Any = None
    will_continue: Any = None


class Part(Proto):
    """One of `text`, `inlineData`, `functionCall`, `functionResponse`; Google's own parts are dropped."""

    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    inline_data: Blob | None = None
    file_data: Any = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    executable_code: Any = None
    code_execution_result: Any = None
    tool_call: Any = None
    tool_response: Any = None
    video_metadata: Any = None
    media_resolution: Any = None
    part_metadata: Any = None


class Content(Proto):
    """A content. `role` absent: the user's."""

    role: Literal["user", "model", "function", "system"] | None = None
    parts: Union[list[Part], Part, None] = None


class FunctionDeclaration(Proto):
    """A function. `parameters`: in OpenAPI's words (`"type": "OBJECT"`). `response` is not for the model."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None
    response: Any = None
    response_json_schema: Any = None
    behavior: Any = None


class ToolBody(Proto):
    """Tools of the request; Google's own, of any type, are left out."""

    function_declarations: list[FunctionDeclaration] | None = None
    google_search: Any = None
    google_search_retrieval: Any = None
    google_maps: Any = None
    code_execution: Any = None
    url_context: Any = None
    computer_use: Any = None
    file_search: Any = None
    mcp_servers: Any = None


class FunctionCallingConfig(Proto):
    mode: str | None = None
    allowed_function_names: list[str] | None = None
    stream_function_call_arguments: Any = None


class ToolConfig(Proto):
    function_calling_config: FunctionCallingConfig | None = None
    retrieval_config: Any = None
    include_server_side_tool_invocations: Any = None


class ThinkingConfig(Proto):
    """How to think. `thinkingBudget`: 0 is no thinking, -1 as much as the model likes."""

    include_thoughts: bool | None = None
    thinking_budget: int | None = None
    thinking_level: str | None = None


class GenerationConfig(Proto):
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    max_output_tokens: Count | None = None
    stop_sequences: list[str] | None = None
    candidate_count: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    response_modalities: list[str] | None = None
    response_logprobs: bool | None = None
    logprobs: TopLogprobs | None = None
    thinking_config: ThinkingConfig | None = None
    speech_config: Any = None
    image_config: Any = None
    media_resolution: Any = None
    enable_enhanced_civic_answers: Any = None
    routing_config: Any = None
    audio_timestamp: Any = None


class GenerateContentBody(Proto):
    contents: Union[list[Content], Content, None] = None
    system_instruction: Union[Content, str, None] = None
    tools: Union[list[ToolBody], ToolBody, None] = None
    tool_config: ToolConfig | None = None
    generation_config: GenerationConfig | None = None
    safety_settings: Any = None
    cached_content: str | None = None
    model: str | None = None
    labels: Any = None
    service_tier: Any = None
    store: Any = None


class CountTokensBody(GenerateContentBody):
    generate_content_request: GenerateContentBody | None = None


def read(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode `body` as the decoder's type, with names in either spelling. Raises InvalidRequest."""
    if _SNAKE.search(body):
        check_shape(body)
        try:
            body = msgspec.json.encode(_camel(_any.decode(body)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # `decode` says what is wrong with it.
        except ValueError as error:
            raise InvalidRequest(f"The request body is not valid JSON: {error}.") from None
    return decode(decoder, body)


_any = msgspec.json.Decoder(Any)
_STRUCTS = (
    *(Blob, FunctionCall, ResponsePart, FunctionResponse, Part, Content, FunctionDeclaration, ToolBody),
    *(FunctionCallingConfig, ToolConfig, ThinkingConfig, GenerationConfig, GenerateContentBody),
    CountTokensBody,
)
_NAMES = {
    snake: camel
    for struct in _STRUCTS
    for snake, camel in zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True)
}
_NAMES["_responseJsonSchema"] = "responseJsonSchema"  # As REST has it.
_SNAKE = re.compile(rb'"(?:[a-z]+_[a-z_]+|_responseJsonSchema)"\s*:')
_FREE = frozenset(
    ("args", "response", "parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema")
)
"""Fields with names of the client's own."""


def _camel(value: Any) -> Any:
    if isinstance(value, list):
        return [_camel(item) for item in value]
    if not isinstance(value, dict):
        return value
    named = {_NAMES.get(name, name): item for name, item in value.items()}
    return {name: item if name in _FREE else _camel(item) for name, item in named.items()}
