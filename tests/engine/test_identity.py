"""Cached against uncached beside the matrix (test_family_matrix.py): paths that only some engines take.

Bit-identical logits and the same greedy tokens, on the CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cold_run import Reference, assert_same, prompt
from families import build_family
from kv_fakes import check_pool
from rig import BLOCK, Rig

CASES = [
    *(("qwen3", "bf16"), ("deepseek_v3", "fp32")),
    *(pytest.param(case, marks=pytest.mark.slow) for case in (("qwen3", "fp32"), ("qwen3_4bit", "bf16"))),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, dtype = request.param
    return build_family(family, tmp_path_factory.mktemp("model") / family, dtype=dtype)


@pytest.fixture(scope="module")
def uncached(model: Path):
    with Reference(model) as reference:
        yield reference


def test_hot_hit_with_the_last_chunk_in_one_pass(model: Path, uncached: Reference, monkeypatch):
    """As on a GPU, where the last token has no pass of its own and hits are whole blocks."""
    tokens = prompt(300)
    monkeypatch.setattr(uncached, "_memo", {})
    with Rig(model, record=True) as rig:
        for scheduler in (rig.scheduler, uncached.rig.scheduler):
            monkeypatch.setattr(scheduler.passes, "last_alone", False)
        assert_same(rig, tokens, uncached, hot=0, cold=0)
        assert_same(rig, tokens, uncached, hot=256, cold=0)
        assert_same(rig, tokens[:200] + prompt(57, seed=9), uncached, hot=192, cold=0)


def test_cold_hits_with_and_without_a_hot_tier(model: Path, uncached: Reference, tmp_path: Path):
    tokens = prompt(300)
    with Rig(model, tmp_path) as rig:
        rig.run(tokens, 4)
    with Rig(model, tmp_path, record=True) as rig:
        assert_same(rig, tokens, uncached, hot=0, cold=256)
        assert_same(rig, tokens, uncached, hot=256, cold=0)  # promoted meanwhile
    with Rig(model, tmp_path, hot=0, record=True) as rig:
        assert_same(rig, tokens[:150] + prompt(99, seed=9), uncached, hot=0, cold=128)
        assert_same(rig, tokens, uncached, hot=0, cold=256)


def test_requests_that_share_a_prefix_at_the_same_time(model: Path, uncached: Reference):
    shared = prompt(200)
    prompts = [shared + prompt(30 + 25 * i, seed=i) for i in range(5)]
    with Rig(model, slots=4) as rig:
        running = [rig.start(p, 12) for p in prompts]
        got = [output.tokens() for output in running]
        rig.settle()
        computed = rig.scheduler.counts.prefilled[None]
        rig.on_engine(lambda: check_pool(rig.pool, {}))
    assert got == [uncached(p, 12)[0] for p in prompts]
    # Nobody computes the shared blocks twice, however they overlap in time.
    assert computed == sum(map(len, prompts)) - 4 * (200 // BLOCK) * BLOCK


@pytest.mark.slow
def test_a_request_right_behind_a_cold_one_reads_nothing_again(
    model: Path, uncached: Reference, tmp_path: Path
):
    tokens = prompt(500)
    with Rig(model, tmp_path) as rig:
        rig.run(tokens, 4)
    with Rig(model, tmp_path) as rig:
        prompts = [tokens, tokens, tokens[:450] + prompt(20, seed=3), tokens + prompt(90, seed=4)]
        running = [rig.start(p, 6) for p in prompts]
        assert [output.tokens() for output in running] == [uncached(p, 6)[0] for p in prompts]
        rig.settle()
        assert rig.run(tokens, 4).hot == 448
        assert rig.store.stats.restored == 500 // BLOCK, "each file is read once"
        assert [output.known for output in running] == [448, 448, 448, 448]
        rig.on_engine(lambda: check_pool(rig.pool, {}))
