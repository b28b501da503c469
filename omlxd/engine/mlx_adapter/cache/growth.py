"""How arrays of KV grow: geometrically, to multiples of `GROW_STEP` tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from ..runtime.arrays import note_outgrown

GROW_STEP = 256
"""Tokens; capacities are multiples of it, as mlx-lm's own are.

MLX's CUDA backend hands attention of single tokens to cuDNN only then, and else to a kernel of its own, which
is slower the longer the context, and faster for batches of short ones. Milliseconds a step, 8B shape in
bfloat16 on an H100 (medians of a noisy host's, up to three runs):

| rows × context | multiples of 256 | 64 more |
|----------------|------------------|---------|
| 1 × 8,192      | 8.1              | 9.0     |
| 1 × 16,000     | 7.8              | 11.2    |
| 1 × 32,768     | 9.0              | 15.4    |
| 1 × 98,304     | 11.0             | 30.0    |
| 8 × 512        | 16.2             | 11.5    |
| 8 × 4,096      | 11.7             | 14.7    |
| 8 × 16,384     | 15.0             | 29.0    |
| 32 × 512       | 16.7             | 13.5    |
| 32 × 2,048     | 16.3             | 22.3    |

cuDNN's sums come in another order from run to run, so that bits differ even between two cold runs.
"""

HALF_UP_TO = 4096
"""Tokens: an array of one row grows by half of what it holds, up to so many. A longer one by a quarter."""

MOST_ROOM = 1024
"""Tokens that a batch grows by at most: to copy it so often costs a token 25 microseconds (8 rows of 32,000,
an 8B shape), and a quarter of them all would be 9 GB."""


def round_up(tokens: int, step: int = GROW_STEP) -> int:
    """A capacity, in tokens."""
    return -(-tokens // step) * step


def next_step(length: int) -> int:
    """Tokens by which an array that holds `length` grows: geometrically, since growing copies all of it.

    By a half as long as that is cheap, by a quarter above; to a multiple of `GROW_STEP`. 8,192 tokens after
    300, with room for 1,024 of them, are 5 copies of 20,992 tokens in all (tools/bench/kv_growth.py).
    """
    room = max(1, length // 4, min(length // 2, HALF_UP_TO))
    return round_up(length + room) - length


class GrowingStep:
    """`step` of a cache of one sequence: tokens of its first arrays, as set; then those by which they grow.

    mlx-lm's is a constant: what suits a row of 300 tokens copies all of its KV every 256. Only what makes
    arrays reads it, so a read of a cache that has some says that they are outgrown.
    """

    def __get__(self, cache: Any, owner: type | None = None) -> int:
        if cache is None:
            return GROW_STEP
        if cache.keys is None:
            return cache.__dict__.get("first_step", GROW_STEP)
        note_outgrown()
        return next_step(cache.offset)

    def __set__(self, cache: Any, tokens: int) -> None:
        cache.__dict__["first_step"] = tokens


cast(Any, KVCache).step = GrowingStep()


def put_tokens(array: mx.array, new: mx.array, ends: Sequence[int]) -> mx.array:
    """`array` (rows, heads, capacity, dim) with `new` (rows, heads, n, dim) from column `ends[row]` on.

    SmolLM2's 30 layers, 4 rows, a CPU: 0.3 ms for one token, as against 0.1 where all rows end alike.
    """
    columns = _columns(tuple(ends), new.shape[2])
    return mx.put_along_axis(array, mx.broadcast_to(columns, new.shape), new, axis=2)


@lru_cache(maxsize=1)  # Layers of a pass ask alike.
def _columns(ends: tuple[int, ...], count: int) -> mx.array:
    columns = np.array(ends, np.int32)[:, None] + np.arange(count, dtype=np.int32)
    return mx.array(columns[:, None, :, None])
