"""Guesses never cost more than they give, whatever passes cost and whichever guesses hold."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest
from fast_or_slow import rest_slow
from hypothesis import given, settings
from hypothesis import strategies as st

from omlxd.engine.speculate.controller import LOST_SHARE, DraftCounts, Speculation
from omlxd.engine.speculate.row import RowSpeculator
from omlxd.engine.speculate.verify import WIDTHS

Table = Callable[[int], float]
"""Tokens of a pass, of all its rows → seconds."""

MACHINES: dict[str, Table] = {
    "each token as long as the first": lambda tokens: 0.02 + 0.072 * tokens,
    "OpenBLAS": lambda tokens: 0.075 + 0.0044 * tokens,
    "H100": lambda tokens: 0.011 if tokens == 1 else 0.015 + 0.00005 * tokens,
}
LONGER = 2
"""Plain steps that the guesses of a machine whose prompts tell the truth may cost, whatever was thought."""


class Row(RowSpeculator):
    """One that always has an idea."""

    def _propose(self) -> None:
        self.draft, self._kind = list(range(WIDTHS[-1])), "short"


def settle(shared: Speculation, rows: Seq[RowSpeculator], drawn: list[int], width: int, took: float) -> None:
    """What DecodeBatch does once a turn has given each row so many tokens."""
    if not width:
        shared.record_step(len(rows), took)
        return
    spared = shared.times.record_verify(len(rows), width, took)
    cost = shared.settle(len(rows), sum(drawn), took - spared)
    for row, tokens in zip(rows, drawn, strict=True):
        row.won += tokens - cost


class Engine:
    """Decodes rows as DecodeBatch does, in simulated seconds.

    holds   does the guess at this place hold? It is asked whether a pass checks it
    prompt  seconds of a prompt's token
    """

    def __init__(self, table: Table, rows: int, holds: Callable[[bool], bool], prompt: float):
        self.table, self.count, self._holds = table, rows, holds
        self.shared = Speculation()
        self.shared.times.record_prompt(65, table(1) + 64 * prompt)
        self.rows = [Row([1, 2, 3], shared=self.shared.rates) for _ in range(rows)]
        self.seconds, self.tokens, self.passes = 0.0, 0, 0
        self.firsts: dict[int, float] = {}

    def run(self, tokens: int) -> None:
        """So many of each row, or some more. Every 100 another request begins."""
        shared, rows, end = self.shared, self.count, self.tokens + tokens * self.count
        while self.tokens < end:
            width = shared.best_width([row.offer() for row in self.rows])
            took, drawn = self.table(rows * (width + 1)), list[int]()
            for row in self.rows:
                held = 0
                while held < max(width, 1) and self._holds(width > 0):
                    held += 1
                new = [*row.draft[:held], -1][: width + 1]
                row.add_tokens(new, width)
                drawn.append(len(new))
            if width:
                self.passes += 1
                self.firsts.setdefault(width, took / self.table(rows))
            settle(shared, self.rows, drawn, width, took)
            self.seconds, self.tokens = self.seconds + took, self.tokens + sum(drawn)
            self.rows = [
                row if len(row.tokens) < 100 else Row([1, 2, 3], shared=shared.rates) for row in self.rows
            ]

    @property
    def lost(self) -> float:
        """Plain steps that it took longer than without guesses, and without the share that it may lose."""
        step = self.table(self.count)
        return self.seconds / step - (1 + LOST_SHARE) * self.tokens / self.count


def texts(seed: int) -> dict[str, Callable[[bool], bool]]:
    rng, turn = random.Random(seed), [0]

    def turns(checked: bool) -> bool:
        turn[0] += 1
        return turn[0] // 50 % 2 == 0

    return {
        "never": lambda checked: False,
        "seldom": lambda checked: rng.random() < 0.3,
        "half": lambda checked: rng.random() < 0.5,
        "often": lambda checked: rng.random() < 0.85,
        "always": lambda checked: True,
        "in turns": turns,
        "only where nobody checks": lambda checked: not checked,
        "only one more": lambda checked: rng.random() < (0.4 if checked else 1.0),
    }


class Silent(RowSpeculator):
    """One that has no idea."""

    def _propose(self) -> None:
        self.draft, self._kind = [], "short"


TOGETHER: dict[str, Table] = {
    "a step of one row takes as long": lambda tokens: 1.0 if tokens <= 16 else 2.1 if tokens <= 128 else 3.0,
    "OpenBLAS": MACHINES["OpenBLAS"],
    "tokens cost nothing": lambda tokens: 1.0,
}


def time_together(
    shared: Speculation, table: Table, rng: random.Random, rate: float, silent: int, longer: int
) -> float:
    """Seconds until the last of `silent` rows that repeat nothing has 200 tokens. The others, up to sixteen,
    end with as many and `longer` more."""
    rows: list[RowSpeculator] = [Silent([1, 2, 3]) for _ in range(silent)]
    rows += [Row([1, 2, 3], shared=shared.rates) for _ in range(16 - silent)]
    seconds = 0.0
    while any(isinstance(row, Silent) for row in rows):
        width = shared.best_width([row.offer(200 + longer - len(row.tokens)) for row in rows])
        took, drawn = table(len(rows) * (width + 1)), list[int]()
        for row in rows:
            held = 0
            while held < min(max(width, 1), len(row.draft)) and rng.random() < rate:
                held += 1
            row.add_tokens([*row.draft[:held], -1][: width + 1], width if row.draft else 0)
            drawn.append(min(held, width) + 1)
        settle(shared, rows, drawn, width, took)
        seconds += took
        rows = [row for row in rows if len(row.tokens) < 203 + (0 if isinstance(row, Silent) else longer)]
    return seconds


@pytest.mark.parametrize(
    ("rate", "silent", "machine", "longer"),
    [
        pytest.param(
            *(rate, silent, machine, longer),
            marks=() if (i + j + k) % 3 == 0 and longer == 2000 * (i % 2) else pytest.mark.slow,
        )
        for i, rate in enumerate([0.4, 0.8, 0.97, 1.0])
        for j, silent in enumerate([1, 3, 8])
        for k, machine in enumerate(TOGETHER)
        for longer in (0, 2000)
    ],
)
def test_no_answer_ends_later_by_the_guesses_of_others(machine: str, silent: int, rate: float, longer: int):
    """But by as many steps as the widest pass gives tokens, where the others' are longer. Costs are new to
    the first round."""
    table, shared, rng = TOGETHER[machine], Speculation(), random.Random(0)
    shared.times.record_prompt(65, table(65))
    for number in range(6):
        seconds = time_together(shared, table, rng, rate, silent, longer)
        debt = WIDTHS[-1] + 1 if longer else 0.0
        assert seconds / table(16) <= 200 * (1.02 if number else 1.1) + debt, number


@pytest.mark.parametrize(("rows", "count"), rest_slow([(4, 1), (1, 5), (4, 5), (16, 5)], (4, 1)))
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("text", texts(0))
def test_guesses_lose_no_more_than_their_share(machine: str, text: str, rows: int, count: int):
    table = MACHINES[machine]
    for seed in range(count):
        engine = Engine(table, rows, texts(seed)[text], table(65) - table(64))
        for _ in range(60):  # At any time.
            engine.run(25)
            assert engine.lost < LONGER, (engine.passes, engine.shared.credit)


@pytest.mark.parametrize(
    ("machine", "rows", "least"),
    [("OpenBLAS", 1, 4.0), ("OpenBLAS", 4, 2.5), ("OpenBLAS", 16, 1.5), ("H100", 1, 5.0)],
)
def test_guesses_that_hold_are_made(machine: str, rows: int, least: float):
    table = MACHINES[machine]
    engine = Engine(table, rows, lambda checked: True, table(65) - table(64))
    engine.run(150)
    assert engine.tokens / engine.seconds > least * rows / table(rows)


def test_where_a_prompt_shows_that_tokens_cost_what_they_give_nothing_is_tried():
    for rows in (1, 4, 8):
        engine = Engine(lambda tokens: 0.07 * tokens, rows, lambda checked: True, 0.07)
        engine.run(100)
        assert not engine.passes


@given(st.lists(st.integers(1, 16), max_size=30), st.lists(st.integers(1, 16), max_size=3), st.booleans())
def test_any_number_of_rows_may_follow_any_other(counts: list[int], stepped: list[int], prompt: bool):
    table = MACHINES["OpenBLAS"]
    engine = Engine(table, 1, lambda checked: True, 0.0044)
    engine.shared = Speculation()
    if prompt:
        engine.shared.times.record_prompt(64, table(64))
    for rows in stepped:
        engine.shared.record_step(rows, table(rows))
    for rows in counts:
        engine.count = rows
        engine.rows = [Row([1, 2, 3], shared=engine.shared.rates) for _ in range(rows)]
        engine.run(5)
        for width in WIDTHS:
            assert engine.shared.times.cost(rows, width) >= 1.0


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Of passes that take no less with more tokens, and no longer than their tokens one by one."""
    seconds = [1.0]
    steps = draw(st.lists(st.sampled_from([0.0, 0.003, 0.03, 0.3, 1.0]), min_size=12, max_size=12))
    for tokens in range(2, 257):
        seconds.append(min(seconds[-1] + steps[tokens.bit_length()], tokens))
    return lambda tokens: seconds[tokens - 1]


@pytest.mark.slow
def test_whatever_passes_cost_and_prompts_promise_the_loss_is_bounded():
    """Beyond the share and the credit it is what the first passes of each width took, and another of one."""

    @settings(max_examples=100, deadline=None)
    @given(
        tables(),
        st.sampled_from([1, 2, 4, 16]),
        st.sampled_from(sorted(texts(0))),
        st.integers(0, 99),
        st.sampled_from([0.0, 0.01, 0.1, 1.0]),
    )
    def check(table: Table, rows: int, text: str, seed: int, prompt: float):
        engine = Engine(table, rows, texts(seed)[text], prompt)
        for _ in range(20):
            engine.run(50)
            firsts = engine.firsts.values()
            assert engine.lost < Speculation().credit + sum(firsts) + max(firsts, default=0.0)

    check()


def test_guesses_that_hold_are_counted_by_their_position():
    made = DraftCounts()
    for guesses, held in ((4, 2), (1, 0), (15, 15), (0, 0)):
        made.record(guesses, held)
    held = [made.accepted_at(position) for position in range(WIDTHS[-1])]
    assert held == [2, 2, *[1] * 13] and sum(held) == made.accepted == 17 and made.drafts == 3
