"""Attention on CUDA of rows that hold segments: segment_kernel.py reads each once for all that hold it.

`checked` gives what takes over for `segments.attend`, once it computed what MLX's own does, and a row's bits
alone were those beside others. fused_step.py's steps read segments by fused_attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import mlx.core as mx

from ...runtime.arrays import rows_at
from ..compile import launch
from ..compile.launch import Code
from . import checks, segment_kernel
from .attention_kernel import TILE_SPAN, Held, Kernel, Tails, constant, constants_of, kept
from .fused_attention import MOST_GROUP, WIDTHS, Heads
from .segment_kernel import MERGE_WARPS, SPAN, STAGES, WARPS, merge_source, segments_source
from .segments import Shared, places_of

Pair = tuple[mx.array, mx.array]

CLOSE = 0.02
"""As attention/hooks.py's."""


class SegmentKernel:
    """Attention of rows that hold segments, beside `tails`, which reads the rest of each.

    sinks  it has these

    Its kernels compile now. Raises what NVRTC, the driver and MLX raise.
    """

    def __init__(self, tails: Kernel, sinks: bool = False):
        self._tails = tails
        self.most_new = tails.most_new
        cuts = dict.fromkeys((tails.span, TILE_SPAN))
        self._code = Code(
            {"": segments_source(tails.width, tails.group, tails.dtype)}
            | {cut: merge_source(tails.width, tails.dtype, cut, sinks) for cut in cuts}
        )

    def __call__(
        self,
        queries: mx.array,
        shared: Shared,
        keys: mx.array,
        values: mx.array,
        places: tuple[Sequence[int], Sequence[int]],
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """As `attention_kernel.Kernel`, whose `keys` and `values` are the rows' tails here."""
        return self._attend(queries, shared, (keys, values), *constants_of(places), scale, sinks)

    def over_tails(
        self,
        queries: mx.array,
        tails: Tails,
        places: tuple[Sequence[int], Sequence[int]],
        scale: float,
        *,
        shared: Shared,
        fresh: Sequence[mx.array] = (),
        behind: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """As `Kernel.over_tails`."""
        return self._attend(queries, shared, tails, *constants_of(places), scale, sinks, fresh, behind)

    def step(
        self,
        queries: mx.array,
        fresh: Sequence[mx.array],
        held: Held,
        shared: Shared,
        starts: mx.array,
        ends: mx.array,
        scale: float,
        sinks: mx.array | None = None,
    ) -> tuple[mx.array, Any, Any]:
        """As `Kernel.step`."""
        return self._attend(queries, shared, held, starts, ends, scale, sinks, fresh), *kept(held)

    def _attend(
        self,
        queries: mx.array,
        shared: Shared,
        held: Held,
        starts: mx.array,
        ends: mx.array,
        scale: float,
        sinks: mx.array | None = None,
        fresh: Sequence[mx.array] = (),
        behind: mx.array | None = None,
    ) -> mx.array:
        scales = constant("scale", (scale,), mx.float32)
        tail_sums, tail_weights, cut = self._tails.parts(
            queries, held, starts, ends, scales, fresh=fresh, behind=behind
        )
        kv_heads = queries.shape[1] // self._tails.group
        rows, heads, new, width = queries.shape
        last = [] if sinks is None else [sinks]
        parts, segments = -(-shared.tokens // SPAN), shared.table.shape[0]
        most, most_tiles = parts * shared.most, segment_kernel.most_tiles(width)
        tiles = -(-rows * self._tails.group * new // (8 * most_tiles))
        ring = WARPS * STAGES * 2 * 16 * width * 2
        sums, weights = self._code.run(
            "",
            [queries, shared.addresses, shared.table, scales],
            [segments, shared.tokens, rows, new, most, kv_heads],
            grid=(tiles * 32 * WARPS, kv_heads, segments * parts),
            threadgroup=(32 * WARPS, 1, 1),
            shared_memory=max(ring, WARPS * 8 * most_tiles * (width + 4) * 4),
            output_shapes=[(rows, heads * new, most, width), (rows, heads * new, most, 2)],
            output_dtypes=[mx.float32, mx.float32],
        )
        return self._code.run(
            cut,
            [sums, weights, shared.counts, tail_sums, tail_weights, starts, ends, *last],
            [parts, most, tail_sums.shape[-2], heads * new, new],
            grid=(rows * heads * new * (32 * MERGE_WARPS + width), 1, 1),
            threadgroup=(32 * MERGE_WARPS + width, 1, 1),
            output_shapes=[queries.shape],
            output_dtypes=[self._tails.dtype],
        )[0]


# --------------------------------------------------------------------------- the check


def in_use() -> bool:
    """Whether a kernel reads segments."""
    return bool(_used)


_used: list[SegmentKernel] = []


@cache
def checked(tails: Kernel, sinks: bool = False) -> SegmentKernel | None:
    """What reads segments beside `tails`; None, and a line in the log, where it does not compute what MLX's
    own attention does, or not the same bits for a row alone."""
    if tails.width not in WIDTHS or tails.group > MOST_GROUP:
        return None
    kernel = checks.checked(
        lambda: SegmentKernel(tails, sinks),
        lambda kernel: max(
            _difference(kernel, tails, tokens, rows, new, sinks)
            for new in {1, min(5, tails.most_new)}
            for tokens, rows in _CASES
        ),
        CLOSE,
        "KV in segments is read by MLX's own products: our kernel",
        "KV in segments is read by omlxd's kernel, once for all rows",
        ", a row's bits alone those beside others",
        remember=("attention over segments", (tails.width, tails.group, tails.dtype, tails.span, sinks)),
    )
    if kernel is not None:
        _used.append(kernel)
    return kernel


def _shared_of(held: Sequence[Pair], rows: Sequence[Sequence[int]]) -> Shared:
    """Of rows that hold these of the segments `held`, by number, which must stay."""
    places = places_of([[held[number] for number in row] for row in rows])
    arrays = [array for row, index in places.holders for array in held[rows[row][index]]]
    addresses = launch.addresses_of(arrays).reshape(-1, 2)
    return Shared(addresses, places.table, places.counts, held[0][0].shape[2], places.most, places.widest)


def example(heads: Heads, rows: int, count: int = 1) -> tuple[Shared, mx.array, list[Pair]]:
    """(what so many rows hold in segments of random numbers, each row's tokens, what must stay as long).

    Each row comes `count` times, one behind the other.
    """
    shape = 1, heads.kv_heads, SPAN, heads.width
    own = [[0, 1, 2][: (row + 1) % 4] for row in range(rows) for _ in range(count)]
    held = [
        cast(
            Pair,
            tuple(mx.random.normal(shape, key=mx.random.key(2 * at + i)).astype(heads.dtype) for i in (0, 1)),
        )
        for at in range(3)
    ]
    return _shared_of(held, own), mx.array([len(row) * SPAN for row in own]), held


_CASES = ((2 * SPAN, ([0, 1, 2], [0, 1], [], [0, 1])), (16, (list(range(19)), [2], [*range(9)], [])))
"""Tokens of a segment, and each row's segments, by number."""


def _difference(
    kernel: SegmentKernel, tails: Kernel, tokens: int, rows: Any, new: int, sinks: bool = False
) -> float:
    """The largest from MLX's own in float32; infinite where a row alone has other bits. NaN too."""
    width, kv_heads, scale = tails.width, 2, tails.width**-0.5
    ends, capacity = [900, 77, 130, new][: len(rows)], 1024

    def random(*shape: int, seed: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(seed)).astype(tails.dtype)

    count = 1 + max(number for row in rows for number in row)
    held = [
        cast(Pair, tuple(random(1, kv_heads, tokens, width, seed=2 * number + i) for i in (0, 1)))
        for number in range(count)
    ]
    keys, values = (random(len(rows), kv_heads, capacity, width, seed=500 + i) for i in (0, 1))
    queries = random(len(rows), kv_heads * tails.group, new, width, seed=502)
    its = random(kv_heads * tails.group, seed=503) + 5 if sinks else None

    def attend(which: list[int]) -> mx.array:
        own = [rows[row] for row in which]
        asked, given = rows_at(queries, which), (rows_at(keys, which), rows_at(values, which))
        places = [0] * len(which), [ends[row] for row in which]
        if not any(own):
            return tails(asked, *given, places, scale, sinks=its)
        return kernel(asked, _shared_of(held, own), *given, places, scale, sinks=its)

    together, far = attend(list(range(len(rows)))), 0.0
    for row, (numbers, end) in enumerate(zip(rows, ends, strict=True)):
        own = [
            *(held[number] for number in numbers),
            (keys[row : row + 1, :, :end], values[row : row + 1, :, :end]),
        ]
        exact = [mx.concatenate(list(parts), axis=2).astype(mx.float32) for parts in zip(*own, strict=True)]
        query = queries[row : row + 1].astype(mx.float32)
        want = mx.fast.scaled_dot_product_attention(
            query, *exact, scale=scale, mask="causal", sinks=None if its is None else its.astype(mx.float32)
        )
        if not mx.array_equal(attend([row]), together[row : row + 1]).item():
            return float("inf")
        far = max(far, checks.far(together[row : row + 1], want))
    return far
