"""What MLX's attention costs: decode steps of four rows, and the longest call of a prompt."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx

from ... import mlx_adapter
from .timing import Measured, chained, short, times

LENGTHS = (512, 4096, 16384)
ROWS = 4
GROUPS = (4, 8)
"""Query heads of a KV head."""
UNEVEN = 7
"""Tokens by which each row is shorter than the one before."""
NEW, CONTEXT = 2048, 32768
ENOUGH_S = 3.0
"""Seconds after which a length's second group is left out."""


def decode(length: int) -> Measured:
    """Four rows of up to `length` tokens: in one masked call, each by itself, and these joined again."""
    heads, width, dtype = _heads()
    said: list[str] = []
    until = time.perf_counter() + ENOUGH_S
    for group in GROUPS:
        if time.perf_counter() > until:
            said.append(f"{heads} heads on {heads // group}: left out, as this device is slow")
            continue
        shapes = (heads, 1), (heads // group, length), (heads // group, length)
        queries, keys, values = (
            mx.random.normal((ROWS, count, tokens, width), key=mx.random.key(seed)).astype(dtype)
            for seed, (count, tokens) in enumerate(shapes)
        )
        starts = mx.arange(ROWS)[:, None, None, None] * UNEVEN
        mask = mx.arange(length) >= starts
        pairs = [(keys[r : r + 1, :, r * UNEVEN :], values[r : r + 1, :, r * UNEVEN :]) for r in range(ROWS)]
        pairs = [(mx.contiguous(k), mx.contiguous(v)) for k, v in pairs]
        mx.eval(queries, keys, values, mask, pairs)

        def alone(rows: Any, pairs: Any = pairs) -> list[mx.array]:
            return [_attend(q, k, v, None) for q, (k, v) in zip(rows, pairs, strict=True)]

        one = chained(lambda q, k=keys, v=values, m=mask: _attend(q, k, v, m), queries)
        each = chained(alone, mx.split(queries, ROWS))
        joined = chained(lambda q: mx.concatenate(alone(mx.split(q, ROWS))), queries)
        said.append(
            f"{heads} heads on {heads // group}: one masked call {short(one)}, "
            f"{ROWS} calls {short(each)}, {ROWS} calls and their results joined {short(joined)}"
        )
    head = f"{ROWS} rows, {width} wide, {str(dtype).rpartition('.')[2]}; each chained inside one evaluation"
    return Measured([(f"sdpa {length:,}", "; ".join([head, *said]))])


def kernel(name: str) -> Measured:
    """A kernel of omlxd's own, judged at a shape of common models."""
    said = mlx_adapter.attention_backend().judge_sample(name)
    return Measured([(name if at == 0 else "", line) for at, line in enumerate(said)])


def longest_kernel() -> Measured:
    """The last call of a long prompt: a display's watchdog ends a kernel of seconds."""
    heads, width, dtype = _heads()
    if mlx_adapter.backend() == "cpu":
        return Measured([("longest kernel", "not on a CPU")])
    queries = mx.random.normal((1, heads, NEW, width)).astype(dtype)
    keys = mx.random.normal((1, heads // GROUPS[0], CONTEXT, width)).astype(dtype)
    mx.eval(queries, keys)
    seconds = min(times(lambda: _attend(queries, keys, keys, "causal"), turns=3))
    text = f"attention of {NEW:,} new tokens over {CONTEXT:,}, {heads} heads: {short(seconds)}"
    return Measured([("longest kernel", text)])


def _attend(queries: mx.array, keys: mx.array, values: mx.array, mask: Any) -> mx.array:
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask=mask)


def _heads() -> tuple[int, int, Any]:
    """Return heads, their width and type: of an 8B model, on a CPU of a small one."""
    return (8, 64, mx.float32) if mlx_adapter.backend() == "cpu" else (32, 128, mx.float16)
