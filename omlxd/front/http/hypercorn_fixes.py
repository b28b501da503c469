"""Hypercorn's connection, released as soon as the client is gone, and HTTP/1.1 alone.

Hypercorn 0.18 ends a connection only when its idle timer ends, even if the client closed it long
before: each connection costs a file and its tasks for another `keep_alive_timeout`, so a client that
makes a connection a request uses up all files in a minute or two.

Hypercorn also speaks HTTP/2 without TLS to whoever asks. No client of ours does, and an answer to one
that hung up waits there for a window that never opens. An upgrade may be ignored (RFC 9110, 7.8).

This file imports Hypercorn, so front/app.py does not import it.
"""

from __future__ import annotations

import h11
from hypercorn import protocol
from hypercorn.asyncio import run
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.events import Closed, Event, Updated
from hypercorn.protocol.h11 import H11Protocol


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
