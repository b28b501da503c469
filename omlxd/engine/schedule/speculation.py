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

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

import numpy as np

from ..constrain.constraint import Constraint
from ..sequence import Sequence
from .draft_model import DraftModel
from .mtp import MtpModel

MIN_MATCH = 3
"""Tokens that must have stood together before, for what followed them to be a guess."""

MARKS = 1 << 20
"""Marks of triples of tokens that stood together: a megabyte a sequence."""

LONGEST_MATCH = 16
"""Tokens of a match that are compared; among the longest the most recent one counts, until a guess fails."""

CANDIDATES = 256
"""Most recent matches that are compared further."""

WIDTHS = (1, 2, 4, 7, 15)
"""Guesses a row in a pass. With 7, four rows have as many tokens as a fused pass takes at most.

Milliseconds of a pass of SmolLM2-135M in float32 on a CPU, by all its tokens:

| tokens | 1 | 3 | 5 | 9 | 16 | 36 | 64 | 144 | 256 |
|---|---|---|---|---|---|---|---|---|---|
| OpenBLAS | 75 | 101 | 98 | 115 | 133 | 217 | 370 | 697 | 1,156 |
| MLX's own BLAS | 94 | 243 | 389 | 684 | 1,178 | | | | |

With the first that is a step and what as many tokens of a prompt take; with the second guesses seldom pay.
"""

MOST_TOKENS = 256
"""Of all rows in a pass with guesses: logits of a vocabulary of 150,000 tokens take 150 MB."""

GAIN = 1.05
"""Tokens a second, as a multiple of plain decoding, that a pass with guesses must promise."""

LOST_SHARE = 0.015
"""Of plain steps: what guesses that fail may cost."""

FIRST_CREDIT = 0.5
"""Plain steps that they may cost before there were any."""

MOST_CREDIT = 2.0
"""Plain steps that they may cost at once: of those won, and saved. With 4, 16 tool calls of 96 tokens behind
16 edits took 4 % longer than without guesses: they lost what the edits had won."""

OWN_SHARE = 0.25
"""Of the steps that guesses have won a batch's rows: what they may cost them, beside the credit. Without it
four rows that returned a file on an H200, eight tokens a pass at the cost of 1.5 steps, waited for credit: a
few passes without success take two steps (SmolLM2: 1.06 times the speed without guesses)."""

DECAY = 0.9
"""Weight of earlier guesses in the share that holds."""

SHARED_DECAY = 0.99
"""Likewise, in that of all requests."""

NEWEST = 0.3
"""Weight of the newest pass in the cost of its kind."""

STEPS = 9
"""Newest plain steps, whose median counts."""

PROMPTS = 9
"""Longest passes of prompts, which foretell what more tokens cost."""

AGEING = 0.999
"""Of a measured cost, with every plain step: passes that once were too slow are tried again, rarely."""

DRAFT = "draft"
"""The kind of a draft model's guesses."""

UNKNOWN = 0.5
"""Share of guesses thought to hold before any was made."""


class NgramProposer:
    """Guesses the continuation of one sequence from its own tokens.

    A search reads the tokens once: 0.1 ms for 100,000 of them. It is made only where the newest tokens may
    have stood together before; 1 of 16 such marks is wrong at 65,000 tokens, and no token is guessed for it.
    While a guess holds, its match grows without a search: 16 rows that repeat a text took 1.4 ms a step for
    searches, and take 0.1.
    """

    def __init__(self, tokens: Seq[int]):
        self._count = len(tokens)
        self._ids = np.empty(max(1024, 2 * self._count), np.int32)
        self._ids[: self._count] = tokens
        self._marks = bytearray(MARKS)
        self._match: tuple[int, int] | None = None  # Where the last one ends, and its tokens.
        ids = self._ids[: self._count].astype(np.int64)
        np.frombuffer(self._marks, np.uint8)[_mark(ids[:-3], ids[1:-2], ids[2:-1])] = 1
        self._newest = (0, 0, *ids[-3:].tolist())[-3:]

    @property
    def tokens(self) -> np.ndarray:
        """All so far; a view."""
        return self._ids[: self._count]

    def add_token(self, token: int) -> None:
        count = self._count
        if count >= MIN_MATCH:
            self._marks[_mark(*self._newest)] = 1
        if count == len(self._ids):
            self._ids = np.resize(self._ids, 2 * count)
        self._ids[count] = token
        self._newest = (*self._newest[1:], token)
        if self._match is not None:
            end, tokens = self._match
            self._match = (end + 1, tokens + 1) if self._ids[end + 1] == token else None
        self._count = count + 1

    def propose(self, most: int) -> tuple[list[int], int]:
        """(`most` tokens that may come next, tokens of the match); nothing where there is no match.

        What followed a match that overlaps the newest tokens is repeated: the text is in a loop.
        """
        ids = self._ids[: self._count]
        if most < 1 or (match := self._longest(ids)) is None:
            return [], 0
        self._match = match
        end, tokens = match
        following = ids[end + 1 : end + 1 + most]
        return (following if len(following) == most else np.resize(following, most)).tolist(), tokens

    def _longest(self, ids: np.ndarray) -> tuple[int, int] | None:
        """Where the match ends, and its tokens, up to LONGEST_MATCH; None: there is none."""
        last = len(ids) - 1
        if self._match is not None:
            return self._match[0], min(self._match[1], LONGEST_MATCH)
        if last < MIN_MATCH or not self._marks[_mark(*self._newest)]:
            return None
        ends = np.flatnonzero(ids[MIN_MATCH - 1 : last] == ids[last]) + (MIN_MATCH - 1)
        for back in range(1, MIN_MATCH):
            ends = ends[ids[ends - back] == ids[last - back]]
        if not ends.size:
            return None
        ends, match = ends[-CANDIDATES:], MIN_MATCH
        while match < LONGEST_MATCH:
            longer = ends[ends >= match]
            longer = longer[ids[longer - match] == ids[last - match]]
            if not longer.size:
                break
            ends, match = longer, match + 1
        return int(ends[-1]), match


