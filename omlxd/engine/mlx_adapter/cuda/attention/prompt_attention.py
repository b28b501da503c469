"""A CUDA kernel of attention of a prompt's passes, `omlxd_prompt`: many new tokens of one row.

MLX hands these to cuDNN, which plans each shape at its first call, and the end of nearly every prompt is a
new shape. Whole chunks, which are of few shapes, stay with cuDNN, whose kernels are faster, and so do passes
before a prompt's last, in shapes of prompt_shapes.py. Windows don't: cuDNN computes what their
masks hide, and its bits depend on where a pass begins. attention/hooks.py says when this one runs, once
`checked` has compared it with MLX's own.

Milliseconds a layer, 32 query heads on 8 of 128 in bfloat16, one H200 (tools/bench/gpu.py --only prompts):

| new, all tokens | MLX's first | MLX's then | this  | this, TFLOP/s |
|-----------------|-------------|------------|-------|---------------|
| 200, 16,200     | 37          | 0.132      | 0.303 | 174           |
| 448, 8,640      | 38          | 0.151      | 0.285 | 216           |
| 600, 17,000     | 36          | 0.308      | 0.737 | 223           |
| 1,000, 16,900   | 36          | 0.450      | 1.134 | 237           |
| 1,500, 10,000   | 36          | 0.392      | 0.954 | 238           |
| 650, 32,650     | 37          | 0.624      | 1.506 | 229           |

Whole chunks of 2,048 tokens over windows in bfloat16, one H100, milliseconds a layer (a script that is not
kept):

| query heads on KV heads, width | window | MLX's first | MLX's then | this |
|--------------------------------|--------|-------------|------------|------|
| 8 on 4, 256                    | 1,024  | 3           | 1.30       | 0.26 |
| 32 on 32, 128                  | 4,096  | 2,292       | 3.24       | 0.95 |
| 64 on 8, 64, sinks             | 128    | 1,385       | 1.98       | 0.13 |

A plan is for a capacity, too: a chunk of 2,048 whose KV lies in arrays of another length takes 57 ms again,
and 0.5 if its keys and values are copied together before.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from ..compile import kernel_store
from ..compile.source import TYPES, source
from . import checks
from .attention_kernel import NO_WINDOW, constant

WARPS = 4
"""Of a block of threads; each has 16 queries of a head."""

WIDE = 256
"""Of heads up to this width, queries and sums have room in registers."""

MOST_PAIRS = 1 << 24
"""New tokens times all tokens of a pass, at most. There it takes 24 ms longer than cuDNN in 36 layers of the
table's shape, and the plan 36."""

CLOSE = 0.03
"""As attention/hooks.py's."""


def columns_of(width: int) -> int:
    """Tokens of keys and values at once: those of wider heads would have no room in registers."""
    return 64 if width <= 128 else 32


def parts_of(width: int) -> int:
    """Blocks of threads that share a query's values."""
    return 1 if width <= WIDE else 2


