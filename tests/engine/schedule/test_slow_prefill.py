"""Prefill on slow machines: between its layers it can be ended, is progress, and lets others decode."""

from __future__ import annotations

import itertools
import statistics
import time
from pathlib import Path

import numpy as np
import pytest
from cold_run import prompt
from families import build_family
from kv_fakes import check_pool
from rig import BLOCK, Output, Rig

from omlxd.chat import Sampling
from omlxd.common.units import PREFILL_CHUNK
from omlxd.engine.output.sink import usage_of
from omlxd.engine.schedule.prefill import LEAST_SLICE_S, MOST_SLICE_S, PrefillBudget, slice_seconds

LAYERS = 16
AFTER_END = 3
"""Layers that may begin behind the end of their request: this thread may see it late."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family("qwen3", tmp_path_factory.mktemp("model"), changes={"num_hidden_layers": LAYERS})


def slow_layers(rig: Rig, pass_s: float, token_s: float) -> list[int]:
    """Every forward pass takes `pass_s` and `token_s` a token, alike in all layers.

    Returns the tokens of each layer's call, a list that grows."""
    calls = list[int]()

    def slow(kind):
        def __call__(layer, x, *args, **kwargs):
            calls.append(x.shape[1])
            time.sleep((pass_s + x.shape[1] * token_s) / LAYERS)
            return kind.__call__(layer, x, *args, **kwargs)

        return type(kind.__name__, (kind,), {"__call__": __call__})

    for layer in rig.loaded.model.layers:
        layer.__class__ = slow(type(layer))
    return calls


def in_a_pass(rig: Rig) -> Output:
    """A long prompt, in the middle of its first pass."""
    output = rig.start(prompt(1745), 1)
    while not output.progressed:
        time.sleep(0.005)
    time.sleep(0.5)
    return output


def test_the_last_layers_output_is_left_alone_for_other_passes_need_its_kv_alone(model: Path):
    """Evaluating it would compute an MLP for nothing."""
    with Rig(model, slots=1) as rig:
        rig.loaded.hook.is_ahead = False
        looks, between = [], rig.scheduler.passes.between_layers
        rig.scheduler.passes.between_layers = lambda: (
            looks.append(rig.scheduler.passes.computing[0].kv.length),
            between(),
        )
        rig.run(prompt(2 * BLOCK + 10), 1)
        assert looks.count(0) == LAYERS - 1


@pytest.mark.parametrize("beside", [False, True])
def test_the_next_layer_is_computed_while_a_look_is_taken(model: Path, beside: bool):
    """As on a GPU: the same logits, a look less, and a step waits for no layer."""
    looks: list[int] = []
    with Rig(model, record=True) as rig:
        expected = rig.run(prompt(300), 4, salt="alone")
        alone = rig.recorder.logits[-4:]
        hook, between = rig.loaded.hook, rig.scheduler.passes.between_layers
        hook.is_ahead = True

        def look() -> None:
            looks.append(rig.scheduler.passes.computing[0].kv.length)
            assert len(hook._under_way) == 1
            between()

        rig.scheduler.passes.between_layers = look
        rig.scheduler.passes._is_long = lambda tokens: True
        rig.scheduler.step_due = lambda: rig.scheduler.decodes and len(looks) % 4 == 0
        decoding = rig.start(prompt(30, seed=1), 30_000) if beside else None
        assert decoding is None or decoding.first.wait(60)
        assert rig.start(prompt(300), 4).tokens(60) == expected.got
        if decoding is not None:
            rig.scheduler.cancel(decoding.sequence)
            rig.settle()
        else:
            assert all(
                np.array_equal(a, b) for (_, a), (_, b) in zip(alone, rig.recorder.logits[-4:], strict=True)
            )
            assert looks.count(0) == LAYERS - 2
        assert looks and hook.call is None and not hook._under_way


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_request_ends_with_the_layer_under_way_and_nobody_waits_for_it(model: Path, how: str):
    with Rig(model, slots=1) as rig:
        calls = slow_layers(rig, 0.0, 0.1)
        output = in_a_pass(rig)
        waiting = rig.start(prompt(1, seed=1), 1)
        if how == "cancel":
            rig.scheduler.cancel(output.sequence)
            before = len(calls)
        else:
            output.sequence.deadline = time.monotonic()
            before = len(calls)
            assert output.tokens() == [] and output.reason == "length"
        waiting.tokens()
        assert sum(tokens > 1 for tokens in calls[before:]) <= AFTER_END
        rig.settle()
        rig.on_engine(lambda: check_pool(rig.pool, {}))


@pytest.mark.slow
def test_a_request_that_waits_is_ended_beside_a_slow_pass(model: Path):
    with Rig(model, slots=1) as rig:
        calls = slow_layers(rig, 0.0, 0.1)
        computing = in_a_pass(rig)
        waiting = rig.start(prompt(30), 1)
        waiting.sequence.deadline = time.monotonic()
        before = len(calls)
        assert waiting.tokens() == [] and len(calls) - before <= AFTER_END
        rig.scheduler.cancel(computing.sequence)


