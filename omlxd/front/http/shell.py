"""The outermost layer of every request: its id, its body limit, its errors, its log line. Pure ASGI.

Whatever happens inside, a request that has had no answer yet gets one here, in its protocol's own
error shape. Nothing unexpected reaches a client but the request id, under which the log has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
from collections.abc import Collection
from typing import NoReturn

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...api.errors import Protocol, http_error, no_such_verb, protocol_of
from ...errors import OmlxdError, Overloaded, RequestTooLarge
from .observe.trace import METHOD_CHARS, RequestTrace, begin
from .sending.slow_reader import TooSlow
from .sending.websockets import refuse_websocket
from .settings import HttpSettings

_ABSENT = {
    "/v1/audio": "audio is neither transcribed, translated nor spoken here: no model of sound is served",
    "/v1/images": "no images are made here: models only read them",
    "/v1/moderations": "nothing is moderated here",
    "/v1/files": "no files are kept here: send them within a request",
    "/v1/realtime": "there is no realtime API: no model of sound is served",
}
"""Paths of other servers' APIs, and why each is absent."""


def advice(path: str, served: Collection[str]) -> str:
    """Return a clause on `path`, which is none of the paths `served`; it ends a sentence."""
    for root, why in _ABSENT.items():
        if path == root or path.startswith(root + "/"):
            return why
    plain = "/" + re.sub(r"/+", "/", path).strip("/")
    for meant in (plain, "/v1" + plain, "/v1" + plain.rpartition("/v1")[2]):
        if meant in served:
            return (
                f"there is no such path, but {meant}; the base URL of an OpenAI client ends in /v1, that of "
                "an Anthropic client in the port"
            )
    return (
        "there is no such path; this server speaks OpenAI's API (/v1/chat/completions, /v1/completions, "
        "/v1/responses), Anthropic's (/v1/messages), Ollama's (/api/chat), Gemini's "
        "(/v1beta/models/MODEL:generateContent) and LM Studio's (/api/v1/chat), and of llama.cpp (/models, "
        "/props) what lists, loads and unloads models; GET "
        "/v1/models lists its models, and GET /openapi.json describes every path"
    )


STREAMED = frozenset({"/omlxd/cache/import", "/omlxd/cache/prompt-cache/import"})
"""Paths of bodies of any length, which are handed on as they come."""

log = logging.getLogger(__name__)


class RouteError(OmlxdError):
    """No such path (404), or not with this method (405), or a body that does not come (408), or is packed
    (415).

    `allow`: the methods that there are.
    """

    def __init__(self, message: str, status: int, allow: str = ""):
        super().__init__(message, code="not_found" if status == 404 else "invalid_request")
        self.status = status
        self.allow = allow


def raise_route_error(request: Request, error: Exception) -> NoReturn:
    """Turn Starlette's own 404 and 405 into ours."""
    assert isinstance(error, HTTPException)
    what = f"{request.method[:METHOD_CHARS]} {request.url.path[:200]}"
    if unknown := no_such_verb(request.method, request.url.path):
        raise RouteError(f"{what}: {unknown}.", 404)
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        raise RouteError(f"{what}: this path takes {allow}.", 405, allow)
    served = {route.path for route in request.app.routes if isinstance(route, Route)}
    raise RouteError(f"{what}: {advice(request.url.path[:200], served)}.", error.status_code)


