"""One budget of memory: who may load, what gives way, what is refused with which figures."""

from __future__ import annotations

import asyncio
import json
import re
import struct
import threading
import time
from pathlib import Path

import mlx.core as mx
import pytest
from app_client import client
from daemon import PATIENCE_S, family_model, wait_until
from engine_processes import until
from hypothesis import given
from hypothesis import strategies as st
from rig import BLOCK, Rig

from omlxd.chat import Failed, Finished, Sampling
from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.runtime import arrays
from omlxd.engine.schedule.memory_admission import RESERVE_FRACTION, MemoryAdmission
from omlxd.engine.schedule.waiting.queue import PATIENCE
from omlxd.engine.sequence.sampling import RowSampling, SamplingDefaults
from omlxd.engine.sequence.sequence import Prompt, SamplerRow, Sequence
from omlxd.errors import InvalidRequest, Unavailable
from omlxd.front.app import create_app
from omlxd.front.engines import memory_guard
from omlxd.front.engines.memory_guard import Allocation, shares
from omlxd.models.footprint import PROCESS_BYTES, footprint
from omlxd.wire import KV_RESERVE, Budget, Wants
from tests.front.engines.test_pool import ask, notes, pool, settings, states, surroundings  # noqa: F401
from tests.models.test_resolve import make

MB = 10**6

sizes = st.integers(0, 10**12)


@given(
    st.dictionaries(
        st.text(min_size=1), st.builds(Allocation, firm=sizes, hot=sizes, freed=sizes), min_size=1, max_size=5
    ),
    st.integers(0, 10**13),
    st.none() | sizes,
    sizes,
)
def test_shares_never_add_up_to_more_than_there_is(
    allocations, total: int, hot_cache_bytes: int | None, claimed: int
):
    budgets = shares(allocations, total, hot_cache_bytes, claimed)
    hot = sum((budget.hot or 0) + (budget.freed or 0) for budget in budgets.values())
    firm = sum(held.firm for held in allocations.values())
    assert hot <= max(0, total - claimed - firm)
    if hot_cache_bytes is not None:
        assert sum(budget.hot or 0 for budget in budgets.values()) <= hot_cache_bytes
    for name, budget in budgets.items():
        assert budget.live is not None and budget.live >= allocations[name].firm


def test_what_one_does_not_use_goes_to_the_others():
    allocations = {"idle": Allocation(100 * MB, 0), "busy": Allocation(100 * MB, 900 * MB)}
    budgets = shares(allocations, 2200 * MB)
    assert budgets["busy"].hot and budgets["busy"].hot > 1850 * MB
    alike = shares({"a": Allocation(0, 500 * MB), "b": Allocation(0, 500 * MB)}, 1000 * MB)
    assert alike["a"].hot == alike["b"].hot
    assert all(b.freed and (b.hot or 0) + b.freed == 500 * MB for b in alike.values())


async def test_what_mlx_keeps_counts_and_gives_way_to_a_load(tmp_path: Path):
    for name in ("a", "b"):
        heavy(tmp_path / "models" / name, 300)
    async with pool(tmp_path, memory_limit="1600MB", stub="--memory 300,0,700") as made:
        await ask(made, "a")
        assert isinstance((await ask(made, "b"))[-1], Finished)
        assert states(made) == {"a": "ready", "b": "ready"}
        await made._guard.read_allocations()
        assert made._guard._allocations["a"].freed < 100 * MB
        made._guard._share_out(0)
        await made._guard.read_allocations()
        assert sum(held.freed for held in made._guard._allocations.values()) < 30 * MB


