"""The access log's line of a request: no text of prompts or answers, but for bodies at debug."""

from __future__ import annotations

import logging
import os
import re
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ....api.fields.unknown_fields import UnknownFields, noting
from ....chat import ChoiceEvent, Event, Progress, ReasoningDelta, Restarted, TextDelta, ToolCallDelta, Usage
from ....common.units import human
from ....errors import OmlxdError
from ..settings import OWN

log = logging.getLogger("omlxd.access")

_SCOPE_KEY = "omlxd.trace"
METHOD_CHARS = 20
SHOWN_CHARS = 120
"""Characters shown of a path, a model's name, and a client's."""
PROBLEM_CHARS = 300
BODY_BYTES = 64 * 1024
"""Bytes of a request's body that debug shows."""
POLLED = frozenset({"/health", "/ready", "/metrics", "/omlxd/status"})
"""Paths that programs poll: at info they would fill the log."""


class Request(msgspec.Struct, frozen=True):
    """One line of the access log.

    prompt_tokens, cached_tokens  of its prompt; None: its client left before they were known, or it has none
    computed_tokens  of its prompt, so far if it was not finished; its times are then those until it ended
    completion_tokens  if it was not finished, pieces that came: a token each, but for text that was held back
    drafted, accepted  tokens that were guessed, and guesses that held; None if it was begun and not finished
    peak_bytes  the most memory that MLX held; None likewise
    client   the User-Agent
    priority, side_request  of `chat.Limited`
    ignored  fields of its body that nobody reads
    param    the field at fault
    problem  the error's sentence; texts of the client's in it are left out
    """

    id: str
    method: str
    path: str
    key: str
    model: str
    status: int
    outcome: str
    prompt_tokens: int | None
    cached_tokens: int | None
    computed_tokens: int
    completion_tokens: int
    drafted: int | None
    accepted: int | None
    ttft_s: float
    queue_s: float
    restore_s: float
    prefill_s: float
    decode_s: float
    tokens_per_s: float
    peak_bytes: int | None
    duration_s: float
    client: str = ""
    priority: int = 0
    side_request: bool = False
    ignored: list[str] = []
    param: str = ""
    problem: str = ""

    def __str__(self) -> str:
        problem = f" param={self.param or '-'} problem: {self.problem}" if self.problem else ""
        prompt, cached = (
            "-" if tokens is None else tokens for tokens in (self.prompt_tokens, self.cached_tokens)
        )
        guesses = "-" if self.drafted is None else f"{self.accepted}/{self.drafted}"
        ignored = f" ignored={','.join(self.ignored)}" if self.ignored else ""
        place = f" priority={self.priority}" if self.priority else ""
        place += " side_request=1" if self.side_request else ""
        peak = "-" if self.peak_bytes is None else human(self.peak_bytes)
        return (
            f"{self.id} {self.method} {self.path} key={self.key} model={self.model} status={self.status} "
            f"outcome={self.outcome} prompt={prompt} cached={cached} "
            f"computed={self.computed_tokens} completion={self.completion_tokens} "
            f"guesses={guesses} "
            f"ttft={self.ttft_s:.3f}s queue={self.queue_s:.3f}s "
            f"restore={self.restore_s:.3f}s prefill={self.prefill_s:.3f}s decode={self.decode_s:.3f}s "
            f"tokens_per_s={self.tokens_per_s:.1f} peak={peak} wall={self.duration_s:.3f}s "
            f"client={self.client}{place}{ignored}{problem}"
        )


@dataclass(slots=True)
class Answered:
    """What of an answer has come.

    computed    tokens of its prompt, so far
    progress_s  seconds until the newest progress came
    first_s     seconds until the answer began; 0: it has not
    pieces      of text that have come
    """

    computed: int = 0
    progress_s: float = 0.0
    first_s: float = 0.0
    pieces: int = 0


