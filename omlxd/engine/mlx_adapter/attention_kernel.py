"""CUDA kernels of attention: `omlxd_decode_spans` for one new token a row, `omlxd_decode_tiles` for several,
`omlxd_decode_several` for several of wide heads.

They read a row's own KV alone, in spans cut at fixed places, with sums in a fixed order;
`omlxd_decode_merge` puts the spans together by log-sum-exp, where there are several. MLX compiles them at
their first call. attention.py says when they run. `omlxd_decode_step` is `omlxd_decode_spans` that also puts
the new token's KV into its place, for compiled_step.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx

from . import nvrtc
from .attention_source import WARPS, heads_at_once, source_of

SPAN = 512
"""Tokens of a row that one block of threads reads. Cut at fixed places, not by how many rows there are.

Milliseconds a layer, 32 query heads on 8 of 128 in bfloat16, one H100 (tools/bench/gpu.py --only attention):

| rows                | MLX, no mask | 256  | 512  | 1024 | bytes at 3.35 TB/s |
|---------------------|--------------|------|------|------|--------------------|
| 4: 16,000 to 20,500 | 0.13         | 0.14 | 0.12 | 0.13 | 0.09               |
| 4: 2,000 to 32,000  | 0.19         | 0.12 | 0.11 | 0.11 | 0.07               |
| 8: 32,000           | 0.36         | 0.39 | 0.39 | 0.38 | 0.31               |
| 32: 500 to 1,647    | 0.10         | 0.08 | 0.08 | 0.07 | 0.04               |
| 1: 16,000           | 0.05         | 0.06 | 0.07 | 0.05 | 0.02               |
| 1: 500              | 0.02         | 0.03 | 0.03 | 0.05 | 0.00               |

With a mask MLX's own takes 0.77, 1.22, 2.12, 0.59, 0.24 and 0.09. A kernel that went by shared memory took
0.14, 0.13, 0.45, 0.10, 0.07 and 0.03.
"""

MOST_NEW = 64
"""New tokens a row, at most: the end of a prompt has fewer than a block of the usual size."""

TILE_SPAN = 1024
"""As `SPAN`, for several new tokens. Milliseconds a layer as above (20 calls, by a script that is not kept),
MLX's own with a mask and this kernel:

| rows                | 3          | 5          | 9          | 16         | 64         |
|---------------------|------------|------------|------------|------------|------------|
| 4: 16,000 to 20,500 | 0.60, 0.15 | 0.66, 0.21 | 0.80, 0.27 | 0.96, 0.39 | 2.12, 1.28 |
| 8: 32,000           | 1.59, 0.45 | 1.76, 0.62 | 2.19, 0.88 | 2.67, 1.09 | -          |
| 32: 500 to 1,647    | 0.48, 0.09 | 0.53, 0.12 | -          | -          | -          |
| 1: 16,000           | 0.25, 0.07 | 0.18, 0.09 | 0.22, 0.09 | 0.38, 0.13 | 0.53, 0.35 |
| 1: 500              | 0.07, 0.06 | 0.07, 0.11 | 0.18, 0.09 | 0.06, 0.04 | 0.10, 0.05 |

Besides, MLX's first call of each shape takes 60 to 120 ms, while cuDNN plans it, and each length of the KV is
a shape. With spans of 512 the first rows take 0.18 to 0.47 and 1.67.
"""


TILE_WIDTH = 128
"""A wider head's sums of 16 queries have no room in registers: `omlxd_decode_several` takes those."""

MOST_WIDE = 16
"""As `MOST_NEW`, for wider heads."""


NO_WINDOW = 1 << 30