def _mark(first: Any, second: Any, third: Any) -> Any:
    """The place of a triple's mark; of arrays those of theirs."""
    return (first * 1_000_003 + second * 8_191 + third) % MARKS


class PassTimes:
    """What passes take, of one model on this machine, by rows and guesses a row.

    first_tells  the first pass of a kind says what the others take. Not on a GPU, where it loads kernels: on
                 an H200 SmolLM2's takes 8 to 13 ms, and the next one 3.5, so that a text that was repeated
                 had 7 guesses in 192 tokens, at 0.96 of the speed without. On a CPU four edits at once lose
                 their credit if the first is forgotten
    """

    def __init__(self, first_tells: bool = True) -> None:
        self._first_tells = first_tells
        self._steps: dict[int, deque[float]] = {}  # Seconds of the newest plain steps, by rows.
        self._plain: dict[int, float] = {}  # Their median.
        self._costs: dict[tuple[int, int], float] = {}  # In plain steps.
        self._thought: dict[tuple[int, int], float] = {}  # Likewise, of kinds that never ran.
        self._prompts: dict[
            int, float
        ] = {}  # Seconds of the newest pass, by its tokens; of the longest ones.

    def record_prompt(self, tokens: int, seconds: float) -> None:
        """A pass computed `tokens` of a prompt."""
        self._prompts[tokens] = seconds
        if len(self._prompts) > PROMPTS:  # Behind a hit they are short, and tell little.
            del self._prompts[min(self._prompts)]
        self._thought.clear()

    def record_step(self, rows: int, seconds: float) -> None:
        """A plain step took `seconds`."""
        if rows not in self._plain:
            self._thought.clear()
        steps = self._steps.setdefault(rows, deque(maxlen=STEPS))
        steps.append(seconds)
        self._plain[rows] = median_low(steps)
        for width in WIDTHS:
            if (rows, width) in self._costs:
                self._costs[rows, width] *= AGEING

    def record_check(self, rows: int, guesses: int, seconds: float) -> float:
        """A pass with guesses took `seconds`.

        Returns those of them that do not count: the first of a kind may load kernels, so no more than twice
        what was expected is held against it.
        """
        plain, usual, new = self.plain(rows), self.cost(rows, guesses), (rows, guesses) not in self._costs
        if not plain:
            return 0.0
        cost = min(seconds / plain, 2 * usual)
        if guesses in WIDTHS:  # Else a grammar, or the end of the answer, has cut it.
            if new:
                self._costs[rows, guesses] = cost if self._first_tells or cost < 2 * usual else usual
            else:
                self._costs[rows, guesses] = usual + NEWEST * (cost - usual)
            self._thought.clear()
        return seconds - cost * plain if new else 0.0

    def plain(self, rows: int) -> float:
        """Seconds of a plain step; before there was one, of that of as many rows as nearly; 0: none ran."""
        if (own := self._plain.get(rows)) is not None:
            return own
        return self._plain[min(self._plain, key=lambda other: abs(other - rows))] if self._plain else 0.0

    @property
    def checked(self) -> bool:
        """Whether any pass with guesses was made."""
        return bool(self._costs)

    def cost(self, rows: int, guesses: int) -> float:
        """Of a pass, in plain steps of the same rows; infinite before there was a step."""
        kind = rows, guesses
        if (own := self._costs.get(kind)) is not None:
            return max(own, 1.0)
        if not self._plain:
            return float("inf")
        if kind not in self._thought:
            self._thought[kind] = max(self._expected(rows, guesses) / self.plain(rows), 1.0)
        return self._thought[kind]

    def _expected(self, rows: int, guesses: int) -> float:
        """Seconds of a pass: those of one of fewer tokens, in all rows, and the others as tokens of a prompt.

        Of a prompt that is no longer than the fewest rows of a step each token takes its share of the pass;
        where there was no prompt, its share of a step.
        """
        fewest = min(self._plain)
        step, plain = self._plain[fewest], self.plain(rows)
        slopes = [
            (seconds - step) / (count - fewest) if count > fewest else seconds / count
            for count, seconds in self._prompts.items()
        ]
        slope, tokens = max(min(slopes, default=plain / rows), 0.0), rows * (guesses + 1)
        ran = [(r * (g + 1), cost * self.plain(r)) for (r, g), cost in self._costs.items()]
        ran += [(rows, plain), *self._plain.items()]
        return max(seconds + (tokens - count) * slope for count, seconds in ran if count <= tokens)


