"""The models of one daemon: which one a client's name means, when each is loaded, and when it goes.

A model is loaded when a request (or the owner) wants it. It goes when it was idle for its time, or
when another one needs its place: the least recently used first, never one that is pinned or has
requests in flight. Going is the end of its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from ...common.units import SLOTS
from ...config import Settings
from ...errors import InvalidRequest, ModelError, NotFound, NotNow, OmlxdError
from ...models.adapters import adapter_state
from ...models.catalog import Catalog, InstalledModel, files_state
from ...models.remove import remove_folder
from ...models.resolve import check_folder, resolve_model
from ...wire import Load
from ..keep_awake import KeepAwake
from .adapters import find_host, join, look_at, take_up_changes, unusable
from .client import EngineProcess
from .ledger.cold_ledger import ColdLedger
from .link import ENGINE_COMMAND, EngineLink, in_background
from .memory_guard import MemoryGuard
from .model import ModelEngine, for_next_load, load_message, settings_of
from .names.model_book import ModelBook
from .names.names import basename, resolve_name
from .supervisor import Link

log = logging.getLogger(__name__)

DRAIN_S = 10.0
"""Seconds for answers under way to end once the daemon is to stop."""
FLUSH_S = 5.0
"""Seconds for an engine to write blocks that are still in memory after that."""
KILL_S = 2.0
"""Seconds for engines to unwire their memory where the daemon is to stop at once."""
LOOK_S = 2.0
"""Seconds that a request waits for a look at the model folders."""
ROOM_WAIT_S = 60.0
"""Seconds that a model waits for others to become idle."""


class EnginePool:
    """Holds every model's engine. `command`: the engine program, replaced in tests."""

    def __init__(
        self,
        settings: Settings,
        command: Sequence[str] = ENGINE_COMMAND,
        *,
        room_wait_s: float = ROOM_WAIT_S,
    ):
        self._settings = settings
        self._command = tuple(command)
        self._room_wait_s = room_wait_s
        self.catalog = Catalog(settings)
        self.catalog.look()  # Nobody is served yet; later looks are in a thread.
        self.book = ModelBook(settings.base_path / "models.json")
        self.cold = ColdLedger.of(settings)
        self.awake = KeepAwake(settings.keep_awake)
        self._engines: dict[str, ModelEngine] = {}
        self._channels = itertools.count(1)
        self._looking: asyncio.Task[None] | None = None
        self._unreadable: set[str] = set()
        self._change = asyncio.Event()
        self._making_room = asyncio.Lock()
        self._keepers: list[asyncio.Task[None]] = []
        self._guard = MemoryGuard(
            self, self.book, settings.memory_limit_bytes, settings.hot_cache_bytes, room_wait_s
        )
        starts_with_one = settings.model or settings.model_dir is None
        self._first = next(iter(self.models()), None) if starts_with_one else None

    # ----------------------------------------------------------------- names

    async def look_for_models(self, *, afresh: bool = False) -> None:
        """Look at the model folders, in a thread, unless that was done a moment ago.

        Looks at the same time are one; `afresh` waits for one that has begun, and looks again. After `LOOK_S`
        what was there before holds: a disk may hang.
        """
        if afresh and self._looking is not None:
            done, _ = await asyncio.wait({self._looking}, timeout=LOOK_S)
            if not done:
                return
        if self._looking is None and (afresh or self.catalog.is_old or self._unmeasured()):
            self._looking = asyncio.create_task(self._look(), name="model folders")
            self._looking.add_done_callback(self._looked)
        if self._looking is not None:
            await asyncio.wait({self._looking}, timeout=LOOK_S)

    async def _look(self) -> None:
        await asyncio.to_thread(self.catalog.look)
        self.models()
        if unmeasured := self._unmeasured():
            await asyncio.to_thread(lambda: [self._measure(engine) for engine in unmeasured])

    def _measure(self, engine: ModelEngine) -> None:
        """Measure a model; an unreadable folder is no other model's trouble."""
        try:
            engine.measure()
        except Exception as error:
            if engine.model_id not in self._unreadable:
                self._unreadable.add(engine.model_id)
                log.error("%s: its folder can't be looked at", engine.model_id, exc_info=error)

    def _looked(self, look: asyncio.Task[None]) -> None:
        self._looking = None
        if not look.cancelled() and (error := look.exception()) is not None:
            log.error("the model folders can't be looked at", exc_info=error)

    def _unmeasured(self) -> list[ModelEngine]:
        return [e for e in self._engines.values() if e.footprint is None and e.folder is not None]

    def models(self) -> list[ModelEngine]:
        """Return every installed model, the default first, as of the last `look`.

        The demo model that this daemon began with stays when another one has become the default.
        """
        installed = self.catalog.models()
        for id, model in installed.items():
            engine = self._engines.get(id)
            # Another folder may have come by the same name.
            if engine is None or (not engine.installed.is_same(model) and engine.is_nothing):
                self._drop(id)
                self._engines[id] = self._new(model)
        for id in [id for id in self._engines if id not in installed]:
            engine = self._engines[id]
            if engine.is_nothing and not (engine is self._first and engine.installed.source == "demo"):
                self._drop(id)  # Its folder is gone.
        order = {id: position for position, id in enumerate(installed)}
        return sorted(self._engines.values(), key=lambda engine: order.get(engine.model_id, len(order)))

    def _drop(self, id: str) -> None:
        """Forget a model that has nothing behind it, and end the task that would start it."""
        if (engine := self._engines.pop(id, None)) is not None:
            in_background(engine.process.close(0.0))

    def _new(self, installed: InstalledModel) -> ModelEngine:
        process = EngineProcess(
            installed.id,
            lambda: self._spawn(self._engines[installed.id]),
            channel=next(self._channels) if installed.base else 0,
            max_concurrent=self._settings.max_concurrent_requests or SLOTS,
            cold=self.cold,
            stall_s=self._settings.stall_timeout,
            stands_back=lambda: made.host is None and self._others_answer(installed.id),
            unusable=lambda reason: unusable(made, reason),
            guard=lambda device: self._guard.admit(self._engines[installed.id], device),
            on_begin=self.awake.begin,
            on_change=self._note_change,
            on_want=lambda wants: in_background(self._guard.answer_wants(self._engines[installed.id], wants)),
        )
        made = ModelEngine(installed, process, may_load=lambda: not self._settings.no_jit_load)
        made.guests = lambda: self._guests(made)
        made.why_never = lambda: self._guard.why_never(made)
        made.stay.pinned = installed.id in self.book.pinned
        self._set_settings(made)
        return made

    def _set_settings(self, engine: ModelEngine) -> None:
        engine.settings = settings_of(engine.model_id, self._settings)
        engine.cpu_weights = engine.settings.cpu_weights or self._settings.cpu_weights
        engine.stay.default_s = self._settings.model_ttl

    def _others_answer(self, model_id: str) -> bool:
        engines = self._engines.values()
        return any(e.state == "ready" and e.in_flight and e.model_id != model_id for e in engines)

    def aliases(self) -> dict[str, str]:
        """Map alias → model id, of installed models; the configuration file's before the owner's."""
        aliases = dict(self.book.aliases)
        for engine in self._engines.values():
            aliases |= dict.fromkeys(engine.settings.aliases, engine.model_id)
        return {alias: id for alias, id in aliases.items() if id in self._engines}

    def aliases_of(self, model_id: str) -> list[str]:
        return sorted(alias for alias, id in self.aliases().items() if id == model_id)

    def default(self) -> ModelEngine | None:
        """Return the model of a `claude-…` name: `--model`'s, else the last used, else the first."""
        # Its folder may be gone, and may have come back.
        if self._first is not None and (first := self._engines.get(self._first.model_id)) is not None:
            return first
        engines = [engine for engine in self.models() if engine.measured.description.kind == "chat"]
        loaded = [e for e in engines if e.state in ("ready", "loading")]
        if loaded:
            return max(loaded, key=lambda e: e.process.used_at)
        return next((e for e in engines if e.is_pinned), engines[0] if engines else None)

    def resolve(self, model_name: str) -> ModelEngine:
        """Return the engine that serves `model_name` (`resolve_name`). Raises OmlxdError."""
        ids, default = [engine.model_id for engine in self.models()], self.default()
        return self._engines[resolve_name(model_name, ids, default and default.model_id, self.aliases())]

    async def find_engine(self, model_name: str) -> ModelEngine:
        """Resolve a name; an unknown one after a new look at the folders."""
        if self.catalog.is_old:
            in_background(self.look_for_models())
        try:
            engine = self.resolve(model_name)
        except NotFound:
            await self.look_for_models(afresh=True)
            engine = self.resolve(model_name)
        await take_up_changes(engine)
        await self._take_up_mended(engine)
        return engine

    async def _take_up_mended(self, engine: ModelEngine) -> None:
        """End the hold of a model whose load failed for good, if its files have changed since."""
        supervisor = engine.process.supervisor
        if not supervisor.is_held_for_good:
            return
        if engine.host is not None:  # Its base is held, and refuses by itself.
            supervisor.end_hold()
            return
        state = await look_at(engine, lambda: self._state_of(engine))
        if state is not None and state != supervisor.restarts.files:
            supervisor.end_hold()

    def _state_of(self, engine: ModelEngine) -> tuple[int, ...]:
        """Return what changes with the files that a load of `engine` reads. Blocks."""
        draft, adapter = engine.settings.draft_model, engine.adapter
        specs = [engine.installed.spec, *([self.catalog.spec_of(draft)] if draft else [])]
        states = [files_state(spec, self._settings.base_path) for spec in specs]
        return tuple(itertools.chain(*states, adapter_state(adapter) if adapter else ()))

    # ----------------------------------------------------------------- what the owner may do

    def estimate(self, engine: ModelEngine) -> tuple[int, int] | None:
        """Return (bytes to load `engine`, bytes of KV a token); None: unknown."""
        return self._guard.estimate(engine)

    def why_never(self, engine: ModelEngine) -> str:
        """Say why `engine` can never be loaded on this machine; "": it may be."""
        return self._guard.why_never(engine)

    def room(self) -> int:
        """Return the bytes that all models together may take; 0: unknown or unlimited."""
        return self._guard.room()

    async def remove(self, engine: ModelEngine, folder: Path) -> None:
        """Unload `engine` and delete its `folder`; until that is done, nobody loads it again.

        Raises OmlxdError; InvalidRequest while it answers.
        """
        engine.check_stays()
        engine.removing = True
        try:
            busy = any(each.in_flight for each in (engine, *self._guests(engine)))
            if busy or not await self.unload(engine.model_id):
                raise InvalidRequest(
                    f"{engine.model_id} answers a request: delete it once that has ended.", param="model"
                )
            await asyncio.to_thread(remove_folder, folder)
            log.info("%s is deleted: %s", engine.model_id, folder)
            await self.look_for_models(afresh=True)
        finally:
            engine.removing = False

    def start(self, *, first: bool = True) -> None:
        """Begin to load what loads at start, if `first`. Returns at once; needs a running event loop."""
        self._keepers = [
            asyncio.create_task(self._keep(), name="idle models"),
            asyncio.create_task(self._guard.keep(), name="memory"),
        ]
        for sentence in self.catalog.unknown_names():
            log.warning("%s", sentence)
        in_background(self.cold.open())  # What it holds is counted and shown before a model is loaded.
        if first and self._first is not None:
            self._first.stay.by_name = True
            self._first.process.supervisor.start()

    async def load(self, model_name: str, keep_alive: float | None = None) -> ModelEngine:
        """Load a model because the owner says so; returns once it is ready. Raises OmlxdError.

        keep_alive  seconds that it stays; None: for good
        """
        engine = await self.find_engine(model_name)
        engine.check_stays()
        engine.stay.by_name, engine.stay.owner_s = keep_alive is None, keep_alive
        engine.stay.asked_s, engine.stay.leaving = None, False
        engine.process.used_at = time.monotonic()  # It may be loaded, and idle, for long.
        engine.process.supervisor.end_hold()
        try:
            await engine.process.load()
        except OmlxdError:
            engine.stay.by_name, engine.stay.owner_s = False, None
            raise
        self._note()
        return engine

    async def unload(self, model_name: str) -> bool:
        """Unload a model. False: it goes once its answers have ended. Raises OmlxdError."""
        engine = await self.find_engine(model_name)
        engine.process.give_up_load()
        for each in (engine, *self._guests(engine)):
            each.stay.by_name = False
        engine.stay.leaving = not self._let_go(engine)
        if not engine.stay.leaving:
            await engine.process.supervisor.gone()
        return not engine.stay.leaving

    def keep_alive(self, engine: ModelEngine, seconds: float) -> None:
        """Keep `engine` for so long after the request; 0: unload it at once.

        One that the owner had unloaded goes all the same; see `ModelEngine.idle_s`.
        """
        engine.stay.asked_s = seconds
        self._note()

    def pin(self, model_name: str, pinned: bool) -> ModelEngine:
        """Pin or unpin a model, between runs, too. Raises OmlxdError."""
        engine = self.resolve(model_name)
        if not pinned and engine.settings.pin:
            raise InvalidRequest(f"{engine.model_id} is pinned by the configuration file; unpin it there.")
        engine.stay.pinned = pinned
        self.book.set_pinned(engine.model_id, pinned)
        self._note()
        return engine

    def alias(self, alias: str, model_name: str | None) -> None:
        """Have `alias` mean that model, between runs, too; None: remove it. Raises OmlxdError."""
        alias = alias.strip()
        engines = self.models()
        if not alias or len(alias) > 200 or not alias.isprintable():
            raise InvalidRequest("alias: give a name of up to 200 printable characters.", param="alias")
        if any(alias == e.model_id for e in engines):
            raise InvalidRequest(f"alias: {alias!r} is the name of a model.", param="alias")
        if any(alias in e.settings.aliases for e in engines):
            raise InvalidRequest(f"alias: {alias!r} stands in the configuration file; change it there.")
        if model_name is None:
            if alias not in self.book.aliases:
                raise NotFound(f"There is no alias {alias!r}.", param="alias")
            self.book.set_alias(alias, None)
        else:
            self.book.set_alias(alias, self.resolve(model_name).model_id)

    def apply_settings(self, settings: Settings) -> asyncio.Task[None]:
        """Apply settings that were read again: those of models, and how many stay how long.

        What a loaded engine can't take up holds from its next load on; the log says which. The task ends
        when the model folders have been read.
        """
        self._settings = self.catalog.settings = settings
        self.awake.switch(settings.keep_awake)
        self._guard.memory_limit_bytes = settings.memory_limit_bytes
        self._guard.hot_cache_bytes = settings.hot_cache_bytes
        for engine in self._engines.values():
            self._set_settings(engine)
            engine.process.supervisor.set_log_level(settings.log_level)
            engine.process.supervisor.end_hold()
            later = for_next_load(engine.loaded_with, engine.settings)
            if later and engine.state == "ready":
                log.info("%s takes up %s when it is loaded again", engine.model_id, ", ".join(later))
        self._note()
        return in_background(self._look_elsewhere())

    async def _look_elsewhere(self) -> None:
        if self._looking is not None:
            await asyncio.wait({self._looking})  # It may be a look at other folders.
        await self.look_for_models(afresh=True)
        for name in self._settings.models:
            if not any(name in (id, basename(id)) for id in self._engines):
                log.warning("settings of %r are for a model that is not here", name)
        for setting, name, _, why in await asyncio.to_thread(lambda: [*self.catalog.parts()]):
            if why:
                log.warning(
                    "%s of %s: %s Until this is mended, %s can't be loaded.", setting, name, why, name
                )

    async def close(self, drain_s: float = DRAIN_S, flush_s: float = FLUSH_S) -> None:
        """Let answers end, then engines; the cache's lock goes last."""
        for keeper in [*self._keepers, *([self._looking] if self._looking else [])]:
            keeper.cancel()
        processes = [engine.process for engine in self._engines.values()]
        await asyncio.gather(*(process.drain(drain_s) for process in processes))
        await asyncio.gather(*(process.close(flush_s) for process in processes))
        await self.cold.close()
        await self.book.close(flush_s)
        await self.awake.close()

    def kill(self) -> None:
        """End every engine process, within `KILL_S`. Blocks."""
        processes: list[psutil.Process] = []
        for pid in {engine.pid for engine in self._engines.values()} - {None}:
            with contextlib.suppress(psutil.Error):
                processes.append(psutil.Process(pid))
                processes[-1].terminate()
        for process in psutil.wait_procs(processes, KILL_S)[1]:
            with contextlib.suppress(psutil.Error):
                process.kill()

    # ----------------------------------------------------------------- going

    def _note(self) -> None:
        """Wake all who wait for a change."""
        change, self._change = self._change, asyncio.Event()
        change.set()

    def _note_change(self) -> None:
        self._note()
        for engine in self._engines.values():
            if not engine.process.supervisor.has_process:
                engine.admitted = False
        if not any(engine.in_flight for engine in self._engines.values()):
            self.awake.end()

    async def _keep(self) -> None:
        """Unload models that were idle for their time."""
        while True:
            change = self._change
            now, next_at = time.monotonic(), math.inf
            for engine in self._engines.values():
                if engine.expires_at <= now:
                    asked = "it was to be unloaded once its requests had ended" if engine.stay.leaving else ""
                    log.info("%s goes: %s", engine.model_id, asked or "it has been idle for its time")
                    self._let_go(engine)
                next_at = min(next_at, engine.expires_at)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(next_at) else max(0.0, next_at - now)):
                    await change.wait()

    def _let_go(self, engine: ModelEngine) -> bool:
        """Unload a model and its guests, unless one is in use; its keep-alive ends, too."""
        going = [*self._guests(engine), engine]
        if any(each.process.is_awaited for each in going if each.state != "unloading"):
            return False
        for each in going:
            each.process.begin_unload()
            each.stay.owner_s, each.stay.asked_s, each.stay.leaving = None, None, False
        return True

    def _guests(self, engine: ModelEngine) -> list[ModelEngine]:
        """Return the adapters in the engine of `engine`, or about to be."""
        return [
            each
            for each in self._engines.values()
            if each.host is engine and each.process.supervisor.has_process
        ]

    async def make_go(self, victim: ModelEngine, why: str) -> None:
        """Unload `victim`; returns once its memory is free, unless a request came in between."""
        if self._let_go(victim):
            log.info("%s goes: %s", victim.model_id, why)
            await victim.process.supervisor.gone()

    # ----------------------------------------------------------------- coming

    async def _spawn(self, engine: ModelEngine) -> tuple[Link, Load]:
        base = self._engines.get(engine.installed.base)
        for each in (engine, base):
            if each is not None:
                each.check_stays()
        engine.host = None
        if (host := await find_host(engine, base, self._settings.defaults)) is not None:
            return await join(engine, host)
        load = await self._prepare(engine)
        plain = ("--mlx-blas",) if self._settings.cpu_blas == "off" else ()
        return await EngineLink.spawn((*self._command, *plain)), load

    async def _prepare(self, engine: ModelEngine) -> Load:
        # A disk may take long to show that it can be written: meanwhile the engine starts
        # (`Supervisor._admit`).
        in_background(self.cold.open())
        restarts = engine.process.supervisor.restarts
        restarts.files = await asyncio.to_thread(self._state_of, engine)
        folder = await self._folder(engine)
        engine.draft_folder = await self._draft_folder(engine)
        restarts.files = await asyncio.to_thread(self._state_of, engine)  # They may have been downloaded.
        await asyncio.to_thread(engine.measure)
        own = engine.footprint.context_length if engine.footprint is not None else None
        if own and (limit := engine.settings.context_limit or 0) > own:
            told = "%s: context-limit is %s tokens, but the model's own %s count"
            log.warning(told, engine.model_id, f"{limit:,}", f"{own:,}")
        self._guard.check_ever(engine)
        await self._make_room(engine)
        engine.loaded_with = engine.settings
        return load_message(engine, self._settings, folder, self.cold.folder)

    async def _folder(self, engine: ModelEngine):
        """Resolve, build or download the model; ask the hub once."""
        if engine.process.supervisor.loads and engine.folder is not None:
            with contextlib.suppress(Exception):
                await asyncio.to_thread(check_folder, engine.folder)
                return engine.folder
        spec = engine.installed.spec
        if engine is not self._first and engine.folder is not None:
            spec = str(engine.folder)
        engine.broken = False
        try:
            engine.folder = await resolve_model(spec, self._settings.base_path)
        except ModelError:
            engine.broken = engine.installed.source == "folder"
            raise
        return engine.folder

    async def _draft_folder(self, engine: ModelEngine) -> Path | None:
        """Resolve the folder of a model's `draft-model`."""
        name = engine.settings.draft_model
        if not name or (engine.settings.speculation or self._settings.speculation) != "auto":
            return None
        try:
            return await resolve_model(self.catalog.spec_of(name), self._settings.base_path, draft=True)
        except ModelError as error:
            raise ModelError(
                f"draft-model of {engine.model_id}: {error.message}",
                code=error.code,
                retry_after=error.retry_after,
            ) from error

    async def _make_room(self, engine: ModelEngine) -> None:
        """Wait until `engine` may load beside the others. Raises NotNow."""
        deadline = time.monotonic() + self._room_wait_s
        async with self._making_room:
            most = self._settings.max_loaded_models
            while most and len(others := self.others(engine)) >= most:
                if victim := self.victim(engine):
                    await self.make_go(victim, f"{engine.model_id} takes its place")
                elif not await self.change_before(deadline):
                    names = ", ".join(other.model_id for other in others)
                    raise NotNow(
                        f"{engine.model_id} can't be loaded now: {len(others)} of {most} models are loaded "
                        f"and in use or pinned ({names}); retry in a moment.",
                        retry_after=10,
                    )
            engine.admitted = True

    def others(self, engine: ModelEngine | None) -> list[ModelEngine]:
        """Return every model that is loaded or may load, but for `engine`."""
        return [other for other in self._engines.values() if other is not engine and other.admitted]

    def victim(self, engine: ModelEngine) -> ModelEngine | None:
        """Return the least recently used model that may go."""
        idle = [other for other in self.others(engine) if other.evictable]
        return min(idle, key=lambda other: other.used_at, default=None)

    async def change_before(self, deadline: float) -> bool:
        """Wait until something changes; False: the deadline came first."""
        left = deadline - time.monotonic()
        # Looked at now and then as well: the owner may let a pinned model go, which is no change of state.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(0.2, max(0.0, left))):
                await self._change.wait()
        return left > 0
