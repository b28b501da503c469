"""KV of Qwen Sparse Attention (`qwen4_exp`), of one sequence and of a batch's rows.

Its attention keeps a key more of each token, by which it chooses blocks of tokens to attend to. mlx-vlm keeps
those keys, and each token's position, in arrays that grow by a copy; the positions of text are known without.

A batch of mlx-vlm's own attends to all tokens where rows have unequal lengths, not to those that it chose
(`left_padded_decode` of mlx-vlm 0.7.10), and so gives other tokens than each row alone. Here each row attends
by itself: `attend_by_rows` changes the two functions that do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..attention.kv_spec import KVSpec
from .rows import RowBatch, each_row, offsets_of

PARTS = ("keys", "values", "index")


class QSAKVCache(KVCache):
    """Of one sequence. `index`: (1, 1, capacity, width), keys that choose; they come before their tokens' KV.

    `index_block_keys` are made of these, one a block: the model keeps them here, and makes what is missing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.index: mx.array | None = None
        self.index_block_keys: mx.array | None = None
        self.index_block_ratio: int | None = None

    def update_indexer(self, keys: mx.array, position_ids: mx.array) -> tuple[mx.array, mx.array]:
        """(1, tokens, width) of all tokens so far, `keys` of new ones behind; and the positions of all."""
        end = self.offset + keys.shape[1]
        if self.index is None or end > self.index.shape[2]:
            room = mx.zeros((1, 1, -(-end // self.step) * self.step - self.offset, keys.shape[2]), keys.dtype)
            held = [] if self.index is None else [self.index[:, :, : self.offset]]
            self.index = mx.concatenate([*held, room], axis=2)
        self.index[:, 0, self.offset : end] = keys
        places = mx.broadcast_to(mx.arange(end), (*position_ids.shape[:-1], end))
        return self.index[:, 0, :end], places

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return [*super().state, *(a for a in (self.index, self.index_block_keys) if a is not None)]

    def trim(self, n: int) -> int:
        n = super().trim(n)
        if self.index_block_keys is not None:
            self.index_block_keys = self.index_block_keys[
                :, :, : self.offset // (self.index_block_ratio or 1)
            ]
        return n


class QSARowsKVCache(RowBatch):
    """A layer of a batch. `rows`: a cache of one sequence each."""

    spec = KVSpec("chosen", PARTS)

    def __init__(self, rows: Iterable[QSAKVCache]):
        super().__init__()
        self.rows = list(rows)

    @classmethod
    def merge(cls, rows: Iterable[QSAKVCache]) -> QSARowsKVCache:
        return cls(rows)

    @property
    def offset(self) -> mx.array:
        """(rows,): tokens of each row."""
        return offsets_of(tuple(row.offset for row in self.rows))

    @property
    def state(self) -> list[Any]:
        return [row.state for row in self.rows if row.keys is not None]

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        return None if N == 1 else "causal"

    def extend(self, other: QSARowsKVCache) -> None:
        self.rows += other.rows

    def filter(self, batch_indices: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in batch_indices]

    def held_by(self, row: int) -> tuple[QSAKVCache, Sequence[Any]]:
        return self.rows[row], ()

    def trim_rows(self, counts: Sequence[int]) -> None:
        for row, count in zip(self.rows, counts, strict=True):
            row.trim(count)


def attend_by_rows(module: Any) -> None:
    """Let attention of `module`, mlx-vlm's `qwen4_exp.language`, take the rows of a batch one by one."""
    attention, steps = module.Qwen4ExpAttention, module.Qwen4ExpBatchInvariantForward
    if hasattr(attention, "omlxd_by_rows"):
        return
    of_passes, of_steps = attention.__call__, steps._qsa_attention

    def __call__(self: Any, x: Any, mask: Any = None, cache: Any = None, position_ids: Any = None) -> Any:
        if not isinstance(cache, QSARowsKVCache):
            return of_passes(self, x, mask=mask, cache=cache, position_ids=position_ids)
        rows = zip(each_row(x), cache.rows, _each_place(position_ids, len(cache.rows)), strict=True)
        return mx.concatenate([of_passes(self, one, mask, row, places) for one, row, places in rows])

    def _qsa_attention(self: Any, layer: Any, x: Any, cache: Any, position_ids: Any, mask: Any) -> Any:
        if not isinstance(cache, QSARowsKVCache):
            return of_steps(self, layer, x, cache, position_ids, mask)
        rows = zip(each_row(x), cache.rows, _each_place(position_ids, len(cache.rows)), strict=True)
        return mx.concatenate([of_steps(self, layer, one, row, places, mask) for one, row, places in rows])

    attention.__call__, steps._qsa_attention = __call__, _qsa_attention
    attention.omlxd_by_rows = True


def _each_place(position_ids: mx.array, rows: int) -> list[mx.array]:
    """(3, 1, tokens) each, of (3, rows, tokens)."""
    return [position_ids[:, row : row + 1] for row in range(rows)]
