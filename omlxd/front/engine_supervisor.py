"""The process behind an engine: started once it is wanted, watched, ended, started again.

| state        | process                    | a request                                        |
|--------------|----------------------------|--------------------------------------------------|
| `unloaded`   | none                       | starts it and waits                              |
| `loading`    | being prepared, or loading | waits                                            |
| `ready`      | serving                    | goes to the engine at once                       |
| `unloading`  | flushing its blocks        | waits, and has it loaded again                   |
| `restarting` | dead, or loading again     | starts it again (after a backoff) and waits      |
| `failed`     | none                       | is refused at once, until `HOLD_S` have passed   |

`loading` → `ready` on Loaded. `ready` → `restarting` when the process ends: every request in
flight fails at once with a retryable error. `ready` → `unloading` → `unloaded` by `unload`, which is
the end of the process, so that its memory comes back for certain. A failed load fails whoever waited
for it, with its reason; after `LOAD_ATTEMPTS` in a row the state is `failed`, and the first request
after the hold tries once more. A load that was refused for want of memory is no failed load. Nothing
restarts by itself: a model that crashes on load costs nothing while nobody asks for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from .. import wire
from ..chat import Failed, Finished
from ..errors import InvalidRequest, NotNow, OmlxdError, Unavailable
from . import priority
from .cold_ledger import ColdLedger
from .engine_life import STALL_S, EngineLife, Guard, in_background
from .engine_link import ENGINE_COMMAND, EngineLink
from .in_flight import InFlight, Waiting, settle
from .restart_policy import BACKOFF_S, HOLD_S, RestartPolicy

log = logging.getLogger(__name__)

State = Literal["unloaded", "loading", "ready", "unloading", "restarting", "failed"]

UNLOAD_S = 60.0
"""How long an engine that unloads may write what it has not written yet: nobody waits for it."""


class EngineSupervisor:
    """`prepare` gives the Load to send, and may take long (a download); it raises OmlxdError.

    command        program and arguments; `--fd N` is added
    model_id       the name that clients use
    max_concurrent requests that decode at once; it bounds how many more may wait
    stall_s        seconds without progress after which an engine that has work is ended; 0: never
    guard          refuses, by raising, to have the model loaded into the memory that the engine found
    stands_back()  whether it should load at a lower priority, for the sake of others that answer
    on_change()    called when the state changes, or the last request in flight ends
    """

    def __init__(
        self,
        model_id: str,
        prepare: Callable[[], Awaitable[wire.Load]],
        *,
        max_concurrent: int = 8,
        cold: ColdLedger | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
        backoff_s: Sequence[float] = BACKOFF_S,
        hold_s: float = HOLD_S,
        stall_s: float = STALL_S,
        guard: Guard | None = None,
        stands_back: Callable[[], bool] = lambda: False,
        on_change: Callable[[], None] = lambda: None,
        on_want: Callable[[wire.Wants], None] = lambda wants: None,
    ):
        self.model_id = model_id
        self.info: wire.ModelInfo | None = None
        self.used_at = time.monotonic()
        self.loads = 0
        self.starts = 0
        self.deaths = 0
        self._state: State = "unloaded"
        self._prepare = prepare
        self._cold = cold
        self._command = tuple(command)
        self._restarts = RestartPolicy(backoff_s, hold_s, stall_s)
        self._on_change = on_change
        self._on_want = on_want
        self._guard = guard
        self._stands_back = stands_back
        self._requests = InFlight(max_concurrent, self._request_ended)
        self._link: EngineLink | None = None
        self._wanted = asyncio.Event()
        self._reason = ""
        self._log_level = ""
        self._closing = False
        self._supervisor: asyncio.Task[None] | None = None
        self._loading: list[asyncio.Future[None]] = []
        self._gone: asyncio.Future[None] | None = None

    @property
    def state(self) -> State:
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        self._on_change()

    # ----------------------------------------------------------------- its requests

    @property
    def in_flight(self) -> int:
        """Requests running or waiting."""
        return len(self._requests)

    @property
    def trouble(self) -> str:
        """Why it last stopped or could not be loaded, while it has not been mended."""
        return "" if self.state == "ready" else self._reason

    def kill(self) -> None:
        """End the process now, losing what it had not written."""
        if self._link is not None:
            self._link.kill()

    @property
    def pid(self) -> int | None:
        return self._link.pid if self._link else None

    def _request_ended(self) -> None:
        self.used_at = time.monotonic()
        if not self._requests:
            self._on_change()

    def _admit(self) -> None:
        if self._closing:
            raise Unavailable("omlxd is shutting down; retry in a moment.", retry_after=5)
        if self.state == "failed":
            left = self._restarts.hold_left_s
            if left > 0:
                raise Unavailable(self._reason, retry_after=min(60, math.ceil(left)))
        self._requests.check_room()

    def _send(self, waiting: Waiting) -> None:
        assert self._link is not None
        self._link.send_frame(waiting.frame)
        waiting.frame = b""  # Sent; a 30 MB request must not be held until its answer ends.

    # ----------------------------------------------------------------- coming and going

    def start(self) -> None:
        """Begin to load now rather than at the first request. Returns at once."""
        self._want()

    def _want(self) -> None:
        if self.state == "unloaded":
            self.state = "loading"
        self._wanted.set()
        if self._supervisor is None:
            self._supervisor = asyncio.create_task(self._supervise(), name=f"engine {self.model_id}")

    async def load(self) -> None:
        """Load, unless it is loaded already; returns once it is ready. Raises OmlxdError."""
        self._admit()
        if self.state == "ready":
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loading.append(done)
        self._want()
        await done

    async def unload(self, grace_s: float = UNLOAD_S) -> bool:
        """End the process in order; True once it is gone. False: requests are in flight, it stays.

        Requests that arrive meanwhile wait, and have it loaded again.
        """
        if self._gone is None:
            if self._requests or self._loading:
                return False
            if self._link is None:
                return self.state != "loading"  # There is no process, or it is about to be.
            self._gone = asyncio.get_running_loop().create_future()
            in_background(self._unload(self._link, grace_s))
        await asyncio.shield(self._gone)
        return True

    async def _unload(self, link: EngineLink, grace_s: float) -> None:
        was_ready = self.state == "ready"
        self.state = "unloading"
        if was_ready:
            link.send(wire.Quit(deadline_s=grace_s))
            await link.close(grace_s + 2.0)
        else:
            await link.close()

    async def drain(self, seconds: float) -> None:
        """Admit nothing more, and let what runs end within `seconds`. What waits for a load fails."""
        self._closing = True
        deadline = time.monotonic() + seconds
        while self._requests and self.state == "ready" and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def close(self, grace_s: float = 5.0) -> None:
        """Fail what is in flight, let the engine flush for `grace_s`, end it."""
        self._closing = True
        self._fail_all(
            Failed(code="unavailable", message="omlxd is shutting down; retry in a moment.", retry_after=5)
        )
        if self._link is not None:
            if self.state == "ready":
                self._link.send(wire.Quit(deadline_s=grace_s))
                await self._link.close(grace_s + 1.0)
            else:
                await self._link.close(grace_s + 1.0 if self.state == "unloading" else 0.0)
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        self._tell_gone()

    # ----------------------------------------------------------------- life after life

    async def _supervise(self) -> None:
        while not self._closing:
            await self._wanted.wait()
            await asyncio.sleep(self._restarts.wait_s)
            if self.state == "failed":
                self.state = "restarting"
            try:
                reason = await self._one_life()
            except OmlxdError as error:
                self._not_now(error)
                continue
            if self._closing:
                return
            if self.state == "unloading":
                self._unloaded()
                continue
            self._wanted.clear()
            self._restarts.ended()
            self._after(reason)

    def _not_now(self, error: OmlxdError) -> None:
        """There is no room for the model; nothing is wrong with it."""
        self._wanted.clear()
        self.state = "unloaded"
        log.warning("%s is not loaded: %s", self.model_id, error.message)
        self._fail_all(error.as_event())

    def _unloaded(self) -> None:
        log.info("unloaded %s", self.model_id)
        if self._requests or self._loading:
            self.state = "loading"  # They came while it ended.
        else:
            self._wanted.clear()
            self.state = "unloaded"
        self._tell_gone()

    def _tell_gone(self) -> None:
        gone, self._gone = self._gone, None
        if gone is not None and not gone.done():
            gone.set_result(None)

    def _after(self, reason: str) -> None:
        """The process ended, or never started, for `reason`: fail its requests, say so."""
        was_ready = self.state == "ready"
        self.deaths += 1
        self.state = "restarting"
        if was_ready:
            self._reason = f"The engine of {self.model_id} stopped: {reason}. Retry: it starts again."
        else:
            self._reason = f"{self.model_id} can't be loaded: {reason}"
            if self._restarts.load_failed():
                self.state = "failed"
        log.error("%s (%d requests failed)", self._reason, len(self._requests))
        retry_after = self._restarts.retry_after(given_up=self.state == "failed")
        self._fail_all(Failed(code="unavailable", message=self._reason, retry_after=retry_after))

    def _fail_all(self, failed: Failed) -> None:
        self._requests.fail(failed)
        loading, self._loading = self._loading, []
        settle(loading, failed)

    async def _one_life(self) -> str:
        """From preparation to the end of the process; returns why it ended."""
        try:
            load = await self._prepare()
            link = await EngineLink.spawn(self._command)
        except (NotNow, InvalidRequest):
            raise
        except OmlxdError as error:
            return error.message
        except OSError as error:
            return f"its engine can't be started: {error}"
        except Exception as error:
            log.exception("preparing %s failed", self.model_id)
            return f"{type(error).__name__}: {error}"
        self.starts += 1
        account = self._cold.account(link.send, link.pid) if self._cold else None
        life = EngineLife(self, link, load, account, self._guard)
        self._link = link
        if self._stands_back():
            priority.lower(link.pid)
        try:
            reason = await life.run(self._restarts.patience_s)
            if self.state == "unloading":
                await link.close()  # Its socket may close first; whoever unloads it wants its memory back.
        finally:
            self._link = None
        self._restarts.life_over(stalled=life.stalled)
        if life.refused is not None:
            raise life.refused
        return reason

    # ----------------------------------------------------------------- what a life tells (engine_life.Owner)

    def loaded(self, info: wire.ModelInfo) -> None:
        self.info, self._reason = info, ""
        self._restarts.loaded()
        if self._link is not None:
            priority.restore(self._link.pid)
        self.state = "ready"
        if self._log_level:  # It may have changed since the Load was made.
            self.send(wire.LogLevel(level=self._log_level))
        self.loads += 1
        self.used_at = time.monotonic()
        self._say_loaded(info)
        for waiting in self._requests.requests.values():
            self._send(waiting)
        loading, self._loading = self._loading, []
        settle(loading)

    def _say_loaded(self, info: wire.ModelInfo) -> None:
        reuse = f"prefixes are not reused: {info.kv_reuse}" if info.kv_reuse else "prefixes are reused"
        log.info(
            "loaded %s (%s, %s): context %d tokens, %s",
            info.model_id,
            info.model_type,
            info.backend,
            info.context_length,
            reuse,
        )
        if info.note:
            log.warning("%s: %s", info.model_id, info.note)

    def wants_memory(self, wants: wire.Wants) -> None:
        """A prompt does not fit into what the engine may have."""
        self._on_want(wants)

    def send(self, message: Any) -> None:
        """To the engine, if there is one that has loaded."""
        if self._link is not None and self.state == "ready":
            self._link.send(message)

    def set_log_level(self, level: str) -> None:
        """What the engine logs from now on."""
        self._log_level = level
        self.send(wire.LogLevel(level=level))

    def answer(self, id: int, result: Any) -> None:
        """Hand `result` to whoever waits for `id`; nobody may, if it was cancelled."""
        if self._requests.answer(id, result) and isinstance(result, Finished):
            self._restarts.finished()
