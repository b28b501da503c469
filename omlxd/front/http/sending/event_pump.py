"""Reads a request's events in a task of their own, so that waiting for them can time out.

`asyncio.wait_for(events.__anext__(), …)` would cancel the generator on the first timeout.

The engine never waits for a client: what it says is kept here until the client has read what came
before. A client so slow that `UNREAD_BYTES` are waiting has its request ended, so that memory is bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable

from ....chat import (
    ChoiceEvent,
    Event,
    Failed,
    Finished,
    ReasoningDelta,
    TextDelta,
    TokenIds,
    ToolCall,
    ToolCallCut,
    ToolCallDelta,
)
from ....errors import InvalidRequest, OmlxdError, Unavailable

log = logging.getLogger(__name__)

UNREAD_BYTES = 4 << 20
"""Bytes of one request that nobody has read: some 25,000 tokens."""
BATCH = 256
"""Events handed out at once: what is made of them is held until the client has read it."""
_EVENT_BYTES = 160
_LOGPROB_BYTES = 250


class EventPump:
    """Reads `events` until Finished, Failed or `close`. Always close it.

    seen          is called with each event as it arrives, whenever its client may read it
    unread_bytes  how much may wait to be taken
    """

    def __init__(
        self,
        events: AsyncGenerator[Event, None],
        seen: Callable[[Event], None] = lambda event: None,
        unread_bytes: int = UNREAD_BYTES,
    ):
        self._events = events
        self._seen = seen
        self._waiting: deque[Event] = deque()
        self._unread, self._limit = 0, unread_bytes
        self._arrived = asyncio.Event()
        self._error: OmlxdError | None = None
        self._task = asyncio.create_task(self._read_events())

    async def next(self, timeout: float | None) -> list[Event]:
        """Return the events that have arrived, one to `BATCH`; [] after `timeout` seconds without any."""
        if not self._waiting:
            try:
                async with asyncio.timeout(timeout):
                    await self._arrived.wait()
            except TimeoutError:
                if not self._waiting:  # They may have come in the same moment.
                    return []
        events = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        self._unread -= sum(map(_size, events))
        if not self._waiting:
            self._arrived.clear()
        return events

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield each event, to Finished. Raises the error of Failed."""
        while True:
            for event in await self.next(None):
                if isinstance(event, Failed):
                    raise self.error(event)
                yield event
                if isinstance(event, Finished):
                    return

    def error(self, failed: Failed) -> OmlxdError:
        """Return the error behind `failed`: the raised one, if any, since it says more."""
        return self._error or OmlxdError.from_event(failed)

    async def close(self) -> None:
        """Stop reading; cancels the request in the engine unless it has ended."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        # Here and not in the task: one that is cancelled before its first step runs no `finally`.
        await self._events.aclose()

    async def _read_events(self) -> None:
        try:
            async for event in self._events:
                self._put(event)
                if isinstance(event, (Finished, Failed)):
                    return
                if self._unread > self._limit:
                    await self._events.aclose()
                    self._end_with(InvalidRequest("The client reads too slowly; the answer was ended."))
                    return
            self._end_with(Unavailable("The engine stopped in the middle of the answer; try again."))
        except OmlxdError as error:
            self._end_with(error)
        except Exception:
            log.exception("reading events failed unexpectedly")
            self._end_with(OmlxdError("Something went wrong inside omlxd; its log has the details."))

    def _end_with(self, error: OmlxdError) -> None:
        self._error = error
        self._put(error.as_event())

    def _put(self, event: Event) -> None:
        self._waiting.append(event)  # First: the client is answered whatever becomes of what follows.
        self._unread += _size(event)
        self._arrived.set()
        if not isinstance(event, ChoiceEvent):
            self._seen(event)
        elif not isinstance(event.event, (Finished, Failed)):  # one for all choices follows
            self._seen(event.event)


def _size(event: Event) -> int:
    """Estimate the bytes of memory that `event` takes."""
    match event:
        case TextDelta():
            return _EVENT_BYTES + len(event.text) + _LOGPROB_BYTES * len(event.logprobs)
        case ReasoningDelta() | ToolCallDelta():
            return _EVENT_BYTES + len(event.text)
        case TokenIds():
            return _EVENT_BYTES + 8 * len(event.prompt)
        case ToolCall() | ToolCallCut():
            return _EVENT_BYTES + len(event.arguments)
        case ChoiceEvent():
            return _size(event.event)
        case _:
            return _EVENT_BYTES
