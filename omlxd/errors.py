"""Typed errors. `api/errors.py` is the one place that turns them into HTTP."""

from __future__ import annotations

from .chat import ErrorCode, Failed

AGENT_CONTEXT = 32_000
"""Tokens that an agent needs, as its tools alone take some 18,000."""
LEAST_CONTEXT, LONGER_CONTEXT = 5000, 40_960
"""Tokens: a model with less than the first is nobody's choice for long prompts; `LONGER` takes the second."""
LONGER = f"`omlxd serve --model mlx-community/Qwen3-8B-4bit` serves a model that takes {LONGER_CONTEXT}."


MOST_CHARS = 4000
"""Of an error's message. A template, a library or a file may say megabytes, which every log and client would
carry."""


class OmlxdError(Exception):
    """An error that a client or an owner can act on.

    code         what kind it is (see `chat.ErrorCode`)
    message      one sentence that says what to do; of a longer one `MOST_CHARS`
    param        the request field at fault, if one is
    retry_after  seconds after which the same request may go through, at most 60
    """

    code: ErrorCode = "internal"
    loggable = False
    """The message names the machine or a setting, never text of a request (see common/private_trace.py)."""

    def __init__(
        self,
        message: str,
        *,
        code: ErrorCode | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ):
        if len(message) > MOST_CHARS:
            message = message[: MOST_CHARS - 2] + " …"
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.param = param
        self.retry_after = retry_after

    def as_event(self) -> Failed:
        return Failed(self.code, self.message, self.retry_after, self.param)

    @classmethod
    def from_event(cls, failed: Failed) -> OmlxdError:
        return OmlxdError(
            failed.message, code=failed.code, param=failed.param, retry_after=failed.retry_after
        )


class InvalidRequest(OmlxdError):
    code = "invalid_request"


def bad_field(param: str, why: str) -> InvalidRequest:
    """Return the error for field `param` of a request: its message begins with the field's name."""
    return InvalidRequest(f"{param}: {why}", param=param)


class PromptTooLong(OmlxdError):
    """`tokens` > `limit`, which is the context without the answer's first token.

    least  not all of them were counted

    The sentence is the one that Claude Code parses (facts of its client).
    """

    code = "prompt_too_long"

    def __init__(self, tokens: int, limit: int, *, least: bool = False):
        self.tokens, self.least = tokens, least
        message = f"prompt is too long: {'at least ' if least else ''}{tokens} tokens > {limit} maximum"
        if limit > LEAST_CONTEXT:
            helps = tokens < LONGER_CONTEXT and not least and limit < AGENT_CONTEXT
            message += f". {LONGER}" if helps else ". Shorten the prompt."
        super().__init__(message)


class NotFound(OmlxdError):
    code = "not_found"


class ThreadError(OmlxdError):
    """A message thread can't be begun or continued. `detail`: Anthropic's `error_code`.

    After `thread_not_found`, `_already_continued` and `_continue_in_flight` its SDKs send the whole
    conversation, after `_unsupported_request` without a thread.
    """

    def __init__(self, param: str, why: str, detail: str):
        code: ErrorCode = "not_found" if detail == "thread_not_found" else "invalid_request"
        super().__init__(f"{param}: {why}", code=code, param=param)
        self.detail = detail


class Unauthorized(OmlxdError):
    code = "authentication"


class RequestTooLarge(OmlxdError):
    code = "request_too_large"


class Overloaded(OmlxdError):
    code = "overloaded"


class Unavailable(OmlxdError):
    code = "unavailable"


class NotNow(OmlxdError):
    """A model is not loaded now, for a reason that lies outside it: no memory, or too many are in use."""

    code = "unavailable"


class ConfigError(OmlxdError):
    """A flag, a variable or a line of the configuration file makes no sense. The message names it."""

    code = "invalid_request"
    loggable = True


class AdapterError(InvalidRequest):
    """The files of an adapter can't be used. They are looked at again for the next request."""

    loggable = True


class ModelError(OmlxdError):
    """A model can't be loaded, and can't be until its owner has changed something."""

    code = "model_unusable"
    loggable = True