@pytest.mark.slow
def test_what_mlx_keeps_is_bounded_by_the_model_and_by_the_grant():
    def keep(megabytes: int) -> None:
        arrays = [mx.zeros(1 << 20) for _ in range(megabytes // 4)]
        mx.eval(arrays)
        del arrays

    try:
        for weights, granted, most in (
            (0, None, 128 << 20),
            (512 << 20, None, 256 << 20),
            (0, 20 * MB, 20 * MB),
        ):
            mlx_adapter.set_limits(1 << 40, Budget())
            keep(400)
            assert mx.get_cache_memory() > most
            mlx_adapter.set_limits(weights, Budget(freed=granted))
            assert mx.get_cache_memory() <= most
            keep(400)
            assert mx.get_cache_memory() <= most
    finally:
        mlx_adapter.set_limits(1 << 40, Budget())


def test_mlx_keeps_to_the_budget_and_wires_arrays_on_metal_alone(monkeypatch: pytest.MonkeyPatch):
    wired: list[int] = []
    monkeypatch.setattr(mx, "set_wired_limit", wired.append)
    monkeypatch.setattr(arrays, "backend", lambda: "cpu")
    usual = mx.get_memory_limit()
    try:
        mlx_adapter.set_limits(0, Budget(live=3 * MB, most=5 * MB, freed=MB))
        assert (mx.get_memory_limit(), wired) == (5 * MB, [])
        assert mlx_adapter.limits == {
            "mlx_cache_limit_bytes": MB,
            "mlx_memory_limit_bytes": 5 * MB,
            "mlx_wired_limit_bytes": 0,
        }
        monkeypatch.setattr(arrays, "backend", lambda: "metal")
        monkeypatch.setattr(arrays, "_released", threading.Event())
        monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 2000 * MB})
        mlx_adapter.set_limits(0, Budget(live=3 * MB))
        # Weights and a pass, whatever blocks in RAM may take; never more than Metal recommends.
        mlx_adapter.set_limits(1000 * MB, Budget(live=5000 * MB))
        mlx_adapter.set_limits(1500 * MB, Budget(most=-MB))  # A limit lowered below what a process takes.
        assert wired == [512 << 20, 1050 * MB + (512 << 20), 2000 * MB] and mx.get_memory_limit() == 0
        assert mlx_adapter.limits["mlx_wired_limit_bytes"] == wired.pop()
        mlx_adapter.release_memory()
        mlx_adapter.set_limits(1000 * MB, Budget())  # Of a thread that does not know of the end.
        assert wired[2:] == [0]
    finally:
        monkeypatch.undo()
        mlx_adapter.set_limits(1 << 40, Budget())
    assert mx.get_memory_limit() == usual


# --------------------------------------------------------------------------- before a load


def heavy(folder: Path, megabytes: int) -> None:
    """A model folder whose weights have that size, as a file with a hole."""
    make(folder)
    for path in folder.glob("model*"):
        path.unlink()
    nbytes = megabytes * MB
    header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + nbytes)


async def test_what_can_never_fit_is_a_400_with_both_figures_where_another_model_fits(tmp_path: Path):
    heavy(tmp_path / "models" / "giant", 20_000)
    async with pool(tmp_path, "small", stub="--device 16000,16000") as made:
        for _ in range(2):
            refused = (await ask(made, "giant"))[-1]
            assert isinstance(refused, Failed) and refused.code == "invalid_request"
            assert "giant needs about 20.2 GB" in refused.message and "15.2 GB of 16 GB" in refused.message
        assert made.resolve("giant").starts == 1  # The second time it is known.
        assert isinstance((await ask(made, "small"))[-1], Finished)


async def test_a_daemon_whose_every_model_is_too_large_is_not_ready(tmp_path: Path):
    for name in ("big", "giant"):
        heavy(tmp_path / "models" / name, 700)
    async with pool(tmp_path, memory_limit="300MB") as made, client(create_app(made)) as http:
        asked = {"model": "big", "prompt": "hello"}
        assert (await http.get("/ready")).status_code == 200  # No engine has named its device yet.
        await made.look_for_models()
        refused = await http.post("/v1/completions", json=asked)
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["code"] == "model_unusable" and error["param"] == "model"
        assert "all models together may take 300 MB" in error["message"]
        ready = await http.get("/ready")
        assert ready.status_code == 503 and ready.json()["reasons"][0] == error["message"]
        assert "giant needs about" in ready.json()["reasons"][1]
        made.apply_settings(settings(tmp_path, memory_limit="off"))
        assert (await http.get("/ready")).json() == {"ready": True, "reasons": []}
        assert (await http.post("/v1/completions", json=asked)).status_code == 200


async def test_off_refuses_nothing(tmp_path: Path):
    heavy(tmp_path / "models" / "giant", 20_000)
    async with pool(tmp_path, memory_limit="off", stub="--device 16000,100") as made:
        assert isinstance((await ask(made, "giant"))[-1], Finished)


