"""Speculative decoding: guesses of every kind leave the tokens, the KV and the counts of plain decoding."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partialmethod
from math import ceil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cold_run import prompt
from daemon import wait_until
from families import build_family
from family_configs import CONFIGS, NOT_REUSED, VLM_TEXT
from fast_or_slow import diagonal, rest_slow
from guesses import check_always, guess_by, half_right
from hypothesis import given
from hypothesis import strategies as st
from rig import BLOCK, GREEDY, Output, Rig

from omlxd.chat import Sampling
from omlxd.engine import mlx_adapter
from omlxd.engine.schedule import decode_batch
from omlxd.engine.schedule.decode_batch import DecodeBatch
from omlxd.engine.speculate.controller import LOST_SHARE, MOST_CREDIT, Speculation
from omlxd.engine.speculate.ngram import NgramProposer
from omlxd.engine.speculate.row import Offer, RowSpeculator
from omlxd.engine.speculate.times import NEWEST, PassTimes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family("qwen3", tmp_path_factory.mktemp("model") / "qwen3")


LOOSE = {"gemma4_text": 2e-2}
"""Of logits of about 4, after 150 tokens. Without guesses, KV of decoded tokens differs from computed KV by
0.007 in these logits."""

SAMPLED = Sampling(temperature=0.9, top_p=0.9, top_k=20, seed=5)
PENALISED = Sampling(temperature=0.9, seed=3, repetition_penalty=1.3, frequency_penalty=0.7)


SAMPLINGS = {"greedy": GREEDY, "seeded": SAMPLED, "penalised": PENALISED}
GUESSED = sorted({*CONFIGS, *VLM_TEXT} - {"recurrent_gemma", *NOT_REUSED})
IN_8_BITS = [f"{name} 8" for name in ("qwen3", "gemma3_text", "qwen3_5")]


@pytest.mark.parametrize(
    ("family", "how"),
    [
        *rest_slow(
            [(family, how) for family in ("qwen3", "qwen3_5") for how in SAMPLINGS],
            *(("qwen3", how) for how in SAMPLINGS),
            ("qwen3_5", "seeded"),
        ),
        *(
            pair
            for pair in diagonal([*GUESSED, *IN_8_BITS], SAMPLINGS)
            if pair.values[0] not in ("qwen3", "qwen3_5")
        ),
    ],
)
def test_the_answer_and_its_kv_are_those_of_plain_decoding(
    family: str, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    sampling = SAMPLINGS[how]
    family, _, bits = family.partition(" ")
    kv_bits = int(bits or 0)
    folder = build_family(family, tmp_path / family, changes={"head_dim": 64} if kv_bits else {})
    kv = {"kv_bits": kv_bits}
    asked = prompt(70, seed=3)
    with Rig(folder, record=True, **kv) as rig:
        plain = rig.run(asked, 90, sampling=sampling).got
        then = asked + plain + prompt(20, seed=4)
        rig.recorder.logits.clear()
        plain_turn = rig.run(then, 5)
        plain_logits = rig.recorder.logits[0]
    guess_by(monkeypatch, half_right([asked + plain], 0))
    with Rig(folder, record=True, speculate=True, **kv) as rig:
        output = rig.run(asked, 90, sampling=sampling)
        assert output.got == plain
        shared = rig.scheduler.speculation
        assert shared is not None and 0 < shared.counts[None].accepted < shared.counts[None].drafted
        assert (output.sequence.stats.drafted, output.sequence.stats.accepted) == (
            shared.counts[None].drafted,
            shared.counts[None].accepted,
        )
        assert output.sequence.kv.length <= len(output.sequence.tokens)
        assert rig.scheduler.counts.decoded[None] == len(plain)
        rig.recorder.logits.clear()
        turn = rig.run(then, 5)
        assert (turn.hot, turn.got) == (plain_turn.hot, plain_turn.got)
        (tokens, logits), (plain_tokens, expected) = rig.recorder.logits[0], plain_logits
        assert tokens == plain_tokens
        assert abs(logits - expected).max() < LOOSE.get(family, 0.05 if kv_bits else 1e-4)


def test_an_answer_ends_where_it_would_although_guesses_went_on(model: Path, monkeypatch):
    asked = prompt(40, seed=1)
    with Rig(model) as rig:
        plain = rig.run(asked, 60).got
    end = plain[25]
    expected = plain[: plain.index(end)]
    guess_by(monkeypatch, lambda tokens: (asked + plain)[len(tokens) : len(tokens) + 9])
    with Rig(model, speculate=True) as rig:
        output = rig.run(asked, 60, eos=[end])
        assert (output.got, output.reason) == (expected, "stop")
        assert output.sequence.kv.length <= len(output.sequence.tokens)
        for most in range(1, 14):
            assert rig.run(asked, most).got == plain[:most]
            assert rig.run(asked, most).reason == "length"


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
def test_guesses_come_from_what_the_client_predicts(model: Path, monkeypatch, sampling: Sampling):
    asked = prompt(40, seed=1)
    with Rig(model) as rig:
        plain = rig.run(asked, 60, sampling=sampling).got
    check_always(monkeypatch)
    with Rig(model, speculate=True) as rig:
        without = rig.run(asked, 60, sampling=sampling)
        right = rig.run(asked, 60, sampling=sampling, prediction=[9, *plain, 9])
        wrong = rig.run(asked, 60, sampling=sampling, prediction=prompt(60, seed=2))
        assert without.got == right.got == wrong.got == plain
        assert right.sequence.stats.predicted_accepted > 40 > without.sequence.stats.accepted
        assert wrong.sequence.stats.predicted_accepted <= wrong.sequence.stats.predicted
        assert not without.sequence.stats.predicted
        assert right.sequence.tokens[:40] == asked and right.sequence.prompt.length == 40


LIKE_QWEN3 = ("qwen3_4bit", "llama", "phi3", "qwen3_vl", "qwen3_moe", "glm4_moe")
"""They have its caches."""
NOT_RECURRENT = [
    name for name, family in CONFIGS.items() if "ArraysCache" not in family.classes and name not in LIKE_QWEN3
]


def wait_for_tokens(output: Output, count: int) -> None:
    wait_until(lambda: len(output.got) >= count or output.reason)


def test_proposals_in_vain_come_further_and_further_apart():
    shared = Speculation()
    shared.times.record_step(4, 1e-4)
    intervals = [shared.propose_interval(4, vain, 2.5e-6) for vain in range(NEWEST + 9)]
    assert intervals[: NEWEST + 3] == [1] * (NEWEST + 1) + [2, 4]
    assert intervals == sorted(intervals) and intervals[-1] == ceil(0.1 / LOST_SHARE), "what they may take"
    for _ in range(9):
        shared.times.record_step(4, 0.01)
    assert shared.propose_interval(4, 99, 0.9 * LOST_SHARE / 400) == 1
    assert shared.propose_interval(5, 99, 0.9 * LOST_SHARE / 400) == 2


@pytest.mark.parametrize("propose_s", [0.0, 1.0])
def test_where_steps_are_short_drafts_are_proposed_rarely(
    propose_s: float, model: Path, monkeypatch: pytest.MonkeyPatch
):
    prompts = [prompt(30 + 9 * index, seed=index) for index in range(4)]
    with Rig(model) as rig:
        alone = [rig.run(tokens, 30 + 12 * index).got for index, tokens in enumerate(prompts)]
    wholes = [tokens + got for tokens, got in zip(prompts, alone, strict=True)]
    guesser = half_right(wholes, 3)
    guess_by(monkeypatch, lambda tokens: guesser(tokens) if len(tokens) % 50 > 40 else [])
    looks, steps = list[int](), list[int]()
    own, own_step = DecodeBatch._catch_up, DecodeBatch.step

    def step(self: DecodeBatch) -> Any:
        steps.append(len(self.rows))
        return own_step(self)

    def catch_up(self: DecodeBatch) -> None:
        own(self)
        looks.append(len(self.rows))
        for row, speculator in self._speculators.items():
            assert speculator.tokens.tolist() == row.tokens, "the tokens of all steps, in their order"

    interval = partialmethod(Speculation.propose_interval, propose_s=propose_s)
    monkeypatch.setattr(Speculation, "propose_interval", interval)
    monkeypatch.setattr(DecodeBatch, "step", step)
    monkeypatch.setattr(DecodeBatch, "_catch_up", catch_up)
    with Rig(model, speculate=True) as rig:
        running = [rig.start(tokens, 30 + 12 * index) for index, tokens in enumerate(prompts)]
        assert [output.tokens() for output in running] == alone
        shared = rig.scheduler.speculation
        assert shared is not None and shared.counts[None].accepted > 0
        assert len(looks) < 0.8 * len(steps) if propose_s else len(looks) == len(steps)
        rig.settle()


@pytest.mark.parametrize(
    ("family", "kv_bits"),
    [
        ("qwen3", 8),
        *(pytest.param(name, 0, marks=pytest.mark.slow) for name in NOT_RECURRENT),
    ],
)
def test_each_row_of_a_batch_takes_its_own_number_of_guesses(
    family: str, kv_bits: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Rows of unequal length come and go; answers, logprobs and KV are those of rows alone."""
    folder = build_family(family, tmp_path / family, changes={"head_dim": 64} if kv_bits else {})
    prompts = [prompt(length, seed=length) for length in (30, 150, 90, 64)]
    asks: list[dict] = [
        {"n": 70},
        {"n": 36, "sampling": SAMPLED},
        {"n": 50, "sampling": PENALISED},
        {"n": 40, "top_logprobs": 2},
    ]
    kv = {"kv_bits": kv_bits}

    def next_turns(rig: Rig, outputs: list[Output]) -> list[tuple]:
        turns = [rig.run(out.sequence.tokens + prompt(20, seed=4), 5) for out in outputs]
        return [(turn.hot, turn.got) for turn in turns]

    with Rig(folder, **kv) as rig:
        alone = [rig.run(tokens, **ask) for tokens, ask in zip(prompts, asks, strict=True)]
        turns = next_turns(rig, alone)
    assert all(output.likelihoods[0] for output in alone[3:])
    guess_by(monkeypatch, half_right([output.sequence.tokens for output in alone[:3]], 0))
    with Rig(folder, speculate=True, **kv) as rig:
        running = []
        for tokens, ask in zip(prompts, asks, strict=True):
            running.append(rig.start(tokens, **ask))
            wait_for_tokens(running[-1], 8)
        for output, plain in zip(running, alone, strict=True):
            assert output.tokens() == plain.got
            for one, other in zip(output.likelihoods, plain.likelihoods, strict=True):
                assert (one is None) == (other is None)
                assert one is None or one.logprob == pytest.approx(
                    other.logprob, abs=LOOSE.get(family, 0.05 if kv_bits else 1e-4)
                )
        shared = rig.scheduler.speculation
        assert shared is not None and 0 < shared.counts[None].accepted < shared.counts[None].drafted
        assert running[0].sequence.stats.accepted and not running[3].sequence.stats.drafted
        rig.settle()
        assert next_turns(rig, running) == turns


