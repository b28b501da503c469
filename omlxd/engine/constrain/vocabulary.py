"""A tokenizer's and model's facts for constraints: ends of turns, thinking tags, spaces, digits."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MOST_DIGITS = 19
"""Digits in a row of a JSON number: all of int64, and more than a double has."""
MOST_EXPONENT = 2
"""Digits of a JSON number's exponent: 1e99 is a double, 1e999 is infinite, which JSON lacks."""
_TAIL = 24
_RUN = re.compile(r"([eE][+-]?)?([0-9]*)\Z")
_IN_TEXT = ('"', "x")
"""Letters behind which digits are part of a text."""


class Vocabulary:
    """Tables over the tokens of one model.

    vocab        width of the logits; matcher_vocab: tokens of the matcher, no fewer
    ends         tokens that end a turn; end_ids: those of the logits
    think_start, think_end  tokens of the tags
    spaces       tokens of space that may follow a thought; space_ids: the same, sorted
    not_ended    (vocab,) bool: all but `ends`
    """

    def __init__(self, tokenizer: Any, vocab: int, matcher: LLTokenizer):
        self._matcher = matcher
        self.vocab = vocab
        self.matcher_vocab = matcher.vocab_size
        self.ends = frozenset(tokenizer.eos_token_ids)
        self.end_ids = np.array(sorted(end for end in self.ends if end < vocab), dtype=np.int64)
        self.think_start: tuple[int, ...] = tuple(tokenizer.think_start_tokens or ())
        self.think_end: tuple[int, ...] = tuple(tokenizer.think_end_tokens or ())
        self.spaces = frozenset(_single(tokenizer, "\n", "\n\n", " "))
        self.space_ids = np.array(sorted(self.spaces), dtype=np.int64)
        self.not_ended = np.ones(vocab, np.bool_)
        self.not_ended[self.end_ids] = False
        self._letters = np.array(sorted(_single(tokenizer, *_IN_TEXT)), dtype=np.int64)
        self._digits = np.zeros(vocab, np.int16)
        for token, id in tokenizer.get_vocab().items():
            if id < vocab and token[:1] in "0123456789":
                self._digits[id] = len(token) - len(token.lstrip("0123456789"))
        self._longest = int(self._digits.max(initial=0))

    def plain_start(self, text: bytes) -> int:
        """Return the token that begins `text` where no part of it is a control token."""
        return self._matcher.greedy_tokenize(text.decode(errors="ignore"))[0]

    def is_control(self, token: int) -> bool:
        return self._matcher.is_special_token(token)

    def add(self, tail: str, token: int) -> str:
        """Return the end of a text that goes on with `token`, for `end_digits`."""
        return (tail + self._matcher.decode_str([token]))[-_TAIL:]

    def end_digits(self, tail: str, mask: np.ndarray) -> None:
        """Take from `mask` the tokens with too many digits behind `tail`, where a number goes on or ends.

        A grammar's numbers have no end: a model that repeats itself writes digits up to its limit.
        """
        run = _RUN.search(tail)
        assert run is not None  # it matches nothing, too
        left = (MOST_EXPONENT if run[1] else MOST_DIGITS) - len(run[2])
        if left >= self._longest or mask[self._letters].any():
            return
        kept = mask & (self._digits <= left)
        if kept.any():  # Else the grammar itself wants more.
            mask[:] = kept


def _single(tokenizer: Any, *texts: str) -> set[int]:
    """Return the ids of the texts that are one token."""
    spelled = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    return {ids[0] for ids in spelled if len(ids) == 1}
