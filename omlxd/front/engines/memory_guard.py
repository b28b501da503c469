"""The memory guard decides whether a model may be loaded beside the others, and what each engine may hold.

A load needs what the model's files say (models/footprint.py), times a factor learned from earlier loads. The
free memory is the least of three: the machine's, the GPU's, the owner's limit. Missing bytes are taken from
hot tiers and from freed arrays that MLX keeps, then from idle models, least recently used first, but only if
all of these hold enough. A model that could fit later waits, then is refused for now (503). A model that can
never fit is refused until settings change: 503, or 400 where another model may fit. Each error names both
sizes.

On Metal a model whose weights fit is loaded also where less is free, with a warning: macOS makes room. It is
refused while memory pressure is critical.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from ...common.units import CRITICAL, available_ram, human, memory_pressure, total_ram
from ...errors import InvalidRequest, NotNow
from ...models.footprint import (
    FLOAT32_FRACTION,
    PROCESS_BYTES,
    Footprint,
    expected,
    likely_backend,
    reserve_of,
)
from ...wire import Budget, Device, Wants
from .model import ModelEngine
from .names.model_book import ModelBook

SLACK = 64 << 20
"""Bytes that a hot tier may grow by beyond what it uses."""
FREED_PART = 32
"""Share of free memory, one part in so many, for freed arrays that MLX keeps, in all engines together."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Bytes that one engine holds.

    firm   weights and live KV: only the end of the process frees them
    hot    of the hot tier
    freed  of freed arrays that MLX keeps for reuse
    """

    firm: int
    hot: int
    freed: int = 0

    @property
    def spare(self) -> int:
        """Bytes that the engine can free while it runs."""
        return self.hot + self.freed


def shares(
    allocations: Mapping[str, Allocation], total: int, hot_cache_bytes: int | None = None, claimed: int = 0
) -> dict[str, Budget]:
    """Divide `total` bytes among the engines; returns budgets by model id.

    hot_cache_bytes  limit of all hot tiers together; None: none
    claimed          bytes promised to models that are loading

    Hot tiers get equal parts of what weights and live KV leave; a tier that uses less than its part leaves
    the rest to the others. Each engine's prompts may use all that is left, since hot tiers give way.
    """
    spare = max(0, total - claimed - sum(held.firm for held in allocations.values()))
    freed = spare // (FREED_PART * max(1, len(allocations)))
    spare -= freed * len(allocations)
    hot_left = spare if hot_cache_bytes is None else min(spare, hot_cache_bytes)
    budgets: dict[str, Budget] = {}
    by_use = sorted(allocations, key=lambda name: allocations[name].hot)
    for done, name in enumerate(by_use):
        held = allocations[name]
        alike = hot_left // (len(by_use) - done)
        last = done == len(by_use) - 1
        hot = alike if last else min(alike, held.hot + max(SLACK, held.hot // 4))
        hot_left -= hot
        budgets[name] = Budget(hot=hot, live=held.firm + spare, freed=freed)
    return budgets


log = logging.getLogger(__name__)

MACOS_FRACTION = 0.125
MACOS_BYTES = 2 << 30
"""Of a Mac's memory, and at least: what macOS and other programs keep if the owner lets Metal wire more."""
LOOK_S = 2.0
"""Seconds between two looks at what engines hold, while they work."""
QUIET_S = 10.0
"""Seconds without a request after which an engine's allocation is steady."""
SHRINK_TRIES = 5
SHRINK_S = 0.2
UNGUARDED = 1 << 62
"""Bytes that all engines may take where the guard is off."""
MEASURABLE = 64 << 20
"""Bytes of weights below which a model says nothing about the load factor."""
MAKES_ROOM = (
    "%s needs about %s and %s are free: macOS compresses or writes out what other programs hold, and all may "
    "be slow meanwhile. Quit some programs, or choose a smaller model."
)


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that another model could take: now, and at most, if hot tiers and all idle models gave way."""

    free: int
    at_most: int


class Engines(Protocol):
    """The guard's view of the engine pool."""

    def models(self) -> list[ModelEngine]:
        """Every installed model, loaded or not."""
        ...

    def others(self, engine: ModelEngine | None) -> list[ModelEngine]:
        """Every model that is loaded or may load, but for `engine`."""
        ...

    def victim(self, engine: ModelEngine) -> ModelEngine | None:
        """The least recently used model that may go."""
        ...

    async def make_go(self, victim: ModelEngine, why: str) -> None:
        """Unload `victim`; its memory is back on return, unless a request came in between."""
        ...

    async def change_before(self, deadline: float) -> bool:
        """Wait until something changes; False: the deadline came first."""
        ...


