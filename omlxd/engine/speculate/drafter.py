"""Draft tokens of a drafter, which reads the model's hidden states, in place of a draft model's.

A drafter is EAGLE-3, DFlash or its kin, or heads for multi-token prediction. As a draft model's
(draft_model.py), its tokens are drawn with the noise that the check draws with, so the answer is that of
plain decoding. It reads the hidden states of the model's own passes, so it knows nothing of a prefix that was
restored: its KV begins with the passes over the rest of the prompt.

Each row has states and KV of its own, and a pass of the drafter of its own.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx

from .. import mlx_adapter
from ..sequence.sampling import BatchSampler
from ..sequence.sequence import MOST_STATES, Sequence
from .draft_model import Wanted, clock, until_no_token
from .verify import most_of_row


class DrafterModel:
    """A drafter in the place of a draft model.

    is_named  by `draft-model`; else it is the model's own heads
    """

    def __init__(self, drafter: mlx_adapter.Drafter, *, is_named: bool = True):
        self.drafter, self.is_named = drafter, is_named

    def kv_bytes(self, sequence: Sequence) -> int:
        """Most that its KV takes for one sequence, as far as room is made for its answer at once."""
        tokens = MOST_STATES + sequence.capacity - sequence.prompt.length
        return self.drafter.token_bytes * mlx_adapter.round_up(tokens)

    def rows(self) -> DrafterRows:
        return DrafterRows(self.drafter)


@dataclass(slots=True)
class _Row:
    """What the drafter keeps of a row: states of its tokens that it has not read, and its KV.

    next  token whose state is to come
    """

    state: mlx_adapter.DrafterState
    unread: list[mx.array]
    next: int


@dataclass(slots=True)
class DrafterRows:
    """What the drafter keeps of the rows of one batch.

    seconds  that the last drafts took; 0: there were none, or the drafter had more to read than usual
    """

    drafter: mlx_adapter.Drafter
    seconds: float = 0.0
    _rows: dict[Sequence, _Row] = field(default_factory=dict)

    def keep(self, sequences: Container[Sequence]) -> None:
        """Drop all others."""
        self._rows = {sequence: row for sequence, row in self._rows.items() if sequence in sequences}

    def record(self, sequence: Sequence, start: int, hidden: mx.array) -> None:
        """Take the states (tokens, any) of a pass over the sequence's tokens from `start` on."""
        row, end = self._rows.get(sequence), start + len(hidden)
        if row is None or start != row.next or end - row.state.position > MOST_STATES:
            hidden = hidden[-MOST_STATES:]
            row = self._rows[sequence] = _Row(self.drafter.new_state(end - len(hidden)), [], end)
        row.unread.append(hidden)
        row.next = end

    def propose(self, wanted: Seq[Wanted], width: int) -> dict[Sequence, list[int]]:
        """Propose up to `width` tokens that may come next, of the rows whose states are there."""
        began, self.seconds, most = clock(), 0.0, 0
        drafts: dict[Sequence, mx.array] = {}
        for each in wanted:
            row = self._rows.get(each.sequence)
            if row is None or not row.unread:
                continue
            states, row.unread = mx.concatenate(row.unread), []
            following = each.tokens[row.state.position + 1 :].tolist()
            if len(following) != len(states):
                del self._rows[each.sequence]
                continue
            most = max(most, len(following))
            drafts[each.sequence] = self._draft(each, row.state, following, states[None], width)
        mx.eval([*drafts.values()])
        if 0 < most <= most_of_row():
            self.seconds = clock() - began
        return {
            sequence: until_no_token(cast(list[int], guesses.tolist()))
            for sequence, guesses in drafts.items()
        }

    def _draft(
        self,
        each: Wanted,
        state: mlx_adapter.DrafterState,
        following: list[int],
        hidden: mx.array,
        width: int,
    ) -> mx.array:
        sampler = BatchSampler([each.sampler])

        def draw(logits: mx.array) -> mx.array:
            token = sampler(logits)
            each.sampler.constraint = None  # Of a grammar it knows the first token alone.
            return token

        return mx.concatenate(self.drafter.draft(state, following, hidden, width, draw))
