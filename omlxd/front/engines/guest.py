"""An adapter in the engine process of its base: for its supervisor a link like any other, without a process.

Its frames go over the base's link. By the ids in them the engine knows whose they are, and so does the base's
supervisor, which gets the answers (wire/, `CHANNEL`). It ends with the base's process, or once the engine
has dropped the adapter.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from ... import wire
from .link import EngineLink

SHARED = "the engine that it shares with its base ended"


class Host(Protocol):
    """The base's supervisor. `guests`: links of adapters in its engine, by channel."""

    guests: dict[int, GuestLink]

    @property
    def link(self) -> EngineLink | GuestLink | None: ...


class GuestLink:
    """An `EngineLink` through the base's process. `host`: the base's supervisor, which is ready."""

    last_words = ""

    def __init__(self, host: Host, channel: int):
        assert host.link is not None
        self._host, self._link, self._channel = host, host.link, channel
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._over = asyncio.Event()
        self._leaving = False
        self._ended = SHARED
        host.guests[channel] = self

    @property
    def pid(self) -> int:
        return self._link.pid

    def send(self, message: Any) -> None:
        """Queue a `wire.ToEngine`, but for what the base's own link says for all."""
        if isinstance(message, wire.Quit):
            self._drop()
        elif not isinstance(message, (wire.LogLevel, wire.Budget, wire.PassLimit, wire.Grant)):
            self._link.send(message)

    def send_frame(self, frame: bytes) -> None:
        self._link.send_frame(frame)

    def take(self, message: Any) -> None:
        """Take a message of the engine for this adapter."""
        if not isinstance(message, wire.AdapterDropped):
            self._inbox.put_nowait(message)
        elif self._leaving:
            self.end("it was dropped")

    def end(self, why: str) -> None:
        """End the link; no message follows."""
        if not self._over.is_set():
            self._ended = why
            self._over.set()
            self._inbox.put_nowait(None)
            if self._host.guests.get(self._channel) is self:
                del self._host.guests[self._channel]

    async def receive(self, handle: Callable[[Any], None]) -> str:
        """Hand each message to `handle` until the end; returns how it ended, in words."""
        while (message := await self._inbox.get()) is not None:
            handle(message)
        return self._ended

    def _drop(self) -> None:
        if not self._leaving and not self._over.is_set():
            self._leaving = True
            self._link.send(wire.DropAdapter(channel=self._channel))

    def terminate(self) -> None:
        self._drop()
        self.end(self._ended)

    def show_threads(self) -> None:
        self._link.show_threads()

    def stop(self) -> None:
        """End the whole engine: what hangs in it hangs for all."""
        self._link.stop()

    def kill(self) -> None:
        self._link.kill()

    async def close(self, grace_s: float = 0.0) -> None:
        """Have the engine drop the adapter, and wait `grace_s` for that."""
        self._drop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._over.wait()
        self.end(self._ended)


def to_guests(guests: dict[int, GuestLink], message: Any) -> Any:
    """Pass `guests` their part of `message` from the engine; returns the base's part, or None."""
    if isinstance(message, wire.Alive):
        for guest in guests.values():
            guest.take(message)
        return message
    if isinstance(message, wire.Events):
        if max((id for id, _ in message.events), default=0) < wire.CHANNEL:
            return message
        parts: dict[int, list[Any]] = {}
        for each in message.events:
            parts.setdefault(each[0] // wire.CHANNEL, []).append(each)
        own = parts.pop(0, None)
        for channel, events in parts.items():
            if (guest := guests.get(channel)) is not None:
                guest.take(wire.Events(events=tuple(events)))
        return wire.Events(events=tuple(own)) if own else None
    if isinstance(message, (wire.Loaded, wire.LoadFailed, wire.AdapterDropped)):
        channel = message.channel
    elif isinstance(message, (wire.Answer, wire.Stats)):
        channel = message.id // wire.CHANNEL
    else:
        return message
    if not channel:
        return message
    if (guest := guests.get(channel)) is not None:
        guest.take(message)
    return None