class MemoryGuard:
    """Settings of the owner, which may be replaced at any time:

    memory_limit_bytes  of all engines together; None: what the machine has; 0: only `hot_cache_bytes` holds
    hot_cache_bytes     of all hot tiers together; None: what is left
    """

    def __init__(
        self,
        pool: Engines,
        book: ModelBook,
        memory_limit_bytes: int | None,
        hot_cache_bytes: int | None,
        wait_s: float,
    ):
        self._pool = pool
        self._book = book
        self.memory_limit_bytes = memory_limit_bytes
        self.hot_cache_bytes = hot_cache_bytes
        self._wait_s = wait_s
        self._device: Device | None = None
        self._allocations: dict[str, Allocation] = {}
        self._claims: dict[str, int] = {}
        self._sent: dict[str, Budget] = {}
        self._measured: dict[str, int] = {}
        self._admitting = asyncio.Lock()
        # Another one: a load may wait for the very engine whose prompt waits for this.
        self._answering = asyncio.Lock()

    # ----------------------------------------------------------------- before a load

    async def admit(self, engine: ModelEngine, device: Device) -> Budget:
        """Wait until `engine` may load; returns its first budget.

        Raises InvalidRequest or NotNow if the model can never fit, NotNow if it does not fit in time.
        """
        self._device = device
        for of_the_last_process in (self._claims, self._allocations, self._sent):
            of_the_last_process.pop(engine.model_id, None)
        engine.float32 = False
        self.check_ever(engine)
        slow = await self._why_not_float32(engine, device)
        engine.float32 = slow == ""
        if slow:
            log.warning(
                "%s: weights stay as stored: %s; KV that was cached with float32 weights is not used",
                engine.model_id,
                slow,
            )
        first = Budget(float32=engine.float32, slow=slow or "")
        prints = engine.footprint
        if self.memory_limit_bytes == 0 or prints is None:
            return first
        need = self.need(engine.model_id, prints)
        deadline = time.monotonic() + self._wait_s
        shrunk = 0
        loading: set[str] | None = None
        while True:
            async with self._admitting:
                while need > (free := (room := await self._room(engine)).free):
                    spare = self._spare()
                    if spare and free + spare >= need and shrunk < SHRINK_TRIES:
                        shrunk += 1
                        self._share_out(self._claimed() + need)
                        await asyncio.sleep(SHRINK_S)
                    elif (room.at_most >= need or self._macos_makes_room(engine, need, idle_go=True)) and (
                        victim := self._pool.victim(engine)
                    ):
                        await self._pool.make_go(victim, f"{engine.model_id} needs {human(need)}")
                    else:
                        break
                if need <= free:
                    return self._claim(engine, need, free, first)
                if self._macos_makes_room(engine, need):
                    log.warning(MAKES_ROOM, engine.model_id, human(need), human(max(0, free)))
                    return self._claim(engine, need, need, first)
            # Nothing gives way now: what needs less may load meanwhile. Loads that were under way before
            # are waited for however long they take; later ones could follow each other without an end.
            loading = set(self._claims) if loading is None else loading & set(self._claims)
            if not (await self._pool.change_before(deadline) or loading):
                raise NotNow(
                    f"{engine.model_id} needs about {human(need)} and {human(max(0, free))} are free "
                    "now; retry when other models or programs have given some back.",
                    retry_after=15,
                )
            await asyncio.sleep(SHRINK_S)

    def _claim(self, engine: ModelEngine, need: int, free: int, first: Budget) -> Budget:
        """Promise `need` bytes of `free` ones to `engine`; returns its first budget."""
        assert self._device is not None
        self._claims[engine.model_id] = need
        if not self._divides(len(self._pool.others(None))):
            return first
        most = self._most(self._device) - PROCESS_BYTES
        live = max(0, min(most, free - PROCESS_BYTES))
        budget = self._sent[engine.model_id] = replace(first, live=live, most=most)
        return budget

    def _macos_makes_room(self, engine: ModelEngine, need: int, idle_go: bool = False) -> bool:
        """Whether `engine` may load where less than `need` is free: what others hold may be compressed, but
        not weights, of which Metal wires as much as it recommends.

        idle_go  if idle models went first
        """
        prints, device, limit = engine.footprint, self._device, self.memory_limit_bytes
        if prints is None or device is None or device.backend != "metal" or memory_pressure() >= CRITICAL:
            return False
        idle = {other.model_id for other in self._pool.others(engine) if idle_go and other.evictable}
        stay = [held for name, held in self._allocations.items() if name not in idle]
        firm = self._claimed() + sum(held.firm for held in stay)
        spare = sum(held.spare for held in stay)
        return prints.weights + firm <= device.total and (not limit or need + firm + spare <= limit)

    async def _why_not_float32(self, engine: ModelEngine, device: Device) -> str | None:
        """Say why float32 weights don't fit; "": they do; None: nobody wants them."""
        if device.backend != "cpu" or (prints := engine.float32_footprint) is None:
            return None
        need, free = self.need(engine.model_id, prints), (await self._room(engine)).free
        if need <= free * FLOAT32_FRACTION:
            return ""
        if engine.footprint is not None and prints.weights <= engine.footprint.weights:
            return None
        return (
            f"float32, which reads prompts many times faster, needs about {human(need)} and may take half of "
            f"the {human(max(0, free))} that are free: {await self._float32_fits(engine, device, need, free)}"
        )

    async def _float32_fits(self, engine: ModelEngine, device: Device, need: int, free: int) -> str:
        """Say how much memory, or which limit, float32 weights of `need` bytes require."""
        enough = math.ceil(need / FLOAT32_FRACTION)
        if limit := self.memory_limit_bytes:
            more = limit + enough - free
            step = 10**8 if more >= 10**9 else 10**6
            available = await self._available(engine, device) - self._claimed()
            beyond = available - reserve_of(device.total) >= enough and more + step <= device.total
            if beyond:  # Else the limit is not what holds it back.
                return f"it fits from --memory-limit {human(-(-more // step) * step).replace(' ', '')} on"
        return f"it fits where {human(enough)} are free"

    def check_ever(self, engine: ModelEngine) -> None:
        """Raise `why_never` as InvalidRequest where another model may fit, else as NotNow."""
        if why := self.why_never(engine):
            others = (other for other in self._pool.models() if other is not engine)
            if all(map(self.why_never, others)):
                raise NotNow(why, param="model", code="model_unusable")
            raise InvalidRequest(why, param="model")

    def why_never(self, engine: ModelEngine) -> str:
        """Say why the model can never fit on the device; "": it may, or the device is unknown."""
        prints = engine.footprint
        if self.memory_limit_bytes == 0 or prints is None or self._device is None:
            return ""
        need, most = self.need(engine.model_id, prints), self._most(self._device)
        if need <= most:
            return ""
        limit, total = self.memory_limit_bytes, self._device.total
        if self._device.backend == "metal" and not (limit and need > limit):
            if prints.weights <= total:
                return ""
            return (
                f"{engine.model_id} has {human(prints.weights)} of weights and Metal recommends "
                f"{human(total)} at most on this Mac: it can't be loaded here "
                f"(--memory-limit off tries).{_higher_limit(need)}"
            )
        return (
            f"{engine.model_id} needs about {human(need)} and all models together may take {human(most)} "
            f"of {human(self._device.total)}: it can't be loaded here (--memory-limit off tries)."
        )

    def room(self) -> int:
        """Return the bytes that all models together may take; 0: no limit, or the device is unknown."""
        if self.memory_limit_bytes == 0 or self._device is None:
            return 0
        return self._most(self._device)

    def need(self, model_id: str, prints: Footprint) -> int:
        """Estimate the bytes to load a model and answer something short, by its files and by experience."""
        return prints.loading(self._backend) + int(prints.weights * (self._book.factor(model_id) - 1))

    def estimate(self, engine: ModelEngine) -> tuple[int, int] | None:
        """Return (`need`, bytes of KV a token) as `engine` was loaded, or would be now; None: unknown."""
        prints = engine.footprint
        if prints is not None and not engine.admitted:
            prints = expected(prints, engine.float32_footprint, self._backend)
        return prints and (self.need(engine.model_id, prints), prints.kv_per_token)

    @property
    def _backend(self) -> str:
        return self._device.backend if self._device is not None else likely_backend()

    def _most(self, device: Device) -> int:
        usable = device.total - reserve_of(device.total)
        return min(usable, self.memory_limit_bytes) if self.memory_limit_bytes else usable

    def _spare(self) -> int:
        """Sum the bytes of all hot tiers and of freed arrays that MLX keeps."""
        return sum(held.spare for held in self._allocations.values())

    async def _room(self, engine: ModelEngine) -> Room:
        await self.read_allocations()
        assert self._device is not None
        device, claimed = self._device, self._claimed()
        allocations = self._allocations
        counted = self._most(device) - claimed - sum(held.firm + held.spare for held in allocations.values())
        going = [other for other in self._pool.others(engine) if other.evictable]
        names = {other.model_id for other in going}
        spare = sum(held.spare + (held.firm if name in names else 0) for name, held in allocations.items())
        spare += sum(self._claims.get(name, 0) for name in names)
        # A process takes more than it counts: rather one goes in vain than one is kept that would be enough.
        beyond = sum(other.memory_bytes or 0 for other in going)
        if not names <= allocations.keys() | self._claims.keys():
            beyond += device.total  # Nobody knows yet what one of them holds.
        available = await self._available(engine, device)

        def free(available: int) -> int:
            # Where little is free, the reserve must not refuse what fits.
            return available - min(reserve_of(device.total), available // 2) - claimed

        return Room(
            free=min(free(available), counted),
            at_most=min(free(available + spare + beyond), counted + spare),
        )

    async def _available(self, engine: ModelEngine, device: Device) -> int:
        """Return the bytes that are free now where arrays live."""
        if device.free_from == "host":
            return available_ram()
        # This engine has not begun to load.
        available = await engine.process.device_available() if device.free_from == "engine" else None
        return device.available if available is None else available

    def _claimed(self) -> int:
        return sum(self._claims.values())

    # ----------------------------------------------------------------- while they run

    async def read_allocations(self) -> None:
        """Ask every engine what it holds, and learn the load factor of an engine that has just loaded."""
        engines = [engine for engine in self._pool.others(None) if engine.state == "ready"]
        answers = await asyncio.gather(*(engine.stats() for engine in engines))
        names = {engine.model_id for engine in self._pool.others(None)}
        for gone in set(self._allocations) - names:
            del self._allocations[gone]
        for gone in (set(self._claims) | set(self._sent)) - names:
            self._claims.pop(gone, None)
            self._sent.pop(gone, None)
        for engine, stats in zip(engines, answers, strict=True):
            if stats is None or engine.state != "ready":
                continue
            hot = int(stats.values.get("kv_hot_bytes", 0))
            active = int(stats.values.get("mlx_active_bytes", 0)) + PROCESS_BYTES
            freed = int(stats.values.get("mlx_cache_bytes", 0))
            self._allocations[engine.model_id] = Allocation(max(0, active - hot), hot, freed)
            self._claims.pop(engine.model_id, None)
            self._learn(engine, int(stats.values.get("mlx_load_peak_bytes", 0)))

    def _learn(self, engine: ModelEngine, peak: int) -> None:
        """Remember, once a load, its peak over the weights in its files."""
        prints, loads = engine.footprint, engine.process.supervisor.loads
        if prints is None or prints.weights < MEASURABLE or not peak:
            return
        if self._measured.get(engine.model_id) != loads:
            self._measured[engine.model_id] = loads
            self._book.set_factor(engine.model_id, min(4.0, max(0.5, peak / prints.weights)))

    async def keep(self) -> None:
        """Divide the memory every `LOOK_S` while engines work, and when one has loaded. Never returns."""
        while True:
            await asyncio.sleep(LOOK_S)
            engines = self._pool.others(None)
            now = time.monotonic()
            shared = self._divides(len(engines)) or any(sent != Budget() for sent in self._sent.values())
            loaded = {e.model_id for e in engines if e.state == "ready"} & set(self._claims)
            if shared and (loaded or any(e.is_busy or now - e.used_at < QUIET_S for e in engines)):
                try:
                    await self.read_allocations()
                    self._share_out(self._claimed())
                except Exception:
                    log.exception("dividing memory failed")

    def _divides(self, engines: int) -> bool:
        """Return whether there is anything to divide: one engine alone without a limit looks after itself."""
        if self.memory_limit_bytes == 0:
            return engines > 1 and bool(self.hot_cache_bytes)
        return engines > 1 or bool(self.memory_limit_bytes and engines)

    def _share_out(self, claimed: int) -> None:
        """Send each engine its budget, if it differs from the last one."""
        engines = self._pool.others(None)
        budgets = self._budgets(len(engines), claimed)
        for engine in engines:
            budget, name = budgets.get(engine.model_id), engine.model_id
            if budget is not None and engine.state == "ready" and self._differs(self._sent.get(name), budget):
                self._sent[name] = budget
                engine.process.supervisor.send(budget)

    def _budgets(self, engines: int, claimed: int) -> dict[str, Budget]:
        if self._device is None or not self._divides(engines):
            return dict.fromkeys(self._sent, Budget())  # The engine that stays has all of the machine again.
        if self.memory_limit_bytes == 0:
            budgets = shares(self._allocations, UNGUARDED, self.hot_cache_bytes, claimed)
            return {name: Budget(hot=budget.hot) for name, budget in budgets.items()}
        most = self._most(self._device)
        return {
            # What an engine calls its own is less the process that it counts nowhere.
            name: replace(budget, live=max(0, (budget.live or 0) - PROCESS_BYTES), most=most - PROCESS_BYTES)
            for name, budget in shares(self._allocations, most, self.hot_cache_bytes, claimed).items()
        }

    def _differs(self, old: Budget | None, new: Budget) -> bool:
        """Return whether a share changed by more than a twentieth: allocations change all the time."""
        if old is None:
            return True
        pairs = ((old.hot, new.hot), (old.live, new.live))
        return any(
            before != now and (before is None or now is None or abs(before - now) * 20 > before)
            for before, now in pairs
        )

    async def answer_wants(self, engine: ModelEngine, wants: Wants) -> None:
        """Find memory for a prompt of `engine`: shrink hot tiers, unload idle models, send the new budget."""
        if self.memory_limit_bytes == 0 or self._device is None:
            engine.process.supervisor.send(Budget(ticket=wants.ticket))
            return
        async with self._answering:
            try:
                await self.read_allocations()
                while (victim := self._pool.victim(engine)) and await self._lacks(engine, wants.nbytes):
                    why = f"a prompt of {engine.model_id} needs {human(wants.nbytes)}"
                    await self._pool.make_go(victim, why)
                self._share_out(self._claimed())
            except Exception:
                log.exception("making room for a prompt of %s failed", engine.model_id)
            own = self._sent.get(engine.model_id, Budget())
            engine.process.supervisor.send(replace(own, ticket=wants.ticket))

    async def _lacks(self, engine: ModelEngine, nbytes: int) -> bool:
        return (await self._room(engine)).free + self._spare() < nbytes


def _higher_limit(need: int) -> str:
    """Say how the owner lets Metal wire the `need` bytes of a model; "": the Mac is too small for them."""
    total = total_ram()
    limit = need + reserve_of(total)
    if limit > total - max(MACOS_BYTES, int(total * MACOS_FRACTION)):
        return ""
    command = f"sudo sysctl iogpu.wired_limit_mb={math.ceil(limit / (1 << 20))}"
    return f" `{command}` lets Metal take enough, until the Mac starts again."
