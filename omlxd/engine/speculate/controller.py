"""Speculative decoding by n-grams: a pass checks guesses, which are what followed the newest tokens before.

vLLM calls the method `ngram`, transformers prompt lookup. Agents return files, logs and JSON that stand in
their prompts, so guesses often hold. A pass computes each row's newest token and its guesses behind it. At
each position a token is drawn as a step of its own would draw it there; guesses hold up to the first that was
not drawn. A guess has no part in what is drawn: sampled answers have the distribution of plain decoding, and
greedy ones its tokens, but for the rounding of wider passes.

Each row of a batch has as many guesses as it likes, none included. The pass is as wide as the longest, or,
where a backend's decode step computes it, flat: it has no more of a row than its own tokens. What
a grammar does not allow is not guessed, and what it leaves no choice in is.

No MLX here: decode_batch.py computes the passes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

import numpy as np

from ..constrain.constraint import Constraint
from ..sequence.sequence import Sequence
from .draft_model import DraftModel
from .mtp import MtpModel
from .ngram import LONGEST_MATCH, NgramProposer

WIDTHS = (1, 2, 4, 7, 15)
"""Guesses a row in a pass.

Milliseconds of a pass of SmolLM2-135M in float32 on a CPU, by all its tokens:

| tokens | 1 | 3 | 5 | 9 | 16 | 36 | 64 | 144 | 256 |
|---|---|---|---|---|---|---|---|---|---|
| OpenBLAS | 75 | 101 | 98 | 115 | 133 | 217 | 370 | 697 | 1,156 |
| MLX's own BLAS | 94 | 243 | 389 | 684 | 1,178 | | | | |

With the first that is a step and what as many tokens of a prompt take; with the second guesses seldom pay.
"""

SIZES = (3, 15, 28, 60)
"""Guesses of all rows in a flat pass, filled up, or as many as there is room for. Each size is compiled for
itself, and costs little more than a smaller one: SmolLM2 in bfloat16 on an H200 took 4.0 ms for 4 rows and 7
guesses or fewer, 7.0 for 16 rows and 112, and 2.5 and 2.9 for steps. With (1, 2, 4, 7, 15, 30, 60) 161 were
compiled, 15 ms each, in 18 rounds of 16 and of 4 streams. Up to 32 tokens five layers are one launch:
4 streams on one H100 were at 1.42, 1.26 and 0.92 times the speed without guesses
with (3, 15, 60), and with these at 1.64, 1.77 and 0.98 (edits, logs, prose)."""

MOST_TOKENS = 256
"""Of all rows in a pass with guesses: logits of a vocabulary of 150,000 tokens take 150 MB."""

GAIN = 1.05
"""Tokens a second, as a multiple of plain decoding, that a pass with guesses must promise. A row waits for
the guesses of others only where it gets the time back (`Speculation.delays_nobody`).

Simulated with SmolLM2's answers of 400 tokens: the speed until the last answer ends, and each answer's own
speed, summed, as multiples of those without guesses (0.99: looks for guesses take time). Before, the harmonic
mean over the rows of a flat pass was to be 1.15, and 1.5 where a row was delayed:

| | steps of one row as long as of 16 | before | 0.66 times as long | before |
|---|---|---|---|---|
| 16 edits | 3.31, 3.31 | 3.29, 3.29 | 4.22, 4.22 | 4.22, 4.22 |
| 16 logs | 1.65, 1.85 | 1.73, 1.80 | 2.00, 2.16 | 2.01, 2.15 |
| 16 stories, many in loops | 1.33, 1.39 | 1.30, 1.35 | 1.44, 1.48 | 1.43, 1.48 |
| 15 in loops beside one that repeats nothing | 0.99, 0.99 | 0.91, 1.33 | 1.05, 1.24 | 1.07, 1.48 |
| 12 beside four | 0.99, 0.99 | 0.96, 1.05 | 0.99, 0.99 | 1.04, 1.28 |
| 8 edits beside 8 that repeat nothing | 0.99, 0.99 | 0.99, 0.99 | 1.01, 2.46 | 0.99, 0.99 |
| 3 edits beside one | 0.99, 1.00 | 0.97, 2.71 | 1.00, 5.44 | 1.00, 4.01 |
| 2 edits beside two | 0.98, 1.09 | 0.99, 1.00 | 0.99, 3.80 | 0.99, 0.99 |

