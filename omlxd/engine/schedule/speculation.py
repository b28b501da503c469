"""Speculative decoding by n-grams: a pass checks guesses, which are what followed the newest tokens before.

vLLM calls the method `ngram`, transformers prompt lookup. Agents return files, logs and JSON that stand in
their prompts, so guesses often hold. A pass computes each row's newest token and its guesses behind it. At
each position a token is drawn as a step of its own would draw it there; guesses hold up to the first that was
not drawn. A guess has no part in what is drawn: sampled answers have the distribution of plain decoding, and
greedy ones its tokens, but for the rounding of wider passes.

Each row of a batch has as many guesses as it likes, none included; the pass is as wide as the longest. What a
grammar does not allow is not guessed, and what it leaves no choice in is.

No MLX here: decode_batch.py computes the passes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..constrain.constraint import Constraint, ForcedAnswer
from .draft_model import DraftModel

MIN_MATCH = 3
"""Tokens that must have stood together before, for what followed them to be a guess."""

MARKS = 1 << 20
"""Marks of triples of tokens that stood together: a megabyte a sequence."""

LONGEST_MATCH = 16
"""Tokens of a match that are compared; among the longest, the most recent one counts."""

CANDIDATES = 256
"""Most recent matches that are compared further."""

WIDTHS = (2, 4, 8, 15)
"""Guesses a row in a pass; which of them pays is measured while it runs, for each number of rows.

SmolLM2-135M in float32, CPU with OpenBLAS, milliseconds of a pass at 512 tokens of context: 1 token 95,
3 127, 5 124, 9 146, 16 186. Tokens a second against `--speculation off`, one stream, greedy, answers equal
(tools/bench/speculation.py): returning an edited file 26.2 and 7.4, a log 23.5 and 11.5, a tool call 16.5 and
13.9, prose 12.7 and 12.3. With MLX's own BLAS a pass takes as long as its tokens one by one.
"""

MOST_TOKENS = 256
"""Of all rows in a pass with guesses: logits of a vocabulary of 150,000 tokens take 150 MB."""

GAIN = 1.05
"""Tokens a second, as a multiple of plain decoding, that a pass with guesses must promise."""

UNTRIED = 1.5
"""Least cost of a pass that was never made, as a multiple of a plain step: one row's chance match among
others is no reason to try one."""

DECAY = 0.9
"""Weight of earlier guesses in the share that holds, and of earlier passes in their time."""

AGEING = 0.999
"""Of a measured time, with every plain step: passes that once were too slow are tried again, rarely."""

DRAFT = "draft"
"""The kind of a draft model's guesses."""

UNKNOWN = 0.5
"""Share of guesses thought to hold before any was made."""


class NgramProposer:
    """Guesses the continuation of one sequence from its own tokens.

    A search reads the tokens once: 0.1 ms for 100,000 of them. It is made only where the newest tokens may
    have stood together before; 1 of 16 such marks is wrong at 65,000 tokens, and no token is guessed for it.
    """

    def __init__(self, tokens: Seq[int]):
        self._count = len(tokens)
        self._ids = np.empty(max(1024, 2 * self._count), np.int32)
        self._ids[: self._count] = tokens
        self._marks = bytearray(MARKS)
        ids = self._ids[: self._count].astype(np.int64)
        np.frombuffer(self._marks, np.uint8)[_mark(ids[:-3], ids[1:-2], ids[2:-1])] = 1

    @property
    def tokens(self) -> np.ndarray:
        """All so far; a view."""
        return self._ids[: self._count]

    def add_token(self, token: int) -> None:
        if self._count >= MIN_MATCH:
            self._marks[self._newest()] = 1
        if self._count == len(self._ids):
            self._ids = np.resize(self._ids, 2 * self._count)
        self._ids[self._count] = token
        self._count += 1

    def _newest(self) -> int:
        first, second, third = self._ids[self._count - MIN_MATCH : self._count].tolist()
        return _mark(first, second, third)

    def propose(self, most: int) -> tuple[list[int], int]:
        """(`most` tokens that may come next, tokens of the match); nothing where there is no match.

        What followed a match that overlaps the newest tokens is repeated: the text is in a loop.
        """
        ids, last = self._ids[: self._count], self._count - 1
        if last < MIN_MATCH or most < 1 or not self._marks[self._newest()]:
            return [], 0
        ends = np.flatnonzero(ids[MIN_MATCH - 1 : last] == ids[last]) + (MIN_MATCH - 1)
        for back in range(1, MIN_MATCH):
            ends = ends[ids[ends - back] == ids[last - back]]
        if not ends.size:
            return [], 0
        ends, match = ends[-CANDIDATES:], MIN_MATCH
        while match < LONGEST_MATCH:
            longer = ends[ends >= match]
            longer = longer[ids[longer - match] == ids[last - match]]
            if not longer.size:
                break
            ends, match = longer, match + 1
        following = ids[ends[-1] + 1 : ends[-1] + 1 + most]
        return np.resize(following, most).tolist(), match


