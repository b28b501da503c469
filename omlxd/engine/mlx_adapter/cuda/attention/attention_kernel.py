"""CUDA kernels of attention: `omlxd_decode_spans` for one new token a row, `omlxd_decode_tiles` for several,
`omlxd_decode_several` for several of wide heads.

They read a row's own KV alone, in spans cut at fixed places, with sums in a fixed order;
`omlxd_decode_merge` puts the spans together by log-sum-exp, where there are several. MLX compiles them at
their first call. attention/hooks.py says when they run. `omlxd_decode_step` is `omlxd_decode_spans` that also
puts the new token's KV into its place, for compiled_step.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..compile import kernel_store, launch
from .attention_source import WARPS, heads_at_once, put_source, source_of

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


class Tails(NamedTuple):
    """A layer's KV of a batch whose rows have arrays of their own, behind what they hold in segments.

    table  (rows, columns) in uint64: addresses of a row's arrays, (1, KV heads, capacity, …) each, and that
           capacity. There are two, keys and values, or six where both are packed (cache/packed.py). Of packed
           ones and of latents the tokens in segments before them follow, and addresses of each segment's
    most   columns; no row is longer
    each   tokens of a segment that the table tells of
    latents  keys are latents of MLA, values the parts that RoPE turns (cache/mla_rows.py)
    """

    table: mx.array
    most: int
    each: int = 0
    latents: bool = False

    @property
    def is_packed(self) -> bool:
        """Whether keys and values are."""
        return self.table.shape[1] > 3 and not self.latents


Held = tuple[mx.array, mx.array] | Tails
"""Keys and values of all rows, (rows, KV heads, capacity, width) each, or what each row has."""


def kept(held: Any) -> tuple[Any, Any]:
    """(keys, values) that are written in place; of rows with arrays of their own (`held`, None)."""
    return (held, None) if isinstance(held, Tails) else held


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
            lambda queries, held, window: mx.compile(partial(self._attend, window=window))
        )

    def compile_ahead(self) -> None:
        """Compile, side by side, what calls will need."""
        one = [name + end for name in ("spans", "step") for end in ("", "_out")]
        several = ["tiles"] if self.width <= TILE_WIDTH else ["several", "several_out"]
        span = TILE_SPAN if self.width <= TILE_WIDTH else self.span
        needed = {(own + name, self.span) for name in one for own in ("", "own_")}
        needed |= {(own + name, span) for name in several for own in ("", "own_")}
        with ThreadPoolExecutor(len(needed) + 2, thread_name_prefix="nvrtc") as aside:
            list(aside.map(self._compile, (*needed, *{("merge", self.span), ("merge", span)})))

    def _compile(self, key: tuple[str, int]) -> None:
        function, source = source_of(key[0], self.width, self.group, self.dtype, key[1], **self._with)
        self._code[key] = function, kernel_store.machine_code(source)

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
        starts, ends = constants_of(places, window)
        call = self._compiled(queries.shape, keys.shape, window)
        more = () if sinks is None else (sinks,)
        scales = constant("scale", (scale,), mx.float32)
        return call(queries, (keys, values), starts, ends, scales, *more)

    def over_tails(
        self,
        queries: mx.array,
        tails: Tails,
        places: tuple[Sequence[int], Sequence[int]],
        scale: float,
        *,
        fresh: Sequence[mx.array] = (),
        behind: mx.array | None = None,
        window: int = 0,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """As a call of the kernel, of rows with arrays of their own; a row's columns go on at its arrays'
        beginning where those end and there is a `window`.

        fresh   KV of a new token of each row, which is put into its place; or else it is there
        behind  what `put` gave
        """
        starts, ends = constants_of(places, window)
        scales = constant("scale", (scale,), mx.float32)
        call = self._compiled((queries.shape, bool(fresh), sinks is None), tails.most, window)
        return call(queries, tails, starts, ends, scales, sinks, fresh=fresh, behind=behind)

    def step(
        self,
        queries: mx.array,
        fresh: Sequence[mx.array],
        held: Held,
        starts: mx.array,
        ends: mx.array,
        scale: float,
        sinks: mx.array | None = None,
    ) -> tuple[mx.array, Any, Any]:
        """Put `fresh`, KV of a new token of each row, into `held`, and attend.

        Returns (out, keys, values), the last two as `kept` gives them.

        fresh  (rows, KV heads, 1, width) each; empty where they are in `held`
        held   in one piece; written in place, column `ends[row] - 1`
        """
        scales = constant("scale", (scale,), mx.float32)
        return self._attend(queries, held, starts, ends, scales, sinks, fresh=fresh), *kept(held)

    def _attend(
        self,
        queries: mx.array,
        held: Held,
        starts: mx.array,
        ends: mx.array,
        scale: mx.array,
        sinks: mx.array | None = None,
        *,
        fresh: Sequence[mx.array] = (),
        behind: mx.array | None = None,
        window: int = 0,
    ) -> mx.array:
        how: dict[str, Any] = {"fresh": fresh, "behind": behind, "window": window, "sinks": sinks}
        *made, span = self.parts(queries, held, starts, ends, scale, **how, out=True)
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
        held: Held,
        starts: mx.array,
        ends: mx.array,
        scale: mx.array,
        *,
        fresh: Sequence[mx.array] = (),
        behind: mx.array | None = None,
        window: int = 0,
        sinks: mx.array | None = None,
        out: bool = False,
    ) -> tuple[Any, ...]:
        """(vectors (rows, queries of a row, spans, width), their logarithms' largest and masses (…, 2), both
        in float32; tokens of a span).

        out  if rows have no more than one span: (what attention gives, with `sinks`; tokens of a span)
        """
        rows, heads, new = queries.shape[:3]
        kv_heads, own = heads // self.group, isinstance(held, Tails)
        arrays, capacity = ([held.table], held.most) if isinstance(held, Tails) else (held, held[0].shape[2])
        if new > 1 and self.width <= TILE_WIDTH:
            name, span, at_once = "tiles", TILE_SPAN, 16
        else:
            name = ("step" if fresh else "spans") if new == 1 else "several"
            span, at_once = self.span, heads_at_once(self.width, self.group, new > 1)
        spans = -(-capacity // span)
        alone = out and spans == 1 and name != "tiles"
        places = (rows, heads * new, spans)
        last = [sinks] if alone and sinks is not None else []
        if own and name != "step":
            last.insert(0, ends if behind is None else behind)
        made = self._run(
            "own_" * own + name + "_out" * alone,
            span,
            [queries, *fresh, *arrays, starts, ends, scale, *last],
            [*([] if own else [capacity]), new, kv_heads, window or NO_WINDOW],
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
            self._compile((name, span))
        return launch.run(self._code[name, span], inputs, scalars, **how)


def put(fresh: Sequence[mx.array], tails: Tails, ends: mx.array) -> mx.array:
    """Put KV of new tokens into rows' own arrays, so that the tokens of row r end at column `ends[r]`, and go
    on at the arrays' beginning where those end. Returns what a kernel takes as `behind` that reads them.

    fresh  a part each, (rows, KV heads, new tokens, …)
    """
    rows, heads, new = fresh[0].shape[:3]
    return launch.run(
        _put_code(len(fresh)),
        [*fresh, tails.table, ends],
        [new, heads, tails.table.shape[1], *(part.shape[3] * part.dtype.size for part in fresh)],
        grid=(rows * heads * 128, 1, 1),
        threadgroup=(128, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )[0]


@cache
def _put_code(parts: int) -> tuple[str, bytes]:
    function, source = put_source(parts)
    return function, kernel_store.machine_code(source)


def constants_of(places: Sequence[Sequence[int]], window: int = 0) -> tuple[mx.array, mx.array]:
    """Starts and ends, (rows,) each; layers with the same `window` share them."""
    starts, ends = places
    return (
        constant(f"starts{window}", tuple(starts), mx.int32),
        constant(f"ends{window}", tuple(ends), mx.int32),
    )


_constants: dict[str, tuple[Any, mx.array]] = {}


def constant(name: str, values: tuple[float, ...], dtype: Any) -> mx.array:
    """An array of these numbers; all layers of a step share it."""
    cached = _constants.get(name)
    if cached is None or cached[0] != values:
        cached = _constants[name] = values, mx.array(values, dtype)
    return cached[1]
