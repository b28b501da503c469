"""Speculative decoding: guesses of every kind leave the tokens, the KV and the counts of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from cold_run import prompt
from daemon import wait_until
from families import build_family
from hypothesis import given
from hypothesis import strategies as st
from rig import GREEDY, Rig

from omlxd.chat import Sampling
from omlxd.engine.schedule.speculation import (
    LONGEST_MATCH,
    MIN_MATCH,
    NgramProposer,
    PassTimes,
    RowSpeculator,
    Speculation,
)

Guesser = Callable[[list[int], int], list[int]]
"""(tokens so far, most) → guesses."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family("qwen3", tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture
def guess_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Guesser], None]:
    """Every pass checks the guesses of this function, whatever they cost."""

    def use(guesser: Guesser) -> None:
        def guesses(self: RowSpeculator, most: int) -> list[int]:
            count = self._proposer._count
            return guesser(self._proposer._ids[:count].tolist(), most)[: max(most, 0)]

        monkeypatch.setattr(RowSpeculator, "guesses", guesses)
        monkeypatch.setattr(RowSpeculator, "promising", True)

    return use


def half_right(right: list[int], seed: int) -> Guesser:
    """Guesses of any number, the true continuation up to some place and something else behind."""
    rng = random.Random(seed)

    def guesser(tokens: list[int], most: int) -> list[int]:
        following = right[len(tokens) : len(tokens) + rng.randrange(0, 12)]
        cut = rng.randrange(0, len(following) + 1)
        return following[:cut] + [rng.randrange(500) for _ in following[cut:]]

    return guesser


SAMPLED = Sampling(temperature=0.9, top_p=0.9, top_k=20, seed=5)
PENALISED = Sampling(temperature=0.9, seed=3, repetition_penalty=1.3, frequency_penalty=0.7)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "seeded", "penalised"])
@pytest.mark.parametrize(("family", "kv_bits"), [("qwen3", 0), ("qwen3", 8), ("deepseek_v3", 0)])
def test_the_answer_and_its_kv_are_those_of_plain_decoding(
    family: str, kv_bits: int, sampling: Sampling, guess_by, tmp_path: Path
):
    folder = build_family(family, tmp_path / family, changes={"head_dim": 64} if kv_bits else {})
    kv = {"kv_bits": kv_bits}
    asked = prompt(70, seed=3)
    with Rig(folder, record=True, **kv) as rig:
        plain = rig.run(asked, 150, sampling=sampling).got
        then = asked + plain + prompt(20, seed=4)
        rig.recorder.logits.clear()
        plain_turn = rig.run(then, 5)
        plain_logits = rig.recorder.logits[0]
    for seed in range(3):
        guess_by(half_right(asked + plain, seed))
        with Rig(folder, record=True, speculate=True, **kv) as rig:
            output = rig.run(asked, 150, sampling=sampling)
            assert output.got == plain
            shared = rig.scheduler.speculation
            assert shared is not None and 0 < shared.accepted < shared.drafted
            assert (output.sequence.drafted, output.sequence.accepted) == (shared.drafted, shared.accepted)
            assert output.sequence.kv_length <= len(output.sequence.tokens)
            assert rig.scheduler.decoded_tokens == len(plain)
            rig.recorder.logits.clear()
            turn = rig.run(then, 5)
            assert (turn.hot, turn.got) == (plain_turn.hot, plain_turn.got)
            (tokens, logits), (plain_tokens, expected) = rig.recorder.logits[0], plain_logits
            assert tokens == plain_tokens
            assert abs(logits - expected).max() < (0.05 if kv_bits else 1e-4)


def test_an_answer_ends_where_it_would_although_guesses_went_on(model: Path, guess_by):
    asked = prompt(40, seed=1)
    with Rig(model) as rig:
        plain = rig.run(asked, 60).got
    end = plain[25]
    expected = plain[: plain.index(end)]
    guess_by(lambda tokens, most: (asked + plain)[len(tokens) : len(tokens) + 9])
    with Rig(model, speculate=True) as rig:
        output = rig.run(asked, 60, eos=[end])
        assert (output.got, output.reason) == (expected, "stop")
        assert output.sequence.kv_length <= len(output.sequence.tokens)
        for most in range(1, 14):
            assert rig.run(asked, most).got == plain[:most]
            assert rig.run(asked, most).reason == "length"


def test_rows_that_join_end_the_guessing_and_leave_the_same_tokens(model: Path, guess_by):
    first, second = prompt(50, seed=1), prompt(90, seed=2)
    with Rig(model, reuse=False) as rig:
        alone = [rig.run(first, 120).got, rig.run(second, 30).got]
    guess_by(half_right(first + alone[0], 1))
    with Rig(model, speculate=True, reuse=False) as rig:
        one = rig.start(first, 120)
        wait_until(lambda: len(one.got) > 10)
        two = rig.start(second, 30)
        assert [one.tokens(), two.tokens()] == alone


