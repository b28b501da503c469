"""What becomes of one request to an engine: its events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from ..chat import Event, Failed, Finished


class EngineStream(AsyncGenerator[Event, None]):
    """The events of one request; the last one is Finished or Failed. Closing it cancels the rest.

    Not a generator function: a generator that is closed before its first event runs no cleanup,
    and a client may be gone by then.

    forget(id)  nobody wants its answer any more
    """

    def __init__(self, id: int, forget: Callable[[int], None]):
        self._forget = forget
        self.id = id
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._ended = False

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        event = await self.events.get()
        self._ended = isinstance(event, (Finished, Failed))
        return event

    async def aclose(self) -> None:
        self._ended = True
        self._forget(self.id)

    async def asend(self, value: None) -> Event:
        return await self.__anext__()

    async def athrow(self, typ: Any, val: Any = None, tb: Any = None) -> Event:
        await self.aclose()
        raise val if val is not None else typ
