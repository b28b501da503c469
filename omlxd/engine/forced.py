"""An answer that is given, to be told how likely it is: its tokens are what is generated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import OmlxdError


class ForcedAnswer:
    """A constraint (constraint.py) that lets one token through a step: the next of `tokens`, of `vocab`.

    The request ends with the last of them, by its limit of tokens.
    """

    error: OmlxdError | None = None

    def __init__(self, tokens: Sequence[int], vocab: int):
        self._tokens = tokens
        self._vocab = vocab
        self._at = 0
        self.mask: np.ndarray | None = self._mask()

    def advance(self, token: int) -> None:
        self._at += 1
        self.mask = self._mask()

    def _mask(self) -> np.ndarray | None:
        if self._at >= len(self._tokens):
            return None
        mask = np.zeros(self._vocab, np.bool_)
        mask[self._tokens[self._at]] = True
        return mask