class Kernel:
    """The kernels for one width, group and type. They compile at their first calls. Raises what NVRTC, the
    driver and MLX raise.

    Its calls are compiled too: a call then costs the host 28 microseconds, and 51 if MLX puts it together
    each time.
    """

    def __init__(
        self,
        width: int,
        group: int,
        dtype: Any,
        span: int = SPAN,
        *,
        ring: bool = False,
        sinks: bool = False,
    ):
        self.width, self.group, self.dtype, self.span = width, group, dtype, span
        self._with = {"ring": ring, "sinks": sinks}
        self.most_new = MOST_NEW if width <= TILE_WIDTH else MOST_WIDE
        """New tokens a row that it takes."""
        self._code: dict[tuple[str, int], tuple[str, bytes]] = {}
        # Each shape by itself: MLX looks through all shapes of a function one by one.
        self._compiled = lru_cache(64)(
            lambda queries, keys, window: mx.compile(partial(self._attend, window=window))
        )

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        places: tuple[Sequence[int], Sequence[int]],
        scale: float,
        *,
        window: int = 0,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """(rows, heads, new tokens, width). `keys`, `values`: (rows, KV heads, capacity, width); row r's KV
        lies in columns `starts[r]` to `ends[r]` of `places`, its new tokens last.

        window  tokens that a new one sees, itself included; 0: all. Of one new token a row, `places` has no
                others, and goes on behind the last column in the first
        sinks   (heads,)
        """
        starts, ends = (
            constant(f"{name}{window}", tuple(at), mx.int32)
            for name, at in zip(("starts", "ends"), places, strict=True)
        )
        call = self._compiled(queries.shape, keys.shape, window)
        more = () if sinks is None else (sinks,)
        return call(queries, keys, values, starts, ends, constant("scale", (scale,), mx.float32), *more)

    def step(
        self,
        queries: mx.array,
        fresh: Sequence[mx.array],
        held: tuple[mx.array, mx.array],
        starts: mx.array,
        ends: mx.array,
        scale: float,
        sinks: mx.array | None = None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Put `fresh`, KV of a new token of each row, into `held`, and attend: (out, keys, values).

        fresh  (rows, KV heads, 1, width) each; empty where they are in `held`
        held   (rows, KV heads, capacity, width), in one piece; written in place, column `ends[row] - 1`
        """
        scales = constant("scale", (scale,), mx.float32)
        return self._attend(queries, *held, starts, ends, scales, sinks, fresh=fresh), *held

    def _attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        starts: mx.array,
        ends: mx.array,
        scale: mx.array,
        sinks: mx.array | None = None,
        *,
        fresh: Sequence[mx.array] = (),
        window: int = 0,
    ) -> mx.array:
        given = queries, keys, values, starts, ends, scale
        *made, span = self.parts(*given, fresh=fresh, window=window, sinks=sinks, out=True)
        if len(made) == 1:
            return made[0]
        rows, heads, new = queries.shape[:3]
        return self._run(
            "merge",
            span,
            [*made, starts, ends, *([] if sinks is None else [sinks])],
            [made[0].shape[2], heads * new, new],
            grid=(rows * heads * new * self.width, 1, 1),
            threadgroup=(self.width, 1, 1),
            output_shapes=[queries.shape],
            output_dtypes=[self.dtype],
        )[0]

    def parts(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        starts: mx.array,
        ends: mx.array,
        scale: mx.array,
        *,
        fresh: Sequence[mx.array] = (),
        window: int = 0,
        sinks: mx.array | None = None,
        out: bool = False,
    ) -> tuple[Any, ...]:
        """(vectors (rows, queries of a row, spans, width), their logarithms' largest and masses (…, 2), both
        in float32; tokens of a span).

        out  if rows have no more than one span: (what attention gives, with `sinks`; tokens of a span)
        """
        rows, heads, new = queries.shape[:3]
        kv_heads, capacity = keys.shape[1:3]
        if new > 1 and self.width <= TILE_WIDTH:
            name, span, at_once = "tiles", TILE_SPAN, 16
        else:
            name = ("step" if fresh else "spans") if new == 1 else "several"
            span, at_once = self.span, heads_at_once(self.width, self.group, new > 1)
        spans = -(-capacity // span)
        alone = out and spans == 1 and name != "tiles"
        places = (rows, heads * new, spans)
        last = [sinks] if alone and sinks is not None else []
        made = self._run(
            name + "_out" * alone,
            span,
            [queries, *fresh, keys, values, starts, ends, scale, *last],
            [capacity, new, kv_heads, window or NO_WINDOW],
            grid=(spans * 32 * WARPS, kv_heads * -(-self.group * new // at_once), rows),
            threadgroup=(32 * WARPS, 1, 1),
            output_shapes=[queries.shape] if alone else [(*places, self.width), (*places, 2)],
            output_dtypes=[self.dtype] if alone else [mx.float32, mx.float32],
        )
        return *made, span

    def _run(
        self, name: str, span: int, inputs: list[mx.array], scalars: list[int], **how: Any
    ) -> list[mx.array]:
        """One kernel, compiled at its first call."""
        if (name, span) not in self._code:
            function, source = source_of(name, self.width, self.group, self.dtype, span, **self._with)
            self._code[name, span] = function, nvrtc.machine_code(source)
        function, code = self._code[name, span]
        return mx.fast.precompiled_cuda_kernel(
            name=function,
            compiled_source=code,
            inputs=inputs,
            scalars=scalars,
            ensure_row_contiguous=True,
            **how,
        )


_constants: dict[str, tuple[Any, mx.array]] = {}


def constant(name: str, values: tuple[float, ...], dtype: Any) -> mx.array:
    """An array of these numbers; all layers of a step share it."""
    cached = _constants.get(name)
    if cached is None or cached[0] != values:
        cached = _constants[name] = values, mx.array(values, dtype)
    return cached[1]
