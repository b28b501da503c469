"""Families with state that exists only at a position: as `test_identity.py`, and where checkpoints stand.

Sliding windows (gemma3, gpt_oss), recurrent layers beside attention (qwen3_next, qwen3_5), and
recurrent layers alone (mamba2). Bit-identical to a run without reuse, on the CPU.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from families import OTHERS, build_family
from mlx_lm.models.cache import ConcatenateKVCache
from rig import BLOCK, Rig
from test_identity import Reference, assert_same, prompt

from omlxd.engine import mlx_adapter
from omlxd.engine.state_keeper import SHARE, _interval
from omlxd.kv.checkpoints import checkpoint_name


@pytest.fixture(scope="module", params=OTHERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family(request.param, tmp_path_factory.mktemp("model") / request.param)


@pytest.fixture(scope="module")
def uncached(model: Path):
    reference = Reference(model)
    yield reference
    reference.close()


def test_hot_hit_at_the_prompts_end(model: Path, uncached: Reference):
    tokens = prompt(300)
    with Rig(model, record=True) as rig:
        assert_same(rig, tokens, uncached, hot=0, cold=0)
        assert_same(rig, tokens, uncached, hot=256, cold=0)
        # Same prompt, other ending: the checkpoint at 256 serves it too.
        assert_same(rig, tokens[:290] + prompt(50, seed=4), uncached, hot=256, cold=0)
        # No checkpoint stands before the divergence, so nothing wrong is used.
        assert_same(rig, tokens[:150] + prompt(99, seed=9), uncached, hot=0, cold=0)
        rig.on_engine(lambda: rig.pool.check({}))


def test_intervals_serve_prompts_that_diverge_in_the_middle(model: Path, uncached: Reference, monkeypatch):
    tokens = prompt(700)
    with Rig(model, record=True) as rig:
        rig.keeper.interval = 128
        # Mamba's scan rounds by its chunks' bounds, so both runs need the same ones.
        for scheduler in (rig.scheduler, uncached._rig.scheduler):
            monkeypatch.setattr(scheduler.pacer, "chunk_end", lambda start, **_: (start // 128 + 1) * 128)
        assert_same(rig, tokens, uncached, hot=0, cold=0)
        diverging = tokens[:500] + prompt(80, seed=9)
        assert_same(rig, diverging, uncached, hot=384, cold=0)
        # A branch, and back to the trunk.
        assert_same(rig, tokens, uncached, hot=640, cold=0)
        assert_same(rig, diverging, uncached, hot=576, cold=0)


def test_cold_hit_after_a_sigkill(model: Path, uncached: Reference, tmp_path: Path):
    tokens = prompt(300)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    child = subprocess.Popen(
        [sys.executable, __file__, str(model), str(tmp_path)], env=env, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "stored\n"
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    with Rig(model, tmp_path, record=True) as rig:
        assert_same(rig, tokens, uncached, hot=0, cold=256)
        assert_same(rig, tokens, uncached, hot=256, cold=0)
    with Rig(model, tmp_path, hot=0, record=True) as rig:
        assert_same(rig, tokens, uncached, hot=0, cold=256)


def test_an_append_only_turn_computes_its_new_tokens_and_at_most_a_block(model: Path, uncached: Reference):
    first = prompt(200)
    with Rig(model) as rig:
        answer = rig.run(first, 90).got
        second = first + answer + prompt(40, seed=2)
        output = rig.run(second, 8)
        assert output.hot >= len(first) + len(answer) - BLOCK
        assert output.got == uncached(second, 8)[0]


def test_an_aborted_prefill_is_kept(model: Path):
    tokens = prompt(2500)
    with Rig(model) as rig:
        rig.scheduler.pacer.chunk_end = lambda start, **_: start + 256
        output = rig.start(tokens, 5)
        while not output.progressed or output.progressed[-1][0] < 512:
            time.sleep(0.001)
        rig.scheduler.cancel(output.sequence)
        rig.settle()
        assert rig.run(tokens, 1).hot >= 512


def test_a_batch_gives_each_row_its_own_checkpoint(model: Path):
    prompts = [prompt(70 + 45 * i, seed=i) for i in range(4)]
    with Rig(model) as rig:
        running = [rig.start(p, 70) for p in prompts]
        answers = [o.tokens() for o in running]
        rig.settle()
        rig.on_engine(lambda: rig.pool.check({}))
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
    files = [p for p in tmp_path.glob("*/*/*.safetensors") if b'"kind":"checkpoint"' in p.read_bytes()[:4096]]
    assert files
    for path in files:
        data = bytearray(path.read_bytes())
        data[-3] ^= 0x10
        path.write_bytes(data)
    with Rig(model, tmp_path, record=True) as rig:
        assert_same(rig, tokens, uncached, hot=0, cold=0)
        assert rig.store.stats.corrupt == len(files)
        rig.on_engine(lambda: rig.pool.check({}))


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
        mine = rig.store.cold.path_of(checkpoint_name(used.sequence.hashes[3]))
        theirs = rig.store.cold.path_of(checkpoint_name(other.sequence.hashes[3]))
        assert order.index(mine) > order.index(theirs)
        assert order[-1] == mine


def test_the_interval_bounds_what_checkpoints_add(model: Path):
    loaded = mlx_adapter.load(model)
    assert loaded.layout is not None and loaded.states is not None
    interval = _interval(loaded.states, loaded.layout)
    if per_token := loaded.layout.nbytes(1):
        assert loaded.states.nbytes(1 << 20) <= SHARE * interval * per_token


def test_an_unknown_cache_class_is_served_without_reuse_and_says_so(model: Path, monkeypatch):
    class Unknown(ConcatenateKVCache):
        pass

    monkeypatch.setattr(mlx_adapter.layouts, "leaves", lambda cache: [("layers.0", Unknown())])
    assert "Unknown" in mlx_adapter.reuse_obstacle([])


def test_a_checkpoint_is_a_copy(model: Path):
    loaded = mlx_adapter.load(model)
    cache = mlx_adapter.new_cache(loaded.model, 256)
    mx.eval(loaded.model(mx.array([prompt(64)]), cache=cache))
    from omlxd.engine.payload import copy_state

    payload = copy_state(loaded.states.at(64), mlx_adapter.state_tensors(cache))
    before = [np.array(a) for a in payload.arrays]
    for token in prompt(40, seed=3):
        mx.eval(loaded.model(mx.array([[token]]), cache=cache))
    for array, want in zip(payload.arrays, before, strict=True):
        assert np.array_equal(np.array(array), want)


if __name__ == "__main__":  # the child that is killed
    with Rig(Path(sys.argv[1]), Path(sys.argv[2])) as child_rig:
        child_rig.run(prompt(300), 4)
        print("stored", flush=True)
        time.sleep(60)