def test_a_recurrent_state_is_put_back_as_its_row_of_the_table_says(monkeypatch: pytest.MonkeyPatch):
    class Sum:
        total, tokens = 1, 0

    def restore(cache: Sum, arrays: Mapping[str, int], tokens: int) -> None:
        cache.total, cache.tokens = arrays["total"], tokens

    kinds = mlx_adapter.cache.kinds
    kind = kinds.CacheKind("state", lambda cache: {"total": cache.total}, restore, Sum, None)
    monkeypatch.setitem(kinds.KINDS, Sum, kind)
    cache = [Sum(), kinds.ArraysCache(1)]
    cache[1][0] = mx.zeros(1)
    before = mlx_adapter.recurrent_states(cache)
    cache[0].total, cache[1][0] = 2, mx.ones(1)
    mlx_adapter.put_back(before, 7)
    assert (cache[0].total, cache[0].tokens, cache[1][0].item()) == (1, 7, 0)


def test_recurrent_states_beside_windows_are_never_guessed_on():
    both = [mlx_adapter.cache.kinds.ArraysCache(2), mlx_adapter.cache.kinds.RotatingKVCache(8)]
    assert all(mlx_adapter.can_take_back([one], 1) for one in both)
    assert not mlx_adapter.can_take_back(both, 1)
    assert [mlx_adapter.can_take_back(mlx_adapter.merge([[one], [one]]), 2) for one in both] == [False, True]


