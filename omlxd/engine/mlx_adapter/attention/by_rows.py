"""Attention of few new tokens a row on a CPU and on Metal: each row reads its own KV alone, where that pays.

MLX attends to a batch in one call. Rows of unequal length need a mask there, and their padding is read. On a
CPU it is two products for each query head, so that a KV head is read as often as it has query heads; here
the query heads of a KV head are the rows of one product. On Metal a row is a call of MLX's own kernel.

At the first pass of a model, which is at its load, both ways are timed on this machine (row_costs.py); `omlxd
doctor` says what came out. Where attention by rows pays, each row of a batch keeps its KV in its own arrays
(cache/rows.py): windows and packed KV too, which MLX's own attention reads, row by row. It has not run on a
Mac.

SmolLM2's heads (9 on 3 of 64, float32), processor milliseconds a layer on two CPUs beside other work, the
least of seven:

| rows                         | OpenBLAS: MLX, here | MLX's wheel: MLX, here |
|------------------------------|---------------------|------------------------|
| 4,000, 4,400, 4,750, 5,100   | 15.5, 9.9           | 32.1, 27.0             |
| 500, 2,000, 4,000, 8,000     | 20.6, 8.0           | 27.5, 12.8             |
| 8 of 500 to 800              | 5.3, 2.7            | 6.0, 4.7               |
| 4 of 2,000 (MLX has no mask) | 5.1, 3.7            | 7.3, 7.5               |
| 1 of 8,000                   | 5.1, 3.7            | 7.1, 7.9               |
| 1 of 8,000, 5 new tokens     | 11.2, 11.8          | 36.8, 34.7             |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from ..runtime.device import backend
from . import row_costs

MOST_NEW = 16
"""New tokens a row: more are computed as fast by MLX's own, whose products are large then."""


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any, sinks: Any
) -> mx.array | None:
    """Attention of one row by itself, or to latents, where that pays; None: MLX's own is as good."""
    new = queries.shape[2]
    latents = keys is values and new == 1 and sinks is None and _are_scores(mask, queries, keys)
    if latents and backend() == "cpu":
        return over_latents(queries, keys, scale, mask)
    few = new <= MOST_NEW and len(queries) == 1 and not hasattr(cache, "by_mlx")
    few = few and isinstance(cache, KVCache | RotatingKVCache) and not isinstance(keys, list)
    if few and keys.shape == values.shape:
        costs = row_costs.costs_for(queries, keys, one_row)  # Measured for windows and sinks, too.
        plain = sinks is None and isinstance(cache, KVCache) and backend() == "cpu"
        plain = plain and (mask == "causal" if isinstance(mask, str) else mask is None and new == 1)
        if plain and costs is not None and costs.pays_alone(keys.shape[2]):
            return one_row(queries, keys, values, scale)
    return None


def _are_scores(mask: Any, queries: mx.array, latents: mx.array) -> bool:
    """Whether `mask` is what MLA adds to the scores by latents."""
    own = *queries.shape[:3], latents.shape[2]
    return latents.shape[1] == 1 and getattr(mask, "shape", ()) == own and mask.dtype != mx.bool_


def over_latents(queries: mx.array, latents: mx.array, scale: float, scores: mx.array) -> mx.array:
    """(rows, heads, 1, width) of MLA: heads are rows of one product; MLX's own reads the latents once a head.

    scores  (rows, heads, 1, tokens): what is added to those by latents
    """
    scores = (queries.swapaxes(1, 2) * scale) @ latents.swapaxes(-1, -2) + scores.swapaxes(1, 2)
    return (mx.softmax(scores, axis=-1, precise=True) @ latents).swapaxes(1, 2)


def one_row(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, sinks: mx.array | None = None
) -> mx.array:
    """(1, heads, n, width) of a row whose newest n tokens of KV are the last."""
    if backend() == "cpu" and queries.shape[2] <= MOST_NEW and sinks is None:
        return fold(queries, [], [[(keys, values)]], scale)
    causal = "causal" if queries.shape[2] > 1 else None
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=causal, sinks=sinks)


Pair = tuple[mx.array, mx.array]
"""Keys and values of some tokens, each (1, KV heads, tokens, width)."""


def fold(
    queries: mx.array,
    shared: Sequence[Pair],
    own: Sequence[Sequence[Pair]],
    scale: float,
    sinks: mx.array | None = None,
    latents: bool = False,
) -> mx.array:
    """(rows, heads, new, width) of rows that attend to `shared`, and then each to its `own`, whose last
    tokens are the `new` ones.

    The query heads of a KV head are rows of one product, over `shared` those of all rows: MLX's own reads KV
    once a query head. Products of weights and values go on from each other's sums, so that a BLAS which adds
    in order adds as over all at once.

    sinks    (heads,)
    latents  keys are latents of MLA, which are values too, and values the parts that RoPE turns; a query for
             the one stands before that for the other
    """
    score, which = (_by_latents, 0) if latents else (_by_keys, 1)
    rows, heads, new, width = queries.shape
    groups = own[0][-1][0].shape[1]
    each = heads // groups * new
    folded = (queries * scale).reshape(rows, groups, each, width)
    ahead: list[mx.array] = []
    if shared:
        joint = folded.swapaxes(0, 1).reshape(1, groups, rows * each, width)
        ahead = [_of_rows(score(joint, pair), rows) for pair in shared]
    weights: list[mx.array] = []
    for row, parts in enumerate(own):
        scores = [part[row : row + 1] for part in ahead]
        scores += [score(folded[row : row + 1], pair) for pair in parts]
        if new > 1:
            length = parts[-1][0].shape[2]
            seen = mx.arange(length) <= mx.arange(length - new, length)[:, None]
            last = scores[-1].reshape(1, groups, heads // groups, new, length)
            scores[-1] = mx.where(seen, last, -mx.inf).reshape(1, groups, each, length)
        if sinks is not None:  # Behind all, where no value is.
            scores.append(mx.repeat(sinks, new).reshape(1, groups, each, 1))
        weights.append(mx.softmax(_joined(scores, -1), axis=-1, precise=True))
    at, total = 0, None
    for values in (pair[which] for pair in shared):
        total = _add(total, _joined([x[..., at : at + values.shape[2]] for x in weights], 2), values)
        at += values.shape[2]
    before = None if total is None else _of_rows(total, rows)
    out: list[mx.array] = []
    for row, parts in enumerate(own):
        total, to = None if before is None else before[row : row + 1], at
        for values in (pair[which] for pair in parts):
            total = _add(total, weights[row][..., to : to + values.shape[2]], values)
            to += values.shape[2]
        assert total is not None
        out.append(total.reshape(1, heads, new, -1))
    return _joined(out, 0)


def _by_keys(queries: mx.array, pair: Pair) -> mx.array:
    return queries @ pair[0].swapaxes(-1, -2)


def _by_latents(queries: mx.array, pair: Pair) -> mx.array:
    width = pair[0].shape[3]
    return _by_keys(queries[..., :width], pair) + queries[..., width:] @ pair[1].swapaxes(-1, -2)


def _of_rows(x: mx.array, rows: int) -> mx.array:
    """(rows, groups, n, any) of (1, groups, rows * n, any)."""
    return x.reshape(x.shape[1], rows, -1, x.shape[3]).swapaxes(0, 1)


def _joined(parts: list[mx.array], axis: int) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)


def _add(total: mx.array | None, weights: mx.array, values: mx.array) -> mx.array:
    return weights @ values if total is None else mx.addmm(total, weights, values)
