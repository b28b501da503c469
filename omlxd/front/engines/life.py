"""One engine process from its start to its end: its messages, whether it makes progress, why it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

import psutil
from msgspec.structs import replace

from ... import wire
from ...common.units import human
from ...errors import OmlxdError
from ...models.footprint import footprint
from .cold_ledger import Account
from .link import EngineLink

log = logging.getLogger(__name__)

STALL_S = 120.0
"""Seconds without any progress after which an engine that has work is ended."""
SLOW_CHUNKS = 4.0
"""An engine may also be silent for this many times its longest silence so far: a slow machine's chunks."""

LOAD_LOOK_S = 0.25
LOAD_SPARE_BYTES = 2 << 30
"""Of memory, beyond twice what a model's files say that it needs."""

Guard = Callable[[wire.Device], Awaitable[wire.Budget]]


class Owner(Protocol):
    """What a life tells of, and asks: the supervisor."""

    model_id: str
    has_work: Callable[[], bool]
    on_message: Callable[[Any], None]

    @property
    def state(self) -> str: ...
    def loaded(self, info: wire.ModelInfo) -> None: ...


class EngineLife:
    """`account`: the process's with the SSD cache. `guard`: refuses, by raising, to have it loaded.

    refused  why the guard refused
    stalled  it was ended because it made no progress
    """

    def __init__(
        self, owner: Owner, link: EngineLink, load: wire.Load, account: Account | None, guard: Guard | None
    ):
        self._owner = owner
        self._link = link
        self._load = load
        self._account = account
        self._guard = guard
        self._failed = ""
        self._heard = 0
        self._steps = -1
        self._admitting: asyncio.Task[None] | None = None
        self.refused: OmlxdError | None = None
        self.stalled = False

    async def run(self, stall_s: float) -> str:
        """Until the process has ended; returns why, in words. `stall_s` 0: it may be silent for ever."""
        watch = asyncio.create_task(self._watch(stall_s), name="engine-watch") if stall_s else None
        try:
            ended = await self._link.receive(self._handle)
        finally:
            for task in (watch, self._admitting):
                if task is not None:
                    task.cancel()
            if self._account is not None:
                self._account.gone()
            # Requests in flight must fail now, not when the process has been reaped.
            in_background(self._link.close())
        if self.stalled:
            return f"it made no progress for {stall_s:.0f} s or more"
        if self._failed or self._owner.state == "ready":
            return self._failed or ended
        return f"{ended}{_quoted(self._link.last_words)}"

    # ----------------------------------------------------------------- messages

    def _handle(self, message: Any) -> None:
        owner = self._owner
        if isinstance(message, (wire.Events, wire.Counted, wire.Explained)):
            self._heard += 1
            owner.on_message(message)
        elif isinstance(message, (wire.Stats, wire.Wants)):
            owner.on_message(message)
        elif isinstance(message, wire.Alive):
            self._steps = message.steps
        elif isinstance(message, wire.Device):
            self._admitting = asyncio.create_task(self._admit(message), name="engine-admission")
        elif isinstance(message, wire.LoadProgress):
            log.info("%s: %s", owner.model_id, message.stage)
        elif isinstance(message, wire.Loaded):
            if self._account is not None:
                self._account.loaded(message.info.namespace, self._load.model_path)
            owner.loaded(message.info)
        elif isinstance(message, wire.LoadFailed):
            self._failed = message.message or "the engine gave no reason"
            self._link.terminate()  # It exits by itself; this is for one that hangs on the way out.
        elif self._account is not None:
            self._account.handle(message)
        elif isinstance(message, wire.Reserve):
            self._link.send(wire.Grant(ticket=message.ticket, nbytes=0))

    async def _admit(self, device: wire.Device) -> None:
        """The engine is up and says what memory there is: have it load, unless that can't be."""
        load = self._load
        try:
            if load.cache.cold_dir and self._account is not None:
                cold_dir = await self._account.folder()
                load = self._load = replace(load, cache=replace(load.cache, cold_dir=cold_dir))
            if self._guard is not None:
                load = replace(load, budget=await self._guard(device))
        except OmlxdError as error:
            self.refused = error
            self._link.kill()
        except Exception:
            log.exception("the memory guard failed")
            self._link.send(self._load)
        else:
            self._link.send(load)
            await self._watch_load(Path(load.model_path))

    # ----------------------------------------------------------------- progress

    async def _watch(self, stall_s: float) -> None:
        """End the engine when it has work and nothing of it gets done.

        Not by asking it anything: a thread that answers says nothing of the one that computes.
        """
        pause, seen = min(5.0, stall_s / 8), None
        silent = longest = 0.0
        looked_at = time.monotonic()
        while True:
            await asyncio.sleep(pause)
            now, state = time.monotonic(), self._progress()
            # While this process itself did not run (the machine slept, or was busy), it heard nothing.
            silent += min(now - looked_at, 2 * pause)
            looked_at = now
            if state is None or state != seen:
                if state is not None and seen is not None:
                    longest = max(longest, silent)
                silent, seen = 0.0, state
            elif silent >= max(stall_s, SLOW_CHUNKS * longest):
                log.error("%s: no progress for %.0f s, it is ended", self._owner.model_id, silent)
                self.stalled = True
                self._link.kill()
                return

    async def _watch_load(self, folder: Path) -> None:
        """End an engine that takes far more than its files say: it may hold Python's lock, and not notice."""
        need = (await asyncio.to_thread(footprint, folder)).loading()
        with contextlib.suppress(psutil.Error):  # It has ended.
            process = psutil.Process(self._link.pid)
            while self._owner.state in ("loading", "restarting"):
                if (took := process.memory_info().rss) > 2 * need + LOAD_SPARE_BYTES:
                    self._failed = f"it took {human(took)} while it loaded; its files need {human(need)}"
                    self._link.kill()
                    return
                await asyncio.sleep(LOAD_LOOK_S)

    def _progress(self) -> tuple[object, ...] | None:
        """Something that changes while work gets done; None: there is none to do."""
        if self._owner.state == "ready":
            return (self._heard, self._steps) if self._owner.has_work() else None
        if self._owner.state == "unloading":
            return None  # Whoever unloads it has a deadline of its own.
        # It has no events to send while it loads; but it computes, or reads, or grows.
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._link.pid)
            with process.oneshot():
                cpu = process.cpu_times()
                return ("loading", round(cpu.user + cpu.system, 1), process.memory_info().rss)
        return None


_background: set[asyncio.Task[None]] = set()
"""The event loop keeps only weak references to tasks."""


def in_background(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    _background.add(task)
    task.add_done_callback(_background.discard)


def _quoted(words: str) -> str:
    """The engine's last line, for an error that a client sees; all of it is in the log."""
    lines = [line for line in words.splitlines() if line.strip()]
    return f"; its last words were: {lines[-1].strip()[:300]}" if lines else ""
