"""Draft tokens of one sequence: who proposes them, and how often they are accepted."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from ..constrain.limits import Limits
from .ngram import NgramProposer
from .verify import MOST_CREDIT, WIDTHS

DRAFT = "draft"
"""The kind of a draft model's tokens."""

KINDS = ("short", "long", "forced", DRAFT)
"""Of draft tokens: by the match that they follow, by a grammar, of the draft model."""

DECAY = 0.9
"""Weight of earlier draft tokens in the share that is accepted, for each newer one. With 0.95, a simulated
tool call on an H100 was at 3.28 and a story at 1.25; with this at 3.47 and 1.29."""


class HoldRate:
    """The share of draft tokens that is accepted, newest first in weight."""

    __slots__ = ("_begin", "_decay", "_held", "_tried")

    def __init__(self, begin: float = 0.5, decay: float = DECAY) -> None:
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
    """What a row has for the next verify step.

    rate     the share of its draft tokens that is accepted
    guesses  how many it has
    won      plain steps that they have won it so far
    """

    rate: float
    guesses: int
    won: float = 0.0

    @property
    def share(self) -> float:
        """`rate`; 0 without draft tokens."""
        return self.rate if self.guesses else 0.0


def expected_tokens(rate: float, guesses: int) -> float:
    """Return the tokens that a verify step gives a row, where each draft token is accepted with `rate` (below
    1) if those before it are."""
    return (1 - rate ** (guesses + 1)) / (1 - rate)


class RowSpeculator:
    """The draft of one sequence, and the share of its draft tokens that is accepted.

    A plain step beside which a draft was at hand tells whether its first token would have been accepted, at
    no cost; so a sequence whose drafts fail goes back to plain decoding, and begins again once they would
    not.

    won         plain steps that drafts have won it: its tokens of turns with drafts, less what those took.
                A row with a prediction begins with `2 * MOST_CREDIT`, so that it tries it whatever others
                have lost, and again where the first token is wrong: one stream of edits on an H200, 1B shape,
                were at 1.43 and 2.32 times the speed without drafts with one step, at 2.41 and 2.48 with
                these, and at 2.44 and 2.00 by the rules before
    constraint  of the sequence; its tokens so far are taken by it first
    shared      the share that is accepted, of all sequences: what is thought before this one proposed any
    prediction  tokens that the client predicts
    """

    def __init__(
        self,
        tokens: Seq[int],
        constraint: Limits | None = None,
        shared: Mapping[str, HoldRate] | None = None,
        prediction: Seq[int] = (),
    ):
        self.won = 2 * MOST_CREDIT if prediction else 0.0
        self._proposer = NgramProposer(tokens, prediction)
        self._constraint = constraint
        self._shared = shared or {kind: HoldRate() for kind in KINDS}
        self._rates = {kind: HoldRate(rate.value) for kind, rate in self._shared.items()}
        self._draft: list[int] | None = []
        self._propose()

    @property
    def draft(self) -> list[int]:
        """Tokens that may come next; empty: no idea. Of a match they are read when somebody asks."""
        if self._draft is None:
            self._draft = self._proposer.following(WIDTHS[-1])
        return self._draft

    @draft.setter
    def draft(self, tokens: list[int]) -> None:
        self._draft = tokens

    @property
    def tokens(self) -> np.ndarray:
        """All so far; a view."""
        return self._proposer.tokens

    @property
    def draft_rate(self) -> float:
        """The share of the draft model's tokens that is accepted."""
        return self._rates[DRAFT].value

    @property
    def of_model(self) -> bool:
        """Whether the draft model proposed the draft."""
        return self._kind == DRAFT

    @property
    def of_prediction(self) -> bool:
        """Whether the draft comes from the client's prediction."""
        return self._kind in ("short", "long") and self._proposer.is_predicted

    def take_draft(self, draft: list[int]) -> None:
        """Take the draft model's in place of its own draft."""
        self.draft, self._kind = draft, DRAFT

    def offer(self, most: int = WIDTHS[-1]) -> Offer:
        """Return what the row has for the next verify step, at most `most` draft tokens."""
        count = WIDTHS[-1] if self._draft is None else len(self._draft)
        return Offer(self._rates[self._kind].value, max(0, min(most, count)), self.won)

    def add_tokens(self, tokens: Seq[int], checked: int = 0) -> None:
        """Take the next tokens. A verify step drew them: those of its `checked` draft tokens that were
        accepted, and one more; or plain steps did."""
        if tokens and (self._draft is None or self._draft):
            held = len(tokens) - 1 if checked else int(self._is_next(tokens[0]))
            for rates in (self._rates, self._shared):
                rates[self._kind].record(held, min(len(tokens), checked) or 1)
        self._proposer.add_tokens(tokens)
        self._propose()

    def _propose(self) -> None:
        forced = self._constraint.forced_tokens() if self._constraint is not None else []
        if len(forced) > 1:
            self.draft, self._kind = forced[: WIDTHS[-1]], "forced"
        else:
            self._draft = None if self._proposer.match() else []
            self._kind = "long" if self._proposer.is_long else "short"

    def _is_next(self, token: int) -> bool:
        """Whether the draft's first token is this one."""
        return self._proposer.is_next(token) if self._draft is None else self._draft[0] == token
