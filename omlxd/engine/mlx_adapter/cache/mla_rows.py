"""Rows of MLA with latents of their own: joining and leaving a batch copies nobody's.

MLA keeps a latent of each token, from which all heads' keys and values are made, and a part of the key that
RoPE turns. mlx-lm's models (deepseek_v3.py and its kin) multiply that part by their queries before they
attend, so attention alone can't read a row's own. For one token a row the cache gives an identity matrix in
place of those parts: what the model then hands on as mask is its queries, and `attend` reads each row's
latents and parts by them.

Of several tokens models make keys and values of each head from all latents. `take_tokens_for_rows` lets
attention take up to `MOST_NEW` tokens of a row for as many rows, and so read latents as they are. Longer
passes of a batch get a joint copy.

`checks.use_own_rows` compares what attention gives rows in a batch with what it gives each alone.

Six layers of DeepSeek V3's kind, random, 16 heads, latents of 512, float32, OpenBLAS, two CPUs beside a test
suite, four rows of 1,500 tokens (tools/bench/joins.py --rows 4 --context 1500 --turns 3 --rounds 2), as one
array and so, milliseconds: a join 269 and 229, a leave 210 and 194, a step 222 and 223; 40 and 1.8 MB at a
join's peak. By MLX's own attention, which reads the latents once a head, a step of one array took 325
(`row_attention.over_latents`).

Twelve layers of that kind with 32 experts in bfloat16, one H100, eight rows of 4,000 tokens (the same bench),
as one array and so: a join 19.7 and 9.2, a leave 21.8 and 7.9, a step 13.6 and 6.6; 542 and 18 MB at a join's
peak. A pass of four tokens of one row of 16,000 took 51 to 96 ms, most of it cuDNN's plan of each length; it
takes 11.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from ..attention import hooks as attention
from ..attention.by_rows import Pair
from ..runtime.arrays import rows_at
from . import segments
from .rows import OwnRowsKVCache, RowBatch, append, each_row, offsets_of

MOST_NEW = 16
"""Tokens of a row that attention takes for rows: those of a pass with guesses.

The model of six layers above, two CPUs that a test suite used too, processor milliseconds of a pass of five
tokens a row (a script that is not kept), as models make it and so: one row of 1,500 tokens 483 and 65, four
rows 2,500 and 204. Of one token: 32 and 33, 82 and 71.
"""


class LatentRows(RowBatch):
    """What a layer of a batch whose rows have latents of their own gives a model: latents as keys, parts as
    values.

    new     tokens of a row that the model takes for rows now
    chosen  of the tokens that the next attention reads, as `IndexRowsKVCache.choose` gives it; None: all
    """

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.new = 1
        self.chosen: Any = None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        raise NotImplementedError

    def _put(self, keys: mx.array, values: mx.array) -> None:
        """Put new tokens, (rows, 1, tokens, width) each, behind the others of their rows."""
        raise NotImplementedError

    def _row_kv(self, row: int) -> Pair:
        """Latents and parts of all tokens of a row that has some, (1, 1, tokens, width) each."""
        raise NotImplementedError

    def _attend(self, queries: mx.array, rope_queries: mx.array, scale: float, chosen: Any) -> mx.array:
        """(rows * new, heads, 1, width), by queries for latents and for parts of the newest `new` tokens."""
        raise NotImplementedError

    @property
    def offset(self) -> mx.array:
        """(rows * new,): tokens before each new one."""
        return offsets_of(tuple(tokens + i for tokens in self.lengths for i in range(self.new)))

    @contextmanager
    def tokens_as_rows(self, new: int) -> Iterator[None]:
        """The model takes `new` tokens of each row for rows of one."""
        self.new = new
        try:
            yield
        finally:
            self.new = 1

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        rows = len(self.lengths)
        if keys.shape[2] == 1:
            self._give(keys, same_parts(values))
            keys, values = (array.reshape(rows, 1, self.new, -1) for array in (keys, values))
        else:
            self._give(*self._joint(keys, values))
        self._put(keys, values)
        return self.keys_and_values()

    def _joint(self, *fresh: mx.array) -> list[mx.array]:
        """Latents and parts, (rows, 1, tokens of the longest, width) each: copies of what rows keep, and
        behind it `fresh`."""
        lengths, joint = self.lengths, list[mx.array]()
        held = [self._row_kv(row) if length else () for row, length in enumerate(lengths)]
        for which, new in enumerate(fresh):
            rows: list[mx.array] = []
            for row, length in enumerate(lengths):
                blank = mx.zeros((1, 1, max(lengths) - length, new.shape[3]), new.dtype)
                parts = [*held[row][which : which + 1], new[row : row + 1], blank]
                rows.append(mx.concatenate(parts, axis=2))
            joint.append(mx.concatenate(rows))
        return joint

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """(rows, 1, N, tokens of the longest row behind them); None: a new token sees its row's."""
        if window_size:
            raise RuntimeError("a layer wants a mask of its own")
        if N == 1:
            return None
        columns, own = mx.arange(max(self.lengths) + N), mx.arange(N)[:, None]
        return columns <= self.offset[:, None, None, None] + own

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        """(rows, heads, n, width). If n is 1, `queries` are for latents, and `mask` has those for parts."""
        self.pending = False
        if queries.shape[2] > 1:
            return attention.mlx_own(queries, keys, values, None, scale, mask, sinks)
        if keys is not self.keys_and_values()[0] or not isinstance(mask, mx.array) or sinks is not None:
            raise RuntimeError("this model's attention reads latents otherwise")
        chosen, self.chosen = self.chosen, None
        return self._attend(queries, mask, scale, chosen)


