"""Rows of MLA with latents of their own, on a CPU and on Metal: joining and leaving a batch copies nobody's.

MLA keeps a latent of each token, from which all heads' keys and values are made, and a part of the key that
is turned by its place. mlx-lm's models (deepseek_v3.py and its kin) multiply that part by their queries
before they attend, so attention alone can't read a row's own. For one token a row the cache gives an identity
matrix in place of those parts: what the model then hands on as mask is its queries, and `attend` multiplies
them by each row's parts. Of several tokens models make keys and values of each head, which costs far more
than a joint copy of the latents: they get one.

`loading.use_own_rows` compares the logits of rows in a batch with those of rows alone.

Six layers of DeepSeek V3's kind, random, 16 heads, latents of 512, float32, OpenBLAS, two CPUs beside a test
suite, four rows of 1,500 tokens (tools/bench/joins.py --rows 4 --context 1500 --turns 3 --rounds 2), as one
array and so, milliseconds: a join 269 and 229, a leave 210 and 194, a step 222 and 223; 40 and 1.8 MB at a
join's peak. By MLX's own attention, which reads the latents once a head, a step of one array took 325
(`row_attention.over_latents`).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from . import attention, row_attention
from .own_rows import OwnRowsKVCache, append, each_row


class LatentRowsKVCache(OwnRowsKVCache):
    """A layer of a batch. rows: a `KVCache` of one sequence each, latents as keys, turned parts as values."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        count, width = keys.shape[2], values.shape[3]
        for row, *new in zip(self.rows, each_row(keys), each_row(values), strict=True):
            append(row, *new)
        if count == 1:
            same = mx.broadcast_to(mx.eye(width, dtype=values.dtype), (len(self.rows), 1, width, width))
            self._give(keys, same)
        else:
            self._give(*(self._joint(name) for name in ("keys", "values")))
        return self.keys_and_values()

    def _joint(self, name: str) -> mx.array:
        """(rows, 1, tokens of the longest, width): a copy of what rows keep by this name."""
        longest = max(row.offset for row in self.rows)
        held = [(getattr(row, name)[..., : row.offset, :], row.offset) for row in self.rows]
        return mx.concatenate(
            [mx.pad(array, [(0, 0), (0, 0), (0, longest - length), (0, 0)]) for array, length in held]
        )

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """(rows, 1, N, tokens of the longest row behind them); None: a new token sees its row's."""
        if window_size:
            raise RuntimeError("a layer wants a mask of its own")
        if N == 1:
            return None
        columns, own = mx.arange(max(row.offset for row in self.rows) + N), mx.arange(N)[:, None]
        return columns <= self.offset[:, None, None, None] + own

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        """(rows, heads, n, width). If n is 1, `queries` are for latents, and `mask` has those for parts."""
        self.pending = False
        if queries.shape[2] > 1:
            return attention.mlx_own(queries, keys, values, None, scale, mask, sinks)
        if keys is not self.keys_and_values()[0] or not isinstance(mask, mx.array):
            raise RuntimeError("this model's attention reads latents otherwise")
        out: list[mx.array] = []
        for row, query, turned in zip(self.rows, each_row(queries), each_row(mask), strict=True):
            latents, parts = (array[..., : row.offset, :] for array in (row.keys, row.values))
            scores = turned @ parts.swapaxes(-1, -2)
            out.append(row_attention.attend(query, latents, latents, None, scale, scores, sinks))
        return mx.concatenate(out)