# --------------------------------------------------------------------------- what is guessed


def proposed(tokens: list[int], most: int = 4) -> tuple[list[int], int]:
    proposer = NgramProposer(tokens)
    return proposer.following(most), proposer.match()


def test_what_followed_the_newest_tokens_is_proposed():
    assert proposed([1, 2, 3, 4, 5, 6, 9, 2, 3, 4]) == ([5, 6, 9, 2], 3)
    assert proposed([1, 2, 3, 4]) == ([], 0)
    assert proposed([7, 2, 3, 8, 1, 2, 3]) == ([], 0), "two tokens are no match"
    longer = [1, 2, 3, 4, 5, 0, 9, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5]
    assert proposed(longer, 1) == ([0], 5), "the longest match counts, before a more recent one"


def test_what_is_predicted_stands_before_the_tokens():
    proposer = NgramProposer([1, 2, 3], prediction=[0, 4, 5, 6, 7, 8])
    assert proposer.tokens.tolist() == [1, 2, 3] and not proposer.match()
    for token in (4, 5, 6):
        proposer.add_tokens([token])
    assert proposer.following(2) == [7, 8] and proposer.is_predicted
    assert proposer.tokens.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_loop_is_proposed_to_go_on():
    assert proposed([5, 1, 2, 1, 2, 1, 2], 5) == ([1, 2, 1, 2, 1], 4)


