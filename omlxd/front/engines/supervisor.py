"""The process behind an engine: started once it is wanted, watched, ended, started again.

| state        | process                    | a request                                        |
|--------------|----------------------------|--------------------------------------------------|
| `unloaded`   | none                       | starts it and waits                              |
| `loading`    | being prepared, or loading | waits                                            |
| `ready`      | serving                    | goes to the engine at once                       |
| `unloading`  | flushing its blocks        | waits, and has it loaded again                   |
| `restarting` | dead, or loading again     | starts it again (after a backoff) and waits      |
| `failed`     | none                       | is refused at once, until `HOLD_S` have passed   |

`loading` → `ready` on Loaded. `ready` → `restarting` when the process ends; what becomes of its requests
is in in_flight.py. Any state → `unloading` → `unloaded` by `begin_unload`, at once, which is the end of
the process, so that its memory comes back for certain. A failed load fails whoever waited for it, with
its reason; after `LOAD_ATTEMPTS` in a row the state is `failed`, and the first request after the hold
tries once more. A load that was refused for want of memory is no failed load. Nothing restarts by
itself: a model that crashes on load costs nothing while nobody asks for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, Protocol

from ... import wire
from ...chat import Failed
from ...errors import InvalidRequest, NotNow, OmlxdError, Unavailable
from . import restart_policy
from .cold_ledger import ColdLedger
from .life import STALL_S, EngineLife, Guard, in_background
from .link import EngineLink
from .restart_policy import BACKOFF_S, HOLD_S, RestartPolicy

log = logging.getLogger(__name__)

State = Literal["unloaded", "loading", "ready", "unloading", "restarting", "failed"]
Spawn = Callable[[], Awaitable[tuple[EngineLink, wire.Load]]]

UNLOAD_S = 60.0
"""How long an engine that unloads may write what it has not written yet: nobody waits for it."""


class OnLost(Protocol):
    def __call__(self, failed: Failed, was_ready: bool) -> None: ...


class Supervisor:
    """Owns one engine's process and state; it knows no request.

    spawn()       starts a process; may take long (a download) and raise OmlxdError or OSError
    on_ready()    called when the engine serves
    on_lost()     called when its process ended by itself, or could not be had
    on_message()  called with each message that is not the process's own business
    on_change()   called when the state changes
    has_work()    whether anybody waits for the engine
    stall_s       seconds without progress after which an engine that has work is ended; 0: never
    guard         refuses, by raising, to have the model loaded into the memory that the engine found
    stands_back() whether it should load at a lower priority, for the sake of others that answer
    """

    def __init__(
        self,
        model_id: str,
        spawn: Spawn,
        *,
        on_ready: Callable[[], None],
        on_lost: OnLost,
        on_message: Callable[[Any], None],
        on_change: Callable[[], None],
        has_work: Callable[[], bool],
        cold: ColdLedger | None = None,
        backoff_s: Sequence[float] = BACKOFF_S,
        hold_s: float = HOLD_S,
        stall_s: float = STALL_S,
        guard: Guard | None = None,
        stands_back: Callable[[], bool] = lambda: False,
    ):
        self.model_id = model_id
        self.info: wire.ModelInfo | None = None
        self.loads = 0
        self.starts = 0
        self.deaths = 0
        self.link: EngineLink | None = None
        self.restarts = RestartPolicy(backoff_s, hold_s, stall_s)
        self.has_work = has_work
        self.on_message = on_message
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_change = on_change
        self._spawn = spawn
        self._cold = cold
        self._guard = guard
        self._stands_back = stands_back
        self._state: State = "unloaded"
        self._wanted = asyncio.Event()
        self._reason = ""
        self._log_level = ""
        self._closing = False
        self._lives: asyncio.Task[None] | None = None
        self._spawning: asyncio.Task[wire.Load] | None = None
        self._gone: asyncio.Future[None] | None = None

    @property
    def state(self) -> State:
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        self._on_change()

    @property
    def trouble(self) -> str:
        """Why it last stopped or could not be loaded, while it has not been mended."""
        return "" if self.state == "ready" else self._reason

    @property
    def pid(self) -> int | None:
        return self.link.pid if self.link else None

    def check_hold(self) -> None:
        """Raises Unavailable while the model is refused because its loads failed."""
        if self.state == "failed" and (left := self.restarts.hold_left_s) > 0:
            raise Unavailable(self._reason, retry_after=min(60, math.ceil(left)))

    def send(self, message: Any) -> None:
        """To the engine, if there is one that has loaded."""
        if self.link is not None and self.state == "ready":
            self.link.send(message)

    def set_log_level(self, level: str) -> None:
        """What the engine logs from now on."""
        self._log_level = level
        self.send(wire.LogLevel(level=level))

    def kill(self) -> None:
        """End the process now, losing what it had not written."""
        if self.link is not None:
            self.link.kill()

    # ----------------------------------------------------------------- coming and going

    def start(self) -> None:
        """Begin to load, unless that has begun. Returns at once."""
        if self._closing:
            return
        if self.state == "unloaded":
            self.state = "loading"
        self._wanted.set()
        if self._lives is None:
            self._lives = asyncio.create_task(self._supervise(), name=f"engine {self.model_id}")

    def begin_unload(self, grace_s: float = UNLOAD_S) -> None:
        """End the process in order, or its start. Takes effect at once; `gone` waits for the end."""
        if self.state == "unloading":
            return
        self._wanted.clear()
        link, was_ready = self.link, self.state == "ready"
        if link is None and (self._spawning is None or self._spawning.done()):
            if self.state == "loading":
                self.state = "unloaded"
            return
        self._gone = asyncio.get_running_loop().create_future()
        self.state = "unloading"
        if link is None:
            assert self._spawning is not None
            self._spawning.cancel()
        elif was_ready:
            link.send(wire.Quit(deadline_s=grace_s))
            in_background(link.close(grace_s + 2.0))
        else:
            in_background(link.close())

    async def gone(self) -> None:
        """Return once what `begin_unload` ends has ended."""
        if self._gone is not None:
            await asyncio.shield(self._gone)

    async def close(self, grace_s: float) -> None:
        """Let the engine flush for `grace_s`, end it, start no other."""
        self._closing = True
        if self.link is not None:
            if self.state == "ready":
                self.link.send(wire.Quit(deadline_s=grace_s))
                await self.link.close(grace_s + 1.0)
            else:
                await self.link.close(grace_s + 1.0 if self.state == "unloading" else 0.0)
        if self._lives is not None:
            self._lives.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._lives
        self._tell_gone()

    def _tell_gone(self) -> None:
        gone, self._gone = self._gone, None
        if gone is not None and not gone.done():
            gone.set_result(None)

    # ----------------------------------------------------------------- life after life

    async def _supervise(self) -> None:
        while not self._closing:
            await self._wanted.wait()
            await asyncio.sleep(self.restarts.wait_s)
            if not self._wanted.is_set():
                continue  # It was unloaded meanwhile.
            if self.state == "failed":
                self.state = "restarting"
            refused: OmlxdError | None = None
            try:
                reason = await self._one_life()
            except (NotNow, InvalidRequest) as error:
                refused, reason = error, error.message
            except OmlxdError as error:
                reason = error.message
            except OSError as error:
                reason = f"its engine can't be started: {error}"
            except Exception as error:
                log.exception("the engine of %s failed", self.model_id)
                reason = f"{type(error).__name__}: {error}"
            if self._closing:
                return
            if self.state == "unloading":
                self._unloaded()
                continue
            self._wanted.clear()
            if refused is not None:
                self._not_now(refused)
            else:
                self._died(reason)

    def _not_now(self, error: OmlxdError) -> None:
        """There is no room for the model; nothing is wrong with it."""
        self.state = "unloaded"
        log.warning("%s is not loaded: %s", self.model_id, error.message)
        self._on_lost(error.as_event(), False)

    def _unloaded(self) -> None:
        log.info("unloaded %s", self.model_id)
        if not self.has_work():
            self._wanted.clear()
        self.state = "loading" if self._wanted.is_set() else "unloaded"
        self._tell_gone()

    def _died(self, reason: str) -> None:
        """The process ended, or never started, for `reason`."""
        was_ready = self.state == "ready"
        self.restarts.ended()
        self.deaths += 1
        self.state = "restarting"
        if was_ready:
            self._reason = f"The engine of {self.model_id} stopped: {reason}. Retry: it starts again."
        else:
            self._reason = f"{self.model_id} can't be loaded: {reason}"
            if self.restarts.load_failed():
                self.state = "failed"
        log.error("%s", self._reason)
        retry_after = self.restarts.retry_after(given_up=self.state == "failed")
        failed = Failed(code="unavailable", message=self._reason, retry_after=retry_after)
        self._on_lost(failed, was_ready)

    async def _one_life(self) -> str:
        """From preparation to the end of the process; returns why it ended."""
        self._spawning = asyncio.create_task(self._start_process(), name=f"start {self.model_id}")
        try:
            load = await self._spawning
        except asyncio.CancelledError:
            if self._closing or self.state != "unloading":
                raise
            return ""
        link = self.link
        assert link is not None
        account = self._cold.account(link.send, link.pid) if self._cold else None
        life = EngineLife(self, link, load, account, self._guard)
        if self.state == "unloading":
            in_background(link.close())
        elif self._stands_back():
            restart_policy.lower(link.pid)
        try:
            reason = await life.run(self.restarts.patience_s)
            if self.state == "unloading":
                await link.close()  # Its socket may close first; whoever unloads it wants its memory back.
        finally:
            self.link = None
        self.restarts.life_over(stalled=life.stalled)
        if life.refused is not None:
            raise life.refused
        return reason

    async def _start_process(self) -> wire.Load:
        link, load = await self._spawn()
        self.link = link  # In the same step: no process may be running that nobody can end.
        self.starts += 1
        return load

    # ----------------------------------------------------------------- what a life tells

    def loaded(self, info: wire.ModelInfo) -> None:
        if self.link is None or self.state == "unloading" or self._closing:
            return  # It was loaded in the moment in which it was to end.
        self.info, self._reason = info, ""
        self.restarts.loaded()
        restart_policy.restore(self.link.pid)
        self.loads += 1
        self.state = "ready"
        if self._log_level:  # It may have changed since the Load was made.
            self.send(wire.LogLevel(level=self._log_level))
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
        self._on_ready()
