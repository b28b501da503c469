"""Sending to a client that may read slowly, or no more at all, without ever hanging on it.

A piece of an answer that the client has not read in `send_pause_s` ends the request, and the
connection with it. The server would flush what it holds before it closes, and so wait as long again.

One connection, as Hypercorn serves it, but let go of as soon as the client is, and HTTP/1.1 alone.

Hypercorn 0.18 ends a connection only when its idle timer has, even if the client closed it long
before: every connection costs a file and its tasks for another `keep_alive_timeout`. A client that
makes a connection a request would have used up all files in a minute or two.

It also speaks HTTP/2 without TLS to whoever asks. No client of ours does, and an answer to one that
has hung up waits there for a window that never opens. An upgrade may be ignored (RFC 9110, 7.8).
"""
# MERGED: docstrings of slow_reader.py, http_connection.py (join by hand)

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any

import h11
from hypercorn import protocol
from hypercorn.asyncio import run
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.events import Closed, Event, Updated
from hypercorn.protocol.h11 import H11Protocol
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send


class Connection(TCPServer):
    """Stops the idle timer, and starts none any more, once there is nothing to read."""

    _over = False

    async def _read_data(self) -> None:
        await super()._read_data()
        self._over = True
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        if self._over and isinstance(event, Updated) and event.idle:
            return
        await super().protocol_send(event)


class HeadersTooLarge(Exception):
    """Of one request."""


class Http1(H11Protocol):
    """Looks for no HTTP/2 in a request, and takes headers of no more than `h11_max_incomplete_size` bytes.

    h11 itself asks only while they are incomplete, so that another read of them may come on top.
    """

    async def _check_protocol(self, event: h11.Request) -> None:
        lines = (len(name) + len(value) for name, value in event.headers)
        if len(event.target) + sum(lines) > self.config.h11_max_incomplete_size:
            raise HeadersTooLarge

    async def _handle_events(self) -> None:
        try:
            await super()._handle_events()
        except HeadersTooLarge:
            await self._send_error_response(431)
            await self.send(Closed())


def use_for_every_connection() -> None:
    # Hypercorn has no parameter for either.
    run.TCPServer = Connection  # type: ignore[misc]
    protocol.H11Protocol = Http1  # type: ignore[misc]


PIECE_BYTES = 64 * 1024


class PacedApp(Starlette):
    """An app none of whose answers waits for a client longer than `send_pause_s` a piece.

    Outermost, as only here `send` is the server's own.
    """

    send_pause_s = 120.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = PacedSend(send, self.send_pause_s)
        await super().__call__(scope, receive, send)


class TooSlow(ClientDisconnect):
    """The client has not read in time; its connection is gone."""


class PacedSend:
    """An ASGI `send` that raises TooSlow. Large bodies go out in pieces, each with time of its own."""

    def __init__(self, send: Send, pause_s: float):
        self._send = send
        self._pause_s = pause_s

    async def __call__(self, message: Message) -> None:
        body = message.get("body", b"")
        if len(body) <= PIECE_BYTES:
            await self._piece(message)
            return
        for at in range(0, len(body), PIECE_BYTES):
            last = at + PIECE_BYTES >= len(body)
            more = not last or message.get("more_body", False)
            await self._piece({**message, "body": body[at : at + PIECE_BYTES], "more_body": more})

    async def _piece(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._pause_s):
                await self._send(message)
        except TimeoutError:
            abort(self._send)
            raise TooSlow from None


def abort(send: Send) -> None:
    """Drop the connection behind an ASGI `send`, and what it has not sent.

    ASGI has no word for this, so it goes by how Hypercorn is made: the stream's `send` leads to the
    protocol's, and that to the connection's. Where it doesn't, the connection lives until the client
    goes or the kernel gives it up.
    """
    with contextlib.suppress(AttributeError):
        stream: Any = send.__self__  # type: ignore[attr-defined]
        transport = stream.send.__self__.send.__self__.writer.transport
        # The kernel too would go on to send what it holds, megabytes at times.
        at_once = struct.pack("ii", 1, 0)
        with contextlib.suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        transport.abort()
