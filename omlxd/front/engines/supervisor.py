"""The supervisor starts an engine process when it is wanted, watches it, ends it, and starts it again.

| state        | process                    | a request                                        |
|--------------|----------------------------|--------------------------------------------------|
| `unloaded`   | none                       | starts it and waits                              |
| `loading`    | being prepared, or loading | waits                                            |
| `ready`      | serving                    | goes to the engine at once                       |
| `unloading`  | flushing its blocks        | waits, and has it loaded again                   |
| `restarting` | dead, or loading again     | starts it again (after a backoff) and waits      |
| `failed`     | none                       | as `restarting`, or is refused during a hold     |

`loading` → `ready` on Loaded. `ready` → `restarting` when the process ends; in_flight.py says what becomes of
its requests. Any state → `unloading` by `begin_unload`, in the same step; → `unloaded` when the process has
ended, so its memory is free. A failed load fails everybody who waits for it, with its reason; from
`LOAD_ATTEMPTS` in a row on requests are refused for `HOLD_S`, unless the owner ends the hold. After a failure
that lasts they are refused until the owner does, or the model's files change (adapters.py looks). A load
refused for lack of memory does not count as failed; one refused for an adapter's files is never held. Nothing
restarts by itself: a model that crashes on load costs nothing while nobody asks for it.

A GPU fault restarts an engine that loads as well as one that serves, and the next process computes prompts in
smaller passes. After `MOST_FAULTS` with no request answered between them it is `failed`, with such a hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from msgspec.structs import replace

from ... import wire
from ...chat import Failed, Finished
from ...errors import AdapterError, InvalidRequest, ModelError, NotNow, OmlxdError, Unavailable
from . import watch
from .guest import SHARED, GuestLink, to_guests
from .ledger.cold_ledger import Account, ColdLedger
from .link import EngineLink, in_background, lower_priority, restore_priority

log = logging.getLogger(__name__)

State = Literal["unloaded", "loading", "ready", "unloading", "restarting", "failed"]
Link = EngineLink | GuestLink
Spawn = Callable[[], Awaitable[tuple[Link, wire.Load]]]
Guard = Callable[[wire.Device], Awaitable[wire.Budget]]

BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
HOLD_S = 60.0
"""Seconds of a retry-after at most: clients give up at once above 60."""
MOST_STALLS = 4
"""Doublings of patience at most: each end for want of progress doubles it."""

UNLOAD_S = 60.0
"""Seconds for an unloading engine to write its blocks."""
AWAY_RETRY_S = 5
"""Seconds after which a host that is away may be back, or memory that lacks."""
FAULT_EXIT_S = 10.0
"""Seconds until an engine that met a GPU fault has exited by itself, or is killed."""


@dataclass(slots=True)
class _Life:
    """One engine process.

    heard    messages about requests; `steps`: of its last Alive
    failed   why its load failed, in words, `lasting`: for good; `refused`: why the guard refused it
    stalled  it was ended because it made no progress
    fault    the GPU fault that ended it
    """

    link: Link
    load: wire.Load
    account: Account | None
    admission: asyncio.Task[None] | None = None
    heard: int = 0
    steps: int = -1
    failed: str = ""
    lasting: bool = False
    refused: OmlxdError | None = None
    stalled: bool = False
    fault: wire.GpuFault | None = None


@dataclass(slots=True)
class _Tasks:
    """What a supervisor awaits of a process.

    lives     starts it again and again; `spawning`: its start
    gone      set once it has ended; `reaping`: waits for that
    """

    lives: asyncio.Task[None] | None = None
    spawning: asyncio.Task[wire.Load] | None = None
    gone: asyncio.Future[None] | None = None
    reaping: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Failure:
    """Why the engine stopped or failed last, in words; `lasting`: another try would fail as well.

    fault  a GPU fault is why
    """

    reason: str = ""
    lasting: bool = False
    fault: wire.GpuFault | None = None


class Owner(Protocol):
    """The holder of an engine's requests."""

    on_change: Callable[[], None]

    @property
    def is_awaited(self) -> bool:
        """Whether anybody waits for the engine: a request, or a load."""
        ...

    def on_ready(self) -> None: ...

    def on_message(self, message: Any) -> None: ...

    def on_lost(self, failed: Failed, goes_on: bool) -> None: ...