SmolLM2 on an H100 is of the first kind: the host's work is the same for any number of rows. There edits,
logs and prose of 16 streams are at 1.94, 1.44 and 1.02 (tools/bench/README.md). A batch on a CPU is of the
second kind, and so is one whose KV takes longer to read than the weights."""

FLAT_GAIN = 1.15
"""The same for a flat pass: no step is begun ahead behind it, so that the next one takes a third longer on an
H200."""

MOST_DEBT = 16.0
"""Plain steps that a row waits at most for the guesses of others. It should get them back once the others
have ended, but they may run longer than it does. Simulated on a CPU, three logs beside a story of 60 tokens:
its speed is 0.88 of that without guesses, and the last log ends at 1.66. With 8, three edits beside an answer
of 200 tokens were at 1.36 in place of 2.22."""

MOST_FLAT_ROWS = 16
"""Rows of a batch with flat passes; a larger batch has no guesses, but those of a draft model. 16 streams of
SmolLM2 on an H100 decode 6,000 to 8,000 tokens a second without guesses: a step takes 1.5 to 2 ms and waits
for the host. More streams were not measured."""

EACH_STEP = 4
"""Looks for guesses in vain, one a step, before a batch is looked at more rarely (`look_interval`)."""

MOST_STEPS = 16
"""Steps between two looks at most.

Steps of a tiny model on a GPU wait for the host: one of 16 rows of SmolLM2 takes an H100 1.5 ms. Simulated
with such steps, as multiples of the speed without guesses, with a look at each and with rarer ones: edits of
400 tokens, 16 streams 1.45 and 1.52, one 2.17 and 2.00; logs 1.89 and 1.89, 2.80 and 2.80; prose of 150
tokens 0.87 and 0.98, 1.01 and 1.00. Rarer from the first vain look on: logs 1.81 and 2.57."""

LOOK_SHARE = 0.02
"""Of a step's time: what a look at each step may take. It is the host's time; longer steps leave some."""

LOOK_S = 15e-6
"""Seconds for a row."""

CAUTION = 0.5
"""Of the share of guesses that hold: what is counted on where a pass may lose. 0.8 let an adversary win three
steps. Where the loss was counted as if no guess held, a batch waited for credit at the beginning of each
answer: simulated, 16 streams that return a file of 150 tokens at 1.4 times the speed without guesses, now
1.7; 8 at 1.9 and 2.2, one at 2.0 and 3.6; prose as before."""

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

PREDICTED_STEPS = 4.0
"""Steps that a row with a prediction is lent. Its guesses may lose `OWN_SHARE` of them: failed ones of other
requests do not hold its first one back."""

DECAY = 0.9
"""Weight of earlier guesses in the share that holds."""

SHARED_DECAY = 0.99
"""Likewise, in that of all requests."""

NEWEST = 0.3
"""Weight of the draft model's newest guesses in what one costs."""

PASSES = 3
"""Newest passes of a kind, whose median counts. With a mean that took 0.3 of the newest, a kind that was
thought to cost one step and costs three was made six times before that was known."""

STEPS = 9
"""Newest plain steps, whose median counts."""

STEADY = 4
"""A plain step is steady behind so many others in a row, of the same rows."""

PROMPTS = 9
"""Longest passes of prompts, which foretell what more tokens cost."""

AGEING = 0.9998
"""Of a measured cost, with every plain step: passes that once were too slow are tried again, rarely. With
0.999, 400 steps made 1.4 of a cost of 2.1: simulated, with passes that cost 3.3 steps, 16 stories of which
one repeats nothing were at 0.96 of the speed without guesses, and at 0.99 with this and `PASSES`."""

