"""Speculative decoding by two rules: how many draft tokens a verify step checks, and whether it is made.

vLLM calls the n-gram method `ngram`, transformers prompt lookup. Agents return files, logs and JSON that
stand in their prompts, so draft tokens are often accepted. A verify step computes each row's newest token and
its draft tokens behind it. At each position a token is drawn as a plain step would draw it there; draft
tokens are accepted up to the first that was not drawn. They have no part in what is drawn: sampled answers
have the distribution of plain decoding, and greedy ones its tokens, but for the rounding of wider forwards.

1. **Acceptance picks the width.** The share of a row's draft tokens that is accepted says how many tokens a
   verify step of each width gives it; of the widths that promise `GAIN`, the one with most tokens a second is
   taken.
2. **Measured speed switches off.** What verify steps, and the steps right behind them, win or lose beside
   plain steps is counted, in plain steps. Once drafts have lost more than they may, they pause until plain
   steps have paid for that. What took too long is tried again after a pause that doubles each time.

No row waits for the drafts of others without getting the time back.

Each row of a batch has as many draft tokens as it likes, none included. The verify step is as wide as the
longest draft, or, where a backend's decode step computes it, packed: it has no more of a row than its own
tokens. What a grammar does not allow is not proposed, and what it leaves no choice in is.

No MLX here: decode_batch.py computes the forwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import ceil

from ..sequence.sequence import Sequence
from .draft_model import DraftModel
from .drafter import DrafterModel
from .row import KINDS, HoldRate, Offer, expected_tokens
from .times import NEWEST, PassTimes
from .verify import MOST_CREDIT, MOST_TOKENS, WIDTHS, most_of_row, packed_size

GAIN = 1.1
"""Tokens a second, as a multiple of plain decoding, that a verify step must promise.

Geometric mean of the speed, as a multiple of that without drafts, of 15 simulated workloads: edits, logs,
tool calls, stories and all of these together by SmolLM2, in 1, 4 and 16 streams. Tables of seconds by tokens
stand for OpenBLAS, for MLX's own BLAS (each token takes as long as the first), for a small model on an H100
and for 4-bit weights on Metal:

| GAIN | OpenBLAS | MLX's own | H100 | Metal |
|---|---|---|---|---|
| 1.05 | 2.01 | 1.01 | 1.80 | 1.75 |
| 1.1 | 2.00 | 1.01 | 1.83 | 1.77 |
| 1.2 | 1.99 | 1.00 | 1.80 | 1.74 |
| two gains and 24 more constants, as it was before | 1.99 | 1.01 | 1.80 | 1.69 |

