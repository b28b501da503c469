"""How attention over rows whose KV lies in parts is launched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from .kernels import MOST_LAUNCHES, SIMDGROUPS, Packing, merge_kernel, spans_kernel
from .plan import Plan, Shape


def bound(parts: Sequence[Sequence[mx.array]], packing: Packing) -> list[list[mx.array]]:
    """The arrays of each launch of `spans` over `parts`, each of which is arrays of keys, then of values."""
    most, launches = packing.most_parts, list[list[mx.array]]()
    unused = [nothing(array.dtype) for array in parts[0]]
    for at in range(0, len(parts), most):
        some = parts[at : at + most]
        launches.append([array for part in (*some, *[unused] * (most - len(some))) for array in part])
    return launches


@cache
def nothing(dtype: mx.Dtype) -> mx.array:
    """For a buffer that a launch has no use for."""
    return mx.zeros((8,), dtype)


def in_device_memory(array: mx.array) -> mx.array:
    """`array`, with zeros behind it if it has fewer than 8 numbers, which MLX gives as `constant`."""
    if array.size >= 8:
        return array
    more = -(-8 * array.shape[0] // array.size) - array.shape[0]
    return mx.pad(array, [(0, more), *[(0, 0)] * (array.ndim - 1)])


def attend(
    queries: mx.array,
    shape: Shape,
    plan: Plan,
    arrays: Sequence[Sequence[mx.array]],
    fresh: Sequence[mx.array] = (),
    sinks: mx.array | None = None,
) -> mx.array:
    """(rows, heads, n, width) of `queries` of that shape.

    arrays  as `bound` gives them, of the parts that `plan` is of
    fresh   the new tokens' keys and values, (rows, KV heads, n, …) each, as the parts keep them
    """
    packing, width, dtype = shape.packing, shape.width, shape.dtype
    spans = spans_kernel(packing)
    numbers = shape.heads * plan.new * (width + 2)
    template = [("T", dtype), ("WIDTH", width), ("BITS", packing.bits), ("GROUP", packing.group)]
    unused = [nothing(array.dtype) for array in arrays[0][: 2 * packing.arrays]]
    beside = [in_device_memory(array) for array in fresh] or unused
    partials = [
        spans(
            [queries, launch.table, *beside, *held],
            template=template,
            grid=(32 * SIMDGROUPS, shape.kv_heads, launch.units),
            threadgroup=(32 * SIMDGROUPS, 1, 1),
            output_shapes=[(launch.slots * numbers,)],
            output_dtypes=[mx.float32],
        )[0]
        for launch, held in zip(plan.launches, arrays, strict=True)
    ]
    if sinks is not None:
        sinks = in_device_memory(sinks.astype(dtype))
    if len(partials) > 1:
        partials += [partials[0]] * (MOST_LAUNCHES - len(partials))
    return merge_kernel(len(partials))(
        [plan.merge, plan.merge if sinks is None else sinks, *partials],
        template=template[:2],
        grid=(32, shape.heads * plan.new, plan.rows),
        threadgroup=(32, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[dtype],
    )[0]
