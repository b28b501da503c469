"""One connection, as Hypercorn serves it, but let go of as soon as the client is.

Hypercorn 0.18 ends a connection only when its idle timer has, even if the client closed it long
before: every connection costs a file and its tasks for another `keep_alive_timeout`. A client that
makes a connection a request would have used up all files in a minute or two.
"""

from __future__ import annotations

from hypercorn.asyncio import run
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.events import Event, Updated


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


def use_for_every_connection() -> None:
    run.TCPServer = Connection  # type: ignore[misc]  # Hypercorn's server has no parameter for it.