@pytest.mark.slow
def test_a_layer_is_progress(model: Path):
    with Rig(model) as rig:
        slow_layers(rig, 0.0, 0.1)
        output = in_a_pass(rig)
        before = rig.scheduler.counts.steps
        time.sleep(1.5)
        assert rig.scheduler.counts.steps > before and output.progressed == [(0, 1745)]
        rig.scheduler.cancel(output.sequence)


def test_an_engine_stops_in_the_middle_of_a_slow_pass(model: Path):
    rig = Rig(model)
    calls = slow_layers(rig, 0.0, 0.1)
    output = in_a_pass(rig)
    before = len(calls)
    rig.close()
    assert len(calls) - before <= AFTER_END and output.sequence.cancelled and not output.got


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])  # State is at no position between the layers.
@pytest.mark.parametrize("ahead", [False, True])
def test_what_a_pass_that_was_cut_off_left_is_not_served(tmp_path: Path, family: str, ahead: bool):
    with Rig(build_family(family, tmp_path), record=True) as rig:
        rig.loaded.hook.is_ahead = ahead
        expected = rig.run(prompt(500), 4, salt="alone")
        alone = rig.recorder.logits[-4:]
        output, passes = Output(), iter(range(100))
        between = rig.scheduler.passes.between_layers

        def cut() -> None:
            if next(passes) == 5:  # Not after the last layer of a pass, for the height of these two.
                rig.scheduler.cancel(output.sequence)
            between()

        rig.scheduler.passes.between_layers = cut
        rig.scheduler.prefill_budget.rate = 0.001
        rig.scheduler.prefill_budget.record_pass = lambda tokens, seconds: None
        rig.start(prompt(500), 4, output=output)
        rig.settle()
        assert output.sequence.cancelled and not output.got
        assert rig.run(prompt(500), 4).got == expected.got
        assert all(
            np.array_equal(a, b) for (_, a), (_, b) in zip(alone, rig.recorder.logits[-4:], strict=True)
        )
        rig.on_engine(lambda: check_pool(rig.pool, {}))


def test_a_prompt_that_is_cut_off_counts_with_what_it_restored(model: Path):
    with Rig(model) as rig:
        rig.run(prompt(4 * BLOCK), 1)
        cached = rig.scheduler.counts.restored_hot.total()
        output, between = Output(), rig.scheduler.passes.between_layers

        def cut() -> None:
            rig.scheduler.cancel(output.sequence)
            between()

        rig.scheduler.passes._is_long = lambda tokens: True
        rig.scheduler.passes.between_layers = cut
        rig.start(prompt(9 * BLOCK), 1, output=output)
        rig.settle()
        assert output.sequence.cancelled and not output.sequence.stats.first_token_s
        restored = output.sequence.stats.restored_hot
        assert restored and rig.scheduler.counts.restored_hot.total() == cached + restored
        assert output.progressed == [(restored, 9 * BLOCK)]


@pytest.mark.slow
def test_gaps_between_tokens_beside_a_prefill_are_about_twice_those_alone(model: Path):
    with Rig(model) as rig:
        calls = slow_layers(rig, 0.08, 0.004)  # a step 84 ms, a pass 336 ms
        decoding = rig.start(prompt(30), 30_000)
        assert decoding.first.wait(60)
        while len(calls) < 12 * LAYERS:
            time.sleep(0.05)
        before = len(calls)
        rig.start(prompt(320, seed=1), 1).tokens()
        beside = calls[before:]
        rig.scheduler.cancel(decoding.sequence)
        # How many layers of the prompt stand between two steps: about as long as half a step.
        runs = [len(list(run)) for is_step, run in itertools.groupby(n == 1 for n in beside) if not is_step]
        assert statistics.median(runs) <= 8, runs
        steps = sum(n == 1 for n in beside) / LAYERS
        most = 320 // BLOCK * (len(rig.loaded.model.layers) + 1)
        assert steps <= most + 3, "a step behind each layer and each pass: the prefill gets its third"


@pytest.mark.parametrize(
    ("layer", "layers"), [(0.01, 69), (0.2, 3), (0.25, 2), (0.4, 1), (0.99, 1), (3.0, 1)]
)
def test_between_two_steps_prefill_gets_the_layers_that_make_no_gap_longer_than_two(layer, layers):
    ended = [n for n in range(1, 200) if n * layer >= slice_seconds(1.0, layer) - 1e-9]
    assert ended[0] == layers and (layers == 1 or layers * layer <= 1)
    assert slice_seconds(1.0, layer) > 0.1 * layer, "what follows a pass's last layer is no layer"


def test_beside_short_steps_prefill_gets_its_least():
    """A step of 8 ms, layers of 2.8: eleven of those between two steps, not one."""
    step, layer = 0.008, 0.0028
    ended = next(n for n in range(1, 200) if n * layer >= slice_seconds(step, layer))
    assert ended == 11 and ended * layer == pytest.approx(LEAST_SLICE_S, abs=layer / 2)


