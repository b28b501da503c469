"""Turns errors into HTTP, in each protocol's own shape (`_TABLE`; Anthropic's status for `overloaded` is
529).

Clients read the sentences too (LiteLLM, LangChain, Claude Code): a prompt that is too long and a wrong key
have the words of the protocol's own server. `unavailable` is an `overloaded_error` to Anthropic clients:
Claude Code then retries as a stream, which is pinged; after an `api_error` it retries without.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from ..chat import ErrorCode
from ..errors import OmlxdError, ThreadError

Protocol = Literal["anthropic", "openai", "completions", "ollama", "gemini"]
"""The protocols; `completions` is OpenAI's, too, but its prompts are no messages."""

MAX_RETRY_AFTER = 60
"""Seconds. Claude Code gives up at once above it."""

_DEFAULT_RETRY_AFTER: dict[ErrorCode, int] = {"overloaded": 2, "unavailable": 2}

_TABLE: dict[ErrorCode, tuple[int, str, str, str | None]] = {
    "invalid_request": (400, "invalid_request_error", "invalid_request_error", None),
    "prompt_too_long": (400, "invalid_request_error", "invalid_request_error", "context_length_exceeded"),
    "authentication": (401, "authentication_error", "invalid_request_error", "invalid_api_key"),
    "not_found": (404, "not_found_error", "invalid_request_error", None),
    "request_too_large": (413, "request_too_large", "invalid_request_error", "request_too_large"),
    "model_unusable": (400, "invalid_request_error", "invalid_request_error", "model_unusable"),
    "overloaded": (503, "overloaded_error", "server_error", "overloaded"),
    "unavailable": (503, "overloaded_error", "server_error", "unavailable"),
    "internal": (500, "api_error", "server_error", "internal_error"),
}


_MISSING = {"model": "model_not_found", "previous_response_id": "previous_response_not_found"}
"""Parameter that names the missing thing → OpenAI's code."""


class _Details(msgspec.Struct):
    error_code: str


class _AnthropicDetail(msgspec.Struct, omit_defaults=True):
    type: str
    message: str
    details: _Details | None = None


class AnthropicError(msgspec.Struct, tag_field="type", tag="error"):
    error: _AnthropicDetail
    request_id: str


class OpenAIDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(msgspec.Struct):
    error: OpenAIDetail


class OllamaError(msgspec.Struct):
    error: str


class GeminiDetail(msgspec.Struct):
    """Details of an error: Google's `RetryInfo`, where a retry may help."""

    code: int
    message: str
    status: str
    details: list[dict[str, str]]


class GeminiError(msgspec.Struct):
    error: GeminiDetail


_GEMINI: dict[ErrorCode, str] = {
    "invalid_request": "INVALID_ARGUMENT",
    "prompt_too_long": "INVALID_ARGUMENT",
    "authentication": "UNAUTHENTICATED",
    "not_found": "NOT_FOUND",
    "request_too_large": "INVALID_ARGUMENT",
    "model_unusable": "FAILED_PRECONDITION",
    "overloaded": "UNAVAILABLE",
    "unavailable": "UNAVAILABLE",
    "internal": "INTERNAL",
}


_GEMINI_OF_STATUS = {404: "NOT_FOUND", 405: "UNIMPLEMENTED"}


