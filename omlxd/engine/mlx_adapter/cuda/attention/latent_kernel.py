"""CUDA kernel of attention over latents of MLA: `omlxd_latents`, for one token a row.

A latent is the value of all heads, and their key beside the part that RoPE turns. Blocks of threads read a
row's own latents and parts by address, in spans cut at fixed places, once for 16 heads, and multiply them on
the tensor cores; attention_source.py's merge puts the spans together. Several tokens of a row are as many
rows here (cache/mla_rows.py), so a pass with guesses has the bits of steps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import Any, cast

import mlx.core as mx

from ...runtime.arrays import rows_at
from ..compile import launch
from ..compile.launch import Code
from ..compile.source import TYPES, source
from . import checks
from .attention_kernel import Tails, constant, put
from .attention_source import source_of as merge_source

log = logging.getLogger(__name__)

SPAN = 512
"""Tokens of a row that one block of threads reads.

Microseconds a layer in bfloat16, latents of 512 and parts of 64, one H100 (20 calls, by a script that is not
kept): MLX's own reads one array of all rows with scores of parts, which a mask hides where rows are unequal.
A launch takes the host 20 to 30 of them.

| heads | rows                | new | MLX's own | ours  | bytes at 3.35 TB/s |
|-------|---------------------|-----|-----------|-------|--------------------|
| 16    | 1: 500              | 1   | 127       | 57    | 0                  |
|       | 1: 16,000           | 1   | 142       | 58    | 6                  |
|       |                     | 5   |           | 106   |                    |
|       | 4: 16,000 to 20,500 | 1   | 1,182     | 89    | 25                 |
|       |                     | 5   |           | 235   |                    |
|       | 8: 32,000           | 1   | 2,740     | 204   | 88                 |
| 64    | 1: 16,000           | 1   | 133       | 93    | 6                  |
|       | 4: 16,000 to 20,500 | 1   | 4,141     | 196   | 25                 |
| 128   | 1: 500              | 1   | 102       | 61    | 0                  |
|       | 1: 16,000           | 1   | 127       | 125   | 6                  |
|       | 4: 16,000 to 20,500 | 1   | 7,820     | 331   | 25                 |
|       | 8: 32,000           | 1   | 19,975    | 958   | 88                 |
|       | 32: 500 to 1,647    | 1   | 4,706     | 219   | 12                 |
"""

TILE = 64
"""Tokens that it has in shared memory at once, twice: the next ones are on their way."""

WARPS = 8
"""Of a block. Each makes the scores of `TILE` / 8 tokens, then the sums of an eighth of the width."""

CLOSE = 0.02
"""Largest difference from MLX's own in float32, for values of a normal distribution: bfloat16's rounding."""


def fits(width: int, part: int, dtype: Any) -> bool:
    """Whether there is a kernel for latents so wide, beside parts so wide."""
    return dtype in TYPES and width % 128 == 0 and width <= 512 and part % 32 == 0 and 0 < part <= 128


def source_of(width: int, part: int, dtype: Any) -> tuple[str, str]:
    """(function, CUDA source)."""
    kind = TYPES[dtype]
    function = f"omlxd_latents_{kind}_{width}_{part}"
    numbers = {"D": width, "E": part, "SPAN": SPAN, "TILE": TILE, "WARPS": WARPS}
    return function, source(["copies", "latents"], {"FUNCTION": function}, kind, numbers)


class LatentKernel:
    """The kernels for latents of one width, parts of one, and a type. Compiles them now. Raises what NVRTC,
    the driver and MLX raise."""

    def __init__(self, width: int, part: int, dtype: Any):
        self._width, self._part, self._dtype = width, part, dtype
        merge = merge_source("merge", width, 1, dtype, SPAN)
        self._code = Code({"spans": source_of(width, part, dtype), "merge": merge})
        # As `Kernel`'s.
        self._compiled = lru_cache(64)(
            lambda queries, **how: cast(Any, mx.compile(partial(self._attend, **how)))
        )

    def over_tails(
        self,
        queries: mx.array,
        rope_queries: mx.array,
        tails: Tails,
        ends: Sequence[int],
        scale: float,
        behind: mx.array,
    ) -> mx.array:
        """(tokens of all rows, heads, 1, width).

        queries       for latents, (tokens of all rows, heads, 1, width): as many tokens of one row as of
                      another, a row's one behind the other
        rope_queries  for parts, likewise, times `scale`
        tails         of each row: latents and parts
        ends          of each token of these: how many it sees of its row's, itself included
        behind        what `put` gave
        """
        new = len(queries) // len(tails.table)
        call = self._compiled(queries.shape, most=tails.most, new=new, each=tails.each)
        places = constant(f"latents{new}", tuple(ends), mx.int32)
        scales = constant("scale", (scale,), mx.float32)
        return call(queries, rope_queries, tails.table, places, scales, behind)

    def step(
        self,
        queries: mx.array,
        rope_queries: mx.array,
        tails: Tails,
        ends: mx.array,
        scale: float,
        behind: mx.array,
    ) -> mx.array:
        """As `over_tails`, of one token a row, for a compiled step; `ends`: (rows,)."""
        scales, how = constant("scale", (scale,), mx.float32), {"most": tails.most, "each": tails.each}
        return self._attend(queries, rope_queries, tails.table, ends, scales, behind, new=1, **how)

    def _attend(
        self,
        queries: mx.array,
        rope_queries: mx.array,
        table: mx.array,
        ends: mx.array,
        scale: mx.array,
        behind: mx.array,
        *,
        most: int,
        new: int,
        each: int,
    ) -> mx.array:
        tokens, heads = queries.shape[:2]
        spans = -(-most // SPAN)
        sums, weights = self._code.run(
            "spans",
            [queries, rope_queries, table, ends, scale, behind],
            [heads, new, table.shape[1], each],
            grid=(spans * 32 * WARPS, -(-heads // 16), tokens),
            threadgroup=(32 * WARPS, 1, 1),
            shared_memory=2 * TILE * (self._width + self._part + 8) * 2,
            output_shapes=[(tokens, heads, spans, self._width), (tokens, heads, spans, 2)],
            output_dtypes=[mx.float32, mx.float32],
        )
        starts = constant("latents' starts", (0,) * tokens, mx.int32)
        return self._code.run(
            "merge",
            [sums, weights, starts, ends],
            [spans, heads, 1],
            grid=(tokens * heads * self._width, 1, 1),
            threadgroup=(self._width, 1, 1),
            output_shapes=[queries.shape],
            output_dtypes=[self._dtype],
        )[0]


# --------------------------------------------------------------------------- the check


def kernel_for(queries: mx.array, rope_queries: mx.array) -> LatentKernel | None:
    """Of attention by such queries, once a check beside MLX's own passed."""
    return checked(queries.shape[3], rope_queries.shape[3], queries.dtype)


