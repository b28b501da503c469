"""How many tokens a text has at least, told without a tokenizer: of a prompt that surely is too long."""

from __future__ import annotations

import math

from ..chat import Conversation, RawPrompt, Struct, plain_texts
from ..errors import PromptTooLong

FILLER = b" \t\r\n\x0b\x0c!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_SLICE = 1 << 20
"""Characters that are counted before other threads get their turn."""


COUNTED_CONTEXTS = 4
"""Clients count what they may then shorten; a prompt of more contexts than this is too long to be counted."""


class TokenBytes(Struct, frozen=True):
    """The most bytes of text that one token of a model stands for; 0: nobody knows.

    word  without `FILLER`: runs of blanks and dashes are tokens of 128 bytes and more in many vocabularies
    any   with it; 0 too where the tokenizer may drop blanks
    """

    word: float = 0.0
    any: float = 0.0

    def check(self, prompt: Conversation | RawPrompt, most: int) -> None:
        """Raise PromptTooLong for a prompt that surely has more than `most` tokens."""
        if isinstance(prompt, RawPrompt):
            self.check_texts([prompt.text], most)
        elif len(prompt.messages) > most:
            raise PromptTooLong(len(prompt.messages), most, least=True)
        else:
            self.check_texts(plain_texts(prompt), most, trimmed=True)

    def check_texts(self, texts: list[str], most: int, *, trimmed: bool = False) -> None:
        """The same of `texts` that stand in a prompt. `trimmed`: without blanks at their ends."""
        if sum(map(len, texts)) > 2 * most:
            least = self.least(texts, trimmed=trimmed, enough=COUNTED_CONTEXTS * most)
            if least > most:
                raise PromptTooLong(least, most, least=True)

    def least(self, texts: list[str], *, trimmed: bool = False, enough: float = math.inf) -> int:
        """Tokens that `texts` have at least; 0 if nobody knows. No more than `enough` are counted."""
        least = 0.0
        words = total = 0
        for text in texts:
            for at in range(0, len(text) if self.word else 0, _SLICE):
                piece = text[at : at + _SLICE].encode(errors="replace")
                total += len(piece)
                words += len(piece.translate(None, FILLER))
                least = max(words / self.word, total / self.any if self.any and not trimmed else 0.0)
                if least > enough:
                    return int(least)
        return int(least)
