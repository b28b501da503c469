"""What the access log tells of a request. No text of prompts or answers ever enters it."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any

from ..chat import Usage

log = logging.getLogger("omlxd.access")

_SCOPE_KEY = "omlxd.trace"
POLLED = frozenset({"/health", "/ready", "/metrics", "/omlxd/status"})
"""Asked again and again by programs that watch: at info they would fill the log."""


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
        log.log(
            level,
            "%s %s %s key=%s model=%s status=%d outcome=%s "
            "prompt=%d cached=%d completion=%d ttft=%.3fs wall=%.3fs",
            self.id,
            self.method,
            _printable(self.path),
            self.key or "-",
            _printable(self.model) or "-",
            self.status,
            self.outcome,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            usage.ttft_s,
            time.monotonic() - self.started,
        )


def _printable(text: str) -> str:
    """Client's text for a log line: short, and with no line breaks or control characters."""
    return text[:120].encode("unicode_escape").decode("ascii")


def begin(scope: Any) -> RequestTrace:
    """A trace for this ASGI scope, kept in it."""
    trace = scope[_SCOPE_KEY] = RequestTrace(method=scope["method"], path=scope["path"])
    return trace


def trace_of(scope: Any) -> RequestTrace:
    return scope[_SCOPE_KEY]
