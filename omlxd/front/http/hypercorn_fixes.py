"""Hypercorn's connection, released as soon as the client is gone, and HTTP/1.1 alone, as RFC 9112 has it.

| Hypercorn 0.18                                         | here                                           |
|--------------------------------------------------------|------------------------------------------------|
| keeps a connection that its client closed, for 75 s    | ends it at once: each costs a file             |
| takes a client that closed its sending half for gone   | answers it, if it shows that it is there       |
| speaks HTTP/2 without TLS to whoever asks              | ignores that (RFC 9110, 7.8)                   |
| goes on after Content-Length with Transfer-Encoding    | answers, then closes (RFC 9112, 6.1)           |
| takes `GET http://host/path` for a path                | has path and Host of it (RFC 9112, 3.2.2)      |
| begins all requests at once                            | begins one a turn of the event loop, none of a |
|                                                        | client that left; `AT_ONCE` go before          |

An answer over HTTP/2 to a client that hung up would wait for a window that never opens.

This file imports Hypercorn, so front/app.py does not import it.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections import deque
from dataclasses import replace

import h11
from hypercorn import protocol
from hypercorn.asyncio import run
from hypercorn.asyncio.tcp_server import MAX_RECV, TCPServer
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Response
from hypercorn.protocol.h11 import H11Protocol

from .observe.trace import POLLED

PROBE_S, MOST_PROBE_S = 0.05, 1.0
"""Seconds between two probes of a client that sends no more; each pause is twice the last."""
MOST_ZEROS = 4
"""Zeros before a chunk's size at most: some clients read no more than 16 digits."""
ABSOLUTE = re.compile(rb"https?://([^/?#@]+)([/?][^#]*)?", re.IGNORECASE)
"""Matches a target with scheme and authority, without user information (RFC 9110, 4.2.4)."""


AT_ONCE = frozenset(path.encode() for path in POLLED)
"""Paths without a turn: monitors ask while the daemon is busy, too."""


