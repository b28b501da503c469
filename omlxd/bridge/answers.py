"""The engine's events, and errors, as lines."""

from __future__ import annotations

from .. import chat
from ..api.openai.fields import chat_logprobs
from ..api.sse import usage_extension
from ..errors import OmlxdError
from .messages import Delta, Done, Failure, Id, Line, Progress, ToolCall, Usage


def line_of(id: Id, event: chat.Event) -> Line | None:
    """None for an event that says nothing here. Not for the last one."""
    match event:
        case chat.Progress():
            return Progress(id, event.done, event.total)
        case chat.ReasoningDelta():
            return Delta(id, reasoning=event.text)
        case chat.TextDelta():
            return Delta(id, event.text, logprobs=chat_logprobs(event.logprobs).content)
        case chat.ToolCall():
            return ToolCall(id, event.id, event.name, event.arguments)
        case chat.ToolCallCut():
            return ToolCall(id, event.id, event.name, event.whole, cut=True)
        case _:
            return None


def done(id: Id, finished: chat.Finished) -> Done:
    return Done(id, finished.reason, usage_of(finished.usage), finished.stop_sequence)


def usage_of(usage: chat.Usage) -> Usage:
    more = usage_extension(usage)
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_hot=usage.cached_hot,
        cached_cold=usage.cached_cold,
        computed=more.computed,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        ttft_s=more.ttft_s,
    )


def failure(id: Id | None, error: OmlxdError) -> Failure:
    """`api` speaks of a request's body, which is a line here."""
    message = error.message.replace("The request body", "The line", 1)
    return Failure(id, error.code, message, error.param, error.retry_after)
