"""GET /openapi.json: what this server takes and gives, made from the structs that do the work.

A row of `OPERATIONS` is a route; app.py's routes and these rows are held together by a test. Bodies
are stricter in fact than in the document where JSON Schema can't say it (a named tool must be in
`tools`); such a request gets the 400 that is documented.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from ... import __version__
from ...api.anthropic.answer import MessageAnswer, TokenCount
from ...api.anthropic.request import MessagesBody
from ...api.embeddings import (
    EmbeddingsAnswer,
    EmbeddingsBody,
    OllamaEmbedAnswer,
    OllamaEmbedBody,
    OllamaEmbeddingsAnswer,
    OllamaEmbeddingsBody,
    RerankAnswer,
    RerankBody,
)
from ...api.errors import AnthropicError, OllamaError, OpenAIError, protocol_of
from ...api.ollama.answer import Answer as OllamaAnswer
from ...api.ollama.request import ChatBody as OllamaChatBody
from ...api.ollama.request import GenerateBody
from ...api.openai.chat_answer import ChatCompletion
from ...api.openai.chat_request import ChatBody
from ...api.openai.completions import Completion, CompletionsBody
from ...api.openai.scores import Classifications, ClassifyBody, PairScores, ScoreBody
from ...api.responses.objects import Response
from ...api.responses.request import ResponsesBody
from ...cli.cache.tree import Trees
from ...cli.owner_api import (
    CachedFiles,
    ClearCache,
    DaemonStatus,
    Forget,
    Forgotten,
    Imported,
    ImportedPrompt,
    PinBlocks,
    PinList,
    Readiness,
    RecentList,
    TidyMemory,
    WhyMiss,
    WhyMissBody,
)
from ..http.discovery import (
    LMStudioInstanceBody,
    LMStudioLoadBody,
    LMStudioLoaded,
    NamedModel,
    OllamaModelBody,
    OllamaStatus,
    OllamaVersion,
    Success,
)
from ..http.generation import InputTokens
from ..http.model_list import (
    LMStudioModels,
    LMStudioV0Models,
    ModelEntry,
    ModelList,
    OllamaProcesses,
    OllamaShow,
    OllamaTags,
    Props,
)
from ..http.response_store import Deleted

_REFS = "#/components/schemas/{name}"
_PROBLEMS = {
    "400": "The request can't be served as it is; the message names the field.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such model, response or path.",
    "413": "The body is larger than the limit.",
    "503": "Loading, restarting or full; `retry-after` says when to try again.",
}
_ERRORS = {"anthropic": AnthropicError, "openai": OpenAIError, "ollama": OllamaError}
_PATH_PARAMETER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. `body`, `answer`: structs; `answer` None: no JSON. `stream`: type of a stream.

    unready  the answer of status 503, where it is not an error
    """

    method: str
    path: str
    summary: str
    body: Any = None
    answer: Any = None
    stream: str = ""
    media: str = "application/json"
    unready: Any = None


SSE, LINES = "text/event-stream", "application/x-ndjson"

