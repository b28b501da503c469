"""Guesses of a sequence's next tokens from its own: what followed the newest ones before.

vLLM calls the method `ngram`, transformers prompt lookup. speculation.py says when a guess is checked.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

MIN_MATCH = 3
"""Tokens that must have stood together before, for what followed them to be a guess."""

MARKS = 1 << 20
"""Marks of triples of tokens that stood together: a megabyte a sequence."""

LONGEST_MATCH = 16
"""Tokens of a match that are compared. Until a guess fails, the most recent of the longest counts, but one in
the prediction first."""

CANDIDATES = 256
"""Most recent matches that are compared further."""


class NgramProposer:
    """Guesses the continuation of one sequence from its own tokens.

    A search reads the tokens once: 0.1 ms for 100,000 of them. It is made only where the newest tokens may
    have stood together before; 1 of 16 such marks is wrong at 65,000 tokens, and no token is guessed for it.
    While a guess holds, its match grows without a search: 16 rows that repeat a text took 1.4 ms a step for
    searches, and take 0.1.

    prediction  tokens that the client predicts: searched as if they stood before `tokens`, and believed first
    """

    def __init__(self, tokens: Seq[int], prediction: Seq[int] = ()):
        self._begin = begin = len(prediction)
        self._count = begin + len(tokens)
        self._ids = np.empty(max(1024, 2 * self._count), np.int32)
        self._ids[:begin], self._ids[begin : self._count] = prediction, tokens
        self._marks = bytearray(MARKS)
        self._match: tuple[int, int] | None = None  # Where the last one ends, and its tokens.
        ids = self._ids[: self._count].astype(np.int64)
        np.frombuffer(self._marks, np.uint8)[_mark(ids[:-3], ids[1:-2], ids[2:-1])] = 1
        self._newest = (0, 0, 0, *ids[-3:].tolist())[-3:]

    @property
    def tokens(self) -> np.ndarray:
        """All of the sequence so far; a view."""
        return self._ids[self._begin : self._count]

    def add_tokens(self, tokens: Seq[int]) -> None:
        count, match = self._count, self._match
        if count + len(tokens) > len(self._ids):
            self._ids = np.resize(self._ids, 2 * (count + len(tokens)))
        ids, marks, (first, second, third) = self._ids, self._marks, self._newest
        for token in tokens:
            if count >= MIN_MATCH:
                marks[_mark(first, second, third)] = 1
            ids[count] = token
            first, second, third = second, third, token
            if match is not None:
                match = (match[0] + 1, match[1] + 1) if ids[match[0] + 1] == token else None
            count += 1
        self._newest, self._match, self._count = (first, second, third), match, count

    def match(self) -> int:
        """Tokens of the longest match, up to LONGEST_MATCH; 0: there is none, and nothing to guess."""
        if self._match is None:
            self._match = self._longest()
        return min(self._match[1], LONGEST_MATCH) if self._match is not None else 0

    @property
    def is_predicted(self) -> bool:
        """Whether the match's next token stands in the prediction."""
        return self._match is not None and self._match[0] + 1 < self._begin

    def is_next(self, token: int) -> bool:
        """Whether the longest match was followed by this one."""
        return self._match is not None and bool(self._ids[self._match[0] + 1] == token)

    def following(self, most: int) -> list[int]:
        """`most` tokens that may come next; none where there is no match.

        What followed a match that overlaps the newest tokens is repeated: the text is in a loop.
        """
        self.match()
        if self._match is None:
            return []
        following = self._ids[self._match[0] + 1 : self._count][:most]
        return (following if len(following) == most else np.resize(following, most)).tolist()

    def _longest(self) -> tuple[int, int] | None:
        """Where the longest match ends, and its tokens; None: there is none."""
        last = self._count - 1
        if last < MIN_MATCH or not self._marks[_mark(*self._newest)]:
            return None
        ids = self._ids[: self._count]
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
        predicted = ends[ends + 1 < self._begin]
        return int((predicted if predicted.size else ends)[-1]), match


def _mark(first: Any, second: Any, third: Any) -> Any:
    """The place of a triple's mark; of arrays those of theirs."""
    return (first * 1_000_003 + second * 8_191 + third) % MARKS
