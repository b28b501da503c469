"""Loads that want memory at the same time: who waits for whom, and who goes for whom. A pool of figures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from omlxd.common.units import parse_size
from omlxd.errors import InvalidRequest, NotNow
from omlxd.front.engines import memory_guard
from omlxd.front.engines.memory_guard import MemoryGuard
from omlxd.models import footprint
from omlxd.models.footprint import PROCESS_BYTES, Footprint
from omlxd.wire import Budget, Device, Stats, Wants

MB = 10**6
HANGS_S = 20.0


class Model:
    """An engine that is nothing but figures. `weights`, `hot`: megabytes."""

    def __init__(self, name: str, weights: int, *, hot: int = 0, pinned: bool = False, busy: bool = False):
        self.model_id = name
        self.footprint = Footprint(
            weights=weights * MB, kv_per_token=0, kv_fixed=0, working=0, context_length=None
        )
        self.float32_footprint: Footprint | None = None
        self.hot, self.pinned, self.busy = hot, pinned, busy
        self.state = "unloaded"
        self.admitted = False
        self.memory_bytes = PROCESS_BYTES
        self.in_flight = int(busy)
        self.is_busy, self.used_at = busy, 0.0
        self.budgets: list[Budget] = []
        supervisor = SimpleNamespace(loads=1, send=lambda budget: self.budgets.append(budget))
        self.process = SimpleNamespace(used_at=0.0, supervisor=supervisor)

    @property
    def evictable(self) -> bool:
        return self.state == "ready" and not self.pinned and not self.busy

    async def stats(self) -> Stats:
        values = {"mlx_active_bytes": self.footprint.weights + self.hot * MB, "kv_hot_bytes": self.hot * MB}
        return Stats(id=1, values={name: float(value) for name, value in values.items()})

    def becomes(self, state: str) -> None:
        self.state, self.admitted = state, state == "ready"


class Models:
    """The pool. Who waits does so until `change`, and then `patient` says whether its time is over."""

    def __init__(self, *loaded: Model, limit: int | None, available: int = 10**6):
        self.all: list[Model] = []
        self.gone: list[str] = []
        self.changed = asyncio.Event()
        self.waits = asyncio.Event()
        self.patient = True
        self.device = Device(backend="stub", total=10**12, available=available * MB)
        book = SimpleNamespace(factor=lambda name: 1.0, set_factor=lambda name, factor: None)
        self.guard = MemoryGuard(cast(Any, self), cast(Any, book), limit and limit * MB, None, 60.0)
        for model in loaded:
            model.becomes("ready")
            self.all.append(model)

    def load(self, model: Model) -> asyncio.Task[Any]:
        self.all.append(model)
        model.admitted = True
        return asyncio.create_task(self.guard.admit(cast(Any, model), self.device))

    def change(self) -> None:
        self.changed.set()
        self.waits.clear()

    def models(self) -> list[Model]:
        return self.all

    def others(self, engine: Model | None) -> list[Model]:
        return [model for model in self.all if model is not engine and model.admitted]

    def victim(self, engine: Model) -> Model | None:
        return next((model for model in self.others(engine) if model.evictable), None)

    async def make_go(self, victim: Model, why: str) -> None:
        self.gone.append(victim.model_id)
        victim.becomes("unloaded")

    async def change_before(self, deadline: float) -> bool:
        assert deadline > time.monotonic()
        if self.patient:
            self.changed.clear()
            self.waits.set()
            await self.changed.wait()
        return self.patient


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_guard, "SHRINK_S", 0.0)


async def soon(what: asyncio.Task[Any] | asyncio.Event) -> Any:
    async with asyncio.timeout(HANGS_S):
        return await (what.wait() if isinstance(what, asyncio.Event) else what)


async def meanwhile(large: int, limit: int) -> tuple[Models, asyncio.Task[Any]]:
    """`large` waits for what a pinned model of 400 holds; a small one loads, and then the pinned one goes."""
    pinned = Model("pinned", 400, pinned=True)
    models = Models(pinned, limit=limit)
    waiting = models.load(Model("large", large))
    await soon(models.waits)
    await soon(models.load(Model("small", 100)))
    pinned.becomes("unloaded")
    models.change()
    return models, waiting


async def test_a_model_that_fits_does_not_wait_behind_one_that_does_not():
    models, waiting = await meanwhile(500, limit=1000)
    await soon(waiting)  # 300 and 700 are all that there is.
    assert not models.gone


async def test_one_that_waits_counts_what_loads_meanwhile():
    models, waiting = await meanwhile(700, limit=1100)
    await soon(models.waits)  # 300 and 900 are too much.
    assert not waiting.done()
    models.patient = False  # And what began to load after it makes it wait no longer than its time.
    models.change()
    with pytest.raises(NotNow, match="large needs about 900 MB and 800 MB are free"):
        await soon(waiting)


async def test_nothing_goes_for_a_load_that_this_would_not_help():
    pinned, large = Model("pinned", 300, hot=50, pinned=True), Model("large", 800)
    busy, idle = Model("busy", 100, busy=True), Model("idle", 100)
    models = Models(pinned, busy, idle, limit=1600)
    waiting = models.load(large)
    await soon(models.waits)  # 500 are pinned, 300 busy: without the idle one it lacks 200 still.
    assert not models.gone
    busy.busy = False
    models.change()
    await soon(waiting)
    assert sorted(models.gone) == ["busy", "idle"]


async def test_an_idle_model_goes_when_it_and_the_hot_tiers_are_enough():
    pinned, idle, large = Model("pinned", 100, hot=200, pinned=True), Model("idle", 100), Model("large", 400)
    models = Models(pinned, idle, limit=1050)
    pinned.process.supervisor.send = lambda budget: setattr(pinned, "hot", 0)
    await soon(models.load(large))  # It lacks 350: 300 of the idle one, and hot blocks.
    assert models.gone == ["idle"]


@pytest.mark.parametrize(("available", "gone"), [(600, []), (1000, ["idle"])])
async def test_nor_for_one_that_other_programs_leave_no_memory_for(available: int, gone: list[str]):
    """Half of the rest is left to these. The idle one counts 300 and its process 200, perhaps besides."""
    idle, large = Model("idle", 100), Model("large", 500)
    models = Models(idle, limit=10**6, available=available)
    models.patient = False
    with pytest.raises(NotNow, match="large needs about 700 MB"):
        await soon(models.load(large))
    assert models.gone == gone


@pytest.mark.parametrize(
    ("weights", "limit", "pressure", "other", "said"),
    [
        (500, None, 1, "", "m needs about 700 MB and 50 MB are free: macOS compresses"),
        (990, None, 2, "", "m needs about 1.2 GB and 50 MB are free: macOS compresses"),
        (500, None, 4, "", "m needs about 700 MB and 50 MB are free now; retry"),
        (1010, None, 1, "", "m has 1 GB of weights and Metal recommends 1 GB at most"),
        (1010, None, 1, "", "`sudo sysctl iogpu.wired_limit_mb=1345` lets Metal take enough, until"),
        (2010, None, 1, "", "it can't be loaded here (--memory-limit off tries)."),
        (500, 800, 1, "", "m needs about 700 MB and 50 MB are free: macOS compresses"),
        (500, 600, 1, "", "m needs about 700 MB and all models together may take 600 MB"),
        (500, None, 1, "pinned", "m needs about 700 MB and 50 MB are free now; retry"),
        (500, None, 1, "idle", "m needs about 700 MB and 50 MB are free: macOS compresses"),
    ],
)
async def test_macos_makes_room_for_weights_that_metal_may_hold(
    weights, limit, pressure, other, said, monkeypatch, caplog
):
    monkeypatch.setattr(memory_guard, "available_ram", lambda: 100 * MB)
    monkeypatch.setattr(memory_guard, "memory_pressure", lambda: pressure)
    monkeypatch.setattr(memory_guard, "total_ram", lambda: 4000 * MB)
    loaded = [Model(other, 400, pinned=other == "pinned")] if other else []
    models = Models(*loaded, limit=limit)
    models.device, models.patient = Device("metal", 1000 * MB, 0, "host"), False
    try:
        await soon(models.load(Model("m", weights)))
        told = caplog.text
    except (InvalidRequest, NotNow) as error:
        told = error.message
    assert said in told and models.gone == ["idle"] * (other == "idle")
    assert ("sysctl" in told) == (weights == 1010)


async def test_the_model_that_stays_has_all_of_the_machine_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_guard, "LOOK_S", 0.0)
    stays, goes = Model("stays", 100, hot=50, busy=True), Model("goes", 100)
    models = Models(stays, limit=None)
    await soon(models.load(goes))
    goes.becomes("ready")

    async def last_budget(is_it: Callable[[Budget], bool]) -> None:
        while not (stays.budgets and is_it(stays.budgets[-1])):
            await asyncio.sleep(0)

    async with asyncio.timeout(HANGS_S):
        keeper = asyncio.create_task(models.guard.keep())
        await last_budget(lambda budget: budget.hot is not None and budget.live is not None)
        goes.becomes("unloaded")
        await last_budget(lambda budget: budget == Budget())
    keeper.cancel()


async def test_a_model_that_has_loaded_has_its_share_before_its_first_request(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(memory_guard, "LOOK_S", 0.0)
    model = Model("m", 100)
    model.used_at = -1e9
    models = Models(limit=1000)
    await soon(models.load(model))
    model.becomes("ready")
    keeper = asyncio.create_task(models.guard.keep())
    async with asyncio.timeout(HANGS_S):
        while not model.budgets:
            await asyncio.sleep(0)
    keeper.cancel()
    assert 0 < (model.budgets[0].hot or 0) < 900 * MB


async def test_a_process_that_starts_again_is_sent_its_share_again(monkeypatch: pytest.MonkeyPatch):
    one, other = Model("one", 100), Model("other", 100)
    models = Models(one, other, limit=1000)
    for _ in range(2):
        await soon(asyncio.create_task(models.guard.admit(cast(Any, one), models.device)))
        one.becomes("ready")
        await models.guard.read_allocations()
        models.guard._share_out(0)
    assert len(one.budgets) == 2


async def test_a_prompt_is_answered_also_where_making_room_for_it_fails(monkeypatch, caplog):
    wants, idle = Model("wants", 100, busy=True), Model("idle", 100)
    models = Models(wants, idle, limit=1000)
    models.guard._device = models.device
    monkeypatch.setattr(models, "make_go", None)
    await soon(asyncio.create_task(models.guard.answer_wants(cast(Any, wants), Wants(7, 10**12))))
    assert wants.budgets[-1].ticket == 7 and "making room for a prompt of wants failed" in caplog.text


@pytest.mark.parametrize(
    ("available", "weights", "float32"),
    [(2200, "auto", True), (1900, "auto", False), (9000, "as-stored", False), (1900, "are float32", False)],
)
async def test_weights_become_float32_where_they_take_half_of_what_is_free(
    available: int, weights: str, float32: bool, monkeypatch: pytest.MonkeyPatch, caplog
):
    monkeypatch.setattr(memory_guard, "available_ram", lambda: available * MB)
    monkeypatch.setattr(footprint, "available_ram", lambda: available * MB)
    monkeypatch.setattr(memory_guard, "likely_backend", lambda: "cpu")
    monkeypatch.setattr(footprint, "RESERVE_BYTES", 0)
    stored = 800 if weights == "are float32" else 100
    models, model = Models(limit=None), Model("m", stored)
    models.device = Device("cpu", 10**12, 0, "host")
    large = replace(model.footprint, weights=800 * MB)
    model.float32_footprint = None if weights == "as-stored" else large
    estimate = models.guard.estimate(cast(Any, model))
    assert estimate == (PROCESS_BYTES + (800 if float32 else stored) * MB, 0)
    budget = await soon(models.load(model))
    assert budget.float32 == model.float32 == float32
    slow = (
        "faster, needs about 1 GB and may take half of the 1.9 GB that are free: it fits where 2 GB are free"
    )
    assert (slow in budget.slow) == (slow in caplog.text) == (weights == "auto" and not float32)
    assert bool(budget.slow) == (slow in budget.slow)


@pytest.mark.parametrize("weights", [800, 817])
async def test_the_limit_that_is_said_is_one_with_which_weights_become_float32(weights: int, monkeypatch):
    monkeypatch.setattr(memory_guard, "available_ram", lambda: 10**12)
    said: list[str] = []
    for limit in (1500, 0):
        limit = limit or parse_size(said[0].rpartition("--memory-limit ")[2].removesuffix(" on")) // MB
        models, model = Models(limit=limit), Model("m", 100)
        models.device = Device("cpu", 10**12, 0, "host")
        model.float32_footprint = replace(model.footprint, weights=weights * MB)
        budget = await soon(models.load(model))
        said.append(budget.slow)
    assert said[0].endswith(f": it fits from --memory-limit {'2GB' if weights == 800 else '2.1GB'} on")
    assert said[1] == "" and budget.float32