class HttpError(msgspec.Struct, frozen=True):
    """A whole answer: status, headers (lower case) and JSON body."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


_ANTHROPIC = ("/v1/messages", "/v1/complete")
_LM_STUDIO = ("/api/v0", "/api/v1")
_GEMINI_VERBS = ("generateContent", "streamGenerateContent", "countTokens")
_GEMINI_PATH = re.compile(rf"/v1(?:alpha|beta)(?:/.*)?|/v1/models/.*:(?:{'|'.join(_GEMINI_VERBS)})")
_GEMINI_VERB = re.compile(r"/v1(?:alpha|beta)/(?:models|tunedModels)/.*:(\w{1,60})")
_OPENAI = (
    "/v1/chat",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/chat",
    "/completions",
    "/completion",
)


def protocol_of(path: str, versioned: bool = False) -> Protocol:
    """Return whose error shape a path answers in, also where there is no such route.

    versioned  the request has an `anthropic-version`: decides where both protocols have the path, or neither
    """
    if _GEMINI_PATH.fullmatch(path):
        return "gemini"
    if _under(path, _ANTHROPIC):
        return "anthropic"
    if _under(path, ("/api",)) and not _under(path, _LM_STUDIO):
        return "ollama"
    if _under(path, ("/v1/completions", "/completions", "/completion")):
        return "completions"
    return "anthropic" if versioned and not _under(path, _OPENAI) else "openai"


def no_such_verb(method: str, path: str) -> str:
    """Explain an unknown verb of a Gemini path; "" for other paths."""
    found = _GEMINI_VERB.fullmatch(path)
    if method != "POST" or found is None or found[1] in _GEMINI_VERBS:
        return ""
    return f"there is no {found[1]} here, but {', '.join(_GEMINI_VERBS[:-1])} and {_GEMINI_VERBS[-1]}"


def _under(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(root + "/") for root in roots)


def message_of(error: OmlxdError, protocol: Protocol) -> str:
    """Return the sentence on `error`, in the words that clients of `protocol` look for."""
    if error.code == "authentication":
        return f"{_WRONG_KEY[protocol]}. {error.message}"
    numbers = _TOO_LONG.match(error.message) if error.code == "prompt_too_long" else None
    if protocol in ("anthropic", "ollama") or not numbers:
        return error.message
    limit = int(numbers[2])
    if protocol == "gemini":
        return (
            f"The input token count ({numbers[1]}) exceeds the maximum number of tokens allowed ({limit})."
            f"{numbers[3]}"
        )
    too_long = (
        f"prompt is too long: it resulted in {numbers[1]} tokens and exceeds the context window"
        if protocol == "completions"
        else f"messages resulted in {numbers[1]} tokens: the prompt is too long, and your input exceeds the "
        "context window of this model"
    )
    return (
        f"This model's maximum context length is {limit + 1} tokens. However, your {too_long}, which leaves "
        f"{limit} for it.{numbers[3]}"
    )


_WRONG_KEY: dict[Protocol, str] = {
    "anthropic": "invalid x-api-key",
    "openai": "Incorrect API key provided",
    "completions": "Incorrect API key provided",
    "ollama": "unauthorized",
    "gemini": "API key not valid",
}
_TOO_LONG = re.compile(r"prompt is too long: (.*) tokens > (\d+) maximum\.?(.*)")


def error_body(
    error: OmlxdError, protocol: Protocol, request_id: str
) -> AnthropicError | OpenAIError | OllamaError | GeminiError:
    """Return the JSON object on `error`, also for the end of a stream."""
    if protocol in ("openai", "completions"):
        return OpenAIError(openai_detail(error, protocol))
    if protocol == "ollama":
        return OllamaError(message_of(error, protocol))
    if protocol == "gemini":
        wait = _wait_of(error)
        retry = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": f"{wait}s"}
        code, status = _TABLE[error.code][0], _GEMINI[error.code]
        said = GeminiDetail(code, message_of(error, protocol), status, [retry] if wait is not None else [])
        return GeminiError(said)
    details = _Details(error.detail) if isinstance(error, ThreadError) else None
    return AnthropicError(
        _AnthropicDetail(_TABLE[error.code][1], message_of(error, protocol), details), request_id
    )


def openai_detail(error: OmlxdError, protocol: Protocol = "openai") -> OpenAIDetail:
    """Return the content of OpenAI's error objects."""
    _, _, kind, code = _TABLE[error.code]
    if error.code == "not_found":
        code = _MISSING.get(error.param or "")
    return OpenAIDetail(message_of(error, protocol), kind, error.param, code)


def http_error(
    error: OmlxdError, protocol: Protocol, request_id: str, *, status: int | None = None
) -> HttpError:
    """Return the answer to a request that failed before its response began. `status`: a finer one (405)."""
    headers = [("content-type", "application/json")]
    if (wait := _wait_of(error)) is not None:
        headers.append(("retry-after", str(wait)))
    elif error.code == "model_unusable":
        headers.append(("x-should-retry", "false"))
    if error.code == "authentication":
        headers.append(("www-authenticate", "Bearer"))
    usual = 529 if protocol == "anthropic" and error.code == "overloaded" else _TABLE[error.code][0]
    told = error_body(error, protocol, request_id)
    if isinstance(told, GeminiError) and status is not None:
        told.error.code = status
        told.error.status = _GEMINI_OF_STATUS.get(status, told.error.status)
    body = msgspec.json.encode(told)
    return HttpError(status or usual, tuple(headers), body)


def _wait_of(error: OmlxdError) -> int | None:
    """Return the seconds after which a retry may help; None: it won't."""
    wait = error.retry_after or _DEFAULT_RETRY_AFTER.get(error.code)
    return None if wait is None else max(1, min(wait, MAX_RETRY_AFTER))