def test_prompts_that_outnumber_those_who_decode_get_more_up_to_a_quarter_of_a_second():
    assert slice_seconds(0.08, 0.0, prompts=3, rows=3) == slice_seconds(0.08, 0.0) == pytest.approx(0.056)
    assert slice_seconds(0.08, 0.0, prompts=3, rows=1) == pytest.approx(0.24)
    assert slice_seconds(0.08, 0.0, prompts=9, rows=1) == MOST_SLICE_S
    assert slice_seconds(0.5, 0.0, prompts=9, rows=1) == slice_seconds(0.5, 0.0) > MOST_SLICE_S


@pytest.mark.slow
def test_others_that_decode_change_no_bit_of_a_prompt(model: Path):
    with Rig(model, record=True) as rig:
        rig.run(prompt(700), 2, salt="alone")
        alone = [last for many, last in rig.recorder.logits if many > 1]
        rig.recorder.logits.clear()
        decoding = rig.start(prompt(30), 30_000, sampling=Sampling(temperature=1.0))
        assert decoding.first.wait(60)
        rig.recorder.logits.clear()
        rig.start(prompt(700), 2).tokens()
        rig.scheduler.cancel(decoding.sequence)
        beside = [last for many, last in rig.recorder.logits if many > 1]
        assert len(beside) == len(alone) == 700 // BLOCK + 1
        assert all(np.array_equal(a, b) for a, b in zip(alone, beside, strict=True))


def test_sizes_of_passes(monkeypatch: pytest.MonkeyPatch):
    def ends(backend: str, rate: float, start: int, block: int = 64) -> int:
        monkeypatch.setattr("omlxd.engine.mlx_adapter.backend", lambda: backend)
        budget = PrefillBudget(block)
        budget.rate = rate
        return budget.chunk_end(start)

    for rate in (0.0, 10.0, 1e6):
        assert ends("cpu", rate, 640) == 704 and ends("cpu", rate, 650) == 704
        assert ends("cpu", rate, 0, block=256) == 256
        assert ends("cuda", rate, 64) == PREFILL_CHUNK and ends("cuda", rate, 2048) == 2 * PREFILL_CHUNK
    assert ends("metal", 0.0, 0) == 64 and ends("metal", 100.0, 64) == 128
    assert ends("metal", 1100.0, 64) == 512  # Half a second, on the grid of its size.
    assert ends("metal", 1e6, 64) == PREFILL_CHUNK and ends("metal", 1e6, 2048) == 2 * PREFILL_CHUNK


def test_the_rate_follows_a_slower_machine_and_leaps_with_a_faster_one():
    budget = PrefillBudget(64)
    assert budget.seconds(64) == float("inf")
    budget.record_pass(64, 1.0)  # Kernels were compiled meanwhile.
    budget.record_pass(64, 0.064)
    assert budget.rate == pytest.approx(1000)
    budget.record_pass(500, 1.0)
    assert 500 < budget.rate < 1000


def of_its_own(output: Output) -> tuple[float, float, float]:
    """(TTFT, its own passes, its wait) of a request that has ended."""
    output.tokens()
    usage = usage_of(output.sequence)
    assert usage.queue_s + usage.restore_s + usage.prefill_s == pytest.approx(usage.ttft_s, abs=1e-6)
    return usage.ttft_s, usage.prefill_s, usage.queue_s


def test_waiting_for_whoever_computes_the_shared_prefix_is_no_prefill(model: Path):
    with Rig(model) as rig:
        slow_layers(rig, 0.0, 0.012)  # Far longer than what a busy machine adds.
        prefix = prompt(4 * BLOCK)
        asked = [prefix + prompt(10, seed=seed) for seed in (1, 2)]
        computing, waiting = rig.on_engine(lambda: [rig.start(tokens, 2) for tokens in asked])
        ttft_s, own_s, _ = of_its_own(computing)
        assert own_s > 0.8 * ttft_s > 0.8 * 266 * 0.012
        ttft_s, own_s, queue_s = of_its_own(waiting)
        assert queue_s > 2.4 and 10 * 0.012 <= own_s < 0.3 * ttft_s


def test_the_steps_of_others_in_a_pass_are_no_prefill(model: Path):
    with Rig(model) as rig:
        slow_layers(rig, 0.1, 0.001)
        decoding = rig.start(prompt(20, seed=2), 500)
        assert decoding.first.wait(60)
        ttft_s, own_s, queue_s = of_its_own(rig.start(prompt(4 * BLOCK + 10, seed=3), 1))
        rig.scheduler.cancel(decoding.sequence)
        assert 0.5 < own_s < 0.85 * ttft_s and queue_s > 0.15 * ttft_s


def test_ends_that_are_computed_together_take_as_long_for_each(model: Path):
    with Rig(model) as rig:
        prefix = prompt(2 * BLOCK)
        rig.run([*prefix, 300], 1)
        slow_layers(rig, 0.1, 0.001)
        asked = [prefix + prompt(10, seed=seed) for seed in (1, 2)]
        for output in rig.on_engine(lambda: [rig.start(tokens, 2) for tokens in asked]):
            ttft_s, own_s, _ = of_its_own(output)
            assert own_s > 0.8 * ttft_s > 0.16