def _shared_bytes(width: int) -> int:
    keys, values = (-(-each // 64) * 64 for each in (width, width // parts_of(width)))
    return 2 * (2 * columns_of(width) * (keys + values) + (0 if width <= WIDE else 16 * WARPS * keys))


def source_of(width: int, group: int, dtype: Any, sinks: bool = False) -> tuple[str, str]:
    """(function, CUDA source)."""
    kind = TYPES[dtype]
    numbers = {"D": width, "GROUP": group, "WARPS": WARPS, "COLUMNS": columns_of(width)}
    name = "_".join(["omlxd_prompt", kind, *map(str, numbers.values()), str(int(sinks))])
    numbers |= {"PARTS": parts_of(width), "HELD": int(width <= WIDE)}
    return name, source(["copies", "prompt"], {"FUNCTION": name, "SINKS": int(sinks)}, kind, numbers)


class PromptKernel:
    """Of one width, group and type. Raises what NVRTC and the driver raise."""

    def __init__(self, width: int, group: int, dtype: Any, sinks: bool = False):
        self._width, self._dtype = width, dtype
        self._function, made = source_of(width, group, dtype, sinks)
        self._code = kernel_store.machine_code(made)

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        places: tuple[int, int],
        scale: float,
        *,
        window: int = 0,
        sinks: mx.array | None = None,
        before: int = 0,
    ) -> mx.array:
        """(1, heads, new tokens, width). `keys`, `values`: (1, KV heads, capacity, width); the row's KV lies
        in the columns from the first of `places` to before the second, its new tokens last.

        window  tokens that a new one sees, itself included; 0: all before it
        sinks   (heads,)
        before  tokens of the row before those columns: sums are cut at multiples of tokens of the row
        """
        heads, new = queries.shape[1:3]
        tiles, (start, end) = -(-new // (16 * WARPS)), places
        more = [] if sinks is None else [sinks]
        return mx.fast.precompiled_cuda_kernel(
            name=self._function,
            compiled_source=self._code,
            inputs=[queries, keys, values, constant("scale", (scale,), mx.float32), *more],
            scalars=[
                keys.shape[2],
                start,
                end - start,
                new,
                window or NO_WINDOW,
                before % columns_of(self._width),
            ],
            grid=(tiles * 32 * WARPS, heads, parts_of(self._width)),
            threadgroup=(32 * WARPS, 1, 1),
            shared_memory=_shared_bytes(self._width),
            output_shapes=[queries.shape],
            output_dtypes=[self._dtype],
            ensure_row_contiguous=True,
        )[0]


def fits(new: int, tokens: int, chunk: int) -> bool:
    """Whether a pass of `new` tokens, which see `tokens` in all, is of a shape that cuDNN would plan anew for
    more than that saves. `chunk`: tokens of a whole chunk."""
    return new < chunk and new * tokens <= MOST_PAIRS


@cache
def checked(width: int, group: int, dtype: Any, sinks: bool) -> PromptKernel | None:
    """A kernel that computes what MLX's own attention does; None, and a line in the log: there is none."""
    if width % 16 or (width > WIDE and width != 512) or dtype not in TYPES:
        return None
    kind = width, group, dtype, sinks
    return checks.checked(
        lambda: PromptKernel(*kind),
        lambda kernel: max(_difference(kernel, kind, *case) for case in _CASES),
        CLOSE,
        "prompts attend by MLX's own kernels: ours",
        f"ends of prompts attend by omlxd's kernel ({width} wide)",
        remember=("attention of prompts", kind),
    )


_CASES = (65, 65, 0), (130, 300, 0), (100, 400, 90)
"""New tokens, all tokens, window."""


def _difference(kernel: PromptKernel, kind: tuple[Any, ...], new: int, tokens: int, window: int) -> float:
    """The largest from MLX's own in float32; NaN is infinite."""
    width, group, dtype, has_sinks = kind

    def some(seed: int, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)

    start, scale = 5, 3 * width**-0.5  # Scores of a few tokens lead: as attention/hooks.py's check.
    queries = some(0, 1, 2 * group, new, width)
    keys, values = (some(seed, 1, 2, tokens + 20, width) for seed in (1, 2))
    sinks = some(3, 2 * group) + 10 if has_sinks else None
    places = start, start + tokens
    got = kernel(queries, keys, values, places, scale, window=window, sinks=sinks)
    own, seen = mx.arange(tokens - new, tokens)[:, None], mx.arange(tokens)
    mask = (seen <= own) & (seen > own - (window or tokens + 1))
    exact = [array[:, :, start : start + tokens].astype(mx.float32) for array in (keys, values)]
    want = mx.fast.scaled_dot_product_attention(
        queries.astype(mx.float32),
        *exact,
        scale=scale,
        mask=mask,
        sinks=None if sinks is None else sinks.astype(mx.float32),
    )
    far = checks.far(got, want)
    if window:  # Without what the last queries do not see.
        less = tokens - window - 20
        places = start + less, start + tokens
        how = {"window": window, "sinks": sinks, "before": less}
        alike = mx.array_equal(
            kernel(queries[:, :, -20:], keys, values, places, scale, **how), got[:, :, -20:]
        )
        far = far if alike.item() else float("inf")
    return far