class Supervisor:
    """Owns one engine's process and state, without a notion of requests.

    spawn()       starts a process; may take long (a download) and raise OmlxdError or OSError
    owner         hears what happens, and says whether anybody waits for the engine
    guard         returns the budget for a load into the memory of Device; raises OmlxdError to refuse it
    stands_back() whether it should load at a lower priority, for the sake of others that answer
    unusable      makes the error of an adapter that can't be used, from the reason
    """

    def __init__(
        self,
        model_id: str,
        spawn: Spawn,
        owner: Owner,
        *,
        cold: ColdLedger | None = None,
        backoff_s: Sequence[float] = BACKOFF_S,
        hold_s: float = HOLD_S,
        stall_s: float = watch.STALL_S,
        guard: Guard | None = None,
        stands_back: Callable[[], bool] = lambda: False,
        unusable: Callable[[str], OmlxdError] = AdapterError,
    ):
        self.model_id = model_id
        self.info: wire.ModelInfo | None = None
        self.loads = 0
        self.starts = 0
        self.deaths = 0
        self.link: Link | None = None
        self.guests: dict[int, GuestLink] = {}
        self.restarts = watch.Restarts(tuple(backoff_s), hold_s, stall_s)
        self._owner = owner
        self._spawn = spawn
        self._cold = cold
        self._guard = guard
        self._stands_back = stands_back
        self._unusable = unusable
        self._state: State = "unloaded"
        self._wanted = asyncio.Event()
        self._last_failure = _Failure()
        self._log_level = ""
        self._closing = False
        self._tasks = _Tasks()

    @property
    def state(self) -> State:
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        self._owner.on_change()

    @property
    def trouble(self) -> str:
        """Why the engine last stopped or failed, and when it is tried again; "" once it is ready."""
        if self.state == "ready":
            return ""
        why = self._last_failure.reason.rstrip(".")
        if self.state == "restarting":
            return f"{why}. {self._starts_again()}"
        if self.is_held_for_good:
            alone = f"`omlxd models load {self.model_id}` alone tries again"
            return f"{why}. Until its files or settings change, {alone}."
        if self.state != "failed" or (left := self.restarts.hold_left_s) <= 0:
            return self._last_failure.reason
        at_once = f"`omlxd models load {self.model_id}`, or SIGHUP after a changed setting, tries at once"
        return f"{why}. It is tried again after {math.ceil(left)} s; {at_once}."

    def _starts_again(self) -> str:
        if not self._wanted.is_set():
            return "Retry: the next request starts it again."
        wait_s = math.ceil(self.restarts.wait_s) if self.restarts.wait_s > 0 else 0
        return f"It starts again {f'in {wait_s} s' if wait_s else 'now'}, since somebody waits for it."

    @property
    def slowed(self) -> str:
        """Say that passes are small since a GPU fault, and what ends that; "": they are not."""
        if not (tokens := self.restarts.pass_limit):
            return ""
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.restarts.limited_at))
        lifts = f"`omlxd models load {self.model_id}` lifts it"
        return f"passes of at most {tokens} tokens since a GPU fault at {at}; {lifts}"

    @property
    def pid(self) -> int | None:
        return self.link.pid if self.link else None

    @property
    def has_process(self) -> bool:
        """Whether a process runs or is being prepared."""
        return self.link is not None or (self._tasks.spawning is not None and not self._tasks.spawning.done())

    @property
    def is_held_for_good(self) -> bool:
        """Whether requests are refused since the last load failed for a reason that lasts."""
        return self.state == "failed" and self._last_failure.lasting and not self.restarts.is_forgiven

    def check_hold(self) -> None:
        """Raise Unavailable, or ModelError, while the model is refused because its loads failed."""
        if self.is_held_for_good:
            raise ModelError(self.trouble, param="model")
        if self.state == "failed" and (left := self.restarts.hold_left_s) > 0:
            raise Unavailable(self.trouble, retry_after=min(60, math.ceil(left)))

    def end_hold(self) -> None:
        """Let the next request try at once, with large passes: the owner may have mended what failed."""
        if self.restarts.pass_limit:
            self.send(wire.PassLimit(0))
        self.restarts.forgive()

    def send(self, message: Any) -> None:
        """Send `message` to the engine if it is ready; else drop it."""
        if self.link is not None and self.state == "ready":
            self.link.send(message)

    def set_log_level(self, level: str) -> None:
        """Set the log level of this engine and later ones."""
        self._log_level = level
        self.send(wire.LogLevel(level=level))

    # ----------------------------------------------------------------- coming and going

    def start(self) -> None:
        """Begin to load, unless that has begun. Returns at once."""
        if self._closing:
            return
        if self.state == "unloaded":
            self.state = "loading"
        self._wanted.set()
        if self._tasks.lives is None:
            self._tasks.lives = asyncio.create_task(self._supervise(), name=f"engine {self.model_id}")

    def begin_unload(self, grace_s: float = UNLOAD_S) -> None:
        """End the process in order, or its start. Sets the state at once; `gone` waits for the end."""
        if self.state == "unloading":
            return
        self._wanted.clear()
        link, was_ready = self.link, self.state == "ready"
        if not self.has_process:
            if self.state == "loading":
                self.state = "unloaded"
            return
        self._tasks.gone = asyncio.get_running_loop().create_future()
        self.state = "unloading"
        if link is None:
            assert self._tasks.spawning is not None
            self._tasks.spawning.cancel()
        elif was_ready:
            link.send(wire.Quit(deadline_s=grace_s))
            in_background(link.close(grace_s + 2.0))
        else:
            in_background(link.close())

    async def gone(self) -> None:
        """Wait until the unload has ended."""
        if self._tasks.gone is not None:
            await asyncio.shield(self._tasks.gone)

    async def close(self, grace_s: float) -> None:
        """Let the engine flush for `grace_s`, end it, start no other."""
        self._closing = True
        if self.link is not None:
            if self.state == "ready":
                self.link.send(wire.Quit(deadline_s=grace_s))
                await self.link.close(grace_s + 1.0)
            else:
                await self.link.close(grace_s + 1.0 if self.state == "unloading" else 0.0)
        if self._tasks.lives is not None:
            self._tasks.lives.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._tasks.lives
        if self._tasks.reaping is not None:
            await self._tasks.reaping
        self._settle_gone()

    def _settle_gone(self) -> None:
        gone, self._tasks.gone = self._tasks.gone, None
        if gone is not None and not gone.done():
            gone.set_result(None)

    # ----------------------------------------------------------------- life after life

    async def _supervise(self) -> None:
        while not self._closing:
            await self._wanted.wait()
            await asyncio.sleep(self.restarts.wait_s)
            if self._tasks.reaping is not None:  # The last process may still hold its memory.
                await asyncio.wait({self._tasks.reaping})
            if not self._wanted.is_set():
                continue  # It was unloaded meanwhile.
            if self.state == "failed":
                self.state = "restarting"
            refused: OmlxdError | None = None
            lasting, retry_after = False, None
            try:
                reason = await self._one_life()
                self.deaths += not (self._closing or self.state == "unloading")
            except (NotNow, InvalidRequest) as error:
                refused, reason = error, error.message
            except OmlxdError as error:
                reason, lasting, retry_after = (
                    error.message,
                    error.code == "model_unusable",
                    error.retry_after,
                )
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
                self._died(reason, lasting, retry_after)

    def _not_now(self, error: OmlxdError) -> None:
        """Note a refused load: for lack of memory, or for an adapter's files, which may be mended."""
        self.state, self._last_failure.reason = "unloaded", error.message
        if isinstance(error, AdapterError):  # Without a hold.
            self.restarts.ended_at, self.state = -math.inf, "failed"
        log.warning("%s is not loaded: %s", self.model_id, error.message)
        self._owner.on_lost(error.as_event(), False)

    def _unloaded(self) -> None:
        log.info("unloaded %s", self.model_id)
        if self._owner.is_awaited:  # Also by requests from before the unload, which waited for a turn.
            self._wanted.set()
        else:
            self._wanted.clear()
        self.state = "loading" if self._wanted.is_set() else "unloaded"
        self._settle_gone()

    def _died(self, reason: str, lasting: bool, retry_after: int | None) -> None:
        """Handle a process that ended or never started, for `reason`; `lasting`: the next one would, too.

        retry_after  seconds until it may start; None: as the backoff says
        """
        restarts, fault = self.restarts, self._last_failure.fault
        restarts.ended_at, restarts.ends_in_a_row = time.monotonic(), restarts.ends_in_a_row + 1
        goes_on = self.state == "ready"
        if fault is not None:
            goes_on, self._last_failure.reason = self._met_fault(fault)
        elif goes_on:
            self._last_failure.reason = f"The engine of {self.model_id} stopped: {reason}."
        else:
            begins = (f"{self.model_id} can't be ", f"draft-model of {self.model_id}: ")
            said = reason.startswith(begins) and " can't be " in reason
            self._last_failure.reason = reason if said else f"{self.model_id} can't be loaded: {reason}"
            restarts.failed_loads += 1
        self._last_failure.lasting = lasting and not goes_on
        self.state = "restarting" if goes_on else "failed"
        log.error("%s", self.trouble)
        wait_s = (
            restarts.backoff_s if goes_on else max(restarts.hold_left_s, restarts.backoff_s, retry_after or 0)
        )
        retry_after = max(1, min(60, math.ceil(wait_s)))
        failed = Failed(code="unavailable", message=self.trouble, retry_after=retry_after)
        if self._last_failure.lasting:
            failed = ModelError(self.trouble, param="model").as_event()
        self._owner.on_lost(failed, goes_on)

    def _met_fault(self, fault: wire.GpuFault) -> tuple[bool, str]:
        """Return whether the engine may start again at once after a GPU fault, and what to tell of it."""
        restarts, met = self.restarts, fault.message.rstrip(".")
        passes = f"passes of at most {restarts.pass_limit} tokens" if restarts.pass_limit else ""
        if restarts.faults < watch.MOST_FAULTS:
            what = f"The engine of {self.model_id} stopped: a GPU fault ended it: {met}"
            return True, f"{what}.{passes and f' The next one computes {passes}.'}"
        what = f"{self.model_id} stays down: {restarts.faults} GPU faults ended it in a row, the last: {met}"
        return False, f"{what}. {fault.help}{passes and f' The next engine computes {passes}.'}"

    async def _one_life(self) -> str:
        """Run one process from preparation to its end; returns why it died. Raises for a load that fails."""
        self._last_failure.fault = None
        self._tasks.spawning = asyncio.create_task(self._start_process(), name=f"start {self.model_id}")
        try:
            load = await self._tasks.spawning
        except asyncio.CancelledError:
            if self._closing or self.state != "unloading":
                raise
            return ""
        link = self.link
        assert link is not None
        life = _Life(link, load, self._cold.account(link.send, link.pid) if self._cold else None)
        if self.state == "unloading":
            in_background(link.close())
        elif self._stands_back():
            lower_priority(link.pid)
        patience_s = self.restarts.patience_s
        watching = [asyncio.create_task(self._watch(life, patience_s))] if patience_s else []
        if load.join and isinstance(link, EngineLink):
            watching.append(asyncio.create_task(link.end_if_stopped()))
        try:
            ended = await link.receive(partial(self._handle, life))
            if self.state == "unloading":
                await link.close()  # Its socket may close first; whoever unloads it wants its memory back.
        finally:
            for task in (*watching, life.admission):
                if task is not None:
                    task.cancel()
            for guest in list(self.guests.values()):
                guest.end(SHARED)
            self._tasks.reaping = in_background(_reap(life))  # Requests in flight fail now, before that.
            self.link = None
        self.restarts.stalls = min(self.restarts.stalls + 1, MOST_STALLS) if life.stalled else 0
        if life.refused is not None:
            raise life.refused
        if life.stalled:
            return f"it made no progress for {patience_s:.0f} s or more"
        if life.fault is not None:
            self.restarts.record_fault(life.fault.pass_tokens, load.cache.block_size)
            self._last_failure.fault = life.fault
        if self.state == "ready":
            return life.failed or ended
        if life.failed and life.lasting:
            raise ModelError(life.failed)
        if life.failed:
            raise Unavailable(life.failed)
        return f"{ended}{_quoted(link.last_words)}"

    async def _start_process(self) -> wire.Load:
        link, load = await self._spawn()
        self.link = link  # In the same step: no process may be running that nobody can end.
        self.starts += 1
        return load

    # ----------------------------------------------------------------- what a process says and does

    def _handle(self, life: _Life, message: Any) -> None:
        if _is_answer(message):  # Its guests' count, too.
            self.restarts.record_answer()
        if self.guests and (message := to_guests(self.guests, message)) is None:
            return
        if isinstance(message, (wire.Events, wire.Answer)):
            life.heard += 1
            self._owner.on_message(message)
        elif isinstance(message, (wire.Stats, wire.Wants)):
            self._owner.on_message(message)
        elif isinstance(message, wire.Alive):
            life.steps = message.steps
        elif isinstance(message, wire.Device):
            life.admission = asyncio.create_task(self._admit(life, message), name="engine-admission")
        elif isinstance(message, wire.LoadProgress):
            log.info("%s: %s", self.model_id, message.stage)
        elif isinstance(message, wire.Loaded):
            if life.account is not None:
                info = message.info
                life.account.model_loaded(
                    info.namespace, life.load.adapter or life.load.model_path, info.shares
                )
            self._loaded(message.info)
            if life.load.pass_limit != self.restarts.pass_limit:  # The owner lifted it meanwhile.
                self.send(wire.PassLimit(self.restarts.pass_limit))
        elif isinstance(message, wire.GpuFault):
            life.fault = message  # It exits by itself; a GPU that hangs may hold it back.
            asyncio.get_running_loop().call_later(FAULT_EXIT_S, life.link.kill)
        elif isinstance(message, wire.LoadFailed):
            if message.now:
                retry_after = None if message.adapter else AWAY_RETRY_S
                life.refused = NotNow(message.message, param="model", retry_after=retry_after)
            elif message.adapter:
                life.refused = self._unusable(message.message)
            else:
                life.failed = message.message or "the engine gave no reason"
                life.lasting = message.lasting
            life.link.stop()  # It exits by itself; this is for one that hangs on the way out.
        elif life.account is not None:
            life.account.handle(message)
        elif isinstance(message, wire.Reserve):
            life.link.send(wire.Grant(ticket=message.ticket, nbytes=0))

    async def _admit(self, life: _Life, device: wire.Device) -> None:
        """Have the engine load, unless the guard refuses it."""
        link = life.link
        load = life.load = replace(life.load, pass_limit=self.restarts.pass_limit)
        try:
            if load.cache.cold_dir and self._cold is not None:
                cold_dir = await self._cold.open()
                load = life.load = replace(load, cache=replace(load.cache, cold_dir=cold_dir))
            if self._guard is not None:
                load = replace(load, budget=await self._guard(device))
        except OmlxdError as error:
            life.refused = error
            link.stop()
            return
        except Exception:
            log.exception("the memory guard failed")
        link.send(load)
        loads = lambda: self.link is link and self.state in ("loading", "restarting")  # noqa: E731
        if problem := await watch.overgrown(link.pid, Path(load.model_path), loads, load.budget.float32):
            life.failed = problem
            link.kill()

    async def _watch(self, life: _Life, stall_s: float) -> None:
        """End the process when it has work and makes no progress."""

        def progress() -> object:
            if self.state == "ready":
                return (life.heard, life.steps) if self._owner.is_awaited else None
            if self.state == "unloading" or life.load.join:
                return None  # Who unloads it has a deadline; so has rank 0, which waits for other machines.
            return watch.load_progress(life.link.pid)

        def show_threads(silent_s: float) -> None:
            log.warning("%s: no progress for %.0f s; where its threads stand:", self.model_id, silent_s)
            life.link.show_threads()

        silent_s = await watch.stalled(progress, stall_s, show_threads)
        log.error("%s: no progress for %.0f s, it is ended", self.model_id, silent_s)
        life.stalled = True
        life.link.stop()

    def _loaded(self, info: wire.ModelInfo) -> None:
        if self.link is None or self.state == "unloading" or self._closing:
            return  # It was loaded in the moment in which it was to end.
        self.info, self._last_failure.reason = info, ""
        self.restarts.failed_loads = 0
        restore_priority(self.link.pid)
        self.loads += 1
        self.state = "ready"
        if self._log_level:  # It may have changed since the Load was made.
            self.send(wire.LogLevel(level=self._log_level))
        reuse = f"prefixes are not reused: {info.kv_reuse}" if info.kv_reuse else "prefixes are reused"
        backend = f"{info.backend}: {info.speed}" if info.speed else info.backend
        what = f"({info.model_type}, {backend}): context {info.context_length} tokens, {reuse}"
        log.info("loaded %s %s", info.model_id, what)
        if info.note:
            log.warning("%s: %s", info.model_id, info.note)
        self._owner.on_ready()


def _is_answer(message: Any) -> bool:
    """Whether a request was answered: whatever is in the way of an engine, it does work."""
    if isinstance(message, wire.Events):
        return any(isinstance(event, Finished) for _, event in message.events)
    return isinstance(message, wire.Embedded)


ORDINARY = re.compile(r"(DEBUG|INFO) [\w.-]+: ")
"""Matches a line of an engine's log that reports no fault."""


def _quoted(words: str) -> str:
    """Return the last line that reports a fault, for an error that a client sees; the log has all lines."""
    lines = [line for line in words.splitlines() if line.strip() and not ORDINARY.match(line)]
    return f"; its last words were: {lines[-1].strip()[:300]}" if lines else ""


async def _reap(life: _Life) -> None:
    """End the process, then reclaim its grants: until then it may write."""
    await life.link.close()
    if life.account is not None:
        life.account.process_ended()