class Shell:
    """Wraps `app`, one request at a time."""

    def __init__(self, app: ASGIApp, settings: HttpSettings):
        self._app = app
        self._settings = settings
        self._bodies = _Budget(settings.bodies_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await refuse_websocket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        trace = begin(scope)
        body = _Body(receive, self._settings, self._bodies, trace, scope["path"] in STREAMED)
        versioned = any(name == b"anthropic-version" for name, _ in scope["headers"])
        answer = _Answer(send, trace, protocol_of(scope["path"], versioned))
        try:
            await self._answer(scope, body, answer, trace)
        finally:
            body.release()
            trace.write()

    async def _answer(self, scope: Scope, body: _Body, answer: _Answer, trace: RequestTrace) -> None:
        try:
            body.check_announced(scope)
            await self._app(scope, body.receive, answer.send)
            return
        except OmlxdError as error:
            problem = error
        except ClientDisconnect as gone:
            trace.outcome = "too_slow" if isinstance(gone, TooSlow) else "disconnected"
            return
        except Exception:
            log.exception("%s failed unexpectedly", trace.id)
            problem = OmlxdError(
                f"Something went wrong inside omlxd; its log has the details under {trace.id}."
            )
        trace.fail(problem)
        if answer.started:
            # The status is out: breaking the connection is the only honest end.
            raise problem
        with contextlib.suppress(TooSlow):
            await answer.send_error(problem, body, self._settings.drain_s)


class _Budget:
    """Bytes that all bodies may take together: each is held until its request ends."""

    def __init__(self, limit: int):
        self._left = limit

    def take_bytes(self, size: int) -> None:
        """Reserve bytes for a body. Raises Overloaded."""
        if size > self._left:
            raise Overloaded("Too many large requests are running already; retry in a moment.", retry_after=5)
        self._left -= size

    def give_back(self, size: int) -> None:
        self._left += size


class _Body:
    """Counts a request's body as it comes in, and waits for it no longer than the settings say."""

    def __init__(
        self, receive: Receive, settings: HttpSettings, budget: _Budget, trace: RequestTrace, streamed: bool
    ):
        self._receive = receive
        self._streamed = streamed
        self._trace = trace
        self._budget = budget
        self._limit = math.inf if streamed else settings.max_body_bytes
        self._pause_s = settings.body_pause_s
        self._deadline = math.inf if streamed else time.monotonic() + settings.body_total_s
        self._size = 0
        self._complete = False

    def check_announced(self, scope: Scope) -> None:
        """Check a request by its headers alone. Raises RequestTooLarge and RouteError."""
        for name, value in scope["headers"]:
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                packed = value[:40].decode("latin-1")
                raise RouteError(f"Content-Encoding: send the body as it is, not as {packed!r}.", 415)
            if name == b"content-length" and value.isdigit() and int(value[:20]) > self._limit:
                raise self._too_large()

    async def receive(self) -> Message:
        message = await (self._receive() if self._complete else self._part())
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
            if self._streamed:
                return message  # Nobody holds it.
            if self._size + size > self._limit:
                raise self._too_large()
            self._budget.take_bytes(size)
            self._size += size
            if self._trace.wants_body:
                self._trace.body += message.get("body", b"")
        return message

    def release(self) -> None:
        """Give back a request's bytes."""
        self._budget.give_back(self._size)
        self._size = 0

    async def _part(self) -> Message:
        try:
            async with asyncio.timeout(min(self._pause_s, self._deadline - time.monotonic())):
                return await self._receive()
        except TimeoutError:
            self._complete = True  # As far as we care: nothing more is read of it.
            raise RouteError("The request's body did not come in time.", 408) from None

    async def drain(self, pause_s: float) -> None:
        """Discard the unread body: a client that still writes would not see the answer.

        However long it takes to write, as long as something comes: its connection would be reset.
        """
        with contextlib.suppress(TimeoutError):
            while not self._complete:
                async with asyncio.timeout(min(pause_s, self._deadline - time.monotonic())):
                    message = await self._receive()
                self._complete = message["type"] != "http.request" or not message.get("more_body", False)

    def _too_large(self) -> RequestTooLarge:
        return RequestTooLarge(f"The request body is larger than {self._limit} bytes.")


class _Answer:
    """The response on its way out: its status noted, the request id in its headers."""

    def __init__(self, send: Send, trace: RequestTrace, protocol: Protocol):
        self._send = send
        self._trace = trace
        self._protocol: Protocol = protocol
        self.started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self._trace.status = message["status"]
            name = b"request-id" if self._protocol == "anthropic" else b"x-request-id"
            message["headers"] = [*message.get("headers", ()), (name, self._trace.id.encode())]
        await self._send(message)

    async def send_error(self, error: OmlxdError, body: _Body, drain_s: float) -> None:
        status = error.status if isinstance(error, RouteError) else None
        answer = http_error(error, self._protocol, self._trace.id, status=status)
        headers = [*answer.headers, ("content-length", str(len(answer.body)))]
        if isinstance(error, RouteError) and error.allow:
            headers.append(("allow", error.allow))
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
        await self.send({"type": "http.response.start", "status": answer.status, "headers": raw})
        await self.send({"type": "http.response.body", "body": answer.body, "more_body": True})
        await body.drain(drain_s)
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})
