"""Rank 0's bridge: what the scheduler asks of its KV is asked of all ranks, and a hit is what all have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ....wire import plan
from ...kvio.copier import Rows
from ...kvio.split_bridge import SplitBridge
from ...mlx_adapter import Cache
from ...sequence.sequence import Sequence
from .lead import Lead

MOST_ROUNDS = 3
"""In which ranks agree on a prefix; after them it is a miss. Blocks may go between two rounds, so a later one
may find less than the one before."""


class _Agreement:
    """The ranks restore what each has, then what the one with the least has, until all hold the same."""

    def __init__(self, bridge: LeadBridge, sequence: Sequence, row: int, ready: Callable[[], None]):
        self._bridge, self._sequence, self._row, self._ready = bridge, sequence, row, ready
        self._rounds = 0
        self._has: dict[int, int] = {}

    def restore(self, limit: int) -> None:
        self._has.clear()
        self._bridge.lead.match(self._row, limit, self._take)
        self._bridge.restore(self._sequence, limit, lambda: self._take(0, self._sequence.kv.length))

    def _take(self, rank: int, tokens: int) -> None:
        self._has[rank] = tokens
        if len(self._has) < self._bridge.lead.world:
            return
        least, most = min(self._has.values()), max(self._has.values())
        if least == most:
            self._bridge.lead.forget(self._row)
            self._ready()
            return
        self._rounds += 1
        self.restore(least // self._bridge.store.block_size if self._rounds < MOST_ROUNDS else 0)


class LeadBridge(SplitBridge):
    """`lead`: set it before the first sequence."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.lead: Lead
        self._rows: dict[Sequence, int] = {}
        self._told: dict[Sequence, int] = {}

    def compute(self, sequence: Sequence, start: int, tokens: list[int], cache: Cache) -> mx.array:
        """Logits of a pass on all ranks."""
        return self.lead.compute(self._rows[sequence], start, tokens, cache)

    def match(self, sequence: Sequence, ready: Callable[[], None]) -> bool:
        """As of `KVBridge`; once for all: what others compute later is no hit."""
        if sequence in self._rows:
            return False
        row = self._rows[sequence] = self.lead.open_row(sequence)
        self._told[sequence] = len(sequence.tokens)
        _Agreement(self, sequence, row, ready).restore(self._limit_of_prompt(sequence))
        return True

    def look_again(self, sequence: Sequence) -> None:
        """Nothing: all ranks have agreed."""

    def offer(self, sequence: Sequence, batch: Rows | None = None) -> None:
        if (row := self._rows.get(sequence)) is not None:
            self.lead.send(plan.Offer(row, self._news(sequence), batch is not None))
        super().offer(sequence, batch)

    def finish(self, sequence: Sequence, batch: Rows | None = None, *, spoiled: bool = False) -> None:
        if (row := self._rows.get(sequence)) is not None:
            kept = batch is not None or sequence.kv.cache is not None
            news, length = self._news(sequence), sequence.kv.length
            self.lead.send(plan.Finish(row, length, news, sequence.cancelled, spoiled, kept))
            del self._rows[sequence], self._told[sequence]
        super().finish(sequence, batch, spoiled=spoiled)

    def _news(self, sequence: Sequence) -> tuple[int, ...]:
        """Tokens that were drawn since the others were told of some."""
        told, self._told[sequence] = self._told[sequence], len(sequence.tokens)
        return tuple(sequence.tokens[told:])
