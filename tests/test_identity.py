"""Cached against uncached: bit-identical logits and the same greedy tokens, on the CPU.

For every family whose layers keep plain per-token KV: a hot hit, a cold hit after SIGKILL, a
prompt that diverges in the middle, and requests that share a prefix at the same time.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from families import FP32_ONLY, TOKEN_KV, VOCAB, build_family
from rig import BLOCK, Rig

CASES = [(f, d) for f in TOKEN_KV for d in ("fp32", "bf16") if not (d == "bf16" and f in FP32_ONLY)]


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, VOCAB) for _ in range(length)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, dtype = request.param
    return build_family(family, tmp_path_factory.mktemp("model") / family, dtype=dtype)


class Reference:
    """What a run without any reuse gives: tokens and every logits row, for any prompt."""

    def __init__(self, model: Path):
        self._rig = Rig(model, reuse=False, record=True)

    def __call__(self, tokens: list[int], n: int = 8) -> tuple[list[int], list[np.ndarray]]:
        self._rig.recorder.logits.clear()
        got = self._rig.run(tokens, n).got
        return got, outputs(self._rig, n)

    def close(self) -> None:
        self._rig.close()


def outputs(rig: Rig, n: int) -> list[np.ndarray]:
    """The logits rows from which the last request's `n` tokens were sampled."""
    # The step in flight when the last token was read computed one row more.
    rows = [row for _, row in rig.recorder.logits][-n - 1 : -1]
    assert len(rows) == n
    return rows


@pytest.fixture(scope="module")
def uncached(model: Path):
    reference = Reference(model)
    yield reference
    reference.close()


def assert_same(rig: Rig, tokens: list[int], uncached: Reference, *, hot: int, cold: int, n: int = 8) -> None:
    rig.recorder.logits.clear()
    output = rig.run(tokens, n)
    want_tokens, want_rows = uncached(tokens, n)
    assert (output.hot, output.cold) == (hot, cold)
    assert output.got == want_tokens
    for got, want in zip(outputs(rig, n), want_rows, strict=True):
        assert np.array_equal(got.view(np.uint32), want.view(np.uint32)), "logits differ in some bit"


def test_hot_hit_and_divergence(model: Path, uncached: Reference):
    tokens = prompt(300)
    with Rig(model, record=True) as rig:
        assert_same(rig, tokens, uncached, hot=0, cold=0)
        assert_same(rig, tokens, uncached, hot=256, cold=0)
        diverging = tokens[:150] + prompt(120, seed=9)
        assert_same(rig, diverging, uncached, hot=128, cold=0)
        exact = tokens[: 4 * BLOCK]
        assert_same(rig, exact, uncached, hot=3 * BLOCK, cold=0)
        rig.on_engine(lambda: rig.pool.check({}))


def test_hot_hit_with_the_last_chunk_in_one_pass(model: Path, uncached: Reference, monkeypatch):
    """As on a GPU, where the last token has no pass of its own."""
    tokens = prompt(300)
    with Rig(model, record=True) as rig:
        for scheduler in (rig.scheduler, uncached._rig.scheduler):
            monkeypatch.setattr(scheduler, "_last_alone", False)
        assert_same(rig, tokens, uncached, hot=0, cold=0)
        assert_same(rig, tokens, uncached, hot=256, cold=0)
        assert_same(rig, tokens[:200] + prompt(57, seed=9), uncached, hot=192, cold=0)


def test_cold_hit_after_a_sigkill(model: Path, uncached: Reference, tmp_path: Path):
    tokens = prompt(300)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    child = subprocess.Popen([sys.executable, __file__, str(model), str(tmp_path)], env=env)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*/*/*.safetensors"))) < 4:
        assert child.poll() is None and time.monotonic() < deadline, "the child stored nothing"
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
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
        computed = rig.scheduler.prefilled_tokens
        rig.on_engine(lambda: rig.pool.check({}))
    assert got == [uncached(p, 12)[0] for p in prompts]
    # Nobody computes the shared blocks twice, however they overlap in time.
    assert computed == sum(map(len, prompts)) - 4 * (200 // BLOCK) * BLOCK


def test_a_turn_that_extends_the_last_one_reuses_prompt_and_output(model: Path, uncached: Reference):
    first = prompt(130)
    with Rig(model) as rig:
        answer = rig.run(first, 100).got
        second = first + answer + prompt(20, seed=3)
        output = rig.run(second, 12)
        # The KV of the answer was computed a token at a time, which MLA's kernels round differently
        # from a chunk: the tokens are the same, the logits may differ in the last bit.
        assert output.got == uncached(second, 12)[0]
        assert output.hot == 229 // BLOCK * BLOCK


if __name__ == "__main__":  # the child that is killed
    with Rig(Path(sys.argv[1]), Path(sys.argv[2])) as child_rig:
        child_rig.run(prompt(300), 4)
        time.sleep(60)