@given(
    st.lists(st.integers(0, 3), max_size=80),
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(4, 16),
)
def test_a_proposal_is_what_followed_the_longest_match(
    begin: list[int], rest: list[int], prediction: list[int], most: int, at_once: int, longest: int
):
    proposer = NgramProposer(begin, prediction, longest)
    for at in range(0, len(rest), at_once):
        proposer.add_tokens(rest[at : at + at_once])
    tokens = prediction + begin + rest
    best, match = 0, 0
    for end in range(len(tokens) - 1):
        length = 0
        while length <= end and length < longest and tokens[end - length] == tokens[-1 - length]:
            length += 1
        is_late = end + 1 >= len(prediction) and best + 1 < len(prediction)
        if length >= max(3, match) and not (length == match and is_late):
            best, match = end, length
    guesses = proposer.following(most)
    assert proposer.match() == match
    if match:
        following = tokens[best + 1 : best + 1 + most]
        assert guesses == (following * most)[:most]


# --------------------------------------------------------------------------- whether it pays


def measured(times: dict[int, float], rows: int = 1) -> Speculation:
    """What passes take, by their guesses."""
    shared = Speculation(credit=MOST_CREDIT)
    shared.times.record_step(rows, times[0])
    for width, seconds in list(times.items())[1:]:
        for _ in range(40):
            shared.times.record_verify(rows, width, seconds)
    return shared


LOOP = [1, 2, 3, 4, 5, 6, 7, 8] * 4