@pytest.mark.parametrize("family", ["gemma3_text", "mamba2"])
def test_state_that_can_not_be_taken_back_is_never_guessed_on(family: str, tmp_path: Path, guess_by):
    guess_by(lambda tokens, most: [1, 2, 3])
    folder = build_family(family, tmp_path / family)
    with Rig(folder, speculate=True) as rig:
        rig.run(prompt(40, seed=1), 20)
        assert rig.scheduler.speculation is not None and not rig.scheduler.speculation.drafts


# --------------------------------------------------------------------------- what is guessed


def proposed(tokens: list[int], most: int = 4) -> tuple[list[int], int]:
    return NgramProposer(tokens).propose(most)


def test_what_followed_the_newest_tokens_is_proposed():
    assert proposed([1, 2, 3, 4, 5, 6, 9, 2, 3, 4]) == ([5, 6, 9, 2], 3)
    assert proposed([1, 2, 3, 4]) == ([], 0)
    assert proposed([7, 2, 3, 8, 1, 2, 3]) == ([], 0), "two tokens are no match"
    longer = [1, 2, 3, 4, 5, 0, 9, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5]
    assert proposed(longer, 1) == ([0], 5), "the longest match counts, before a more recent one"


def test_a_loop_is_proposed_to_go_on():
    assert proposed([5, 1, 2, 1, 2, 1, 2], 5) == ([1, 2, 1, 2, 1], 4)


@given(st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(0, 3), max_size=40), st.integers(1, 9))
def test_a_proposal_is_what_followed_the_longest_match(begin: list[int], rest: list[int], most: int):
    proposer = NgramProposer(begin)
    for token in rest:
        proposer.add_token(token)
    tokens = begin + rest
    best, match = 0, 0
    for end in range(len(tokens) - 1):
        length = 0
        while length <= end and length < LONGEST_MATCH and tokens[end - length] == tokens[-1 - length]:
            length += 1
        if length >= max(MIN_MATCH, match):
            best, match = end, length
    guesses, found = proposer.propose(most)
    assert found == match
    if match:
        following = tokens[best + 1 : best + 1 + most]
        assert guesses == (following * most)[:most]


# --------------------------------------------------------------------------- whether it pays


def speculator(times: dict[int, float], tokens: list[int]) -> RowSpeculator:
    shared = Speculation()
    for width, seconds in times.items():
        shared.times.record_pass(width, 1000.0)  # The first loads kernels.
        shared.times.record_pass(width, seconds)
    return RowSpeculator(shared, tokens)


LOOP = [1, 2, 3, 4, 5, 6, 7, 8] * 4


def test_guesses_that_hold_are_made_and_those_that_fail_are_not():
    row = speculator({0: 1.0, 2: 1.2, 4: 1.3, 8: 1.5, 15: 2.0}, LOOP)
    assert row.guesses(15)
    for other in range(100, 112):
        row.record_pass(4, [other], 1.3)
        row.add_tokens(LOOP)  # The match is there again, and fails again.
    assert not row.promising and not row.guesses(15)
    for _ in range(40):  # They would hold now, as plain steps show.
        row.add_tokens([row._guess[0]])
    assert row.guesses(15)


def test_passes_that_cost_as_much_as_their_tokens_are_not_made():
    row = speculator({0: 1.0, 2: 3.0, 4: 5.0, 8: 9.0, 15: 16.0}, LOOP)
    for _ in range(20):
        row.add_tokens([row._guess[0]])
    assert not row.guesses(15)
    assert speculator({0: 1.0, 2: 1.1}, LOOP).guesses(15)


def test_no_more_is_guessed_than_may_be_generated():
    row = speculator({0: 1.0}, LOOP)
    assert [len(row.guesses(most)) for most in (-1, 0, 1, 2, 3)] == [0, 0, 0, 2, 2]


def test_one_slow_pass_does_not_end_it():
    times = PassTimes()
    for seconds in (60.0, 1.0, 1.0, 60.0):
        times.record_pass(4, seconds)
    for _ in range(2):
        times.record_pass(0, 1.0)
    assert times.cost(4) <= 2.0 and times.cost(2) == 1.0 and times.cost(8) == times.cost(4)


def test_what_was_too_slow_is_tried_again():
    row = speculator({0: 1.0, 2: 3.0, 4: 5.0, 8: 9.0, 15: 60.0}, LOOP)
    for _ in range(20):
        row.add_tokens([row._guess[0]])
    assert not row.guesses(15)
    for _ in range(5000):
        row.shared.times.record_pass(0, 1.0)
    assert row.guesses(15)


def test_answers_that_must_repeat_do_not_depend_on_what_is_measured(model: Path, guess_by):
    """`--seed` promises the same answers; a request without a seed draws from the stream of all."""
    guess_by(lambda tokens, most: [1, 2, 3])
    with Rig(model, speculate=True) as rig:
        shared = rig.scheduler.speculation
        assert shared is not None
        shared.repeatable = True
        rig.run(prompt(40, seed=1), 20, sampling=Sampling(temperature=0.9))
        assert not shared.drafts
        rig.run(prompt(40, seed=1), 20, sampling=SAMPLED)
        assert shared.drafts
