"""The hot tier's budget: fixed, or what memory safely allows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from omlxd.engine.kvio import hot_budget
from omlxd.engine.kvio.hot_budget import RESERVE_BYTES, HotBudget

GB = 1 << 30


@pytest.mark.parametrize("limit", [0, 5, 10 * GB])
def test_a_fixed_limit_is_taken_as_it_is(limit: int):
    assert HotBudget(limit, lambda: 0)() == limit


@pytest.mark.parametrize(
    ("total", "available", "used", "budget"),
    [
        (64 * GB, 40 * GB, 0, 32 * GB),  # never more than half
        (16 * GB, 6 * GB, 0, 4 * GB),  # what is free, less the reserve
        (16 * GB, 3 * GB, 4 * GB, 5 * GB),  # what the tier holds already is its own
        (16 * GB, 1 * GB, 0, 0),
        (16 * GB, 1 * GB, 3 * GB, 2 * GB),  # it shrinks when memory runs short
    ],
)
def test_without_a_limit_it_follows_memory(monkeypatch, total, available, used, budget):
    monkeypatch.setattr(hot_budget, "memory", lambda: (total, available))
    monkeypatch.setattr(hot_budget, "available_ram", lambda pageable: total)
    assert RESERVE_BYTES == 2 * GB
    assert HotBudget(None, lambda: used)() == budget


def test_ranks_of_one_machine_divide_its_memory(monkeypatch):
    monkeypatch.setattr(hot_budget, "memory", lambda: (64 * GB, 60 * GB))
    monkeypatch.setattr(hot_budget, "available_ram", lambda pageable: 60 * GB)
    used = [0, 2 * GB, 4 * GB, 0]
    budgets = [HotBudget(None, lambda mine=mine: mine, parts=4)() for mine in used]
    assert budgets == [8 * GB] * 4, "half of it in all"
    monkeypatch.setattr(hot_budget, "memory", lambda: (16 * GB, 6 * GB))
    assert sum(HotBudget(None, lambda: GB, parts=4)() for _ in used) == 8 * GB, "4 held, 4 free"
    monkeypatch.setattr(hot_budget.mlx_adapter, "backend", lambda: "cuda")
    assert HotBudget(None, lambda: 0, parts=4)() == 4 * GB, "each has a GPU"


def test_on_metal_it_leaves_other_programs_what_they_hold(monkeypatch):
    monkeypatch.setattr(hot_budget, "memory", lambda: (24 * GB, 18 * GB))
    monkeypatch.setattr(hot_budget, "available_ram", lambda pageable: 6 * GB - pageable)
    monkeypatch.setattr(hot_budget.mx, "get_cache_memory", lambda: 1 * GB)
    reserve = int(24 * GB * hot_budget.RESERVE_FRACTION)
    for backend, free in (("metal", 7 * GB), ("cuda", 18 * GB)):
        monkeypatch.setattr(hot_budget.mlx_adapter, "backend", lambda backend=backend: backend)
        assert HotBudget(None, lambda: 0)() == min(12 * GB, free - reserve)
        # macOS says that its own could give way, too.
        more = 0 if backend == "metal" else 2 * GB
        assert HotBudget(None, lambda: 2 * GB)() == min(12 * GB, free - reserve + more)


def test_memory_is_read_twice_a_second_at_most(monkeypatch):
    reads = []
    monkeypatch.setattr(hot_budget, "memory", lambda: reads.append(1) or (16 * GB, 8 * GB))
    clock = [100.0]
    monkeypatch.setattr(hot_budget, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    budget = HotBudget(None, lambda: 0)
    for _ in range(100):
        budget()
    assert len(reads) == 1
    clock[0] += 0.6
    budget()
    assert len(reads) == 2


def test_memory_of_this_machine_makes_sense():
    total, available = hot_budget.memory()
    assert 0 < available <= total


def test_what_was_promised_to_requests_is_left_to_them(monkeypatch):
    monkeypatch.setattr(hot_budget, "memory", lambda: (64 * GB, 30 * GB))
    monkeypatch.setattr(hot_budget, "available_ram", lambda pageable: 30 * GB)
    budget = HotBudget(None, lambda: 10 * GB)
    budget.promised = lambda: 20 * GB
    assert budget() == 40 * GB - int(64 * GB * hot_budget.RESERVE_FRACTION) - 20 * GB