@dataclass(slots=True)
class GuessCounts:
    """What passes checked of the model, or of one adapter.

    drafts      guesses of a row in a pass; drafted, accepted: guesses made, guesses that held
    by_held     passes of a row, by how many of its guesses held
    of_model    likewise, of the draft model alone
    """

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    by_held: list[int] = field(default_factory=lambda: [0] * (WIDTHS[-1] + 1))
    of_model: list[int] = field(default_factory=lambda: [0, 0, 0])

    def record(self, guesses: int, held: int, *, of_model: bool = False) -> None:
        """Count what a pass checked for one row."""
        self.drafts += guesses > 0
        self.drafted += guesses
        self.accepted += held
        self.by_held[min(held, WIDTHS[-1])] += 1
        if of_model and guesses:
            self.of_model = [n + more for n, more in zip(self.of_model, (1, guesses, held), strict=True)]

    def accepted_at(self, position: int) -> int:
        """How many guesses held that were the `position`th of their pass, counted from 0."""
        return sum(self.by_held[position + 1 :])


@dataclass(slots=True)
class Speculation:
    """What the sequences of one engine share.

    Guesses cost no more than they give: what passes with them win and lose is counted in plain steps. One is
    made only where the credit covers its loss if no guess holds, and each plain step adds `LOST_SHARE` of a
    step to that. So beside decoding without guesses that share is lost at most, the first credit, and what a
    pass of a new kind takes beyond expectation. Rows whose own guesses have won may lose `OWN_SHARE` of that.

    repeatable  the same requests in the same order get the same answers: one whose draws depend on what was
                drawn before, so on the passes, decodes plainly
    times       of passes
    credit      plain steps that guesses may lose
    rates       the share of guesses that hold, by their kind
    draft_model  whose guesses are checked where a row has none as good; the model's own heads are one, too
    draft_seconds  of one guess of it, by rows
    counts      of each adapter, by it; None: of the model itself
    """

    repeatable: bool = False
    times: PassTimes = field(default_factory=PassTimes)
    credit: float = FIRST_CREDIT
    rates: dict[str, HoldRate] = field(
        default_factory=lambda: {kind: HoldRate(decay=SHARED_DECAY) for kind in KINDS}
    )
    draft_model: DraftModel | MtpModel | None = None
    draft_seconds: dict[int, float] = field(default_factory=dict)
    counts: defaultdict[Hashable, GuessCounts] = field(default_factory=lambda: defaultdict(GuessCounts))

    def count(self, row: Sequence, guesses: int, held: int, *, of_model: bool) -> None:
        """Count what a pass checked of `row`."""
        self.counts[row.adapter].record(guesses, held, of_model=of_model)
        row.drafted += guesses
        row.accepted += held
        if of_model:
            row.model_drafted += guesses
            row.model_accepted += held

    def record_step(self, rows: int, seconds: float) -> None:
        """A plain step took `seconds`."""
        self.times.record_step(rows, seconds)
        self._win(LOST_SHARE)

    def settle(self, rows: int, tokens: int, seconds: float) -> float:
        """A turn that was none of plain decoding gave `tokens` in all. Returns the steps that this wins.

        A step that was started ahead gives its tokens a turn later: what the last turn before a pass with
        guesses gives too much, the first one behind it gives too little. That costs a step at most: what else
        it takes, as on a GPU where the KV's arrays have grown, a plain step would take, too.
        """
        if not (plain := self.times.plain(rows)):
            return 0.0
        steps = tokens / rows - (seconds / plain if tokens else min(seconds / plain, 1.0))
        self._win(steps)
        return steps

    def record_draft(self, rows: int, guesses: int, seconds: float) -> None:
        """The draft model took `seconds` for so many guesses a row."""
        usual = self.draft_seconds.get(rows, seconds / guesses)
        self.draft_seconds[rows] = usual + NEWEST * (min(seconds / guesses, 2 * usual) - usual)

    def _win(self, steps: float) -> None:
        self.credit = min(self.credit + steps, MOST_CREDIT)

    def best_width(self, offers: Seq[tuple[float, int]], own: float = 0.0) -> int:
        """Guesses a row for the next pass of a batch; 0: a plain step is faster.

        offers  (share of its guesses that hold, guesses at hand) of each row
        own     steps that its rows may lose, beside the credit
        """
        return self._best(offers, own)[0]

    def draft_width(
        self, offers: Seq[tuple[float, int]], rates: Seq[float], most: int = WIDTHS[-1], own: float = 0.0
    ) -> int:
        """Guesses a row that the draft model is to make for the next pass; 0: a pass without them is faster.

        rates  the share of its guesses that holds, of each row; 0: a row that it guesses nothing for
        most   guesses that a row may have
        """
        rows = [
            (rate, most) if rate > (share if count else 0.0) else (share, count)
            for (share, count), rate in zip(offers, rates, strict=True)
        ]
        width, gain = self._best(rows, own, drafting=True)
        return width if gain > self._best(offers, own)[1] else 0

    def _best(
        self, offers: Seq[tuple[float, int]], own: float, *, drafting: bool = False
    ) -> tuple[int, float]:
        """(guesses a row, tokens a second as a multiple of plain decoding).

        drafting  the draft model's time counts

        The narrowest are tried first: what wider ones cost follows from them.
        """
        rows, best, best_gain = len(offers), 0, GAIN
        most = max((count for _, count in offers), default=0)
        seconds, plain, known = 0.0, self.times.plain(rows), self.times.checked
        if drafting and plain:
            seconds, known = self.draft_seconds.get(rows, 0.0), known and rows in self.draft_seconds
        for width in WIDTHS if known else WIDTHS[:1]:
            if width > most or rows * (width + 1) > MOST_TOKENS:
                break
            tokens = sum(expected_tokens(rate, min(width, count)) for rate, count in offers)
            cost = self.times.cost(rows, width) + (seconds * width / plain if seconds else 0.0)
            if cost - 1 <= max(self.credit, own) and (gain := tokens / rows / cost) > best_gain:
                best, best_gain = width, gain
        return best, best_gain