def same_parts(parts: mx.array) -> mx.array:
    """(rows, 1, width, width): what a model gets in place of parts, (rows, 1, 1, width)."""
    return mx.broadcast_to(
        mx.eye(parts.shape[3], dtype=parts.dtype), (*parts.shape[:2], *parts.shape[3:] * 2)
    )


class LatentRowsKVCache(LatentRows, OwnRowsKVCache):
    """A layer of a batch on a CPU or Metal. rows: a `KVCache` of one sequence each."""

    @property
    def lengths(self) -> list[int]:
        return [row.offset for row in self.rows]

    def _put(self, keys: mx.array, values: mx.array) -> None:
        for row, *new in zip(self.rows, each_row(keys), each_row(values), strict=True):
            append(row, *new)

    def _row_kv(self, row: int) -> Pair:
        held = self.rows[row]
        return held.all_kv() if getattr(held, "segments", ()) else held.keys_and_values()

    def _attend(self, queries: mx.array, rope_queries: mx.array, scale: float, chosen: Any) -> mx.array:
        rows, (_, heads, _, width) = len(self.rows), queries.shape
        both = mx.concatenate([queries * scale, rope_queries], axis=-1).reshape(rows, self.new, heads, -1)
        if not chosen:
            return self._over_all(both, range(rows)).reshape(rows * self.new, heads, 1, width)
        out = {row: self._over_chosen(both[row], row, places) for row, places in chosen.items()}
        if others := [row for row in range(rows) if row not in out]:
            out |= zip(others, each_row(self._over_all(rows_at(both, others), others)), strict=True)
        joint = [out[row].reshape(self.new, heads, 1, width) for row in range(rows)]
        return mx.concatenate(joint)

    def _over_all(self, queries: mx.array, which: Sequence[int]) -> mx.array:
        """(rows, new, heads, width) of these rows. Heads and tokens of a row are rows of one product: MLX's
        own reads the latents once a head."""
        rows = [self.rows[row] for row in which]
        held = [getattr(row, "segments", ()) for row in rows]
        tails = [row.tail() if own else row.keys_and_values() for row, own in zip(rows, held, strict=True)]
        layer = getattr(rows[0], "layer", "")
        return segments.by_rows(queries.swapaxes(1, 2), layer, held, tails, 1.0, latents=True).swapaxes(1, 2)

    def _over_chosen(self, queries: mx.array, row: int, places: mx.array) -> mx.array:
        """(new, heads, width) of a row whose new tokens attend to these `places` (new, most) of it."""
        latents, parts = (array[0, 0][places] for array in self._row_kv(row))
        new, most, width = latents.shape
        scores = queries[..., :width] @ latents.swapaxes(1, 2) + queries[..., width:] @ parts.swapaxes(1, 2)
        counts = mx.arange(self.lengths[row] - new, self.lengths[row])[:, None, None] + 1
        scores = mx.where(mx.arange(most) < counts, scores, -mx.inf)
        return mx.softmax(scores, axis=-1, precise=True) @ latents


def attentions(model: Any) -> list[Any]:
    """The modules of `model` that attend to latents and take the arguments of DeepSeek V3's."""
    found = [
        module for module in model.modules() if hasattr(module, "embed_q") and hasattr(module, "unembed_out")
    ]
    called = ["self", "x", "mask", "cache"]
    return [one for one in found if list(inspect.signature(type(one).__call__).parameters) == called]


def take_tokens_for_rows(modules: Iterable[Any]) -> None:
    """Let `attentions` take tokens for rows."""
    for module in modules:
        module.__class__ = _by_tokens(type(module))


def _by_tokens(kind: Any) -> Any:
    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        rows, new, width = x.shape
        if not hasattr(cache, "tokens_as_rows") or not 1 < new <= MOST_NEW:
            return kind.__call__(self, x, mask, cache)
        with cache.tokens_as_rows(new):
            out = kind.__call__(self, x.reshape(rows * new, 1, width), None, cache)
        return out.reshape(rows, new, -1)

    return type(kind.__name__, (kind,), {"__call__": __call__})


@contextmanager
def calls_of(module: Any) -> Iterator[list[tuple[mx.array, Any, mx.array]]]:
    """Input, cache and output of each call of one of `attentions` until then."""
    calls, kind = list[tuple[mx.array, Any, mx.array]](), type(module)

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        out = kind.__call__(self, x, mask, cache)
        calls.append((x, cache, out))
        return out

    module.__class__ = type(kind.__name__, (kind,), {"__call__": __call__})
    try:
        yield calls
    finally:
        module.__class__ = kind