def test_guesses_that_hold_are_made_and_those_that_fail_are_not():
    shared, row = measured({0: 1.0, 2: 1.2, 4: 1.3, 7: 1.5, 15: 2.0}), RowSpeculator(LOOP)
    assert shared.best_width([row.offer()])
    for other in range(100, 112):
        row.add_tokens([other], checked=4)
        row.add_tokens(LOOP)  # The match is there again, and fails again.
    assert not shared.best_width([row.offer()])
    for _ in range(40):  # They would hold now, as plain steps show.
        row.add_tokens([row.draft[0]])
    assert shared.best_width([row.offer()])


def test_a_predicted_answer_does_not_wait_for_what_others_lost():
    shared = measured({0: 1.0, 2: 1.2, 4: 1.3, 7: 1.5, 15: 2.0})
    shared.credit = -5.0
    row, plain = RowSpeculator([9, 4, 5, 6], prediction=[*range(40)]), RowSpeculator(LOOP)
    assert plain.draft and not shared.best_width([plain.offer()])
    assert row.draft[:2] == [7, 8] and shared.best_width([row.offer()])
    row.won -= 4  # It was wrong.
    assert not shared.best_width([row.offer()])


def sure_row() -> RowSpeculator:
    """One whose guesses held so far."""
    row = RowSpeculator(LOOP)
    for _ in range(20):
        row.add_tokens([row.draft[0]])
    return row


def test_passes_that_cost_as_much_as_their_tokens_are_not_made():
    offer = sure_row().offer()
    assert not measured({0: 1.0, 2: 3.0, 4: 5.0, 7: 9.0, 15: 16.0}).best_width([offer])
    assert not Speculation(credit=MOST_CREDIT).best_width([offer]), "a plain step is measured first"
    shared = measured({0: 1.0})
    assert not shared.best_width([offer]), "nor is it known what more tokens cost"
    shared.times.record_prompt(64, 7.3)
    assert shared.best_width([offer]) == 1
    assert shared.times.cost(1, 2) == pytest.approx(1.2) and shared.times.cost(1, 15) == pytest.approx(2.5)
    assert shared.times.record_verify(1, 2, 9.0) == pytest.approx(9.0 - 2.4)
    assert shared.times.cost(1, 2) == pytest.approx(2.4), "the first may have loaded kernels"
    assert shared.times.cost(1, 15) == pytest.approx(3.7), "and wider ones take no less"


def test_on_a_gpu_the_second_pass_of_a_kind_tells():
    times = PassTimes(first_tells=False)
    times.record_step(1, 1.0)
    times.record_prompt(64, 7.3)
    assert times.record_verify(1, 2, 9.0) == pytest.approx(9.0 - 2.4)
    assert times.cost(1, 2) == pytest.approx(1.2), "the first may have loaded kernels"
    assert times.record_verify(1, 2, 9.0) == 0.0
    assert times.cost(1, 2) == pytest.approx(2.4), "twice what was expected at most"
    assert times.record_verify(1, 2, 1.5) == 0.0
    assert times.cost(1, 2) == pytest.approx(1.5), "the median"
    assert times.record_verify(1, 4, 2.0) == 0.0
    assert times.cost(1, 4) == pytest.approx(2.0), "it was not twice what was expected"


def test_a_pass_is_made_where_the_credit_covers_its_loss():
    shared, offer = measured({0: 1.0, 2: 2.2, 4: 2.4, 7: 4.0, 15: 5.0}), Offer(0.97, 15)
    widths: list[int] = []
    for shared.credit in (0.0, 0.1, 0.3, 0.6, 2.2, 3.1):  # Of 1.97 tokens a pass is sure.
        widths.append(shared.best_width([offer]))
    assert widths == [0, 0, 2, 4, 4, 15]
    shared.credit = 0.0
    shared.settle(1, 1, 1.2)
    assert shared.credit == pytest.approx(-0.2)
    for _ in range(40):
        shared.record_step(1, 1.0)
    assert shared.credit == pytest.approx(-0.2 + 40 * LOST_SHARE)
    assert shared.settle(1, 16, 3.0) == pytest.approx(3.0)
    assert shared.credit == MOST_CREDIT
    shared.credit = -1.0
    assert not shared.best_width([offer._replace(won=0.1)])
    assert shared.best_width([offer._replace(won=0.6)]) == 4