The slowest are 16 stories on the H100: 0.97, and 0.98 before."""

LOST_SHARE = 0.015
"""Of plain steps: what drafts that are not accepted may cost, and proposing drafts. So no work is slower
than 0.985 for long, whatever is accepted."""


@dataclass(slots=True)
class DraftCounts:
    """What verify steps checked of the model, or of one adapter.

    drafts      rows with draft tokens in a verify step; drafted, accepted: draft tokens, and those accepted
    by_held     verify steps of a row, by how many of its draft tokens were accepted
    of_model    drafts, drafted and accepted of the draft model alone
    """

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    by_held: list[int] = field(default_factory=lambda: [0] * (WIDTHS[-1] + 1))
    of_model: list[int] = field(default_factory=lambda: [0, 0, 0])

    def record(self, guesses: int, held: int, *, of_model: bool = False) -> None:
        """Count what a verify step checked for one row."""
        self.drafts += guesses > 0
        self.drafted += guesses
        self.accepted += held
        self.by_held[min(held, WIDTHS[-1])] += 1
        if of_model and guesses:
            self.of_model = [n + more for n, more in zip(self.of_model, (1, guesses, held), strict=True)]

    def accepted_at(self, position: int) -> int:
        """Return how many draft tokens were accepted that were the `position`th of theirs, counted from 0."""
        return sum(self.by_held[position + 1 :])


@dataclass(slots=True)
class Speculation:
    """What the sequences of one engine share.

    repeatable  the same requests in the same order get the same answers: one whose draws depend on what was
                drawn before, so on the verify steps, decodes plainly
    times       of steps and verify steps
    credit      plain steps that drafts may lose; one in the beginning: then an adversary wins two at most
    rates       the share of draft tokens that is accepted, by their kind
    draft_model  proposes where a row has no draft as good; a drafter is one, too
    draft_seconds  of one token of its drafts, by rows
    counts      of each adapter, by it; None: of the model itself
    _idle       plain steps since the last verify step
    _pause      of these, after which costs are doubted: those that pay for the whole credit, then twice as
                many each time
    """

    repeatable: bool = False
    times: PassTimes = field(default_factory=PassTimes)
    credit: float = 1.0
    rates: dict[str, HoldRate] = field(default_factory=lambda: {kind: HoldRate(decay=0.99) for kind in KINDS})
    draft_model: DraftModel | DrafterModel | None = None
    draft_seconds: dict[int, float] = field(default_factory=dict)
    counts: defaultdict[Hashable, DraftCounts] = field(default_factory=lambda: defaultdict(DraftCounts))
    _idle: int = 0
    _pause: float = MOST_CREDIT / LOST_SHARE

    def count(self, row: Sequence, guesses: int, held: int, *, of_model: bool, predicted: bool) -> None:
        """Count what a verify step checked of `row`."""
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
        """Record that a plain step took `seconds`, as `PassTimes.record_step` has it."""
        self.times.record_step(rows, seconds, steady=steady)
        self._win(LOST_SHARE)
        self._idle += 1
        if self._idle >= self._pause:
            self.times.doubt()
            self._idle, self._pause = 0, 2 * self._pause

    def propose_interval(self, rows: int, vain: int, propose_s: float = 15e-6) -> int:
        """Return the steps from one proposal to the next, after so many in vain.

        propose_s  seconds of the host for a row's proposal
        """
        if self.draft_model is not None or not (plain := self.times.plain(rows)):
            return 1
        longest = max(1, ceil(propose_s * rows / (LOST_SHARE * plain)))
        return min(1 << max(0, vain - NEWEST), longest)

    def settle(self, rows: int, tokens: int, seconds: float) -> float:
        """Count a turn that was none of plain decoding and gave `tokens` in all. Returns what it took, in
        plain steps.

        A step that was started ahead gives its tokens a turn later: what the last turn before a verify
        step gives too much, the first one behind it gives too little. That costs a step at most: what else
        it takes, as on a GPU where the KV's arrays have grown, a plain step would take, too. A turn loses
        `MOST_CREDIT` at most, what one may be planned to lose: the rest is the machine's, which stood still.
        """
        if not (plain := self.times.plain(rows)):
            return 0.0
        took = min(seconds / plain, tokens / rows + MOST_CREDIT if tokens else 1.0)
        self._win(tokens / rows - took)
        self._idle = 0
        if self.credit >= MOST_CREDIT:
            self._pause = MOST_CREDIT / LOST_SHARE
        return took

    def record_draft(self, rows: int, guesses: int, seconds: float) -> None:
        """Record that the draft model took `seconds` for so many draft tokens a row."""
        usual = self.draft_seconds.get(rows, seconds / guesses)
        self.draft_seconds[rows] = (usual + min(seconds / guesses, 2 * usual)) / 2

    def _win(self, steps: float) -> None:
        self.credit = min(self.credit + steps, MOST_CREDIT)

    def best_width(self, offers: Seq[Offer], packed: int = 0) -> int:
        """Return the draft tokens a row, at most, of the next verify step; 0: a plain step is faster.

        offers  of each row
        packed  tokens of a packed verify step at most; 0: it has as many of each row
        """
        return self._best(offers, packed)[0]

    def draft_width(
        self, offers: Seq[Offer], rates: Seq[float], most: int = WIDTHS[-1], packed: int = 0
    ) -> int:
        """Return the tokens a row that the draft model is to propose; 0: a step without them is faster.

        rates  the share of its tokens that is accepted, of each row; 0: it proposes nothing for that row
        most   draft tokens that a row may have
        """
        rows = [
            own._replace(rate=rate, guesses=most) if rate > own.share else own
            for own, rate in zip(offers, rates, strict=True)
        ]
        width, gain = self._best(rows, packed, drafting=True)
        return width if gain > self._best(offers, packed)[1] else 0

    def _best(self, offers: Seq[Offer], packed: int, *, drafting: bool = False) -> tuple[int, float]:
        """Return (draft tokens a row, tokens a second as a multiple of plain decoding).

        drafting  the draft model's time counts

        The narrowest are tried first: what wider ones cost follows from them.
        """
        rows, best, best_gain = len(offers), 0, GAIN
        if (may_lose := max(self.credit, sum(own.won for own in offers) / rows)) <= 0:
            return best, best_gain
        most = max(own.guesses for own in offers)
        seconds, plain, known = 0.0, self.times.plain(rows), self.times.checked
        if drafting and plain:
            seconds, known = self.draft_seconds.get(rows, 0.0), known and rows in self.draft_seconds
        for width in WIDTHS if known else WIDTHS[:1]:
            counts = [min(width, own.guesses) for own in offers]
            all_guesses = sum(counts) if packed else rows * width
            if width > most or rows + all_guesses > (packed or MOST_TOKENS):
                break
            guesses = packed_size(all_guesses, packed - rows) / rows if packed else width
            cost = self.times.cost(rows, guesses, packed=packed > 0) + (
                seconds * width / plain if seconds else 0.0
            )
            if 1 + all_guesses / rows <= best_gain * cost:
                continue
            sure = sum(own.share for own in offers) / rows  # Of its first draft token alone.
            if cost - 1 > may_lose and cost - 1 - sure > may_lose:  # A row has one token at least.
                continue
            tokens = [expected_tokens(own.rate, n) for own, n in zip(offers, counts, strict=True)]
            gain = sum(tokens) / rows / cost
            if gain > best_gain and self.delays_nobody(offers, tokens, cost):
                best, best_gain = width, gain
        return best, best_gain

    def delays_nobody(self, offers: Seq[Offer], tokens: Seq[float], cost: float) -> bool:
        """Return whether no answer ends later by a verify step that gives each row so many tokens and takes
        `cost` plain steps.

        A row is late if plain steps would give it more tokens. It then uses what its own drafts have won it,
        or it waits, for as many steps as the widest one gives tokens at most: the others end earlier by what
        they are ahead of it, and a step of the smaller batch takes less time. With half as many
        steps three simulated edits beside an answer of 200 tokens were at 1.36 in place of 2.22.
        """
        after = [own.won + n for own, n in zip(offers, tokens, strict=True)]
        late = [won for won, n in zip(after, tokens, strict=True) if n < cost and won < cost]
        if not late or len(late) == len(after):
            return not late
        ahead = (sum(after) - sum(late)) / (len(after) - len(late))
        saved = self.times.saved(len(after), len(late))
        return all(cost - most_of_row() <= won and cost <= won + (ahead - won) * saved for won in late)
