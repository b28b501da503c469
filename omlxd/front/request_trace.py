"""What the access log tells of a request. No text of prompts or answers ever enters it."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..chat import Usage

log = logging.getLogger("omlxd.access")

_SCOPE_KEY = "omlxd.trace"
METHOD_CHARS = 20
SHOWN_CHARS = 120
"""Of a path, and of a model's name."""
POLLED = frozenset({"/health", "/ready", "/metrics", "/omlxd/status"})
"""Asked again and again by programs that watch: at info they would fill the log."""


class Request(msgspec.Struct, frozen=True):
    """One line of the access log."""

    id: str
    method: str
    path: str
    key: str
    model: str
    status: int
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float
    duration_s: float

    def __str__(self) -> str:
        return (
            f"{self.id} {self.method} {self.path} key={self.key} model={self.model} status={self.status} "
            f"outcome={self.outcome} prompt={self.prompt_tokens} cached={self.cached_tokens} "
            f"completion={self.completion_tokens} ttft={self.ttft_s:.3f}s wall={self.duration_s:.3f}s"
        )


@dataclass(slots=True)
class RequestTrace:
    """Filled in as the request goes along.

    status   HTTP status sent; 0 while none was
    outcome  `ok`, an error code, or `disconnected`
    key      name of the key that it carried
    """

    method: str
    path: str
    id: str = field(default_factory=lambda: "req_" + os.urandom(12).hex())
    started: float = field(default_factory=time.monotonic)
    key: str = ""
    model: str = ""
    status: int = 0
    outcome: str = "ok"
    usage: Usage | None = None

    def write(self) -> None:
        """One line, at info; at debug for `POLLED`."""
        level = logging.DEBUG if self.path in POLLED else logging.INFO
        if not log.isEnabledFor(level):
            return
        usage = self.usage or Usage()
        line = Request(
            id=self.id,
            method=self.method,
            path=printable(self.path[:SHOWN_CHARS]),
            key=self.key or "-",
            model=printable(self.model[:SHOWN_CHARS]) or "-",
            status=self.status,
            outcome=self.outcome,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            ttft_s=round(usage.ttft_s, 4),
            duration_s=round(time.monotonic() - self.started, 4),
        )
        log.log(level, "%s", line, extra={"fields": line})


def printable(text: str) -> str:
    """A client's text for a log line: with no line breaks or control characters."""
    return text.encode("unicode_escape").decode("ascii")


def begin(scope: Any) -> RequestTrace:
    """A trace for this ASGI scope, kept in it."""
    trace = scope[_SCOPE_KEY] = RequestTrace(method=scope["method"][:METHOD_CHARS], path=scope["path"])
    return trace


def trace_of(scope: Any) -> RequestTrace:
    return scope[_SCOPE_KEY]