class Turns:
    """Lets one request begin in each turn of the event loop, in order of arrival.

    To begin one takes milliseconds. Where clients come and go faster than that (at 200 a second each
    waited in the kernel's queue behind all others), connections are still taken, looked at, and dropped
    if nobody is there any more.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._busy = False

    async def wait(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._busy:
            self._busy = True
            loop.call_soon(self._next)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()  # Its connection was ended.
        self._busy = bool(self._waiting)
        if self._busy:
            self._waiting.popleft().set_result(None)
            asyncio.get_running_loop().call_soon(self._next)


class Connection(TCPServer):
    """Stops the idle timer, and starts none again, once the client sends no more."""

    _over = False

    async def _read_data(self) -> None:
        try:
            while not self._over:
                data = await self.reader.read(MAX_RECV)
                self._over = not data
                await self.protocol.handle(RawData(data))
            await self._stay_for_answer()
        except OSError:
            pass
        finally:
            self._over = True
            await self.protocol.handle(Closed())
            await self.idle_task.stop()

    async def _stay_for_answer(self) -> None:
        """Wait for the answer while a client that sends no more can still read it."""
        http = getattr(self.protocol, "protocol", None)
        pause_s = PROBE_S
        while isinstance(http, Http1) and http.is_asked and self._is_there(http):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_PROBE_S)

    def has_left(self, http: Http1) -> bool:
        """Return whether the client left before its request began."""
        return self._is_gone() or (self._sends_no_more() and not self._is_there(http))

    def _sends_no_more(self) -> bool:
        return self.reader.at_eof() or at_end(self.writer.get_extra_info("socket").fileno())

    def _is_there(self, http: Http1) -> bool:
        """Probe a client that sends no more, by writing.

        TCP tells one that closed its sending half from one that is gone only then: at once on this machine.
        """
        if not http.takes_probes:
            return False
        if not self.send_lock.locked() and (probe := http.probe()):
            self.writer.write(probe)
        return not self._is_gone()

    def _is_gone(self) -> bool:
        # asyncio reads no more, and so notices a reset only at the next write.
        transport = self.writer.transport
        if transport.is_closing():
            return True
        return bool(transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    async def protocol_send(self, event: Event) -> None:
        if self._over and isinstance(event, Updated) and event.idle:
            return
        await super().protocol_send(event)


def at_end(fd: int) -> bool:
    """Return whether a socket has nothing to read but its unread end."""
    try:
        with socket.socket(fileno=os.dup(fd)) as same:
            same.setblocking(False)
            return not same.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


class BadRequest(Exception):
    """A request that HTTP does not allow, or that is too large. `status`: of the answer."""

    def __init__(self, status: int):
        super().__init__(status)
        self.status = status


class ClientGone(Exception):
    """The client that an answer is for is gone."""


class Http1(H11Protocol):
    """Looks for no HTTP/2 in a request, and takes headers of no more than `h11_max_incomplete_size` bytes.

    h11 itself asks only while they are incomplete, so that another read of them may come on top.
    """

    _last = False
    """Whether no request follows, since nobody could be sure where it begins."""
    _chunked, _zeros = False, 0
    _turns = Turns()

    async def _check_protocol(self, event: h11.Request) -> None:
        lines = (len(name) + len(value) for name, value in event.headers)
        if len(event.target) + sum(lines) > self.config.h11_max_incomplete_size:
            raise BadRequest(431)
        names = {name for name, _ in event.headers}
        self._last = {b"content-length", b"transfer-encoding"} <= names

    async def _create_stream(self, request: h11.Request) -> None:
        request = _origin_form(request)
        if request.target.partition(b"?")[0] not in AT_ONCE:
            await self._turns.wait()
            connection = getattr(self.send, "__self__", None)
            if isinstance(connection, Connection) and connection.has_left(self):
                raise ClientGone
        await super()._create_stream(request)

    async def _handle_events(self) -> None:
        try:
            await super()._handle_events()
        except BadRequest as error:
            await self._send_error_response(error.status)
            await self.send(Closed())
        except ClientGone:
            await self.send(Closed())

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, Response):
            if self._last:
                event = replace(event, headers=[*event.headers, (b"connection", b"close")])
            self._chunked = all(name != b"content-length" for name, _ in event.headers)
        await super().stream_send(event)

    @property
    def is_asked(self) -> bool:
        """Whether a client that sends no more waits for an answer."""
        return self.stream is not None and self.connection.their_state is h11.CLOSED

    @property
    def takes_probes(self) -> bool:
        """Whether the client skips probes: with HTTP/1.1 alone. nginx speaks 1.0, and closes by itself."""
        return getattr(self.connection, "their_http_version", None) == b"1.1"

    def probe(self) -> bytes:
        """Return bytes that clients skip: an interim answer (RFC 9110, 15.2) or a zero of a chunk's size."""
        if self.connection.our_state is h11.SEND_RESPONSE:
            return self.connection.send(h11.InformationalResponse(status_code=100, headers=[])) or b""
        if self.connection.our_state is h11.SEND_BODY and self._chunked and self._zeros < MOST_ZEROS:
            self._zeros += 1
            return b"0"
        return b""


def _origin_form(request: h11.Request) -> h11.Request:
    """Return `request` with a path for its target, and its Host from the target. Raises BadRequest."""
    target = request.target
    if target.startswith(b"/") or target == b"*" or request.method == b"CONNECT":
        return request
    found = ABSOLUTE.fullmatch(target)
    if found is None:
        raise BadRequest(400)
    path = found[2] or b"/"
    return h11.Request(
        method=request.method,
        target=path if path.startswith(b"/") else b"/" + path,
        headers=[(name, value) for name, value in request.headers if name != b"host"] + [(b"host", found[1])],
        http_version=request.http_version,
    )


def use_for_every_connection() -> None:
    # Hypercorn has no parameter for either.
    run.TCPServer = Connection  # type: ignore[misc]
    protocol.H11Protocol = Http1  # type: ignore[misc]
