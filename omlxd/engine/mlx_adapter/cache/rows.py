"""A batch whose rows keep arrays of their own: joining and leaving copies nobody's KV, and a row grows alone.

In place of one array with all rows, padded to the longest, which is copied whenever a row joins, leaves or
outgrows it (batch.py). Attention goes row by row, as it does where that pays (attention/by_rows.py); rows
that begin with the same segments read those once, together (segments.py). Windows and packed KV (packed.py)
that is not in segments are read as they are of a row alone: by MLX's own attention, with the row's own mask.

`checks.use_own_rows` checks that all of a model's attention over such a batch goes through `attend`. A
backend may have a batch of its own (`AttentionBackend.row_batch`). mla_rows.py has rows of MLA.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, cast

import mlx.core as mx

from ..attention import by_rows as row_attention
from ..attention import hooks as attention
from ..attention.backend import AttentionCall, current
from ..attention.by_rows import Pair
from ..attention.kv_spec import KVSpec
from ..runtime.arrays import rows_at
from . import segments
from .packed import is_packed
from .segments import OWN_MASK


class RowBatch:
    """A layer of a batch whose rows keep arrays of their own.

    spec       what it keeps; `kinds.merge` sets it
    window     tokens that a new one sees; 0: all
    pending    `update_and_fetch` gave out the new tokens, and `attend` has not got them yet
    is_checked  a backend's `attend` compares with MLX's own, and raises RuntimeError where they differ
    gives_views  views of what a row keeps may be given out; else copies must

    `update_and_fetch` gives the new tokens alone; `attend` reads the others. `make_mask` gives no array.
    Raises RuntimeError where the model attends otherwise.
    """

    window = 0
    spec: KVSpec
    gives_views = True

    def __init__(self) -> None:
        self.pending = self.is_checked = False
        self._given: tuple[mx.array, mx.array] | None = None

    def _give(self, keys: mx.array, values: mx.array) -> None:
        """Note that the model gets the KV of new tokens."""
        if self.pending:
            raise RuntimeError("this model's attention does not read the rows of a batch one by one")
        self.pending, self._given = True, (keys, values)
        attention.note_given(keys, values, self)

    def held_by(self, row: int) -> tuple[Any, Sequence[Any]]:
        """What `state_of` of the table of kinds reads for a row, and the segments before it."""
        raise NotImplementedError

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the newest pass got, for layers that attend to this one's KV after it."""
        if self._given is None:
            raise RuntimeError("a layer reads another's KV before it is there")
        return self._given

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> str:
        if return_array or (window_size or self.window) != self.window:
            raise RuntimeError("a layer wants a mask of its own")
        return OWN_MASK


class OwnRowsKVCache(RowBatch):
    """A layer of a batch.

    rows     a cache of one sequence each, all of one class; `attend` reads them one by one
    masks    of the newest pass, one a row, where that keeps a window or packed KV
    """

    def __init__(self, rows: Iterable[Any]):
        super().__init__()
        self.rows = list(rows)
        self.window: int = getattr(self.rows[0], "max_size", 0)
        self.masks: list[Any] = []

    @property
    def offset(self) -> mx.array:
        """(rows,): tokens of each row."""
        return offsets_of(tuple(row.offset for row in self.rows))

    @property
    def state(self) -> list[Any]:
        return [[row.keys, row.values] for row in self.rows if row.keys is not None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._give(keys, values)
        self.masks = []
        for row, *new in zip(self.rows, each_row(keys), each_row(values), strict=True):
            if self._plain:
                append(row, *new)
                continue
            self.masks.append(row.make_mask(keys.shape[2], window_size=None, return_array=False))
            row.update_and_fetch(*new)
            if getattr(row, "segments", ()):
                row.unread = None
        return keys, values

    @property
    def _plain(self) -> bool:
        """Whether rows keep all tokens, and as they are."""
        return not self.window and not is_packed(self.rows[0])

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        """(rows, heads, n, width), once `update_and_fetch` got the KV of these n tokens: `keys`, `values`."""
        if mask is not OWN_MASK:
            raise RuntimeError("a layer masks more than what comes after a token")
        self.pending = False
        held = [getattr(row, "segments", ()) for row in self.rows]
        if not (sharing := [at for at, own in enumerate(held) if own]):
            each = enumerate(each_row(queries))
            return _joined([self._one_row(at, query, scale, sinks) for at, query in each])
        rows = [cast(Any, self.rows[at]) for at in sharing]
        some = queries if len(rows) == len(held) else rows_at(queries, sharing)
        got = segments.by_rows(
            some, rows[0].layer, [row.segments for row in rows], [row.tail() for row in rows], scale, sinks
        )
        if some is queries:
            return got
        out = dict(zip(sharing, each_row(got), strict=True))
        for at, query in enumerate(each_row(queries)):
            if at not in out:
                out[at] = self._one_row(at, query, scale, sinks)
        return _joined([out[at] for at in range(len(held))])

    def _one_row(self, at: int, query: mx.array, scale: float, sinks: Any) -> mx.array:
        """What a row that holds no segment has alone."""
        row = self.rows[at]
        pair = cast(Pair, row.keys_and_values())
        mask = (None if query.shape[2] == 1 else "causal") if self._plain else self.masks[at]
        out = current().forward_row(AttentionCall(query, *pair, row, scale, mask, sinks))
        if out is not None:
            return out
        if self._plain:
            return row_attention.one_row(query, *pair, scale, sinks)
        return attention.mlx_own(query, *pair, row, scale, cast(Any, mask), sinks)

    def extend(self, other: OwnRowsKVCache) -> None:
        self.rows += other.rows

    def filter(self, batch_indices: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in batch_indices]

    def extract(self, row: int) -> Any:
        return self.rows[row]

    def held_by(self, row: int) -> tuple[Any, Sequence[Any]]:
        return self.rows[row], getattr(self.rows[row], "segments", ())


def append(row: Any, keys: mx.array, values: mx.array) -> None:
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


def each_row(x: mx.array) -> list[mx.array]:
    """Its rows, (1, …) each."""
    return [x] if x.shape[0] == 1 else cast(Any, mx.split(x, x.shape[0]))


def _joined(rows: list[mx.array]) -> mx.array:
    return rows[0] if len(rows) == 1 else mx.concatenate(rows)


@lru_cache(maxsize=1)  # Layers of a pass ask alike.
def offsets_of(tokens: tuple[int, ...]) -> mx.array:
    """(rows,): tokens of each row."""
    return mx.array(tokens)
