"""Draft tokens of a model's own heads for multi-token prediction, in place of a draft model's.

As a draft model's (draft_model.py), they are drawn with the noise that the check draws with, so the answer is
that of plain decoding. The heads read the hidden states of the model's own passes, so they know nothing of a
prefix that was restored: their KV begins with the last pass over the prompt.

Of one row alone: the families that have such heads keep recurrent states, whose draft tokens can be taken
back of one row only.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx

from .. import mlx_adapter
from ..sequence.sampling import BatchSampler
from ..sequence.sequence import Sequence
from .draft_model import Wanted, clock, until_no_token
from .verify import most_of_row


class MtpModel:
    """A model's heads in the place of a draft model.

    most  hidden states that wait for the heads: 8 MB of 4,096 numbers in 16 bits. Then they begin anew
    """

    def __init__(self, heads: mlx_adapter.MtpHeads, most: int = 1024):
        self.heads, self.most = heads, most

    def kv_bytes(self, sequence: Sequence) -> int:
        """Most that the heads' KV takes for one sequence, as far as room is made for its answer at once."""
        tokens = self.most + sequence.capacity - sequence.prompt.length
        return self.heads.token_bytes * mlx_adapter.round_up(tokens)

    def rows(self) -> MtpRows:
        return MtpRows(self.heads, self.most)


@dataclass(slots=True)
class MtpRows:
    """What the heads keep of a batch's row: states of its tokens that they have not read, and their KV.

    most     states that wait at most
    seconds  that the last draft took; 0: there were none, or the heads had more to read than usual
    _next    token whose state is to come
    """

    heads: mlx_adapter.MtpHeads
    most: int
    seconds: float = 0.0
    _sequence: Sequence | None = None
    _state: mlx_adapter.MtpState | None = None
    _unread: list[mx.array] = field(default_factory=list)
    _next: int = 0

    def keep(self, sequences: Container[Sequence]) -> None:
        """Drop all others."""
        if self._sequence is not None and self._sequence not in sequences:
            self._sequence, self._state, self._unread = None, None, []

    def record(self, sequence: Sequence, start: int, hidden: mx.array) -> None:
        """Take the states (tokens, hidden) of a pass over the sequence's tokens from `start` on."""
        state, end = self._state, start + len(hidden)
        follows = sequence is self._sequence and state is not None and start == self._next
        if state is None or not follows or end - state.position > self.most:
            hidden = hidden[-self.most :]
            self._sequence, self._unread = sequence, []
            self._state = self.heads.new_state(end - len(hidden))
        self._unread.append(hidden)
        self._next = end

    def propose(self, wanted: Seq[Wanted], width: int) -> dict[Sequence, list[int]]:
        """Propose up to `width` tokens that may come next."""
        began, self.seconds = clock(), 0.0
        each = next((each for each in wanted if each.sequence is self._sequence), None)
        state = self._state
        if each is None or state is None or not self._unread:
            return {}
        states, self._unread = mx.concatenate(self._unread), []
        following = each.tokens[state.position + 1 :].tolist()
        if len(following) != len(states):
            self.keep(())
            return {}
        logits, hidden = self.heads.forward(state, following, states[None])
        sampler = BatchSampler([each.sampler])
        drawn = [sampler(logits)]
        each.sampler.constraint = None
        while len(drawn) < width:
            logits, hidden = self.heads.forward(state, drawn[-1], hidden)
            drawn.append(sampler(logits))
        guesses = mx.concatenate(drawn)
        mx.eval(guesses)
        self.heads.take_back(state, width - 1)
        if len(following) <= most_of_row():
            self.seconds = clock() - began
        return {each.sequence: until_no_token(cast(list[int], guesses.tolist()))}