async def test_off_leaves_the_limit_of_ram_caches_one_for_all_models(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(memory_guard, "LOOK_S", 0.05)
    for name in ("a", "b"):
        heavy(tmp_path / "models" / name, 300)
    flags = {"memory_limit": "off", "hot_cache_max_size": "600MB"}
    async with pool(tmp_path, stub="--memory 300,500", **flags) as made:
        await ask(made, "a")
        await ask(made, "b")
        await until(lambda: notes(tmp_path).count("budget 300000000 None 0") == 2)


@pytest.mark.slow
async def test_what_is_not_free_now_is_a_503_with_both_figures_and_no_failed_load(tmp_path: Path):
    heavy(tmp_path / "models" / "big", 9_000)
    async with pool(tmp_path, stub="--device 16000,3000") as made:
        for _ in range(4):
            refused = (await ask(made, "big"))[-1]
            assert isinstance(refused, Failed) and refused.code == "unavailable" and refused.retry_after
            assert "9.2 GB" in refused.message and "2.2 GB are free" in refused.message
        assert states(made) == {"big": "unloaded"}


async def test_an_idle_model_gives_way_and_a_pinned_one_does_not(tmp_path: Path):
    for name in ("a", "b"):
        heavy(tmp_path / "models" / name, 500)
    async with pool(tmp_path, memory_limit="1300MB", stub="--memory 500,0") as made:
        await ask(made, "a")
        assert isinstance((await ask(made, "b"))[-1], Finished)
        assert states(made) == {"a": "unloaded", "b": "ready"}
        made.pin("b", True)
        refused = (await ask(made, "a"))[-1]
        assert (
            isinstance(refused, Failed)
            and refused.code == "unavailable"
            and "a needs about" in refused.message
        )
        assert states(made) == {"a": "unloaded", "b": "ready"}


async def test_an_engine_knows_its_share_from_its_first_prompt_on(tmp_path: Path):
    heavy(tmp_path / "models" / "a", 300)
    async with pool(tmp_path, memory_limit="1600MB", stub="--memory 300,0") as made:
        await ask(made, "a")
        assert "first live=1400000000 most=1400000000" in notes(tmp_path)
    async with pool(tmp_path, stub="--memory 300,0") as made:
        await ask(made, "a")
        assert "first live=None most=None" in notes(tmp_path)  # Alone it looks after itself.


async def test_hot_tiers_shrink_before_a_model_goes(tmp_path: Path):
    for name in ("a", "b"):
        heavy(tmp_path / "models" / name, 300)
    async with pool(tmp_path, memory_limit="1600MB", stub="--memory 300,700") as made:
        await ask(made, "a")
        assert isinstance((await ask(made, "b"))[-1], Finished)
        assert states(made) == {"a": "ready", "b": "ready"}
        assert "budget" in notes(tmp_path)


async def test_two_that_load_at_once_count_each_other(tmp_path: Path):
    for name in ("a", "b"):
        heavy(tmp_path / "models" / name, 500)
    async with pool(tmp_path, memory_limit="1300MB", stub="--memory 500,0 --load-s 0.4") as made:
        made._guard._wait_s = 60.0
        answers = await asyncio.gather(ask(made, "a"), ask(made, "b"))
        assert all(isinstance(events[-1], Finished) for events in answers)
        assert sorted(states(made).values()) == ["ready", "unloaded"]


async def test_a_prompt_that_wants_memory_does_not_wait_for_a_load_that_waits_for_it(tmp_path: Path):
    for name in ("a", "b"):
        heavy(tmp_path / "models" / name, 500)
    async with pool(tmp_path, memory_limit="1300MB", stub="--memory 500,0") as made:
        made._guard._wait_s = 600.0
        await ask(made, "a")
        held = asyncio.create_task(ask(made, "a", "gate want:1000000 hello"))
        waiting = asyncio.create_task(ask(made, "b"))
        await until(lambda: made.resolve("b").pid)
        await asyncio.sleep(0.5)  # By now it waits for what "a" holds; if not yet, all is well too.
        (tmp_path / "gate").touch()
        assert isinstance((await asyncio.wait_for(held, PATIENCE_S))[-1], Finished)
        assert isinstance((await asyncio.wait_for(waiting, PATIENCE_S))[-1], Finished)


async def test_what_a_load_took_is_remembered(tmp_path: Path):
    heavy(tmp_path / "models" / "a", 500)
    async with pool(tmp_path, stub="--memory 500,0 --load-peak 1000") as made:
        before = made._guard.need("a", footprint(tmp_path / "models" / "a"))
        await ask(made, "a")
        await made._guard.read_allocations()
    async with pool(tmp_path) as again:
        assert again.book.factor("a") == 2.0
        need = again._guard.need("a", footprint(tmp_path / "models" / "a"))
        assert need - before == pytest.approx(500 * MB, rel=0.01) and need > PROCESS_BYTES + 1000 * MB


# --------------------------------------------------------------------------- before a prompt


class Memory:
    """A machine with `available` bytes, and a front that answers `Wants` with `grants`."""

    def __init__(self, rig: Rig, available: int, total: int = 10**10):
        self.available, self.total = available, total
        self.wants: list[Wants] = []
        self.on_want = lambda wants: None
        self.now = 0.0
        self.admission = MemoryAdmission(
            rig.loaded, 0, self._want, measure=lambda: (self.total, self.available), clock=lambda: self.now
        )
        self.admission.store = getattr(rig, "store", None)
        self.admission.end_chunk = lambda start, stop: None  # What chunks take is not the matter here.
        rig.on_engine(lambda: setattr(rig.scheduler, "memory", self.admission))

    def _want(self, wants: Wants) -> None:
        self.wants.append(wants)
        self.on_want(wants)


PROMPT = list(range(1, 600))
RESERVE = 2 * 10**8


@pytest.fixture
def rig():
    with Rig(family_model("qwen3"), hot=1 << 30) as made:
        yield made


def kv(rig: Rig, tokens: int) -> int:
    from omlxd.engine import mlx_adapter

    assert rig.loaded.layout is not None
    return rig.loaded.layout.nbytes(mlx_adapter.round_up(tokens))


def test_a_prompt_that_fits_runs_and_one_that_never_can_is_refused(rig: Rig):
    memory = Memory(rig, 10**9)
    assert len(rig.run(PROMPT, 4).got) == 4
    memory.total = memory.available = 10**5
    output = rig.start(PROMPT, 4)
    with pytest.raises(InvalidRequest, match=r"prompt of 599 tokens needs about .* at most .* can be had"):
        output.tokens()
    assert not memory.wants


def test_one_that_does_not_fit_waits_while_others_run(rig: Rig):
    memory = Memory(rig, 10**9)
    first = rig.start(PROMPT, 100_000)
    assert first.first.wait(60)
    memory.available = 0  # Nor would all hot blocks do, however many the first one makes.
    second = rig.start(list(reversed(PROMPT)), 4)
    for _ in range(3):  # It is looked at again and again.
        rig.on_engine(lambda: None)
        assert second.sequence.kv.cache is None and not second.got
    assert not first.reason
    memory.available = 10**9
    assert len(second.tokens()) == 4
    rig.scheduler.cancel(first.sequence)


@pytest.mark.slow
def test_short_prompts_go_before_one_that_waits_for_memory_and_no_more_than_patience_has_it(rig: Rig):
    memory = Memory(rig, 10**9)
    first = rig.start(PROMPT, 100_000)
    assert first.first.wait(60)
    memory.available = RESERVE + kv(rig, 600)
    memory.admission.store = None  # No hot tier gives way.
    long = rig.start(PROMPT * 3, 4)
    for n in range(PATIENCE):
        assert len(rig.start([n + 1] * 20, 2).tokens()) == 2
    late = rig.start([99] * 20, 2)
    for _ in range(3):
        rig.on_engine(lambda: None)
    assert not late.got and not long.got and not memory.wants
    memory.available = 10**9
    assert len(long.tokens()) == 4 and len(late.tokens()) == 2
    rig.scheduler.cancel(first.sequence)


def test_with_nothing_else_running_the_front_is_asked_and_its_word_is_final(rig: Rig):
    memory = Memory(rig, RESERVE)

    def answer(wants: Wants) -> None:
        rig.scheduler.post(lambda: memory.admission.take_budget(Budget(ticket=wants.ticket)))

    memory.on_want = answer
    with pytest.raises(Unavailable, match="are free now"):
        rig.start(PROMPT, 4).tokens()
    assert len(memory.wants) == 1 and memory.wants[0].nbytes > 0

    def give(wants: Wants) -> None:
        memory.available = 10**9
        answer(wants)

    memory.available, memory.on_want = RESERVE, give
    assert len(rig.start(PROMPT, 4).tokens()) == 4


def test_one_that_ends_while_the_front_is_asked_is_let_go(rig: Rig):
    memory = Memory(rig, RESERVE)
    rig.start(PROMPT, 4)
    wait_until(lambda: memory.wants)
    (sequence,) = rig.scheduler.waiting
    rig.scheduler.cancel(sequence)
    wait_until(lambda: not rig.scheduler.active_sequences)
    assert rig.on_engine(lambda: memory.admission._asked) is None


def test_hot_blocks_give_way_to_a_prompt(rig: Rig):
    memory = Memory(rig, 10**9)
    rig.run(PROMPT, 2)
    hot = rig.pool.hot_bytes
    assert hot
    need = kv(rig, 600 + 4)
    memory.available = RESERVE + need - hot // 2
    assert len(rig.start([7, *PROMPT[::-1]], 4).tokens()) == 4
    assert not memory.wants


@pytest.mark.parametrize("on_disk", [True, False])
def test_hot_blocks_of_a_running_request_give_way(tmp_path: Path, on_disk: bool):
    """It has copied them. Those that are nowhere else are kept again at its end, from its own KV."""
    with Rig(family_model("qwen3"), tmp_path if on_disk else None, hot=1 << 30) as rig:
        memory = Memory(rig, 10**9)
        first = rig.start(PROMPT, 100_000)
        assert first.first.wait(60)
        blocks = rig.on_engine(lambda: first.sequence.kv.table.blocks[: len(PROMPT) // BLOCK])
        if on_disk:
            deadline = time.monotonic() + 60
            while not all(block.on_disk for block in blocks):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        held = sum(block.payload.nbytes for block in blocks)
        rig.hot = 1  # No room for those that go, as long as the other one runs.
        memory.available = RESERVE + kv(rig, 600 + 4) - held // 2
        second = rig.start([7, *PROMPT[::-1]], 4)
        assert second.first.wait(60)
        gone = [index for index, block in enumerate(blocks) if block.payload is None]
        assert gone and not first.reason
        assert len(second.tokens()) == 4
        blocks_to_retry = rig.on_engine(lambda: set(first.sequence.kv.blocks_to_retry))
        assert blocks_to_retry.isdisjoint(gone) if on_disk else blocks_to_retry.issuperset(gone)
        rig.hot = 1 << 30
        rig.scheduler.cancel(first.sequence)
        rig.settle()
        memory.available = 10**9
        again = rig.run(PROMPT, 1)
        assert again.known == len(PROMPT) // BLOCK * BLOCK


def test_a_request_that_waits_does_not_evict_what_another_will_use(rig: Rig):
    """Its own turn comes as soon as those that run have copied their blocks, which then go first."""
    memory = Memory(rig, 10**9)
    others = [[n, *PROMPT] for n in (11, 12, 13)]
    for tokens in others:
        rig.run(tokens, 1)
    hot = rig.pool.hot_bytes
    memory.available = RESERVE + 2 * kv(rig, 600 + KV_RESERVE) - hot // 6
    started = rig.on_engine(lambda: [rig.start(tokens, 100_000) for tokens in others])
    assert all(output.first.wait(60) for output in started)
    assert [output.hot for output in started] == [len(others[0]) // BLOCK * BLOCK] * 3
    for output in started:
        rig.scheduler.cancel(output.sequence)


def test_what_the_cache_has_done_refuses_no_prompt(rig: Rig):
    """And the hot blocks that it stands on are not what gives way to it."""
    memory = Memory(rig, 10**9)
    rig.run(PROMPT, 2)
    others = [7, *PROMPT[::-1]]
    younger = rig.pool.hot_bytes
    rig.run(others, 2)
    cached = (len(PROMPT) - 1) // BLOCK * BLOCK
    assert rig.loaded.layout is not None
    memory.admission.cost.per_token = MB
    need = kv(rig, 600 + 4) + kv(rig, cached) + (len(PROMPT) - cached) * MB
    own = rig.loaded.layout.nbytes(cached)
    memory.available = RESERVE + need - own - younger // 2
    memory.admission.take_budget(Budget(most=rig.loaded.weight_bytes + need))
    again = rig.run(PROMPT, 4)
    assert len(again.got) == 4 and again.sequence.stats.restored_hot == cached
    with pytest.raises(InvalidRequest, match=r"at most .* can be had"):
        rig.start([8, *PROMPT], 4).tokens()
    assert not memory.wants


def test_a_long_prompts_peak_says_nothing_of_a_short_one(rig: Rig):
    admission = MemoryAdmission(rig.loaded, 2048 * 100, lambda wants: None, chunk=BLOCK)
    assert admission.working(10**6) == admission.working(BLOCK) == BLOCK * 100
    rig.on_engine(lambda: setattr(rig.scheduler, "memory", admission))
    rig.run([n % 1000 for n in range(2000)], 2)
    assert admission.working(8000) > admission.working(2000) > 5 * admission.working(10) > 0


def test_a_waiting_prompt_can_be_cancelled(rig: Rig, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "omlxd.engine.schedule.memory_admission")
    memory = Memory(rig, RESERVE)
    memory.now = 1.0
    output = rig.start(PROMPT, 1000)
    output.sequence.stats.received -= 100  # It came when no one looked whether there is memory.
    rig.on_engine(lambda: None)
    rig.scheduler.cancel(output.sequence)
    rig.settle()
    assert rig.scheduler.active_sequences == 0
    began, ended = (record.getMessage() for record in caplog.records)
    assert f"(prompt={len(PROMPT)}) waits for memory: it needs " in began
    assert re.search(r" [1-9]\S* \w+ of that for its answer \(kv-reserve\)", began)
    assert re.search(rf"\(prompt={len(PROMPT)}\) ended before it got memory, queue=1\d\d\.\d{{3}}s$", ended)
    memory.available = 10**9
    assert len(rig.run(PROMPT, 2).got) == 2


def test_who_waits_behind_one_that_waits_for_memory_has_a_line(rig: Rig, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "omlxd.engine.schedule")
    memory = Memory(rig, RESERVE)
    memory.now = 1.0
    outputs = rig.on_engine(lambda: [rig.start(PROMPT[: 599 - n], 4) for n in range(4)])
    rig.on_engine(lambda: None)
    memory.available = 10**9
    assert all(len(output.tokens()) == 4 for output in outputs)
    lines = [record.getMessage() for record in caplog.records if " waits " in record.getMessage()]
    assert [line.partition(":")[0] for line in lines] == [
        *(f"request 0 (prompt={tokens}) waits for memory" for tokens in (599, 596)),
        *(f"request 0 (prompt={tokens}) waits for memory behind request 0" for tokens in (598, 597)),
    ]


def test_what_chunks_take_is_learnt_from_whole_ones(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """A long prompt must not be refused for what the short last chunk of another one took."""
    from omlxd.engine.schedule import memory_admission as admission

    taken = 0
    monkeypatch.setattr(admission.mx, "reset_peak_memory", lambda: None)
    monkeypatch.setattr(admission.mx, "get_active_memory", lambda: 0)
    monkeypatch.setattr(admission.mx, "get_peak_memory", lambda: taken)
    learning = MemoryAdmission(rig.loaded, 0, lambda wants: None, measure=lambda: (10**10, 10**10))

    def chunk(start: int, stop: int, took: int) -> None:
        nonlocal taken
        learning.begin_chunk()
        taken = took
        learning.end_chunk(start, stop)

    chunk(0, 2048, 200 * MB)
    assert learning.working(2048) == pytest.approx(200 * MB)
    chunk(60_000, 60_050, 180 * MB)  # a fixed cost, of fifty tokens as of thousands
    chunk(2048, 4096, 200 * MB)
    assert learning.working(100_000) == pytest.approx(200 * MB)
    chunk(57_952, 60_000, 500 * MB)
    assert learning.working(100_000) == pytest.approx(700 * MB, rel=0.01)
    assert learning.working(100) < 20 * MB
    chunk(2048, 4096, 900 * MB)  # nearer than what is known: another matter
    assert learning.working(100_000) == pytest.approx(700 * MB, rel=0.01)


def test_a_guess_from_short_contexts_refuses_no_long_one_where_attention_is_fused(rig: Rig):
    learning = MemoryAdmission(rig.loaded, 0, lambda wants: None, measure=lambda: (10**10, 10**10))
    learning.cost.per_pair, learning.cost.farthest = 400.0, 4096
    learning._fused = False
    assert learning.working(100_000) == 2048 * 100_000 * 400
    learning._fused = True
    assert learning.working(100_000) == 2048 * 4 * 4096 * 400


def test_the_first_long_prompt_is_weighed_with_its_scores_where_attention_is_not_fused(rig: Rig):
    memory = Memory(rig, 10**9)
    memory.admission._fused, memory.admission.cost.pair = False, 10_000.0
    memory.admission.take_budget(Budget(most=rig.loaded.weight_bytes + 10**9))
    assert len(rig.run(PROMPT[:100], 2).got) == 2  # 100 MB
    with pytest.raises(InvalidRequest, match=r"at most .* can be had"):
        rig.start(PROMPT, 2).tokens()  # 3.6 GB
    memory.admission._fused = True
    assert len(rig.run(PROMPT, 2).got) == 2


def test_what_is_measured_near_and_what_scores_take_tell_of_far_contexts(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    from omlxd.engine.schedule import memory_admission as admission

    taken = 0
    monkeypatch.setattr(admission.mx, "reset_peak_memory", lambda: None)
    monkeypatch.setattr(admission.mx, "get_active_memory", lambda: 0)
    monkeypatch.setattr(admission.mx, "get_peak_memory", lambda: taken)
    learning = MemoryAdmission(rig.loaded, 2048 * 3000, lambda wants: None, pair=16)
    learning._fused = False

    def chunk(start: int, stop: int, each: int) -> None:
        nonlocal taken
        learning.begin_chunk()
        taken = (stop - start) * each
        learning.end_chunk(start, stop)

    assert learning.working(20_000) == 2048 * (3000 + 16 * 20_000)
    chunk(0, 2048, 5000 + 16 * 2048)
    assert learning.working(2048) == 2048 * (5000 + 16 * 2048)
    assert learning.working(20_000) == 2048 * (5000 + 16 * 20_000)
    chunk(2048, 4096, 5000 + 16 * 4096)
    assert learning.working(20_000) == 2048 * (5000 + 16 * 20_000)
    chunk(4096, 6144, 5000 + 16 * 2048)  # It does not grow with the context after all.
    assert learning.working(20_000) == 2048 * (5000 + 16 * 2048)


def of_300_tokens(max_new: int, reserve: int | None) -> Sequence:
    params = RowSampling.of(Sampling(), SamplingDefaults())
    sampling = SamplerRow(params, max_new=max_new, reserve=reserve)
    return Sequence(1, list(range(1, 301)), Prompt(300, bytes(32)), sampling)


def test_a_models_reserve_is_room_at_once_and_is_counted(rig: Rig):
    rooms = (0, KV_RESERVE, 4096, 10**6)
    none, usual, wide, most = (of_300_tokens(5000, room) for room in rooms)
    capacities = [none.capacity, usual.capacity, wide.capacity, most.capacity]
    assert capacities == [300, 300 + KV_RESERVE, 300 + 4096, 300 + 5000]
    admission = MemoryAdmission(rig.loaded, 1000, lambda wants: None)
    assert admission.need(none) < admission.need(usual) < admission.need(wide)


def test_an_answers_room_is_what_it_may_need_up_to_a_share_of_free_memory(rig: Rig):
    """`kv-reserve` auto: one request gets a 32nd of what is free, all a quarter; none waits for it."""
    total = 64 << 30
    free = 1 << 26
    admission = MemoryAdmission(
        rig.loaded, 1000, lambda wants: None, measure=lambda: (total, free + int(total * RESERVE_FRACTION))
    )
    assert rig.loaded.layout is not None
    per_token = rig.loaded.layout.nbytes(1)

    def admitted(max_new: int, running: list[Sequence], reserve: int | None = None) -> Sequence:
        sequence = of_300_tokens(max_new, reserve)
        assert admission.has_room_for(sequence, running)
        return sequence

    assert admitted(50, []).capacity == 350, "no more than the answer may be long"
    assert admitted(10**6, [], 77).capacity == 377, "a number is what the user wants"
    running: list[Sequence] = []
    for _ in range(40):
        running.append(admitted(10**6, running))
    rooms = [sequence.capacity - 300 - KV_RESERVE for sequence in running]
    assert rooms[0] * per_token == pytest.approx(free / 32, rel=0.02)
    assert rooms == sorted(rooms, reverse=True) and sum(rooms) * per_token <= free / 4
    none = of_300_tokens(10**6, None)
    free = admission.need(none) + 1
    assert admission.has_room_for(none, []) and none.capacity == 300 + KV_RESERVE, "it fits, and just so"