def test_a_step_begun_behind_a_pass_costs_a_step_at_most():
    shared = measured({0: 1.0})
    assert shared.settle(4, 0, 0.7) == pytest.approx(0.7)
    assert shared.settle(4, 0, 9.0) == 1.0


PASSES = {0: 1.0, 2: 1.5, 4: 2.0, 7: 2.7, 15: 6.0}
"""Seconds of a pass of four rows, by their guesses."""
SURE, UNSURE, NONE = Offer(0.99, 15), Offer(0.02, 15), Offer(0.5, 0)


def test_a_batch_guesses_where_its_rows_together_gain():
    shared = measured(PASSES, rows=4)
    assert shared.best_width([SURE] * 4) == 7
    assert shared.best_width([SURE] * 3 + [UNSURE._replace(won=9.0)]) == 7
    assert not shared.best_width([SURE] + [UNSURE._replace(won=9.0)] * 3), "no faster in sum"


@pytest.mark.parametrize(
    ("passes", "packed"), [(PASSES, 0), ({0: 1.0, 3 / 4: 1.5, 15 / 4: 2.0, 28 / 4: 2.7, 60 / 4: 6.0}, 128)]
)
def test_a_row_waits_for_no_other_rows_guesses(passes: dict[float, float], packed: int):
    """Steps of one row take as long as those of four."""
    shared = measured(passes, rows=4)
    for last in (NONE, UNSURE, NONE._replace(won=0.4), NONE._replace(won=-9.0)):
        assert not shared.best_width([*[SURE] * 3, last], packed)
    for last in (SURE, SURE._replace(won=-9.0), NONE._replace(won=2.0)):
        assert shared.best_width([*[SURE] * 3, last], packed), "its own guesses pay, or have paid"


@pytest.mark.parametrize(("alone", "width"), [(1.0, 0), (0.95, 0), (0.5, 7)])
def test_a_row_waits_for_others_where_its_steps_take_less_time_without_them(alone: float, width: int):
    shared = measured(PASSES, rows=4)
    shared.times.record_step(1, alone)
    assert shared.best_width([SURE] * 3 + [NONE]) == width
    assert shared.best_width([SURE] * 4) == 7


def test_short_ends_of_prompts_hide_no_long_one():
    """Behind hits a prompt's end is shorter than a batch has rows: 16 rows were never guessed for."""
    shared, offer = measured({0: 0.23}, rows=16), sure_row().offer()
    shared.times.record_prompt(64, 0.444)
    for tokens in range(1, 14):
        shared.times.record_prompt(tokens, 0.28)
    assert shared.best_width([offer] * 16) == 1
    assert shared.times.cost(16, 1) == pytest.approx(1 + 16 * (0.444 - 0.23) / 48 / 0.23)
    many = measured({0: 1.0}, rows=100)
    many.times.record_prompt(64, 0.32)
    assert many.times.cost(100, 1) == pytest.approx(1.5)


def test_what_a_batch_may_cost_follows_from_what_fewer_rows_took():
    shared = measured({0: 1.0, 2: 3.0, 4: 5.0})
    shared.times.record_prompt(64, 1.0)  # As if more tokens took no time.
    shared.times.record_step(2, 1.5)
    assert shared.times.cost(2, 2) == pytest.approx(5.0 / 1.5, abs=0.02), (
        "five tokens of one row took as long"
    )
    assert shared.times.plain(4) == 1.5, "as many as nearly"
    alone = measured({0: 1.0}, rows=8)
    assert alone.times.cost(1, 2) == 3.0, "before a step of one row was made"