def expected_tokens(rate: float, guesses: int) -> float:
    """Tokens that a pass gives a row, where each guess holds with `rate` (below 1) if those before it do."""
    return (1 - rate ** (guesses + 1)) / (1 - rate)


class HoldRate:
    """The share of guesses that hold, newest first in weight."""

    __slots__ = ("_begin", "_decay", "_held", "_tried")

    def __init__(self, begin: float = UNKNOWN, decay: float = DECAY) -> None:
        """`begin`: what is thought before any was made."""
        self._begin, self._decay = begin, decay
        self._held = self._tried = 0.0

    def record(self, held: int, tried: int) -> None:
        weight = self._decay**tried
        self._held, self._tried = self._held * weight + held, self._tried * weight + tried

    def forget(self) -> None:
        """Come nearer to what was thought before: what failed is tried again, rarely."""
        self._held, self._tried = self._held * DECAY, self._tried * DECAY

    @property
    def value(self) -> float:
        return (self._held + self._begin) / (self._tried + 1.0)


KINDS = ("short", "long", "forced", DRAFT)
"""Of guesses: by the match that they follow, by a grammar, of the draft model."""


class RowSpeculator:
    """The guesses of one sequence, and the share of them that holds.

    A plain step beside which a guess was at hand tells whether that would have held, at no cost; so a
    sequence whose guesses fail goes back to plain decoding, and begins again once they would hold.

    guess       tokens that may come next; empty: no idea
    won         steps, by guesses of the batches that it was in
    constraint  of the sequence; its tokens so far are taken by it first
    shared      the share of guesses that holds, of all sequences: what is thought before this one made any
    """

    def __init__(
        self,
        tokens: Seq[int],
        constraint: Constraint | None = None,
        shared: Mapping[str, HoldRate] | None = None,
    ):
        self.won = 0.0
        self._proposer = NgramProposer(tokens)
        self._constraint = constraint
        self._shared = shared or {kind: HoldRate() for kind in KINDS}
        self._rates = {kind: HoldRate(rate.value) for kind, rate in self._shared.items()}
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
            for rates in (self._rates, self._shared):
                rates[self._kind].record(held, min(len(tokens), checked) or 1)
        for token in tokens:
            self._proposer.add_token(token)
        self._propose()

    def _propose(self) -> None:
        forced = self._constraint.forced_tokens() if self._constraint is not None else []
        if len(forced) > 1:
            self.guess, self._kind = forced[: WIDTHS[-1]], "forced"
        else:
            self.guess, match = self._proposer.propose(WIDTHS[-1])
            self._kind = "long" if match >= LONGEST_MATCH else "short"
