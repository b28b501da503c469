"""Sending to a client that reads slowly, or no more, ends instead of hanging.

A piece of an answer that the client has not read in `send_pause_s` ends the request and its
connection. A plain close would flush what is held first, and so wait as long again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

PIECE_BYTES = 64 * 1024


class PacedApp(Starlette):
    """Wraps an app so that no answer waits longer than `send_pause_s` a piece for a client.

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