def _mark(first: Any, second: Any, third: Any) -> Any:
    """The place of a triple's mark; of arrays those of theirs."""
    return (first * 1_000_003 + second * 8_191 + third) % MARKS


@dataclass(slots=True)
class PassTimes:
    """Seconds of a pass by its (rows, guesses a row), of one model on this machine; 0: a plain step."""

    _seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    _begun: set[tuple[int, int]] = field(default_factory=set)

    def record_pass(self, rows: int, guesses: int, seconds: float) -> None:
        """A pass took `seconds`. The first of a kind does not count: it loads kernels."""
        if guesses and guesses not in WIDTHS:
            return  # A grammar has cut it.
        kind = rows, guesses
        if kind not in self._begun:
            self._begun.add(kind)
            return
        usual = self._seconds.get(kind, seconds)
        self._seconds[kind] = min(DECAY * usual + (1 - DECAY) * seconds, 2 * usual)
        if not guesses:
            for width in WIDTHS:
                if (rows, width) in self._seconds:
                    self._seconds[rows, width] *= AGEING

    def has_run(self, rows: int, guesses: int) -> bool:
        return (rows, guesses) in self._begun

    def cost(self, rows: int, guesses: int) -> float:
        """As a multiple of a plain step of the same rows; infinite until that is measured.

        Where no such pass was measured, that of the slowest with no more tokens in all.
        """
        plain, measured = self._seconds.get((rows, 0)), self._seconds.get((rows, guesses))
        if plain is None:
            return float("inf")
        if measured is not None:
            return max(measured / plain, 1.0)
        tokens = rows * (guesses + 1)
        slowest = max(s for (r, g), s in self._seconds.items() if r * (g + 1) <= tokens)
        return max(slowest / plain, UNTRIED)

    def seconds(self, rows: int, guesses: int) -> float:
        """Of such a pass, else of the slowest with no more of either; 0: none was measured."""
        smaller = (s for (r, g), s in self._seconds.items() if r <= rows and g <= guesses)
        return self._seconds.get((rows, guesses)) or max(smaller, default=0.0)


@dataclass(slots=True)
class Speculation:
    """What the sequences of one engine share.

    repeatable  the same requests in the same order get the same answers: one whose draws depend on what was
                drawn before, so on the passes, decodes plainly
    times       of passes
    draft_model  whose guesses are checked where a row has none as good; None: there is none
    draft_times  of its guesses, by rows and guesses a row
    draft_rate  the share of its guesses that hold, of all rows
    drafts      guesses of a row in a pass; drafted, accepted: guesses made, guesses that held
    of_model    likewise, of the draft model alone
    """

    repeatable: bool = False
    times: PassTimes = field(default_factory=PassTimes)
    draft_model: DraftModel | None = None
    draft_times: PassTimes = field(default_factory=PassTimes)
    draft_rate: _HoldRate = field(default_factory=lambda: _HoldRate())
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    of_model: list[int] = field(default_factory=lambda: [0, 0, 0])

    def record_guesses(self, guesses: int, held: int, *, of_model: bool = False) -> None:
        """Count what a pass checked for one row."""
        self.drafts += guesses > 0
        self.drafted += guesses
        self.accepted += held
        if of_model and guesses:
            self.of_model = [n + more for n, more in zip(self.of_model, (1, guesses, held), strict=True)]
            self.draft_rate.record(held, min(held + 1, guesses))

    def best_width(self, offers: Seq[tuple[float, int]]) -> int:
        """Guesses a row for the next pass of a batch; 0: a plain step is faster.

        offers  (share of its guesses that hold, guesses at hand) of each row

        A wider pass is tried once the narrower ones have run.
        """
        return self._best(offers, 0.0, self.times)[0]

    def draft_width(self, offers: Seq[tuple[float, int]], rates: Seq[float]) -> int:
        """Guesses a row that the draft model is to make for the next pass; 0: a pass without them is faster.

        rates  the share of its guesses that holds, of each row; 0: a row that it guesses nothing for
        """
        rows = [
            (rate, WIDTHS[-1]) if rate > (share if count else 0.0) else (share, count)
            for (share, count), rate in zip(offers, rates, strict=True)
        ]
        width, gain = self._best(rows, self.times.seconds(len(rows), 0), self.draft_times)
        return width if gain > self._best(offers, 0.0, self.times)[1] else 0

    def _best(self, offers: Seq[tuple[float, int]], plain: float, tried: PassTimes) -> tuple[int, float]:
        """(guesses a row, tokens a second as a multiple of plain decoding).

        plain  seconds of a plain step, where the draft model's count as well; 0: there are none
        """
        rows, best, best_gain = len(offers), 0, GAIN
        most = max((count for _, count in offers), default=0)
        for width in WIDTHS:
            if width > most or rows * (width + 1) > MOST_TOKENS:
                break
            tokens = sum(expected_tokens(rate, min(width, count)) for rate, count in offers)
            cost = self.times.cost(rows, width)
            if plain:
                cost += self.draft_times.seconds(rows, width) / plain
            if (gain := tokens / rows / cost) > best_gain:
                best, best_gain = width, gain
            if not tried.has_run(rows, width):
                break
        return best, best_gain


