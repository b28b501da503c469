"""Maps pieces of the answer to their tokens, for log-probabilities.

Text may be held back, dropped or given back (tags, stop strings, space before a tag). So tokens wait here by
their place in the raw text, then in the answer, and leave with the text that they begin.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from msgspec.structs import replace

from ...chat import TokenLogprob
from ..sequence.sequence import Likelihood
from .detokenizer import bytes_of


class AnswerLogprobs:
    """Queues likelihoods by position in letters. Unused unless a token comes with a likelihood."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._raw = 0
        self._pending: deque[tuple[int, int, TokenLogprob]] = deque()
        self._queue: deque[tuple[int, TokenLogprob]] = deque()
        self._answer = 0
        self._dropped = 0

    def spelled(self, token: int, likelihood: Likelihood) -> TokenLogprob:
        """Return a token in clients' spelling."""
        text, raw = _spelled(self._tokenizer, token)
        top = [(_spelled(self._tokenizer, id), value) for id, value in likelihood.top]
        return TokenLogprob(
            token=text,
            logprob=likelihood.logprob,
            top=tuple((spelled[0], value) for spelled, value in top),
            raw=raw,
            top_raw=tuple(spelled[1] for spelled, _ in top) if any(spelled[1] for spelled, _ in top) else (),
        )

    def add(self, token: int, text: str, likelihood: Likelihood | None) -> None:
        """Add a token that made `text` certain; it may be empty, or hold what was held back before."""
        if likelihood is not None:
            logprob = self.spelled(token, likelihood)
            self._pending.append((self._raw, self._raw + len(text), logprob))
        self._raw += len(text)

    def answer(self, length: int, end: int) -> None:
        """Note that the raw text's `length` letters up to `end` are answer."""
        start = end - length
        while self._pending and self._pending[0][0] < end:
            at, stop, logprob = self._pending.popleft()
            if at >= start or stop > start:
                self._queue.append((self._answer + max(0, at - start), logprob))
        self._answer += length

    def other(self, end: int) -> None:
        """Note that the raw text up to `end` is no answer."""
        while self._pending and self._pending[0][1] <= end and self._pending[0][0] < end:
            self._pending.popleft()

    def take(self, end: int) -> tuple[TokenLogprob, ...]:
        """Take the log-probabilities of tokens before letter `end` of the answer, which go out now."""
        taken = []
        while self._queue and self._queue[0][0] < end:
            at, logprob = self._queue.popleft()
            taken.append(replace(logprob, at=at - self._dropped))
        return tuple(taken)

    def drop(self, end: int, length: int) -> None:
        """Drop the `length` letters of the answer up to `end`, which never go out."""
        self.take(end)
        self._dropped += length


def _spelled(tokenizer: Any, token: int) -> tuple[str, bytes]:
    """Return a token's text, and its bytes if the text is ambiguous."""
    raw = bytes_of(tokenizer, token)
    try:
        return raw.decode(), b""
    except UnicodeDecodeError:
        return raw.decode(errors="replace"), raw
