"""An engine as the front sees it: always there, with or without a process.

It has a supervisor, which owns the process, and owns the requests in flight. Those that wait are sent
when the engine is ready. Those of whose answer no client has read anything are sent again, once, when
their engine dies: as one of them may be what ended it, they go one after the other, so that it does not
take the others with it a second time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ... import wire
from ...chat import Conversation, EmbedRequest, Failed, GenerateRequest, RawPrompt, Vectors
from ...common.units import counted
from ...errors import NotNow, Unavailable
from ...wire.explanation import Explanation
from .in_flight import EngineStream, InFlight, Request, settle
from .supervisor import UNLOAD_S, Spawn, State, Supervisor

log = logging.getLogger(__name__)

STATS_TIMEOUT_S = 5.0
MOST_LAST = 64
"""Ends of processes whose counters are kept until they are read."""
TRIAL_S = 2.0
"""Seconds that a request that is sent again may hold up the next one before its answer begins."""


class EngineProcess:
    """An engine and its requests. `max_concurrent`: requests that decode at once; it bounds how many more may
    wait.

    channel      of its requests' ids (wire/)
    on_begin()   called when a request comes
    on_change()  called when the state changes, or the last request in flight or a wait for a load ends
    on_want()    called when a prompt does not fit into what the engine may have
    options      of the Supervisor
    """

    def __init__(
        self,
        model_id: str,
        spawn: Spawn,
        *,
        max_concurrent: int = 8,
        channel: int = 0,
        on_begin: Callable[[], None] = lambda: None,
        on_change: Callable[[], None] = lambda: None,
        on_want: Callable[[wire.Wants], object] = lambda wants: None,
        **options: Any,
    ):
        self.used_at = time.monotonic()
        self.channel = channel
        self._on_begin = on_begin
        self.on_change = on_change
        self._on_want = on_want
        self._requests = InFlight(max_concurrent, self._request_ended, channel)
        self._load_waiters: set[asyncio.Future[None]] = set()
        self._again: deque[Request] = deque()
        self.last_stats: deque[tuple[int, dict[str, float]]] = deque(maxlen=MOST_LAST)
        """(process, by its number, what it had counted when it ended in order), until somebody takes them."""
        self._trial: Request | None = None
        self._trial_ends: asyncio.TimerHandle | None = None
        self._closing = False
        self._turning = False
        self.supervisor = Supervisor(model_id, spawn, self, **options)

    @property
    def state(self) -> State:
        return self.supervisor.state

    @property
    def in_flight(self) -> int:
        """Requests running or waiting."""
        return len(self._requests)

    @property
    def by_priority(self) -> dict[int, int]:
        """Return how many of them each priority has."""
        return self._requests.by_priority

    @property
    def is_awaited(self) -> bool:
        """Whether a request or a load waits for the process."""
        return bool(self._requests or self._load_waiters)

    # ----------------------------------------------------------------- what can be asked

    def generate(self, request: GenerateRequest) -> EngineStream:
        """Send `request`; raises Overloaded, Unavailable or InvalidRequest before any event."""
        self._admit(request.client, request.priority)
        stream = EngineStream(self._requests.new_id(), self.cancel_request)
        self._submit(stream.id, wire.Generate(id=stream.id, request=request), stream, request.client)
        return stream

    async def count_tokens(
        self, prompt: Conversation | RawPrompt, session: str = "", client: str = ""
    ) -> int:
        """Count the tokens of `prompt` as `generate` would render it. Raises OmlxdError."""
        return await self._ask(lambda id: wire.Count(id, prompt, session, client), client)

    async def explain(self, request: GenerateRequest, reached: int = -1, files: bool = False) -> Explanation:
        """Ask the engine for a `wire.Explain`. Raises OmlxdError."""
        return await self._ask(lambda id: wire.Explain(id, request, reached, files))

    async def embed(self, request: EmbedRequest) -> Vectors:
        """Return vectors or scores of texts. Raises OmlxdError."""
        return await self._ask(lambda id: wire.Embed(id=id, request=request), request.client)

    async def _ask(self, message: Callable[[int], Any], client: str = "") -> Any:
        self._admit(client)
        id, answer = self._requests.new_id(), asyncio.get_running_loop().create_future()
        self._submit(id, message(id), answer, client)
        try:
            return await answer
        finally:
            self.cancel_request(id)

    async def stats(self, trim: bool = False, reset_peak: bool = False) -> wire.Stats | None:
        """Return the engine's own counters; None unless it is ready and answers soon. As `wire.GetStats`."""
        return await self._ask_stats(trim, reset_peak) if self.state == "ready" else None

    async def device_available(self) -> int | None:
        """Return the bytes free where arrays live, as the engine measures them; None: unknown."""
        stats = await self._ask_stats()
        value = stats.values.get("device_available_bytes") if stats else None
        return None if value is None else int(value)

    async def _ask_stats(self, trim: bool = False, reset_peak: bool = False) -> wire.Stats | None:
        # Not a request: it neither keeps a model loaded nor waits for one.
        if (link := self.supervisor.link) is None:
            return None
        id = self._requests.new_id()
        asked = wire.GetStats(id=id, trim=trim, reset_peak=reset_peak)
        return await self._requests.question(id, lambda: link.send(asked), STATS_TIMEOUT_S)

    def cancel_request(self, id: int) -> None:
        """Drop request `id`, and have the engine stop it."""
        request = self._requests.drop_request(id)
        if request is not None and request.life:
            self.supervisor.send(wire.Cancel(id=id))
            self._after_trial(request)

    # ----------------------------------------------------------------- coming and going

    async def load(self) -> None:
        """Load the model unless it is loaded; returns once it is ready. Raises OmlxdError."""
        self._admit()
        if self.state == "ready":
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._load_waiters.add(done)
        self.supervisor.start()
        try:
            await done
        finally:
            self._load_waiters.discard(done)
            self.on_change()  # Its base may go, if nobody waits for it any more.

    def begin_unload(self, grace_s: float = UNLOAD_S) -> bool:
        """Begin an unload: new requests wait for the next load. False: requests are in flight.

        False: requests are in flight, it stays.
        """
        if self.state != "unloading" and self.is_awaited:
            return False
        self.supervisor.begin_unload(grace_s)
        return True

    def begin_turn(self) -> bool:
        """Unload and load again, at once or after the answers in flight.

        What is submitted meanwhile waits for the next load. False: this was asked for already.
        """
        began, self._turning = not self._turning, True
        self._turn()
        return began

    def _turn(self) -> None:
        sent = any(request.sends for request in self._requests.requests.values())
        if self._turning and self.state == "ready" and not (sent or self._closing):
            self.supervisor.begin_unload()

    def give_up_load(self) -> None:
        """Fail loads under way, which the owner ends, unless requests wait: they are answered first."""
        if self.state in ("loading", "restarting", "failed") and not self._requests:
            name = self.supervisor.model_id
            self._fail_all(NotNow(f"{name} was unloaded before it was loaded.", retry_after=5).as_event())

    async def drain(self, seconds: float) -> None:
        """Admit nothing more, and let running answers end within `seconds`. What waits for a load fails."""
        self._closing = True
        if self._requests and self.state == "ready":
            requests = counted(len(self._requests), "request")
            log.info("%s: up to %g s for %s to end", self.supervisor.model_id, seconds, requests)
        deadline = time.monotonic() + seconds
        while self._requests and self.state == "ready" and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def close(self, grace_s: float = 5.0) -> None:
        """Fail what is in flight, let the engine flush for `grace_s`, end it."""
        self._closing = True
        self._fail_all(_shutting_down().as_event())
        await self.supervisor.close(grace_s)

    # ----------------------------------------------------------------- its requests

    def _admit(self, client: str = "", priority: int = 0) -> None:
        if self._closing:
            raise _shutting_down()
        self.supervisor.check_hold()
        self._requests.check_room(client, priority)

    def _submit(self, id: int, message: Any, answer: EngineStream | asyncio.Future[Any], client: str) -> None:
        request = self._requests.add_request(id, message, answer, client)
        self.used_at = time.monotonic()
        self._on_begin()
        if self.state != "ready":
            self.supervisor.start()
        elif not self._turning:
            self._send(request)

    def _send(self, request: Request) -> None:
        assert request.frame is not None and self.supervisor.link is not None
        request.life, request.sends = self.supervisor.starts, request.sends + 1
        self.supervisor.link.send_frame(request.frame)

    def _send_again(self) -> None:
        """Send the next request of those whose engine died."""
        self._end_trial()
        while self._again and self._trial is None:
            request = self._again.popleft()
            if request.id in self._requests.requests:
                self._trial = request
                self._trial_ends = asyncio.get_running_loop().call_later(TRIAL_S, self._send_again)
                self._send(request)

    def _after_trial(self, request: Request) -> None:
        if request is self._trial:
            self._send_again()

    def _end_trial(self) -> None:
        self._trial = None
        if self._trial_ends is not None:
            self._trial_ends.cancel()

    def _request_ended(self) -> None:
        self.used_at = time.monotonic()
        self._turn()
        if not self._requests:
            self.on_change()

    def _fail_all(self, failed: Failed) -> None:
        self._end_trial()
        self._again.clear()
        self._requests.fail(failed)
        self._end_loads(failed)

    def _end_loads(self, failed: Failed | None = None) -> None:
        settle(self._load_waiters, failed)
        self._load_waiters.clear()  # In this step: they keep nothing loaded any more.

    # ----------------------------------------------------------------- what the supervisor calls

    def on_ready(self) -> None:
        """Send what waited for the engine."""
        self.used_at, self._turning = time.monotonic(), False
        for request in self._requests.requests.values():
            if not request.sends:
                self._send(request)
        self._send_again()
        self._end_loads()

    def on_lost(self, failed: Failed, goes_on: bool) -> None:
        """Handle a process that ended or did not start. Requests without an answer go on, if it does."""
        before = len(self._requests)
        if goes_on and not self._closing:
            self._end_trial()
            self._again = deque(self._requests.lost(failed))
        else:
            self._fail_all(failed)
        if before and goes_on:  # Why a load failed is told already.
            failures = counted(before - len(self._requests), "request")
            log.error("%s failed, %d to be sent again", failures, len(self._requests))
        if self.is_awaited:
            self.supervisor.start()

    def on_message(self, message: Any) -> None:
        """Take a message about requests, statistics or memory."""
        if isinstance(message, wire.Events):
            for id, event in message.events:
                self._answer(id, event)
        elif isinstance(message, wire.Answer):
            self._answer(message.id, message.result)
        elif isinstance(message, wire.Stats):
            if message.id % wire.CHANNEL:
                self._answer(message.id, message)
            else:  # Unasked, at the end.
                self.last_stats.append((self.supervisor.starts, message.values))
        elif isinstance(message, wire.Wants):
            self._on_want(message)

    def _answer(self, id: int, result: Any) -> None:
        """Hand `result` to the request or question `id`, unless it was cancelled."""
        request = self._requests.answer_request(id, result)
        if request is not None and request.begun:
            self._after_trial(request)


def _shutting_down() -> Unavailable:
    return Unavailable("omlxd is shutting down; retry in a moment.", retry_after=5)
