"""Checkpoints of state that exists only at a position: where they stand, what they cost, how they end.

That hits on them give a cold run's answers is the matrix's (test_family_matrix.py).
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from cache_folder import flip
from cold_run import Reference, assert_same, prompt
from families import build_family
from fast_or_slow import rest_slow
from kv_fakes import check_pool
from rig import BLOCK, Rig

from omlxd.engine import mlx_adapter
from omlxd.engine.kvio.checkpointer import SHARE, _interval
from omlxd.engine.kvio.payload import copy_state
from omlxd.kv.checkpoint import checkpoint_name

CASES = ("gemma3_text", "qwen3_5", "mamba2")


@pytest.fixture(scope="module", params=rest_slow(CASES, "qwen3_5"))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family(request.param, tmp_path_factory.mktemp("model") / request.param)


@pytest.fixture(scope="module")
def uncached(model: Path):
    with Reference(model) as reference:
        yield reference


def checkpoint_files(root: Path) -> list[Path]:
    """Files of checkpoints under a cache dir, told by their own headers."""
    found = root.glob("*/*/*.safetensors")
    return sorted(p for p in found if b'"kind":"checkpoint"' in p.read_bytes()[:4096])


@pytest.mark.slow
def test_a_turn_writes_one_checkpoint_apart_from_its_blocks_and_named_by_its_chain(
    model: Path, tmp_path: Path
):
    with Rig(model, tmp_path) as rig:
        first = rig.run(prompt(150), 150)  # four blocks and 43 tokens
        end = first.sequence.kv.hashes[(150 + 150 - 1) // BLOCK - 1]
        (only,) = checkpoint_files(tmp_path)
        assert only == tmp_path / rig.store.cold.path_of(checkpoint_name(end))
        blocks = {p for p in tmp_path.glob("*/*/*.safetensors")} - {only}
        assert len(blocks) == (4 if rig.loaded.layout.groups else 0)
        # The same turn again goes on from its prompt's end, which is then written too, once.
        for _ in range(2):
            rig.run(prompt(150), 150)
            assert len(checkpoint_files(tmp_path)) == 2
        # The next turn's end is one more, and a fork of the same turn is one more.
        turn = prompt(150) + first.got
        for number, seed in enumerate((3, 4), start=3):
            rig.run(turn + prompt(70, seed=seed), 3)
            assert len(checkpoint_files(tmp_path)) == number


def test_an_answer_that_ends_at_a_boundary_keeps_the_checkpoint_before_it(model: Path, tmp_path: Path):
    """Nobody has looked at the logits behind its last token, whose state is no checkpoint."""
    asked = prompt(2 * BLOCK + 10)
    with Rig(model, tmp_path) as rig:
        answer = rig.run(asked, 2 * BLOCK - 10).got
    with Rig(model, tmp_path) as rig:
        assert rig.run(asked + answer + prompt(30, seed=9), 2).cold == 3 * BLOCK


def test_a_prompt_asked_twice_is_known_after_a_restart(uncached: Reference, model: Path, tmp_path: Path):
    tokens = prompt(150)
    with Rig(model, tmp_path) as rig:
        for _ in range(2):
            rig.run(tokens, 70)
    with Rig(model, tmp_path, record=True) as rig:
        assert_same(rig, tokens, uncached, hot=0, cold=149 // BLOCK * BLOCK)


def test_a_prompt_that_leaves_another_leaves_a_checkpoint_there(uncached: Reference, model: Path):
    shared = prompt(330)
    first, second, third = (shared + prompt(200, seed=seed) for seed in (5, 6, 7))
    with Rig(model, record=True) as rig:
        if not rig.loaded.layout.groups:
            pytest.skip("without token blocks nobody knows where prompts part")
        rig.checkpointer.least_fork = 4 * BLOCK
        assert_same(rig, first, uncached, hot=0, cold=0)
        assert_same(rig, second, uncached, hot=0, cold=0)
        assert_same(rig, third, uncached, hot=5 * BLOCK, cold=0)
        # Not for less than a checkpoint is worth.
        rig.checkpointer.least_fork = 100 * BLOCK
        for seed in (8, 9):
            assert_same(rig, prompt(330)[:100] + prompt(300, seed=seed), uncached, hot=0, cold=0)


def test_a_batch_gives_each_row_its_own_checkpoint(model: Path):
    prompts = [prompt(70 + 45 * i, seed=i) for i in range(4)]
    with Rig(model) as rig:
        running = [rig.start(p, 70) for p in prompts]
        answers = [o.tokens() for o in running]
        rig.settle()
        rig.on_engine(lambda: check_pool(rig.pool, {}))
        for p, answer in zip(prompts, answers, strict=True):
            turn = p + answer + prompt(30, seed=8)
            output = rig.run(turn, 6)
            assert output.hot >= len(p) + len(answer) - BLOCK
            with_nothing = rig.run(turn, 6, salt="other").got
            assert output.got == with_nothing


def test_a_damaged_checkpoint_is_a_miss(model: Path, uncached: Reference, tmp_path: Path):
    tokens = prompt(300)
    with Rig(model, tmp_path) as rig:
        rig.run(tokens, 4)
    files = checkpoint_files(tmp_path)
    assert files
    for path in files:
        flip(path, -3, 0x10)
    with Rig(model, tmp_path, record=True) as rig:
        assert_same(rig, tokens, uncached, hot=0, cold=0)
        assert rig.store.stats.corrupt == len(files)
        rig.on_engine(lambda: check_pool(rig.pool, {}))


def test_a_checkpoint_that_serves_a_hit_becomes_the_most_recent_file(model: Path, tmp_path: Path):
    with Rig(model, tmp_path) as rig:
        rig.run(prompt(300), 1)
        other = rig.run(prompt(300, seed=7), 1)
        assert rig.run(prompt(300), 1).hot == 256
        (files,) = rig.ledger._files._lists.values()
        order = list(files)
        used = rig.start(prompt(300), 1)
        used.tokens()
        rig.settle()
        mine = rig.store.cold.path_of(checkpoint_name(used.sequence.kv.hashes[3]))
        theirs = rig.store.cold.path_of(checkpoint_name(other.sequence.kv.hashes[3]))
        assert order.index(mine) > order.index(theirs)
        assert order[-1] == mine


def test_the_interval_bounds_what_checkpoints_add(model: Path):
    loaded = mlx_adapter.load(model)
    assert loaded.layout is not None and loaded.states is not None
    interval = _interval(loaded.states, loaded.layout)
    if per_token := loaded.layout.nbytes(1):
        assert loaded.states.nbytes(1 << 20) <= SHARE * interval * per_token


def test_a_checkpoint_is_a_copy(model: Path):
    loaded = mlx_adapter.load(model)
    cache = mlx_adapter.new_cache(loaded.model, 256)
    mx.eval(loaded.model(mx.array([prompt(64)]), cache=cache))
    payload = copy_state(loaded.states.at(64), mlx_adapter.state_tensors(cache))
    before = [np.array(a) for a in payload.arrays]
    for token in prompt(40, seed=3):
        mx.eval(loaded.model(mx.array([[token]]), cache=cache))
    for array, want in zip(payload.arrays, before, strict=True):
        assert np.array_equal(np.array(array), want)