DRAFT = "draft"
"""The kind of a draft model's guesses."""

UNKNOWN = 0.5
"""Share of guesses thought to hold before any was made."""


class PassTimes:
    """What passes take, of one model on this machine, by rows and guesses a row: the mean, where rows have
    unequal ones.

    first_tells  the first pass of a kind says what the others take. Not on a GPU, where it loads kernels: on
                 an H200 SmolLM2's takes 8 to 13 ms, and the next one 3.5, so that a text that was repeated
                 had 7 guesses in 192 tokens, at 0.96 of the speed without. On a CPU four edits at once lose
                 their credit if the first is forgotten
    """

    def __init__(self, first_tells: bool = True) -> None:
        self._first_tells = first_tells
        self._steps: dict[int, deque[float]] = {}  # Seconds of the newest plain steps, by rows.
        self._plain: dict[int, float] = {}  # Their median.
        self._costs: defaultdict[int, dict[float, float]] = defaultdict(dict)  # In plain steps.
        # The newest costs of a kind, by (rows, guesses).
        self._passes: defaultdict[tuple[int, float], deque[float]] = defaultdict(lambda: deque(maxlen=PASSES))
        self._thought: dict[tuple[int, float], float] = {}  # Costs of kinds that never ran.
        self._prompts: dict[
            int, float
        ] = {}  # Seconds of the newest pass, by its tokens; of the longest ones.

    def record_prompt(self, tokens: int, seconds: float) -> None:
        """A pass computed `tokens` of a prompt."""
        self._prompts[tokens] = seconds
        if len(self._prompts) > PROMPTS:  # Behind a hit they are short, and tell little.
            del self._prompts[min(self._prompts)]
        self._thought.clear()

    def record_step(self, rows: int, seconds: float, *, steady: bool = True) -> None:
        """A plain step took `seconds`.

        steady  plain steps of the same rows came before it. Those behind a pass or a row that joins take
                longer: 16 rows of SmolLM2 on an H100, 3.1 ms for 1.8, so that passes with guesses were
                thought to cost 1.6 steps, cost 2.7, and lost. They show what a step takes at most
        """
        if not steady and seconds >= self._plain.get(rows, 0.0):
            return
        if rows not in self._plain:
            self._thought.clear()
        steps = self._steps.setdefault(rows, deque(maxlen=STEPS))
        steps.append(seconds)
        self._plain[rows] = median_low(steps)
        costs = self._costs[rows]
        for guesses in costs:
            costs[guesses] *= AGEING

    def record_check(
        self, rows: int, guesses: float, seconds: float, *, flat: bool = False, compiled: bool = False
    ) -> float:
        """A pass with guesses took `seconds`.

        flat      as `cost` has it
        compiled  before it ran, so that the time tells nothing of other passes

        Returns those of them that do not count: the first of a kind may load kernels, so no more than twice
        what was expected is held against it. Before as many rows made a plain step, it tells no cost.
        """
        plain, usual, costs = self.plain(rows), self.cost(rows, guesses, flat=flat), self._costs[rows]
        new = guesses not in costs
        if not plain:
            return 0.0
        if compiled:
            return max(0.0, seconds - usual * plain)
        cost, passes = min(seconds / plain, 2 * usual), self._passes[rows, guesses]
        if rows in self._plain:
            if self._first_tells or not new or cost < 2 * usual:
                passes.append(cost)
            costs[guesses] = median_low(passes or [usual])
            self._thought.clear()
        return seconds - cost * plain if new else 0.0

    def plain(self, rows: int) -> float:
        """Seconds of a plain step; before there was one, between those of fewer and of more rows, or as the
        next to them; 0: none ran."""
        if (own := self._plain.get(rows)) is not None or not self._plain:
            return own or 0.0
        counts = sorted(self._plain)
        return float(np.interp(rows, counts, [self._plain[count] for count in counts]))

    def saved(self, rows: int, fewer: int) -> float:
        """Of a step of `rows`: what it takes less for fewer of them, or for the next more that a step had."""
        ran = [count for count in self._plain if fewer <= count <= rows]
        return max(0.0, 1 - self._plain[min(ran)] / self.plain(rows)) if ran else 0.0

    @property
    def checked(self) -> bool:
        """Whether any pass with guesses was made."""
        return any(self._costs.values())

    def cost(self, rows: int, guesses: float, *, flat: bool = False) -> float:
        """Of a pass, in plain steps of the same rows; infinite before there was a step.

        flat  it is thought to take as long as one of fewer tokens: starting kernels is what it costs, as
              long as the weights are read once
        """
        kind = rows, guesses
        if (own := self._costs[rows].get(guesses)) is not None:
            return max(own, 1.0)
        if not self._plain:
            return float("inf")
        if kind not in self._thought:
            self._thought[kind] = max(self._expected(rows, guesses, flat) / self.plain(rows), 1.0)
        return self._thought[kind]

    def _expected(self, rows: int, guesses: float, flat: bool) -> float:
        """Seconds of a pass: those of one of fewer tokens, in all rows, and the others as tokens of a prompt;
        where it is flat, those of the one with most of these.

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
        ran = [(r * (g + 1), c * self.plain(r)) for r, costs in self._costs.items() for g, c in costs.items()]
        ran = [(c, s) for c, s in [(rows, plain), *self._plain.items(), *ran] if c <= tokens]
        if flat:
            return max(plain, max(ran)[1])
        return max(seconds + (tokens - count) * slope for count, seconds in ran)


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

    Guesses cost no more than they give: what passes with them, and the steps right behind them, win and lose
    is counted in plain steps. One is made only where the credit covers its loss if guesses hold half as often
    as they did (`CAUTION`), and each plain step adds `LOST_SHARE` of a step to that. So beside decoding
    without guesses that share is lost at most, the first credit, a pass whose guesses fail, and what one of a
    new kind takes beyond expectation. Rows whose own guesses have won may lose `OWN_SHARE` of that. No row
    waits for the guesses of others without getting the time back.

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

    def count(self, row: Sequence, guesses: int, held: int, *, of_model: bool, predicted: bool) -> None:
        """Count what a pass checked of `row`."""
        self.counts[row.adapter].record(guesses, held, of_model=of_model)
        row.stats.drafted += guesses
        row.stats.accepted += held
        if of_model:
            row.stats.model_drafted += guesses
            row.stats.model_accepted += held
        if predicted:
            row.stats.predicted += guesses
            row.stats.predicted_accepted += held

    def record_step(self, rows: int, seconds: float, *, steady: bool = True) -> None:
        """A plain step took `seconds`, as `PassTimes.record_step` has it."""
        self.times.record_step(rows, seconds, steady=steady)
        self._win(LOST_SHARE)

    def look_interval(self, rows: int, vain: int) -> int:
        """Steps from one look for guesses to the next, after so many in vain."""
        if self.draft_model is not None or LOOK_S * rows <= LOOK_SHARE * self.times.plain(rows):
            return 1
        return min(1 << max(0, vain - EACH_STEP), MOST_STEPS)

    def settle(self, rows: int, tokens: int, seconds: float) -> float:
        """A turn that was none of plain decoding gave `tokens` in all. Returns what it took, in plain steps.

        A step that was started ahead gives its tokens a turn later: what the last turn before a pass with
        guesses gives too much, the first one behind it gives too little. That costs a step at most: what else
        it takes, as on a GPU where the KV's arrays have grown, a plain step would take, too.
        """
        if not (plain := self.times.plain(rows)):
            return 0.0
        took = seconds / plain if tokens else min(seconds / plain, 1.0)
        self._win(tokens / rows - took)
        return took

    def record_draft(self, rows: int, guesses: int, seconds: float) -> None:
        """The draft model took `seconds` for so many guesses a row."""
        usual = self.draft_seconds.get(rows, seconds / guesses)
        self.draft_seconds[rows] = usual + NEWEST * (min(seconds / guesses, 2 * usual) - usual)

    def _win(self, steps: float) -> None:
        self.credit = min(self.credit + steps, MOST_CREDIT)

    def best_width(self, offers: Seq[Offer], flat: int = 0) -> int:
        """Guesses a row, at most, for the next pass of a batch; 0: a plain step is faster.

        offers  of each row
        flat    tokens of the pass at most, which has no more of a row than its guesses; 0: as many of each
        """
        return self._best(offers, flat)[0]

    def draft_width(
        self, offers: Seq[Offer], rates: Seq[float], most: int = WIDTHS[-1], flat: int = 0
    ) -> int:
        """Guesses a row that the draft model is to make for the next pass; 0: a pass without them is faster.

        rates  the share of its guesses that holds, of each row; 0: a row that it guesses nothing for
        most   guesses that a row may have
        """
        rows = [
            own._replace(rate=rate, guesses=most) if rate > own.share else own
            for own, rate in zip(offers, rates, strict=True)
        ]
        width, gain = self._best(rows, flat, drafting=True)
        return width if gain > self._best(offers, flat)[1] else 0

    def _best(self, offers: Seq[Offer], flat: int, *, drafting: bool = False) -> tuple[int, float]:
        """(guesses a row, tokens a second as a multiple of plain decoding).

        drafting  the draft model's time counts

        The narrowest are tried first: what wider ones cost follows from them.
        """
        rows, best, best_gain = len(offers), 0, FLAT_GAIN if flat else GAIN
        if (may_lose := max(self.credit, OWN_SHARE * sum(own.won + own.lent for own in offers) / rows)) <= 0:
            return best, best_gain
        most = max(own.guesses for own in offers)
        seconds, plain, known = 0.0, self.times.plain(rows), self.times.checked
        if drafting and plain:
            seconds, known = self.draft_seconds.get(rows, 0.0), known and rows in self.draft_seconds
        for width in WIDTHS if known else WIDTHS[:1]:
            counts = [min(width, own.guesses) for own in offers]
            all_guesses = sum(counts) if flat else rows * width
            if width > most or rows + all_guesses > (flat or MOST_TOKENS):
                break
            guesses = flat_size(all_guesses, flat - rows) / rows if flat else width
            cost = self.times.cost(rows, guesses, flat=flat > 0) + (
                seconds * width / plain if seconds else 0.0
            )
            if 1 + all_guesses / rows <= best_gain * cost:
                continue
            sure = (expected_tokens(CAUTION * own.rate, n) for own, n in zip(offers, counts, strict=True))
            if cost - 1 > may_lose and cost - sum(sure) / rows > may_lose:  # A row has one token at least.
                continue
            tokens = [expected_tokens(own.rate, n) for own, n in zip(offers, counts, strict=True)]
            gain = sum(tokens) / rows / cost
            if gain > best_gain and self.delays_nobody(offers, tokens, cost):
                best, best_gain = width, gain
        return best, best_gain

    def delays_nobody(self, offers: Seq[Offer], tokens: Seq[float], cost: float) -> bool:
        """Whether no answer ends later by a pass that gives each row so many tokens and takes `cost` steps.

        A row is late if plain steps would give it more tokens. It then uses what its own guesses have won it,
        or it waits, `MOST_DEBT` at most: the others end earlier by what they are ahead of it, and a step of
        the smaller batch takes less time.
        """
        after = [own.won + n for own, n in zip(offers, tokens, strict=True)]
        late = [won for won, n in zip(after, tokens, strict=True) if n < cost and won < cost]
        if not late or len(late) == len(after):
            return not late
        ahead = (sum(after) - sum(late)) / (len(after) - len(late))
        saved = self.times.saved(len(after), len(late))
        return all(cost - MOST_DEBT <= won and cost <= won + (ahead - won) * saved for won in late)


def flat_size(guesses: int, most: int) -> int:
    """What a flat pass with so many `guesses` of all rows is filled up to, `most` at most."""
    return next((size for size in SIZES if guesses <= size < most), most)


def filled_up(tokens: list[int], rows: int, most: int) -> list[int]:
    """`tokens` of so many rows and, behind them, tokens of no meaning: as many as a flat pass has, `most` at
    most."""
    return tokens + [0] * (rows + flat_size(len(tokens) - rows, most - rows) - len(tokens))


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


class Offer(NamedTuple):
    """Of a row, for the next pass.

    rate     the share of its guesses that hold
    guesses  how many it has
    won      steps that they have won it so far
    lent     steps that they may lose as if they had won them
    """

    rate: float
    guesses: int
    won: float = 0.0
    lent: float = 0.0

    @property
    def share(self) -> float:
        """`rate`; 0 without guesses."""
        return self.rate if self.guesses else 0.0


KINDS = ("short", "long", "forced", DRAFT)
"""Of guesses: by the match that they follow, by a grammar, of the draft model."""


class RowSpeculator:
    """The guesses of one sequence, and the share of them that holds.

    A plain step beside which a guess was at hand tells whether that would have held, at no cost; so a
    sequence whose guesses fail goes back to plain decoding, and begins again once they would hold.

    won         plain steps that guesses have won it: its tokens of turns with guesses, less what those took
    constraint  of the sequence; its tokens so far are taken by it first
    shared      the share of guesses that holds, of all sequences: what is thought before this one made any
    prediction  tokens that the client predicts
    """

    def __init__(
        self,
        tokens: Seq[int],
        constraint: Constraint | None = None,
        shared: Mapping[str, HoldRate] | None = None,
        prediction: Seq[int] = (),
    ):
        self.won, self._lent = 0.0, PREDICTED_STEPS if prediction else 0.0
        self._proposer = NgramProposer(tokens, prediction)
        self._constraint = constraint
        self._shared = shared or {kind: HoldRate() for kind in KINDS}
        self._rates = {kind: HoldRate(rate.value) for kind, rate in self._shared.items()}
        self._guess: list[int] | None = []
        self._propose()

    @property
    def guess(self) -> list[int]:
        """Tokens that may come next; empty: no idea. Of a match they are read when somebody asks."""
        if self._guess is None:
            self._guess = self._proposer.following(WIDTHS[-1])
        return self._guess

    @guess.setter
    def guess(self, tokens: list[int]) -> None:
        self._guess = tokens

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

    @property
    def of_prediction(self) -> bool:
        """Whether the guess comes from the client's prediction."""
        return self._kind in ("short", "long") and self._proposer.is_predicted

    def take_draft(self, guess: list[int]) -> None:
        """The draft model's in place of its own guess."""
        self.guess, self._kind = guess, DRAFT

    def offer(self, most: int = WIDTHS[-1]) -> Offer:
        """At most `most` guesses."""
        count = WIDTHS[-1] if self._guess is None else len(self._guess)
        return Offer(self._rates[self._kind].value, max(0, min(most, count)), self.won, self._lent)

    def add_tokens(self, tokens: Seq[int], checked: int = 0) -> None:
        """Take the next tokens. A pass drew them: those of its `checked` guesses that held, and one more; or
        plain steps did."""
        if tokens and (self._guess is None or self._guess):
            held = len(tokens) - 1 if checked else int(self._is_next(tokens[0]))
            for rates in (self._rates, self._shared):
                rates[self._kind].record(held, min(len(tokens), checked) or 1)
        self._proposer.add_tokens(tokens)
        self._propose()

    def _propose(self) -> None:
        forced = self._constraint.forced_tokens() if self._constraint is not None else []
        if len(forced) > 1:
            self.guess, self._kind = forced[: WIDTHS[-1]], "forced"
        else:
            match = self._proposer.match()
            self._guess = None if match else []
            self._kind = "long" if match >= LONGEST_MATCH else "short"

    def _is_next(self, token: int) -> bool:
        """Whether the guess's first token is this one."""
        return self._proposer.is_next(token) if self._guess is None else self._guess[0] == token