def test_steps_behind_passes_show_what_a_step_takes_at_most():
    times = PassTimes()
    times.record_step(16, 3.1, steady=False)
    assert not times.plain(16) and times.cost(16, 4) == float("inf"), "nothing is known yet"
    for _ in range(9):
        times.record_step(16, 2.0)
    for _ in range(99):
        times.record_step(16, 3.1, steady=False)
    assert times.plain(16) == 2.0
    for _ in range(9):
        times.record_step(16, 1.5, steady=False)
    assert times.plain(16) == 1.5


def test_steps_behind_a_pass_are_charged_to_it(model: Path, monkeypatch: pytest.MonkeyPatch):
    """Up to the first steady one."""
    tokens, now = prompt(40), [0.0]
    with Rig(model) as rig:
        whole = tokens + rig.run(tokens, 60).got
    at = {len(tokens) + more for more in (12, 13, 20, 21, 40, 41)}
    guess_by(monkeypatch, lambda before: whole[len(before) :][:3] if len(before) in at else [])
    monkeypatch.setattr(decode_batch, "clock", lambda: now[0])
    charged: list[list[float]] = []
    own, behind = DecodeBatch.end_turn, [99]

    def end_turn(batch: DecodeBatch) -> None:
        turn = batch._turn
        behind[0] = 0 if turn is not None and turn.guesses else behind[0] + 1
        charged.extend([[]] if not behind[0] else [])
        # Of steps behind a pass, the second and the third take half a step longer.
        now[0] += 1.5 if behind[0] in (2, 3) else 1.0
        before = [speculator.won for speculator in batch._speculators.values()]
        own(batch)
        after = [speculator.won for speculator in batch._speculators.values()]
        if charged:
            charged[-1] += [a - b for a, b in zip(after, before, strict=True)]

    monkeypatch.setattr(DecodeBatch, "end_turn", end_turn)
    with Rig(model, speculate=True) as rig:
        assert tokens + rig.run(tokens, 60).got == whole
        rig.settle()
    assert len(charged) == 3
    for won in charged:  # The pass, the step begun behind it, those behind that.
        assert won[0] > 0 and won[1] == pytest.approx(-1.0)
        assert won[2:4] == pytest.approx([-0.5, -0.5]) and won[4:] == pytest.approx([0.0] * len(won[4:]))


def test_before_a_plain_step_a_pass_tells_no_cost():
    times = PassTimes()
    times.record_step(1, 1.0)
    times.record_step(16, 2.5)
    assert times.plain(6) == pytest.approx(1.5)
    thought = times.cost(6, 4)
    assert times.record_verify(6, 4, 99.0) == pytest.approx(99.0 - 2 * thought * 1.5)
    assert times.cost(6, 4) == thought
    times.record_step(6, 1.2)
    times.record_verify(6, 4, 2.4)
    assert times.cost(6, 4) == 2.0


def test_what_failed_for_one_request_is_not_begun_with_by_the_next():
    shared = measured({0: 1.0, 2: 1.5})
    for _ in range(30):
        row = RowSpeculator(LOOP, shared=shared.rates)
        row.add_tokens([99], checked=2)
    assert shared.best_width([Offer(0.5, 15)]) and not shared.best_width(
        [RowSpeculator(LOOP, shared=shared.rates).offer()]
    )
    assert RowSpeculator(LOOP).offer().rate == 0.5


def test_no_more_is_guessed_than_may_be_generated():
    row = RowSpeculator(LOOP)
    assert [row.offer(most).guesses for most in (-1, 0, 1, 2, 3, 99)] == [0, 0, 1, 2, 3, 15]


def test_one_slow_pass_does_not_end_it():
    times = PassTimes()
    for seconds in (60.0, 1.0, 1.0, 60.0, 1.0):
        times.record_step(1, seconds)
    times.record_prompt(64, 1.0)
    for seconds in (60.0, 1.3, 1.3, 1.3):
        times.record_verify(1, 4, seconds)
    assert times.plain(1) == 1.0 and times.cost(1, 4) < 1.6