@cache
def checked(width: int, part: int, dtype: Any) -> LatentKernel | None:
    """A kernel that computes what MLX's own does, on rows of unequal length; None, and a line in the log."""
    if not fits(width, part, dtype):
        log.info("no kernel for latents %d wide beside parts %d wide in %s", width, part, dtype)
        return None
    return checks.checked(
        lambda: LatentKernel(width, part, dtype),
        lambda kernel: difference(kernel, width, part, dtype),
        CLOSE,
        "latents are read by MLX's own attention: omlxd's kernel",
        f"decode attends to latents by omlxd's kernel ({dtype}, {width} wide, parts {part} wide)",
    )


def tails_behind(rows: Sequence[Sequence[mx.array]], cut: int) -> tuple[Tails, list[mx.array]]:
    """(tails of a check's `rows`, two arrays each, whose first `cut` tokens are in a segment; what must stay
    as long)."""
    parts = [part for row in rows for part in row]
    own, before = [part[:, :, cut:] + 0 for part in parts], [part[:, :, :cut] + 0 for part in parts if cut]
    found = [launch.addresses_of(arrays) for arrays in (own, before) if arrays]
    numbers = [addresses.reshape(len(rows), 2) for addresses in found]
    capacity = parts[0].shape[2]
    numbers.insert(1, mx.array([[capacity - cut, cut]] * len(rows), mx.uint64))
    return Tails(mx.concatenate(numbers, axis=1), capacity, max(cut, 1)), own + before


def difference(kernel: Any, width: int, part: int, dtype: Any) -> float:
    """The largest from MLX's own in float32, for rows of unequal length; NaN is infinite. So are other bits
    of a row alone, of one whose first tokens are in a segment, and of one of several tokens in a pass."""
    ends, capacity, heads, scale = (SPAN - 100, 2 * SPAN + 17), 3 * SPAN, 20, (width + part) ** -0.5

    def some(seed: int, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)

    held = [[some(10 * row + i, 1, 1, capacity, of) for i, of in enumerate((width, part))] for row in (0, 1)]
    queries, turned = some(5, 2, 2, heads, 1, width), some(6, 2, 2, heads, 1, part)
    mx.eval(held, queries, turned)

    def attend(rows: Sequence[int], tokens: Sequence[int], cut: int = 0) -> mx.array:
        """`tokens` of the last two of each of `rows`, whose first `cut` tokens are in a segment."""
        count, at = len(tokens), [ends[row] - 2 + tokens[0] for row in rows]
        fresh = [
            [part[:, :, first : first + count] for part in held[row]]
            for row, first in zip(rows, at, strict=True)
        ]
        columns = mx.arange(capacity)
        apart = [
            [
                mx.where(((columns < first) | (columns >= first + count))[:, None], part, 0)
                for part in held[row]
            ]
            for row, first in zip(rows, at, strict=True)
        ]
        tails, _held = tails_behind(apart, cut)
        newest = [mx.concatenate(list(parts)) for parts in zip(*fresh, strict=True)]
        behind = put(newest, tails, mx.array([first + count - cut for first in at], mx.int32))
        asked = [
            rows_at(rows_at(array, rows).swapaxes(0, 1), tokens)
            .swapaxes(0, 1)
            .reshape(-1, heads, 1, array.shape[4])
            for array in (queries, turned)
        ]
        seen = [ends[row] - 1 + token for row in rows for token in tokens]
        out = kernel.over_tails(*asked, tails, seen, scale, behind)
        mx.eval(out)
        return out

    together, far = attend((0, 1), (0, 1)), 0.0
    same = [(attend((1,), (0, 1)), together[2:]), (attend((0, 1), (1,)), together[1::2])]
    same.append((attend((1,), (0, 1), SPAN), together[2:]))
    if not checks.are_equal(*zip(*same, strict=True)):
        return float("inf")
    for at, got in enumerate(together):
        row, token = divmod(at, 2)
        read = slice(ends[row] - 1 + token)
        latents, parts = (array[0, 0, read].astype(mx.float32) for array in held[row])
        query, rope = (array[row, token, :, 0].astype(mx.float32) for array in (queries, turned))
        want = mx.softmax(query @ latents.T * scale + rope @ parts.T, axis=-1) @ latents
        far = max(far, checks.far(got[:, 0], want))
    return far
