"""Rows of DeepSeek V3.2, which keep latents of their own and choose the tokens that attention reads.

Beside the latents of MLA a layer keeps an index: a key of each token. A token's queries for the index score
all tokens before it, and attention reads the latents of the `index_topk` best alone. mlx-lm's models do both
with arrays of all rows. For one token a row `let_choose` lets the index of a batch (`IndexRowsKVCache`) keep
its keys and choose among each row's own. Latents (mla_rows.py) read what it chose, and the model is told that
all tokens are read. Several tokens of a row are as many rows. Longer passes are the model's own.

Six layers of 512, 16 heads, latents of 512, an index of 16 heads that chooses 1,024 tokens, random, float32,
OpenBLAS, two CPUs, four rows from 2,000 tokens on (tools/bench/joins.py --rows 4 --context 2000 --turns 3
--rounds 1), as one array and so, milliseconds: a join 285 and 120, a leave 209 and 107, a step 210 and 110.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from .mla_rows import LatentRowsKVCache
from .rows import each_row


class IndexRowsKVCache(LatentRowsKVCache):
    """Keys of the index, as keys; values are zeros, as mlx-lm's models have it.

    chosen  what `choose` found, until attention takes it; None: it reads all tokens
    """

    @property
    def newest(self) -> list[mx.array]:
        """Arrays that hold the newest tokens: attention asks for them, since nothing else may."""
        return [array for row in self.rows for array in (row.keys, row.values)]

    def choose(self, queries: mx.array, keys: mx.array, weights: mx.array, most: int) -> None:
        """Keep `keys`, (rows * new, 1, 1, width), and choose up to `most` tokens for each new one.

        queries  (rows * new, heads, 1, width)
        weights  (rows * new, heads): of each head's scores, which are 0 at least
        """
        keys = keys.reshape(len(self.lengths), 1, self.new, -1)
        self._put(keys, mx.zeros_like(keys))
        self.chosen = self._choose(queries, weights, most)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Of longer passes."""
        return super().update_and_fetch(keys, mx.zeros_like(values))

    def _choose(self, queries: mx.array, weights: mx.array, most: int) -> dict[int, mx.array] | None:
        """Of each row that has more than `most` tokens: (new, most), in order. Those that a token does not
        see come last."""
        chosen, new, (_, heads, _, width) = dict[int, mx.array](), self.new, queries.shape
        each = zip(self.lengths, *map(each_row, self._by_row(queries, weights)), strict=True)
        for row, (length, query, weight) in enumerate(each):
            if length <= most:
                continue
            keys = self._row_kv(row)[0].reshape(length, width)
            scores = mx.maximum(query.reshape(new * heads, width) @ keys.T, 0).reshape(new, heads, length)
            scores = (scores * weight.reshape(new, heads, 1)).sum(axis=1)
            seen = mx.arange(length) <= mx.arange(length - new, length)[:, None]
            chosen[row] = best(mx.where(seen, scores, -mx.inf), most)
        return chosen or None

    def _by_row(self, *arrays: mx.array) -> list[mx.array]:
        return [array.reshape(len(self.rows), self.new, *array.shape[1:]) for array in arrays]


def best(scores: mx.array, most: int) -> mx.array:
    """(…, most): places of the largest of `scores`, (…, tokens), in order of place."""
    return mx.sort(mx.argpartition(scores, kth=-most, axis=-1)[..., -most:], axis=-1)


class Member:
    """Stands for latents or their index while a layer is computed. mlx-lm's model sets `keys` and `values`,
    for the sake of evaluation: of rows with arrays of their own that changes nothing."""

    keys: mx.array
    values: mx.array

    def __init__(self, held: Any):
        self.held = held

    @property
    def offset(self) -> mx.array:
        return self.held.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = given = self.held.update_and_fetch(keys, values)
        return given


class ChosenLatents:
    """What a layer of a batch gives its model: latents, and the index that chooses among them."""

    def __init__(self, latents: Any, index: Any):
        self._latents, self._index = latents, index
        self._members = Member(latents), Member(index)

    def __getitem__(self, at: int) -> Member:
        return self._members[at]

    @contextmanager
    def tokens_as_rows(self, new: int) -> Iterator[None]:
        with self._latents.tokens_as_rows(new), self._index.tokens_as_rows(new):
            yield

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        self._latents.chosen, self._index.chosen, self._index.pending = self._index.chosen, None, False
        out = self._latents.attend(queries, keys, values, scale, mask, sinks)
        return cast(Any, mx.depends)(out, self._index.newest)


def let_choose(modules: Iterable[Any]) -> None:
    """Let those of `latent_rows.attentions` that have an index choose among rows' own latents."""
    for module in modules:
        if hasattr(module, "indexer"):
            module.__class__ = _with_index(type(module))
            module.indexer.__class__ = _by_own_keys(type(module.indexer))


def _with_index(kind: Any) -> Any:
    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if isinstance(cache, CacheList | list) and hasattr(cache[1], "choose"):
            cache = ChosenLatents(cache[0], cache[1])
        return kind.__call__(self, x, mask, cache)

    return type(kind.__name__, (kind,), {"__call__": __call__})


def _by_own_keys(kind: Any) -> Any:
    def __call__(self: Any, x: mx.array, qr: mx.array, mask: Any, cache: Any = None) -> mx.array | None:
        """As deepseek_v32.py's, which it replaces for one token a row."""
        rows, new, _ = x.shape
        if not isinstance(cache, Member) or new > 1:
            return kind.__call__(self, x, qr, mask, cache)
        queries = self.wq_b(qr).reshape(rows, 1, self.n_heads, self.head_dim).swapaxes(1, 2)
        keys = self.k_norm(self.wk(x)).reshape(rows, 1, 1, self.head_dim)
        queries, keys = (self.rope(each, offset=cache.offset) for each in (queries, keys))
        weights = self.weights_proj(x)[:, 0] * (self.n_heads**-0.5 * self.softmax_scale)
        cache.held.choose(queries, keys, weights, self.index_topk)
        cache.keys = cache.values = keys
        return None

    return type(kind.__name__, (kind,), {"__call__": __call__})
