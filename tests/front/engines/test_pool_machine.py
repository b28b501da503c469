"""The pool's promises after every step: how many are loaded, who goes and when, and that nobody hangs.

Engines are the fake links of test_supervisor_machine.py, one machine a model, and the clock is a rule's. The
owner loads, unloads and pins while clients ask, with and without `keep_alive`, and engines load, die or hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kv_fakes import ram_folder
from kv_machines import LONG, QUICK

from omlxd import wire
from omlxd.chat import GenerateRequest, RawPrompt
from omlxd.config import load_settings
from omlxd.errors import OmlxdError
from omlxd.front.engines import client, model, supervisor
from omlxd.front.engines import pool as pool_module
from omlxd.front.engines.model import ModelEngine
from omlxd.front.engines.pool import EnginePool
from tests.front.engines.test_supervisor_machine import DONE, INFO, NUMBER, Asked, FakeLink
from tests.models.test_resolve import make

NAMES = ("a", "b")
NAME = st.sampled_from(NAMES)
TICKS = st.sampled_from([0, 0, 1, 2, 60])
TTL_S = 100.0
ROOM_WAIT_S = 60.0


class Link(FakeLink):
    """Of one model: it says why it is to end."""

    def __init__(self, side: Side):
        super().__init__(side, side.starts)  # type: ignore[arg-type]
        self.side = side

    def send(self, message: Any) -> None:
        if isinstance(message, wire.Quit):
            self.side.goes()
        super().send(message)


class Side:
    """What the machine knows of one model.

    owned    the owner had it loaded for good; owner_s: for so many seconds
    asked_s  what the last request wished for its stay
    leaves   the owner had it unloaded while it was in use
    """

    def __init__(self, machine: PoolMachine, name: str):
        self.machine, self.name, self.errors = machine, name, machine.errors
        self.asked: dict[int, Asked] = {}
        self.links: list[FakeLink] = []
        self.owned, self.leaves, self.pinned = False, False, False
        self.failed_pass = 0  # No GPU fault is played here.
        self.owner_s: float | None = None
        self.asked_s: float | None = None
        self.used_at = machine.now

    @property
    def engine(self) -> ModelEngine:
        return self.machine.pool.resolve(self.name)

    @property
    def starts(self) -> int:
        return len(self.links) + 1

    @property
    def idle_s(self) -> float:
        """Seconds that it is to stay without a request."""
        owner_s = math.inf if self.owned else self.owner_s
        if self.asked_s is None:
            return TTL_S if owner_s is None else owner_s
        return max(self.asked_s, owner_s or 0.0) if self.asked_s else 0.0

    @property
    def link(self) -> FakeLink | None:
        return self.links[-1] if self.links and not self.links[-1].ended.is_set() else None

    def goes(self) -> None:
        """Its engine is told to end: somebody must have a reason."""
        machine = self.machine
        if any(not asked.over for asked in self.asked.values()):
            self.errors.append(f"{self.name} goes while it is in use")
        idle = machine.now >= self.used_at + self.idle_s and not self.pinned
        room = machine.most and not self.pinned and any(s.waits for s in machine.sides.values())
        if not (idle or room or self.leaves or machine.closing):
            self.errors.append(f"{self.name} goes for no reason")

    def stays_as_usual(self) -> None:
        self.owner_s, self.asked_s, self.leaves = None, None, False

    @property
    def waits(self) -> bool:
        """It wants the place of another."""
        return self.link is None and self.engine.state in ("loading", "restarting")


class Clock:
    """`time` of the modules under test."""

    def __init__(self, machine: PoolMachine):
        self.monotonic = lambda: machine.now
        self.time = time.time


class TimedAsked(Asked):
    @property
    def over(self) -> bool:
        return self.ended or self.cancelled


class FakePool(EnginePool):
    machine: PoolMachine

    async def look_for_models(self, *, afresh: bool = False) -> None:
        pass

    def _let_go(self, engine: ModelEngine) -> bool:
        going = super()._let_go(engine)
        if going:
            self.machine.sides[engine.model_id].stays_as_usual()
        return going

    async def _spawn(self, engine: ModelEngine) -> Any:
        await self._make_room(engine)
        side = self.machine.sides[engine.model_id]
        if any(not link.ended.is_set() for link in side.links):
            self.machine.errors.append("two processes of one model")
        side.links.append(Link(side))
        return side.links[-1], wire.Load(model_path="", model_id=side.name, cache=wire.CacheSettings())


class PoolMachine(RuleBasedStateMachine):
    @initialize(most=st.sampled_from([1, 1, 0]))
    def begin(self, most: int) -> None:
        self.most, self.now, self.closing = most, 0.0, False
        self.home = Path(tempfile.mkdtemp(prefix="omlxd-pool-", dir=ram_folder()))
        for name in NAMES:
            make(self.home / "models" / name)
        self.errors: list[Any] = []
        self.loop = asyncio.new_event_loop()
        self.loop.time = lambda: self.now  # type: ignore[method-assign]
        self.loop.set_exception_handler(lambda loop, context: self.errors.append(context))
        for module in (client, model, supervisor, pool_module):
            module.time = Clock(self)  # type: ignore[assignment]
        self.tasks: list[asyncio.Task[Any]] = []
        self.run(self.make())
        self.sides = {name: Side(self, name) for name in NAMES}

    async def make(self) -> None:
        flags = {"max_loaded_models": str(self.most), "model_ttl": f"{TTL_S}s", "stall_timeout": "0"}
        home = {"base_path": str(self.home), "model_dir": str(self.home / "models"), "no_cache": "true"}
        self.pool = FakePool(load_settings({**home, **flags}, {}), room_wait_s=ROOM_WAIT_S)
        self.pool.machine = self
        self.pool.book.set_pinned = lambda *_: None  # type: ignore[method-assign]

        async def unguarded(*_: Any) -> wire.Budget:
            return wire.Budget()

        self.pool._guard.admit = unguarded  # type: ignore[method-assign]
        self.pool._keepers = [asyncio.create_task(self.pool._keep())]

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def ticks(self, count: int) -> None:
        async def pass_() -> None:
            for _ in range(count):
                await asyncio.sleep(0)

        if count:
            self.run(pass_())

    def at_once(self, function: Any) -> Any:
        """Call it on the loop, with no tick before."""

        async def call() -> Any:
            return function()

        return self.run(call())

    # ----------------------------------------------------------------- clients

    @rule(name=NAME, ticks=TICKS, keep_alive=st.sampled_from([None, None, None, 0.0, 5.0, math.inf]))
    def ask(self, name: str, ticks: int, keep_alive: float | None = None) -> None:
        side = self.sides[name]

        def generate() -> None:
            engine = side.engine
            if keep_alive is not None:
                self.pool.keep_alive(engine, keep_alive)
                side.asked_s = keep_alive
            id = engine.process._requests.new_id() + 1
            asked = side.asked[id] = TimedAsked()
            try:
                asked.stream = engine.generate(GenerateRequest(prompt=RawPrompt(text="x")))
                side.used_at = self.now
            except OmlxdError:
                del side.asked[id]

        self.at_once(generate)
        self.ticks(ticks)

    @rule(name=NAME, number=NUMBER, ticks=TICKS)
    def hang_up(self, name: str, number: int, ticks: int) -> None:
        side = self.sides[name]
        asked = [asked for asked in side.asked.values() if not asked.over]
        if asked:
            chosen = asked[number % len(asked)]
            chosen.cancelled, side.used_at = True, self.now
            self.run(chosen.stream.aclose())
        self.ticks(ticks)

    # ----------------------------------------------------------------- the owner

    @rule(name=NAME, ticks=TICKS, keep_alive=st.sampled_from([None, None, 5.0, 50.0]))
    def load(self, name: str, ticks: int, keep_alive: float | None = None) -> None:
        side = self.sides[name]

        async def load() -> None:
            side.leaves, side.used_at = False, self.now
            side.owned, side.owner_s, side.asked_s = keep_alive is None, keep_alive, None
            try:
                await self.pool.load(name, keep_alive)
            except OmlxdError:
                side.owned, side.owner_s = False, None
                raise
            if not side.links[-1].is_loaded:  # It may have gone again since.
                self.errors.append("it is not loaded")

        self.tasks.append(self.at_once(lambda: asyncio.ensure_future(load())))
        self.ticks(ticks)

    @rule(name=NAME, ticks=TICKS)
    def unload(self, name: str, ticks: int) -> None:
        side = self.sides[name]

        async def unload() -> None:
            side.leaves, side.owned = True, False
            process = side.link
            if await self.pool.unload(name):
                if process is not None and not process.ended.is_set():
                    self.errors.append("it is not gone")
            elif not side.engine.in_flight:
                self.errors.append("it stays, and nobody uses it")

        self.tasks.append(self.at_once(lambda: asyncio.ensure_future(unload())))
        self.ticks(max(1, ticks))

    @rule(name=NAME, pinned=st.booleans(), ticks=TICKS)
    def pin(self, name: str, pinned: bool, ticks: int) -> None:
        self.sides[name].pinned = pinned
        self.at_once(lambda: self.pool.pin(name, pinned))
        self.ticks(ticks)

    @rule(name=NAME, keep_alive=st.sampled_from([None, 5.0, math.inf]), ticks=TICKS)
    def unload_in_use(self, name: str, keep_alive: float | None, ticks: int) -> None:
        """And another request comes before it goes."""
        self.serves(name, 2)
        self.unload(name, 2)
        self.ask(name, ticks, keep_alive)

    # ----------------------------------------------------------------- engines

    @rule(name=NAME, says=st.sampled_from(["device", "loaded", "loaded", "failed"]), ticks=TICKS)
    def loading(self, name: str, says: str, ticks: int) -> None:
        link = self.sides[name].link
        if link is not None and not link.quit and not link.is_loaded:
            if says == "device":
                link.inbox.put_nowait(wire.Device("none", 1, 1))
            elif says == "failed":
                link.inbox.put_nowait(wire.LoadFailed("it can't"))
            elif link.loads:
                link.is_loaded, self.sides[name].used_at = True, self.now
                link.inbox.put_nowait(wire.Loaded(INFO))
                ticks = max(2, ticks)
        self.ticks(ticks)

    @rule(name=NAME, ticks=TICKS)
    def serves(self, name: str, ticks: int) -> None:
        """The whole way up, if there is room."""
        self.ask(name, 60)
        self.loading(name, "device", 60)
        self.loading(name, "loaded", ticks)

    @rule(name=NAME, ticks=TICKS)
    def answers(self, name: str, ticks: int) -> None:
        """All that it has."""
        side, link = self.sides[name], self.sides[name].link
        for id in list(link.sent) if link is not None and link.is_loaded else []:
            if id in side.asked:
                side.asked[id].passed_on, side.used_at = True, self.now
                del link.sent[id]
                link.inbox.put_nowait(wire.Events(((id, DONE),)))
                self.ticks(2)
        self.ticks(ticks)

    @rule(
        name=NAME, then=st.sampled_from(["unpinned", "loaded again", "another", "load failed"]), ticks=TICKS
    )
    def is_idle(self, name: str, then: str, ticks: int) -> None:
        """For its time while it is pinned; or almost, and the owner loads it again, or another wants in."""
        if then == "load failed":
            self.load(name, 60)
            self.loading(name, "failed", 60)
        self.serves(name, 60)
        self.answers(name, 60)
        if then == "unpinned":
            self.pin(name, True, 0)
        self.time_passes(TTL_S + 1 if then == "unpinned" else TTL_S - 1)
        if then == "unpinned":
            self.pin(name, False, 60)
            self.who_was_idle_has_gone()
        elif then == "loaded again":
            self.load(name, ticks, 5.0)
        else:
            self.ask(NAMES[name == NAMES[0]], ticks)

    @precondition(lambda self: any(side.link for side in self.sides.values()))
    @rule(name=NAME, ticks=TICKS)
    def dies(self, name: str, ticks: int) -> None:
        link = self.sides[name].link
        if link is not None:
            link.kill()
        self.ticks(ticks)

    @rule(name=NAME, ticks=TICKS)
    def quits(self, name: str, ticks: int) -> None:
        link = self.sides[name].link
        if link is not None and link.quit:
            link.kill()
        self.ticks(ticks)

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 6.0, TTL_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.ticks(60)
        self.now += seconds
        self.ticks(60)
        self.who_was_idle_has_gone()

    # ----------------------------------------------------------------- what must hold

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "sides"):
            return
        assert not self.errors, self.errors
        running = [name for name, side in self.sides.items() if side.link is not None]
        assert not self.most or len(running) <= self.most, f"{running} run"

    def who_was_idle_has_gone(self) -> None:
        for side in self.sides.values():
            if side.engine.state != "ready" or any(not asked.over for asked in side.asked.values()):
                continue
            assert not side.leaves, "the owner had it unloaded"
            assert side.engine.idle_s == side.idle_s
            assert side.pinned or self.now < side.used_at + side.idle_s, "it has been idle for its time"

    def teardown(self) -> None:
        if not hasattr(self, "sides"):
            return
        try:
            self.recovers()
            self.closing = True
            closing = self.at_once(lambda: asyncio.ensure_future(self.pool.close(0.0, 1.0)))
            for _ in range(10):
                self.ticks(60)
                self.now += 1.0
                for side in self.sides.values():
                    if side.link is not None:
                        side.link.kill()
            assert closing.done(), "it does not end"
            closing.result()
            assert not self.errors, self.errors
            for side in self.sides.values():
                assert all(link.ended.is_set() for link in side.links), "an orphan"
        finally:
            for module in (client, model, supervisor, pool_module):
                module.time = time
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.ticks(5)
            self.loop.close()
            shutil.rmtree(self.home)

    def recovers(self) -> None:
        """Engines that work give everybody an answer, long before whoever waits for room gives up."""
        for name in NAMES:
            self.pin(name, False, 0)
        for _ in range(16):
            for name in NAMES:
                self.quits(name, 60)
                self.loading(name, "device", 60)
                self.loading(name, "loaded", 60)
                self.answers(name, 60)
            self.time_passes(2.0)
        for side in self.sides.values():
            assert all(asked.over for asked in side.asked.values()), "a request hangs"
        for task in self.tasks:
            assert task.done(), "the owner waits for ever"
            with contextlib.suppress(OmlxdError):
                task.result()
        self.holds()


def test_quick():
    run_state_machine_as_test(PoolMachine, settings=settings(QUICK, max_examples=15, stateful_step_count=25))


@pytest.mark.slow
def test_long():
    run_state_machine_as_test(PoolMachine, settings=settings(LONG, max_examples=LONG.max_examples // 2))
