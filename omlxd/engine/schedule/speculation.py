"""Speculative decoding by n-grams: a pass checks guesses, which are what followed the newest tokens before.

vLLM calls the method `ngram`, transformers prompt lookup. Agents return files, logs and JSON that stand in
their prompts, so guesses often hold. A pass computes the newest token and some guesses behind it. At each
position a token is drawn as a step of its own would draw it there; guesses hold up to the first that was not
drawn. A guess has no part in what is drawn: sampled answers have the distribution of plain decoding, and
greedy ones its tokens, but for the rounding of wider passes.

A batch speculates while it is one row: rows that took different numbers of guesses would lie unevenly in one
array. Rows with logprobs or a grammar decode plainly.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

MIN_MATCH = 3
"""Tokens that must have stood together before, for what followed them to be a guess."""

LONGEST_MATCH = 16
"""Tokens of a match that are compared; among the longest, the most recent one counts."""

CANDIDATES = 256
"""Most recent matches that are compared further."""

WIDTHS = (2, 4, 8, 15)
"""Guesses in a pass; which of them pays is measured while it runs.

SmolLM2-135M in float32, CPU with OpenBLAS, milliseconds of a pass at 512 tokens of context: 1 token 95,
3 127, 5 124, 9 146, 16 186. Tokens a second against `--speculation off`, one stream, greedy, answers equal
(tools/bench/speculation.py): returning an edited file 26.2 and 7.4, a log 23.5 and 11.5, a tool call 16.5 and
13.9, prose 12.7 and 12.3. With MLX's own BLAS a pass takes as long as its tokens one by one.
"""

GAIN = 1.05
"""Tokens a second, as a multiple of plain decoding, that a pass with guesses must promise."""

DECAY = 0.9
"""Weight of earlier guesses in the share that holds, and of earlier passes in their time."""

AGEING = 0.999
"""Of a measured time, with every plain step: passes that once were too slow are tried again, rarely."""

UNKNOWN = 0.5
"""Share of guesses thought to hold before any was made."""


class NgramProposer:
    """Guesses the continuation of one sequence from its own tokens.

    A search reads the tokens once: 0.1 ms for 100,000 of them, with no index to build or keep.
    """

    def __init__(self, tokens: Seq[int]):
        self._count = len(tokens)
        self._ids = np.empty(max(1024, 2 * self._count), np.int32)
        self._ids[: self._count] = tokens

    def add_token(self, token: int) -> None:
        if self._count == len(self._ids):
            self._ids = np.resize(self._ids, 2 * self._count)
        self._ids[self._count] = token
        self._count += 1

    def propose(self, most: int) -> tuple[list[int], int]:
        """(`most` tokens that may come next, tokens of the match); nothing where there is no match.

        What followed a match that overlaps the newest tokens is repeated: the text is in a loop.
        """
        ids, last = self._ids[: self._count], self._count - 1
        if last < MIN_MATCH or most < 1:
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


@dataclass(slots=True)
class PassTimes:
    """Seconds of a pass by its guesses, of one model on this machine; 0 guesses is a plain step."""

    _seconds: dict[int, float] = field(default_factory=dict)
    _begun: set[int] = field(default_factory=set)

    def record_pass(self, guesses: int, seconds: float) -> None:
        """A pass took `seconds`. The first with so many guesses does not count: it loads kernels."""
        if guesses not in self._begun:
            self._begun.add(guesses)
            return
        usual = self._seconds.get(guesses, seconds)
        self._seconds[guesses] = min(DECAY * usual + (1 - DECAY) * seconds, 2 * usual)
        if not guesses:
            for width in self._seconds.keys() - {0}:
                self._seconds[width] *= AGEING

    def cost(self, guesses: int) -> float:
        """As a multiple of a plain step; that of the widest narrower pass where none was measured."""
        measured = max((width for width in self._seconds if width <= guesses), default=None)
        if measured is None or not (plain := self._seconds.get(0)):
            return 1.0
        return max(self._seconds[measured] / plain, 1.0)


@dataclass(slots=True)
class Speculation:
    """What the sequences of one engine share.

    repeatable  the same requests in the same order get the same answers: one whose draws depend on what was
                drawn before, so on the passes, decodes plainly
    times       of passes
    drafts      passes with guesses; drafted, accepted: guesses made, guesses that held
    """

    repeatable: bool = False
    times: PassTimes = field(default_factory=PassTimes)
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0


class _HoldRate:
    """The share of guesses that hold, newest first in weight."""

    __slots__ = ("_held", "_tried")

    def __init__(self) -> None:
        self._held = self._tried = 0.0

    def record(self, held: int, tried: int) -> None:
        weight = DECAY**tried
        self._held, self._tried = self._held * weight + held, self._tried * weight + tried

    @property
    def value(self) -> float:
        return (self._held + UNKNOWN) / (self._tried + 1.0)


class RowSpeculator:
    """Decides for one sequence how many guesses the next pass checks.

    A plain step beside which a guess was at hand tells whether that would have held, at no cost; so a
    sequence whose guesses fail goes back to plain decoding, and begins again once they would hold.
    """

    def __init__(self, shared: Speculation, tokens: Seq[int]):
        self.shared = shared
        self._proposer = NgramProposer(tokens)
        self._rates: dict[bool, _HoldRate] = {False: _HoldRate(), True: _HoldRate()}
        self._guess, self._long = self._propose()

    def record_pass(self, guesses: int, tokens: Seq[int], seconds: float) -> None:
        """A pass checked some guesses and drew `tokens`: those that held, and one more."""
        held = len(tokens) - 1
        self.shared.times.record_pass(guesses, seconds)
        self.shared.drafts += 1
        self.shared.drafted += guesses
        self.shared.accepted += held
        self._rates[self._long].record(held, min(held + 1, guesses))
        self._take(tokens)

    def add_tokens(self, tokens: Seq[int]) -> None:
        """Take tokens of plain steps."""
        if self._guess and tokens:
            self._rates[self._long].record(int(self._guess[0] == tokens[0]), 1)
        self._take(tokens)

    def _take(self, tokens: Seq[int]) -> None:
        for token in tokens:
            self._proposer.add_token(token)
        self._guess, self._long = self._propose()

    @property
    def promising(self) -> bool:
        """Whether checking the guesses at hand would pay: the newest token is then worth waiting for."""
        return self._width(len(self._guess)) > 0

    def guesses(self, most: int) -> list[int]:
        """Guesses to check in the next pass, at most so many; none where plain decoding is faster."""
        return self._guess[: self._width(min(most, len(self._guess)))]

    def _propose(self) -> tuple[list[int], bool]:
        guess, match = self._proposer.propose(WIDTHS[-1])
        return guess, match >= LONGEST_MATCH

    def _width(self, most: int) -> int:
        rate, best, best_gain = self._rates[self._long].value, 0, GAIN
        for width in WIDTHS:
            if width > most:
                break
            tokens = sum(rate**count for count in range(width + 1))
            if (gain := tokens / self.shared.times.cost(width)) > best_gain:
                best, best_gain = width, gain
        return best
