"""Reads a body of Gemini's generateContent into a `GenerateRequest`. The path names the model and says if to
stream.

Fields that would change the answer and can't be honoured are refused; Google's own tools (search, code
execution, …) run there and are left out, and so are their parts of earlier turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ... import chat
from ...errors import bad_field
from ..answer.answer_format import MAX_CHOICES, only
from ..answer.thinking import as_budget
from ..conversation import conversation
from ..fields.body import (
    MAX_TOKENS,
    ParsedRequest,
    checked_name,
    free_json,
    not_contacted,
    nucleus,
    refuse,
    session_header,
    stops,
)
from . import body as bodies
from .body import (
    Content,
    CountTokensBody,
    FunctionCallingConfig,
    FunctionDeclaration,
    GenerateContentBody,
    GenerationConfig,
    ThinkingConfig,
    ToolBody,
)
from .messages import messages_of, system_of
from .schema import json_schema

_generate = msgspec.json.Decoder(GenerateContentBody)
_count = msgspec.json.Decoder(CountTokensBody)
ANY_JSON: dict[str, Any] = {"anyOf": [{"type": "object"}, {"type": "array"}]}


class GeminiRequest(ParsedRequest, frozen=True, kw_only=True):
    """A parsed body. `thoughts`: the answer shows its thinking."""

    thoughts: bool = False


def parse(stream: bool) -> Callable[[bytes, Mapping[str, str]], GeminiRequest]:
    """Make a parser of `generateContent`, or of `streamGenerateContent`."""

    def read(body: bytes, headers: Mapping[str, str]) -> GeminiRequest:
        return _request(bodies.read(_generate, body), headers, stream)

    return read


def parse_count(body: bytes, headers: Mapping[str, str]) -> GeminiRequest:
    """Read a body of `countTokens`: `contents` alone, or a `generateContentRequest`."""
    request = bodies.read(_count, body)
    return _request(request.generate_content_request or request, headers, False, excerpt=True)


def _request(
    body: GenerateContentBody, headers: Mapping[str, str], stream: bool, *, excerpt: bool = False
) -> GeminiRequest:
    config = body.generation_config or GenerationConfig()
    _refuse(body, config)
    contents = [body.contents] if isinstance(body.contents, Content) else body.contents or []
    messages = messages_of(contents, excerpt=excerpt)
    if not messages:
        raise bad_field("contents", "at least one content with a part is required")
    tools = _tools([body.tools] if isinstance(body.tools, ToolBody) else body.tools or [])
    choice, allowed = _choice(body.tool_config and body.tool_config.function_calling_config, tools)
    prompt = conversation(
        [*system_of(body.system_instruction), *messages],
        tools,
        tool_choice=choice,
        allowed_tools=allowed,
        **_thinking(config.thinking_config),
    )
    return GeminiRequest(
        model="",
        stream=stream,
        n=config.candidate_count or 1,
        generate=chat.GenerateRequest(
            prompt=prompt,
            sampling=_sampling(config),
            session=session_header(headers, "x-session-affinity", "x-session-id"),
            format=_format(config),
        ),
        thoughts=bool(config.thinking_config and config.thinking_config.include_thoughts),
    )


def _refuse(body: GenerateContentBody, config: GenerationConfig) -> None:
    modalities = [kind for kind in config.response_modalities or () if kind.upper() != "TEXT"]
    refuse(
        {
            "cachedContent": (
                body.cached_content,
                "no contents are kept here: send them; KV is reused by itself",
            ),
            "generationConfig.responseModalities": (modalities, "answers are text; leave it out"),
            "generationConfig.speechConfig": (config.speech_config, "answers are text; leave it out"),
        }
    )


def _sampling(config: GenerationConfig) -> chat.Sampling:
    limit = config.max_output_tokens
    return chat.Sampling(
        temperature=config.temperature,
        **nucleus(config.top_p, config.top_k),
        seed=config.seed,
        presence_penalty=config.presence_penalty or 0.0,
        frequency_penalty=config.frequency_penalty or 0.0,
        max_tokens=None if limit is None else min(limit, MAX_TOKENS),
        stop=stops(config.stop_sequences, "generationConfig.stopSequences"),
        logprobs=(config.logprobs or 0) if config.response_logprobs else None,
    )


_LEVELS = ("minimal", "low", "medium", "high")


def _thinking(config: ThinkingConfig | None) -> dict[str, Any]:
    """Return what a Conversation says of thinking. Showing thoughts says nothing of it."""
    if config is None:
        return {}
    said, where = config.thinking_level or "", "generationConfig.thinkingConfig."
    level = said.lower().replace("thinking_level_unspecified", "")
    if level and level not in _LEVELS:
        named = ", ".join(_LEVELS).upper()
        raise bad_field(f"{where}thinkingLevel", f"{said[:40]!r} is none of {named}")
    given = config.thinking_budget
    budget = None if given is None else as_budget(given, f"{where}thinkingBudget")
    thinking = bool(level) or None if given is None else given != 0
    return {"thinking": thinking, "thinking_budget": budget, "effort": level}


def _format(config: GenerationConfig) -> chat.AnswerFormat | None:
    where = "generationConfig."
    kind = (config.response_mime_type or "").partition(";")[0].strip().lower()
    given = (
        ("responseSchema", config.response_schema and json_schema(config.response_schema)),
        ("responseJsonSchema", config.response_json_schema),
    )
    if kind in ("", "text/plain"):
        # As at Google: a schema without the type that it is of changes nothing but in newer versions.
        given = given if not kind else ()
    elif kind == "text/x.enum":
        return _enum(next((schema for _, schema in given if schema), None))
    elif kind != "application/json":
        raise bad_field(
            where + "responseMimeType",
            f"{kind[:80]!r} is none of text/plain, application/json, text/x.enum",
        )
    schema = only(
        *(
            chat.AnswerFormat("json", schema=free_json(schema, where + name), param=where + name)
            for name, schema in given
            if schema is not None
        )
    )
    if schema is None and kind == "application/json":
        return chat.AnswerFormat("json", schema=ANY_JSON, param=where + "responseMimeType")
    return schema


def _enum(schema: Any) -> chat.AnswerFormat:
    words = schema.get("enum") if isinstance(schema, dict) else None
    if not isinstance(words, list) or not 0 < len(words) <= MAX_CHOICES:
        raise bad_field("generationConfig.responseSchema.enum", f"1 to {MAX_CHOICES} texts are needed")
    if not all(isinstance(word, str) and word for word in words):
        raise bad_field("generationConfig.responseSchema.enum", "texts are needed, none of them empty")
    return chat.AnswerFormat("choice", choices=tuple(words), param="generationConfig.responseSchema")


# --------------------------------------------------------------------------- tools


def _tools(tools: Sequence[ToolBody]) -> tuple[chat.Tool, ...]:
    made: list[chat.Tool] = []
    for index, tool in enumerate(tools):
        if tool.file_search is not None:
            raise bad_field(
                f"tools.{index}.fileSearch", "no files are kept or searched here; send their text in contents"
            )
        if tool.mcp_servers:
            raise not_contacted(f"tools.{index}.mcpServers")
        for at, declared in enumerate(tool.function_declarations or ()):
            made.append(_tool(declared, f"tools.{index}.functionDeclarations.{at}"))
    return tuple(made)


def _tool(declared: FunctionDeclaration, param: str) -> chat.Tool:
    if not declared.name:
        raise bad_field(f"{param}.name", "a function needs a name")
    checked_name(declared.name, f"{param}.name")
    if declared.parameters_json_schema is not None:
        schema = free_json(declared.parameters_json_schema, f"{param}.parametersJsonSchema")
    else:
        schema = free_json(json_schema(declared.parameters or {}), f"{param}.parameters")
    return chat.Tool(declared.name, declared.description or "", schema)


def _choice(config: FunctionCallingConfig | None, tools: Sequence[chat.Tool]) -> tuple[str, tuple[str, ...]]:
    """Return (`tool_choice`, `allowed_tools`). Raises InvalidRequest."""
    param = "toolConfig.functionCallingConfig"
    mode = (config.mode or "AUTO").upper() if config else "AUTO"
    if mode not in ("AUTO", "ANY", "NONE", "VALIDATED", "MODE_UNSPECIFIED"):
        raise bad_field(f"{param}.mode", f"{mode[:40]!r} is none of AUTO, ANY, NONE, VALIDATED")
    listed = {tool.name for tool in tools}
    allowed = tuple(dict.fromkeys(config.allowed_function_names or ())) if config else ()
    if unknown := [name for name in allowed if name not in listed]:
        raise bad_field(f"{param}.allowedFunctionNames", f"there is no function {unknown[0][:100]!r}")
    if mode == "NONE":
        return "none", ()
    if mode != "ANY":
        return "auto", allowed
    if not tools:
        raise bad_field(f"{param}.mode", "there are no functions to choose from")
    return "required", allowed