def test_what_was_too_slow_is_tried_again():
    shared, offer = measured({0: 1.0, 2: 3.0, 4: 5.0, 7: 9.0, 15: 60.0}), sure_row().offer()
    assert not shared.best_width([offer])
    for _ in range(5000):
        shared.record_step(1, 1.0)
    assert shared.best_width([offer])


def test_answers_that_must_repeat_do_not_depend_on_what_is_measured(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    """`--seed` promises the same answers; a request without a seed draws from the stream of all."""
    guess_by(monkeypatch, lambda tokens: [1, 2, 3])
    with Rig(model, speculate=True) as rig:
        shared = rig.scheduler.speculation
        assert shared is not None
        shared.repeatable = True
        rig.run(prompt(40, seed=1), 20, sampling=Sampling(temperature=0.9))
        assert not shared.counts[None].drafts
        rig.run(prompt(40, seed=1), 20, sampling=SAMPLED)
        assert shared.counts[None].drafts


@pytest.mark.parametrize("speculate", [False, True])
def test_penalties_of_rows_whose_prompts_end_together_know_each_guess(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speculate: bool
):
    sampling = Sampling(temperature=0.0, frequency_penalty=2.0, logit_bias={7: 9.0})
    shared = prompt(2 * BLOCK, seed=1)
    asked = [shared + prompt(9, seed=2), shared + prompt(11, seed=3)]
    with Rig(model) as rig:
        plain = [rig.run(one, 20, sampling=sampling).got for one in asked]
    whole = [one + answer for one, answer in zip(asked, plain, strict=True)]
    guess_by(
        monkeypatch,
        lambda tokens: next(
            (each[len(tokens) : len(tokens) + 4] for each in whole if each[: len(tokens)] == tokens), []
        ),
    )
    with Rig(model, speculate=speculate) as rig:
        rig.run([*shared, 5], 1)
        together: list[int] = []
        add_prompts = DecodeBatch.add_prompts

        def counted(self: DecodeBatch, sequences: Any, cache: Any) -> None:
            together.append(len(sequences))
            add_prompts(self, sequences, cache)

        monkeypatch.setattr(DecodeBatch, "add_prompts", counted)
        outputs: list[Output] = []
        rig.on_engine(lambda: outputs.extend(rig.start(one, 20, sampling=sampling) for one in asked))
        assert [output.tokens() for output in outputs] == plain
    assert together == [2]


@pytest.mark.parametrize("speculate", [False, True])
def test_the_kv_of_rows_that_left_is_let_go_once_a_step_behind_them_was_read(
    speculate: bool, model: Path, monkeypatch: pytest.MonkeyPatch
):
    """The step on its way as they leave still writes there."""
    keep, read = mlx_adapter.keep_rows, DecodeBatch._read
    left, freed, waited = list[object](), list[object](), set[object]()

    def keep_rows(cache: Any, rows: Any) -> list[Any]:
        left.append(object())
        return [*keep(cache, rows), left[-1]]

    def has_waited(self: DecodeBatch, drawn: list[Any]) -> list[Any]:
        waited.update(self._left if drawn else ())
        return drawn

    def let_go(tails: list[Any]) -> None:
        assert waited.issuperset(tails)
        freed.extend(tails)

    monkeypatch.setattr(mlx_adapter, "keep_rows", keep_rows)
    monkeypatch.setattr(mlx_adapter, "let_go", let_go)
    monkeypatch.setattr(DecodeBatch, "_read", lambda self, *given: has_waited(self, read(self, *given)))
    if speculate:
        guess_by(monkeypatch, lambda tokens: tokens[-40:-33])
        monkeypatch.setattr(mlx_adapter, "let_go", freed.extend)  # Behind a pass nothing is on its way.
    with Rig(model, speculate=speculate) as rig:
        outputs = [rig.start(prompt(30 + i, seed=i), 8 + 5 * i) for i in range(6)]
        for output in outputs:
            output.tokens(60)
    assert left and len(left) - len(freed) <= 1, "but of the last that left"