def expected_tokens(rate: float, guesses: int) -> float:
    """Tokens that a pass gives a row, where each guess holds with `rate` (below 1) if those before it do."""
    return (1 - rate ** (guesses + 1)) / (1 - rate)


class _HoldRate:
    """The share of guesses that hold, newest first in weight."""

    __slots__ = ("_begin", "_held", "_tried")

    def __init__(self, begin: float = UNKNOWN) -> None:
        """`begin`: what is thought before any was made."""
        self._begin = begin
        self._held = self._tried = 0.0

    def record(self, held: int, tried: int) -> None:
        weight = DECAY**tried
        self._held, self._tried = self._held * weight + held, self._tried * weight + tried

    def forget(self) -> None:
        """Come nearer to what was thought before: what failed is tried again, rarely."""
        self._held, self._tried = self._held * DECAY, self._tried * DECAY

    @property
    def value(self) -> float:
        return (self._held + self._begin) / (self._tried + 1.0)


class RowSpeculator:
    """The guesses of one sequence, and the share of them that holds.

    A plain step beside which a guess was at hand tells whether that would have held, at no cost; so a
    sequence whose guesses fail goes back to plain decoding, and begins again once they would hold.

    guess       tokens that may come next; empty: no idea
    constraint  of the sequence; its tokens so far are taken by it first
    drafts_hold the share of the draft model's guesses that is thought to hold, before it made any
    """

    def __init__(
        self,
        tokens: Seq[int],
        constraint: Constraint | ForcedAnswer | None = None,
        drafts_hold: float = UNKNOWN,
    ):
        self._proposer = NgramProposer(tokens)
        self._constraint = constraint
        self._rates: dict[str, _HoldRate] = {kind: _HoldRate() for kind in ("short", "long", "forced")}
        self._rates[DRAFT] = _HoldRate(drafts_hold)
        self._propose()

    @property
    def tokens(self) -> np.ndarray:
        """All so far; a view."""
        return self._proposer.tokens

    @property
    def draft_rate(self) -> float:
        """The share of the draft model's guesses that hold."""
        return self._rates[DRAFT].value

    @property
    def of_model(self) -> bool:
        """Whether the draft model made the guess."""
        return self._kind == DRAFT

    def take_draft(self, guess: list[int]) -> None:
        """The draft model's in place of its own guess."""
        self.guess, self._kind = guess, DRAFT

    def offer(self, most: int = WIDTHS[-1]) -> tuple[float, int]:
        """(share of its guesses that hold, how many there are, at most `most`)."""
        return self._rates[self._kind].value, max(0, min(most, len(self.guess)))

    def add_tokens(self, tokens: Seq[int], checked: int = 0) -> None:
        """Take what a pass drew: those of its `checked` guesses that held, and one more."""
        if self.guess and tokens:
            held = len(tokens) - 1 if checked else int(self.guess[0] == tokens[0])
            self._rates[self._kind].record(held, min(len(tokens), checked) or 1)
        for token in tokens:
            self._proposer.add_token(token)
        self._propose()

    def _propose(self) -> None:
        forced = self._constraint.forced_tokens() if self._constraint is not None else []
        if len(forced) >= WIDTHS[0]:
            self.guess, self._kind = forced[: WIDTHS[-1]], "forced"
        else:
            self.guess, match = self._proposer.propose(WIDTHS[-1])
            self._kind = "long" if match >= LONGEST_MATCH else "short"