@dataclass(slots=True)
class RequestTrace:
    """Filled in as the request goes along.

    status   HTTP status sent; 0 while none was
    outcome  `ok`, an error code, or `disconnected`
    key      name of the key that it carried
    model    as the client writes it
    model_id the model that this means; "" until it is found
    priority as the request has it
    body     the beginning of the request's body; empty unless the log is at debug
    handed_on  a model has got it, or will once it is loaded
    prompt_tokens, restored  of its prompt, once its prefill began; -1: not known
    progress   the newest
    unknown_fields  of its body
    """

    method: str
    path: str
    id: str = field(default_factory=lambda: "req_" + os.urandom(12).hex())
    started: float = field(default_factory=time.monotonic)
    key: str = ""
    model: str = ""
    model_id: str = ""
    priority: int = 0
    status: int = 0
    outcome: str = "ok"
    usage: Usage | None = None
    prompt_tokens: int = -1
    restored: int = -1
    handed_on: bool = False
    progress: Progress | None = None
    answer: Answered = field(default_factory=Answered)
    client: str = ""
    problem: OmlxdError | None = None
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    body: bytearray = field(default_factory=bytearray)

    @property
    def wants_body(self) -> bool:
        return log.isEnabledFor(logging.DEBUG) and len(self.body) < BODY_BYTES

    def follow(self, event: Event) -> None:
        """Record an event before the last. An engine's first Progress has the restored tokens."""
        passed_s = time.monotonic() - self.started
        if isinstance(event, Progress):
            if self.progress is None or event.done < self.progress.done:
                self.restored, self.prompt_tokens = event.done, event.total
            self.answer.computed = event.done - self.restored
            self.progress, self.answer.progress_s = event, passed_s
        elif isinstance(event, Restarted):
            self.answer.first_s, self.answer.pieces = 0.0, 0
        else:
            if not self.answer.first_s:
                self.answer.first_s, self.answer.computed = passed_s, self.prompt_tokens - self.restored
            said = event.event if isinstance(event, ChoiceEvent) else event
            is_text = isinstance(said, TextDelta | ReasoningDelta)
            self.answer.pieces += said.pieces if is_text else isinstance(said, ToolCallDelta)

    def usage_so_far(self) -> Usage:
        """Return tokens and times of a request that was not finished.

        Behind the newest progress it prefills until its answer begins: nothing else is known here.
        """
        passed_s, progress = time.monotonic() - self.started, self.progress
        if progress is None:
            return Usage(queue_s=passed_s if self.handed_on else 0.0)
        prefilled_s = max(self.answer.first_s, self.answer.progress_s) if self.answer.first_s else passed_s
        return Usage(
            completion_tokens=self.answer.pieces,
            ttft_s=self.answer.first_s,
            queue_s=max(0.0, self.answer.progress_s - progress.restore_s - progress.prefill_s),
            restore_s=progress.restore_s,
            prefill_s=progress.prefill_s + prefilled_s - self.answer.progress_s,
            decode_s=passed_s - prefilled_s,
        )

    def fail(self, problem: OmlxdError) -> None:
        self.outcome, self.problem = problem.code, problem

    def write(self) -> None:
        """Log one line, at info; at debug for `POLLED`."""
        level = logging.DEBUG if self.path in POLLED else logging.INFO
        if not log.isEnabledFor(level):
            return
        usage, problem = self.usage or self.usage_so_far(), self.problem
        param = (problem.param or "") if problem else ""
        known = self.prompt_tokens, self.restored, self.answer.computed
        if self.usage:
            known = usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens
        prompt_tokens, cached_tokens = (None if tokens < 0 else tokens for tokens in known[:2])
        is_known = self.usage is not None or not self.handed_on
        line = Request(
            id=self.id,
            method=self.method,
            path=printable(self.path[:SHOWN_CHARS]),
            key=self.key or "-",
            model=printable(self.model[:SHOWN_CHARS]) or "-",
            status=self.status,
            outcome=self.outcome,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            computed_tokens=known[2],
            completion_tokens=usage.completion_tokens,
            drafted=usage.drafted if is_known else None,
            accepted=usage.accepted if is_known else None,
            ttft_s=round(usage.ttft_s, 4),
            queue_s=round(usage.queue_s, 4),
            restore_s=round(usage.restore_s, 4),
            prefill_s=round(usage.prefill_s, 4),
            decode_s=round(usage.decode_s, 4),
            tokens_per_s=round(usage.tokens_per_s, 1),
            peak_bytes=usage.peak_bytes if is_known else None,
            duration_s=round(time.monotonic() - self.started, 4),
            client=printable(self.client[:SHOWN_CHARS]) or "-",
            priority=self.priority,
            side_request=usage.limited.side_request,
            ignored=[printable(name) for name in self.unknown_fields.names if name != param],
            param=printable(param[:SHOWN_CHARS]),
            problem=printable(without_texts(problem.message)[:PROBLEM_CHARS]) if problem else "",
        )
        log.log(level, "%s", line, extra={"fields": line})
        if self.body:
            log.debug("%s body: %s", self.id, printable(self.body[:BODY_BYTES].decode("utf-8", "replace")))


_QUOTED = re.compile(r"""(?<!\w)(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")""")


def without_texts(message: str) -> str:
    """Return `message` without its quotations: a client may have put its prompt in any field."""
    return _QUOTED.sub("'...'", message)


def printable(text: str) -> str:
    """Clean a client's text for a log line: no line breaks or control characters."""
    return text.encode("unicode_escape").decode("ascii")


def begin(scope: Any) -> RequestTrace:
    """Begin a trace and keep it in this ASGI scope."""
    trace = scope[_SCOPE_KEY] = RequestTrace(
        method=scope["method"][:METHOD_CHARS], path=scope["path"], unknown_fields=noting()
    )
    trace.client = dict(scope["headers"]).get(b"user-agent", b"").decode("latin-1")
    return trace


def trace_of(scope: Any) -> RequestTrace:
    return scope[_SCOPE_KEY]


def client_of(scope: Any) -> str:
    """Return the client for fairness: the name of its key, else its address; "" over a Unix socket.

    The key of `--api-key` may be everybody's, so it says nothing.
    """
    key, address = trace_of(scope).key, scope.get("client")
    return key if key not in ("", OWN) else str(address[0]) if address else ""
