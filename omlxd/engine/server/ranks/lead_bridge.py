"""Rank 0's bridge: what the scheduler asks of its KV is asked of all ranks, and a hit is what all have."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx

from ....wire import plan
from ...kvio.copier import Rows
from ...kvio.split_bridge import SplitBridge
from ...mlx_adapter import Cache
from ...schedule.decode_batch import Draw
from ...sequence.sequence import Sequence
from .compute import RankBatch, SharedSampler
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
        self._offered: set[Sequence] = set()
        self._batches = 0

    def compute(self, sequence: Sequence, start: int, tokens: list[int], cache: Cache) -> mx.array:
        """Logits of a pass on all ranks."""
        return self.lead.compute(self._rows[sequence], start, tokens, cache)

    def new_batch(self) -> LeadBatch:
        """Rows that decode together on all ranks."""
        self._batches += 1
        return LeadBatch(self._model, self, self._batches)

    def enter(self, batch: int, sequence: Sequence) -> int:
        """Have the others let it decode in their `batch`; returns its number."""
        self.lead.send(plan.Enter(batch, row := self._rows[sequence], self._news(sequence)))
        return row

    def step(self, batch: int, rows: Seq[Sequence]) -> None:
        """Have the others start a step."""
        offers = tuple((self._rows[row], self._news(row)) for row in rows if row in self._offered)
        self._offered.difference_update(rows)
        self.lead.send(plan.Step(batch, tuple(row.kv.length for row in rows), offers))

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
            if batch is None:
                self.lead.send(plan.Offer(row, self._news(sequence)))
            else:
                self._offered.add(sequence)  # Its next step says so: a frame a step, not one a row.
        super().offer(sequence, batch)

    def finish(self, sequence: Sequence, batch: Rows | None = None, *, spoiled: bool = False) -> None:
        if (row := self._rows.get(sequence)) is not None:
            kept = batch is not None or sequence.kv.cache is not None
            news, length = self._news(sequence), sequence.kv.length
            self.lead.send(plan.Finish(row, length, news, sequence.cancelled, spoiled, kept))
            del self._rows[sequence], self._told[sequence]
            self._offered.discard(sequence)
        super().finish(sequence, batch, spoiled=spoiled)

    def _news(self, sequence: Sequence) -> tuple[int, ...]:
        """Tokens that were drawn since the others were told of some."""
        told, self._told[sequence] = self._told[sequence], len(sequence.tokens)
        return tuple(sequence.tokens[told:])


class LeadBatch(RankBatch):
    """Rank 0's rows that decode together: the others' batch of that `number` has the same, in one order."""

    def __init__(self, model: Any, bridge: LeadBridge, number: int):
        super().__init__(model, bridge.lead.group, SharedSampler)
        self._bridge, self._number = bridge, number
        self._numbers: dict[Sequence, int] = {}

    def add_row(self, sequence: Sequence) -> None:
        self._numbers[sequence] = self._bridge.enter(self._number, sequence)
        with self._bridge.lead.all_or_none("a row that joins others"):
            super().add_row(sequence)

    def remove_rows(self, rows: Seq[Sequence]) -> None:
        left = tuple(self._numbers.pop(row) for row in rows)
        self._bridge.lead.send(plan.Leave(self._number, left))
        with self._bridge.lead.all_or_none("a row that leaves others"):
            super().remove_rows(rows)

    def step(self) -> list[Draw]:
        self._bridge.step(self._number, self.rows)
        with self._bridge.lead.all_or_none(f"a step of {len(self.rows)} rows"):
            return super().step()

    def wait(self) -> None:
        with self._bridge.lead.all_or_none(f"a step of {len(self.rows)} rows"):
            super().wait()
