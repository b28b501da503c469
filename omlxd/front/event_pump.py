"""A request's events, read by a task of their own, so that waiting for them can time out.

`asyncio.wait_for(events.__anext__(), …)` would cancel the generator on the first timeout.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from ..chat import Event, Failed, Finished
from ..errors import OmlxdError, Unavailable

log = logging.getLogger(__name__)


class EventPump:
    """Reads `events` until Finished, Failed or `close`. Always close it.

    seen  is called with each event as it arrives, whenever its client may read it
    """

    def __init__(
        self, events: AsyncGenerator[Event, None], seen: Callable[[Event], None] = lambda event: None
    ):
        self._events = events
        self._seen = seen
        self._waiting: list[Event] = []
        self._arrived = asyncio.Event()
        self._error: OmlxdError | None = None
        self._task = asyncio.create_task(self._run())

    async def next(self, timeout: float | None) -> list[Event]:
        """What has arrived, at least one event; [] after `timeout` seconds without any."""
        if not self._waiting:
            try:
                async with asyncio.timeout(timeout):
                    await self._arrived.wait()
            except TimeoutError:
                return []
        self._arrived.clear()
        events, self._waiting = self._waiting, []
        return events

    def error(self, failed: Failed) -> OmlxdError:
        """The error behind `failed`: the one that was raised, if one was, as it tells more."""
        return self._error or OmlxdError.from_event(failed)

    async def close(self) -> None:
        """Stop reading; cancels the request in the engine unless it has ended."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        # Here and not in the task: one that is cancelled before its first step runs no `finally`.
        await self._events.aclose()

    async def _run(self) -> None:
        try:
            async for event in self._events:
                self._put(event)
                if isinstance(event, (Finished, Failed)):
                    return
            self._fail(Unavailable("The engine stopped in the middle of the answer; try again."))
        except OmlxdError as error:
            self._fail(error)
        except Exception:
            log.exception("reading events failed unexpectedly")
            self._fail(OmlxdError("Something went wrong inside omlxd; its log has the details."))

    def _fail(self, error: OmlxdError) -> None:
        self._error = error
        self._put(error.as_event())

    def _put(self, event: Event) -> None:
        self._seen(event)
        self._waiting.append(event)
        self._arrived.set()
