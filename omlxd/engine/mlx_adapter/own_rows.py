"""A batch whose rows keep arrays of their own: joining and leaving copies nobody's KV, and a row grows alone.

In place of one array with all rows, padded to the longest, which is copied whenever a row joins, leaves or
outgrows it (batch_kv.py). Attention goes row by row, as it does where that pays (row_attention.py); rows that
begin with the same segments read those once, together (segments.py).

`loading.use_own_rows` checks that all of a model's attention over such a batch goes through `attend`. On CUDA
fused steps read rows' own arrays by address (segments.py), and all others read one array.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from . import row_attention, segments
from .attention import note_given
from .row_attention import Pair
from .segments import OWN_MASK


class OwnRowsKVCache:
    """A layer of a batch.

    rows     a cache of one sequence each
    pending  `update_and_fetch` gave out the new tokens, and `attend` has not got them yet

    `update_and_fetch` gives the new tokens alone; `attend` reads the others from `rows`. `make_mask` gives no
    array. Raises RuntimeError where the model attends otherwise.
    """

    def __init__(self, rows: Iterable[KVCache]):
        self.rows = list(rows)
        self.pending = False

    @property
    def offset(self) -> mx.array:
        """(rows,): tokens of each row."""
        return _offsets(tuple(row.offset for row in self.rows))

    @property
    def state(self) -> list[Any]:
        return [[row.keys, row.values] for row in self.rows if row.keys is not None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.pending:
            raise RuntimeError("this model's attention does not read the rows of a batch one by one")
        self.pending = True
        note_given(keys, values, self)
        for row, *new in zip(self.rows, _each(keys), _each(values), strict=True):
            _append(row, *new)
        return keys, values

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> str:
        if window_size or return_array:
            raise RuntimeError("a layer wants a mask of its own")
        return OWN_MASK

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        """(rows, heads, n, width), once `update_and_fetch` got the KV of these n tokens: `keys`, `values`."""
        if mask is not OWN_MASK:
            raise RuntimeError("a layer masks more than what comes after a token")
        self.pending = False
        tails = [cast(Pair, row.keys_and_values()) for row in self.rows]
        held = [getattr(row, "segments", ()) for row in self.rows]
        if any(held):
            if sinks is not None:
                raise RuntimeError("this model can't share a prefix: serve it with --share-prefix off")
            return segments.by_rows(queries, cast(Any, self.rows[0]).layer, held, tails, scale)
        each = zip(_each(queries), tails, strict=True)
        out = [row_attention.one_row(query, *tail, scale, sinks) for query, tail in each]
        return out[0] if len(out) == 1 else mx.concatenate(out)

    def extend(self, other: OwnRowsKVCache) -> None:
        self.rows += other.rows

    def filter(self, batch_indices: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in batch_indices]

    def trim_rows(self, counts: Sequence[int]) -> None:
        """Forget the last `counts[row]` tokens of each row."""
        for row, count in zip(self.rows, counts, strict=True):
            row.offset -= count


def _append(row: Any, keys: mx.array, values: mx.array) -> None:
    """Put the KV of the next tokens behind what `row` keeps, without asking for all of it."""
    start = row.offset - getattr(row, "base", 0)
    end = start + keys.shape[2]
    if row.keys is None or end > row.keys.shape[2]:
        row.update_and_fetch(keys, values)
        row.unread = None  # What a row with segments gave out.
        return
    row.keys[..., start:end, :] = keys
    row.values[..., start:end, :] = values
    row.offset += keys.shape[2]


def _each(x: mx.array) -> list[mx.array]:
    """Its rows, (1, …) each."""
    return [x] if x.shape[0] == 1 else cast(Any, mx.split(x, x.shape[0]))


@lru_cache(maxsize=1)  # Layers of a pass ask alike.
def _offsets(tokens: tuple[int, ...]) -> mx.array:
    return mx.array(tokens)
