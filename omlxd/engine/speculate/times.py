"""What steps and verify steps take, of one model on this machine."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median_low

import numpy as np

NEWEST = 5
"""Newest measures of a kind, whose median counts; plain steps behind a verify step or a row that joins before
one counts as steady; and proposals in vain before a batch proposes more rarely.

Simulated on an H100, with 3, 5 and 9: 16 logs at 1.15, 1.17 and 1.08 times the speed without drafts, one
story at 1.27, 1.29 and 1.20; four tool calls with a slower host at 1.79, 2.27 and 1.73."""


class PassTimes:
    """What steps and verify steps take, by rows and draft tokens a row: the mean, where rows have unequal
    ones.

    first_tells  the first verify step of a kind says what the others take. Not on a GPU, where it loads
                 kernels: on an H200 SmolLM2's takes 8 to 13 ms, and the next one 3.5, so that a text that was
                 repeated had 7 draft tokens in 192, at 0.96 of the speed without
    """

    def __init__(self, first_tells: bool = True) -> None:
        self._first_tells = first_tells
        self._steps: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=NEWEST))
        self._plain: dict[int, float] = {}  # Median seconds of the newest plain steps, by rows.
        self._costs: defaultdict[int, dict[float, float]] = defaultdict(dict)  # In plain steps.
        # The newest costs of a kind, by (rows, draft tokens a row).
        self._passes: defaultdict[tuple[int, float], deque[float]] = defaultdict(lambda: deque(maxlen=NEWEST))
        self._thought: dict[tuple[int, float], float] = {}  # Costs of kinds that never ran.
        self._prompts: dict[int, float] = {}  # Seconds of the longest ones, by tokens.

    def record_prompt(self, tokens: int, seconds: float) -> None:
        """Record that a pass computed `tokens` of a prompt."""
        self._prompts[tokens] = seconds
        if len(self._prompts) > NEWEST:  # Behind a hit they are short, and tell little.
            del self._prompts[min(self._prompts)]
        self._thought.clear()

    def record_step(self, rows: int, seconds: float, *, steady: bool = True) -> None:
        """Record that a plain step took `seconds`.

        steady  plain steps of the same rows came before it. Those behind a pass or a row that joins take
                longer: 16 rows of SmolLM2 on an H100, 3.1 ms for 1.8, so that verify steps were
                thought to cost 1.6 steps, cost 2.7, and lost. They show what a step takes at most
        """
        if not steady and seconds >= self._plain.get(rows, 0.0):
            return
        if rows not in self._plain:
            self._thought.clear()
        self._steps[rows].append(seconds)
        self._plain[rows] = median_low(self._steps[rows])

    def record_verify(
        self, rows: int, guesses: float, seconds: float, *, packed: bool = False, compiled: bool = False
    ) -> float:
        """Record that a verify step took `seconds`.

        packed    as `cost` has it
        compiled  before it ran, so that the time tells nothing of other steps

        Returns those of them that do not count: the first of a kind may load kernels, so no more than twice
        what was expected is held against it. Before as many rows made a plain step, it tells no cost.
        """
        plain, usual, costs = self.plain(rows), self.cost(rows, guesses, packed=packed), self._costs[rows]
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

    def doubt(self) -> None:
        """Take half of what verify steps cost beyond a plain step: what was too slow is tried again, and
        measured."""
        self._passes.clear()
        for costs in self._costs.values():
            for guesses, cost in costs.items():
                costs[guesses] = (1 + cost) / 2

    def plain(self, rows: int) -> float:
        """Return seconds of a plain step; before there was one, between those of fewer and of more rows, or
        as the next to them; 0: none ran."""
        if (own := self._plain.get(rows)) is not None or not self._plain:
            return own or 0.0
        counts = sorted(self._plain)
        return float(np.interp(rows, counts, [self._plain[count] for count in counts]))

    def saved(self, rows: int, fewer: int) -> float:
        """Return what a step of `rows` takes less for fewer of them, or for the next more that a step had."""
        ran = [count for count in self._plain if fewer <= count <= rows]
        return max(0.0, 1 - self._plain[min(ran)] / self.plain(rows)) if ran else 0.0

    @property
    def checked(self) -> bool:
        """Whether any verify step was made."""
        return any(self._costs.values())

    def cost(self, rows: int, guesses: float, *, packed: bool = False) -> float:
        """Return the cost of a verify step in plain steps of the same rows; infinite before there was a step.

        packed  it is thought to take as long as one of fewer tokens: starting kernels is what it costs, as
              long as the weights are read once
        """
        kind = rows, guesses
        if (own := self._costs[rows].get(guesses)) is not None:
            return max(own, 1.0)
        if not self._plain:
            return float("inf")
        if kind not in self._thought:
            self._thought[kind] = max(self._expected(rows, guesses, packed) / self.plain(rows), 1.0)
        return self._thought[kind]

    def _expected(self, rows: int, guesses: float, packed: bool) -> float:
        """Return the seconds of a pass: those of one of fewer tokens, in all rows, and the others as tokens
        of a prompt; where it is packed, those of the one with most of these.

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
        if packed:
            return max(plain, max(ran)[1])
        return max(seconds + (tokens - count) * slope for count, seconds in ran)
