"""Tells an endless loop from honest repetition, by tokens and not by text; O(1) a token.

A loop of a period is a run of tokens in which each equals the one a period before it. Where a token does not,
the newest `GRAM` tokens say by what distance they stood before: that is the next period to try.

Honest answers repeat, too: rows of a matrix, equal objects of a list, a line that somebody asked for some
hundred times. So an answer is a loop only where the run is longer than those of the 200 answers that
tests/engine/constrain/test_repetition.py makes, with room to spare. A thought is ended earlier: what a false
alarm costs there is the rest of a thought, and the answer is written all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

GRAM = 8
"""Tokens by which a place is found again: words of a language stand in such an order by chance next to never,
and a loop is found within as many tokens as it has."""
REACH = 320
"""Tokens of the longest period. Loops of models are a token, a sentence or a paragraph; text that comes again
after more than that is a copy, as of a file that is written anew."""

THOUGHT = 4096
"""Tokens of a run that end a thought, so 12 repeats of the longest period. A thought drafts a table or two;
what is said 12 times and more in 4,096 tokens has been thought."""
DRIFT = 8192, 12
"""Score that ends a thought whose repeats differ in a few tokens, and what such a token costs. A paragraph of
100 tokens with one number that counts up gains 88 a repeat: it takes 94 of them."""
ONE = 8192
"""Tokens of a run of one token, in an answer: what broken weights give ("!!!!"), and goes on for ever."""
OTHER = 256
"""What a break of that run costs, where another token comes and where the one comes again. Qwen2.5 Coder 0.5B
wrote 8,011 zeros, a "#", and zeros again; lines of a picture are shorter than twice this."""
RICH = 8
MOST = 20_480
"""Tokens of a run of words: of a period with at least `RICH` different tokens, or where half of them differ,
as in a sentence, a paragraph or an object. That is 64 repeats of the longest period, 660 of an object of 31
tokens, 6,800 zeros with commas. The longest run of the 200 answers has 17,353."""
LONG = 32_768
"""Tokens of a run of any other kind: 100 rows of a matrix of 100 zeros have 30,000. Also where the prompt has
the text, as somebody who asks for repeats names it, and where a grammar writes the answer."""

_RING = 512  # a power of two, and more than REACH


class Repetition:
    """The newest run of one answer.

    prompt  tokens of the prompt, or more: `prompt_length` of them count
    period  of the run; 0: none
    run     tokens that equal the one a period before, in a row
    """

    __slots__ = (
        "_grams",
        "_newest",
        "_ones",
        "_position",
        "_prompt",
        "_prompt_length",
        "_ring",
        "_score",
        "period",
        "run",
    )

    def __init__(self, prompt: Sequence[int] = (), prompt_length: int = 0):
        self._prompt, self._prompt_length = prompt, prompt_length
        self._ring = [-1] * _RING
        self._position = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what was said: a thought is over."""
        self._grams: dict[tuple[int, ...], int] = {}
        self._newest: tuple[int, ...] = (-1,) * GRAM
        self._score = self._ones = self.period = self.run = 0

    def add(self, token: int) -> None:
        ring, at = self._ring, self._position
        ring[at % _RING] = token
        self._newest = newest = (*self._newest[1:], token)
        before = self._grams.get(newest, -_RING)
        if self.period and ring[(at - self.period) % _RING] == token:
            self.run += 1
            self._score += 1
            self._ones += self.period == 1
        else:
            self.run, self._score = 0, max(0, self._score - DRIFT[1])
            self._ones = max(0, self._ones - OTHER)
            if at - before <= REACH:
                self.period = at - before
            elif not self._score:
                self.period = 0
        self._grams[newest] = at
        if len(self._grams) > 8 * REACH:
            self._grams = {gram: place for gram, place in self._grams.items() if at - place <= REACH}
        self._position = at + 1

    def ends_thought(self) -> bool:
        """Whether a thought goes round for certain."""
        return self.run >= THOUGHT or self._score >= DRIFT[0]

    def ends_answer(self, *, written: bool) -> bool:
        """Whether an answer goes round for certain. `written`: by a grammar."""
        run = self.run
        if run >= LONG or written:
            return run >= LONG
        if self.period == 1 and self._ones >= ONE:
            return True
        if run != MOST:  # Looked into once a run: the period stays the same.
            return False
        tokens = [self._ring[(self._position - back) % _RING] for back in range(self.period, 0, -1)]
        different = len({*tokens})
        is_text = different >= RICH or 2 * different >= self.period
        return is_text and not self._is_in_prompt(tokens)

    def _is_in_prompt(self, period: list[int]) -> bool:
        """Whether the prompt has a part of the run: `GRAM` tokens in a row, or a shorter period itself."""
        size = min(GRAM, len(period))
        if size < 4:  # Any text has those.
            return False
        text, twice = np.array(self._prompt[: self._prompt_length], np.int64), period * 2
        grams = {tuple(twice[start : start + size]) for start in range(len(period))}
        starts = np.flatnonzero(np.isin(text[: max(0, len(text) - size + 1)], period))
        return any(tuple(text[start : start + size].tolist()) in grams for start in starts.tolist())