OPERATIONS = (
    Operation("post", "/v1/messages", "Anthropic: one message", MessagesBody, MessageAnswer, stream=SSE),
    Operation("post", "/v1/messages/count_tokens", "Anthropic: tokens of a prompt", MessagesBody, TokenCount),
    Operation("post", "/v1/chat/completions", "OpenAI: chat", ChatBody, ChatCompletion, stream=SSE),
    Operation("post", "/v1/completions", "OpenAI: completion", CompletionsBody, Completion, stream=SSE),
    Operation(
        "post", "/v1/classify", "vLLM: which label is the likeliest answer", ClassifyBody, Classifications
    ),
    Operation("post", "/v1/score", "vLLM: how likely a text is after another", ScoreBody, PairScores),
    Operation("post", "/v1/responses", "OpenAI: response", ResponsesBody, Response, stream=SSE),
    Operation("post", "/v1/responses/compact", "OpenAI: a summary of the input", ResponsesBody, Response),
    Operation("post", "/v1/responses/input_tokens", "OpenAI: tokens of a prompt", ResponsesBody, InputTokens),
    Operation("get", "/v1/responses/{id}", "OpenAI: a stored response", answer=Response),
    Operation("delete", "/v1/responses/{id}", "OpenAI: forget a stored response", answer=Deleted),
    Operation("post", "/v1/embeddings", "OpenAI: vectors", EmbeddingsBody, EmbeddingsAnswer),
    Operation("post", "/v1/rerank", "Jina: documents by how they answer a query", RerankBody, RerankAnswer),
    Operation("post", "/v2/rerank", "Cohere: the same", RerankBody, RerankAnswer),
    Operation("post", "/rerank", "The same", RerankBody, RerankAnswer),
    Operation("get", "/v1/models", "The models", answer=ModelList),
    Operation("get", "/v1/models/{id}", "One model; its id may hold slashes", answer=ModelEntry),
    Operation("get", "/models", "llama.cpp's router: the models", answer=ModelList),
    Operation("get", "/models/sse", "llama.cpp's router: states as they change", media="text/event-stream"),
    Operation("post", "/models/load", "llama.cpp's router: load a model", NamedModel, Success),
    Operation("post", "/models/unload", "llama.cpp's router: unload a model", NamedModel, Success),
    Operation("get", "/props", "llama.cpp: what a model can do", answer=Props),
    Operation("post", "/api/chat", "Ollama: chat", OllamaChatBody, OllamaAnswer, stream=LINES),
    Operation("post", "/api/generate", "Ollama: answer a prompt", GenerateBody, OllamaAnswer, stream=LINES),
    Operation("post", "/api/embed", "Ollama: vectors", OllamaEmbedBody, OllamaEmbedAnswer),
    Operation("post", "/api/embeddings", "Ollama: a vector", OllamaEmbeddingsBody, OllamaEmbeddingsAnswer),
    Operation("get", "/api/version", "Ollama: the version whose API this is", answer=OllamaVersion),
    Operation("get", "/api/tags", "Ollama: the models", answer=OllamaTags),
    Operation("get", "/api/ps", "Ollama: the models that are loaded", answer=OllamaProcesses),
    Operation("post", "/api/show", "Ollama: one model", OllamaModelBody, OllamaShow),
    Operation("post", "/api/pull", "Ollama: download a model", OllamaModelBody, OllamaStatus, LINES),
    Operation("delete", "/api/delete", "Ollama: refused"),
    *(Operation("post", f"/api/{verb}", "Ollama: refused") for verb in ("copy", "push", "create")),
    Operation("get", "/api/v1/models", "LM Studio: the models", answer=LMStudioModels),
    Operation("post", "/api/v1/models/load", "LM Studio: load a model", LMStudioLoadBody, LMStudioLoaded),
    Operation(
        "post", "/api/v1/models/unload", "LM Studio: unload", LMStudioInstanceBody, LMStudioInstanceBody
    ),
    Operation("get", "/api/v0/models", "LM Studio: the models", answer=LMStudioV0Models),
    Operation("get", "/health", "Whether the daemon answers, and the state of its engines"),
    Operation("get", "/ready", "Whether a request could be served now", answer=Readiness, unready=Readiness),
    Operation("get", "/metrics", "Figures for Prometheus", media="text/plain"),
    Operation("get", "/omlxd/status", "Models, memory, tiers and counters", answer=DaemonStatus),
    Operation("get", "/omlxd/events", "The status every few seconds", media="text/event-stream"),
    Operation("post", "/omlxd/memory", "Give memory back, count peaks anew", TidyMemory, DaemonStatus),
    Operation("get", "/omlxd/requests", "The last requests, without their prompts", answer=RecentList),
    Operation("post", "/omlxd/cache/forget", "Files of the SSD cache that shall go", Forget, Forgotten),
    Operation("get", "/omlxd/cache/tree", "The prefixes of the SSD cache", answer=Trees),
    Operation("post", "/omlxd/cache/clear", "Remove some of them", ClearCache, Forgotten),
    Operation("post", "/omlxd/cache/pin", "What is evicted last, or no more", PinBlocks, PinList),
    Operation("get", "/omlxd/cache/pins", "What is pinned", answer=PinList),
    Operation("post", "/omlxd/cache/files", "Files that a prompt is restored from", WhyMissBody, CachedFiles),
    Operation("post", "/omlxd/cache/import", "Take in an archive of KV, the body", answer=Imported),
    Operation("post", "/omlxd/cache/prompt-cache/import", "Take in mlx-lm's file", answer=ImportedPrompt),
    Operation(
        *("post", "/omlxd/cache/prompt-cache/export", "A prompt's KV as mlx-lm's file", WhyMissBody),
        media="application/octet-stream",
    ),
    Operation("post", "/omlxd/why-miss", "Why a prompt's cached prefix ends", WhyMissBody, WhyMiss),
    Operation("get", "/openapi.json", "This document"),
    Operation("get", "/", "Name and version; for a browser, the page", media="text/plain"),
    Operation("get", "/web/{name}", "A file of the page", media="text/javascript"),
)


@functools.cache
def document() -> bytes:
    """The document, as JSON."""
    types = [t for row in OPERATIONS for t in (row.body, row.answer, row.unready) if t is not None]
    types += list(_ERRORS.values())
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFS)
    schema_of = dict(zip(map(id, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for row in OPERATIONS:
        paths.setdefault(row.path, {})[row.method] = _operation(row, schema_of)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "omlxd", "version": __version__},
            "security": [{}, {"bearer": []}, {"key": []}],
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
        }
    )


def _operation(row: Operation, schema_of: dict[int, Any]) -> dict[str, Any]:
    problem = schema_of[id(_ERRORS[protocol_of(row.path)])]
    content = {row.media: {"schema": schema_of[id(row.answer)] if row.answer else {}}}
    if row.stream:
        content[row.stream] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "operationId": f"{row.method} {row.path}",
        "summary": row.summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **{
                status: {"description": why, "content": {"application/json": {"schema": problem}}}
                for status, why in _problems(row.path).items()
            },
        },
    }
    if row.unready is not None:
        operation["responses"]["503"] = {
            "description": "Not now; the reasons say why.",
            "content": {row.media: {"schema": schema_of[id(row.unready)]}},
        }
    if row.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema_of[id(row.body)]}},
        }
    if names := _PATH_PARAMETER.findall(row.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    return operation


def _problems(path: str) -> dict[str, str]:
    if protocol_of(path) == "anthropic":
        return _PROBLEMS | {"529": "Full; `retry-after` says when to try again."}
    return _PROBLEMS
