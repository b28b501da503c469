"""What calls kernels under `--pretend-metal`: stand-ins (stand_ins.py), which take no longer than MLX's own.

`PRETENDED_KERNELS=cpp` has all kernels run as C++, but in daemons that tests start. One without a
stand-in always does. Never some calls of a kernel by the one and some by the other: a row has the same bits
in any company, and theirs differ by rounding.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from . import harness, stand_ins
from .source import Kernel


def run(
    kernel: Kernel,
    arrays: Sequence[mx.array],
    template: Sequence[tuple[str, Any]] = (),
    *,
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[Any],
) -> list[mx.array]:
    function = stand_ins.of(kernel)
    if function is None or os.environ.get("PRETENDED_KERNELS") == "cpp":
        how: dict[str, Any] = {"output_shapes": output_shapes, "output_dtypes": output_dtypes}
        how |= {"grid": grid, "threadgroup": threadgroup, "orders": (0,), "all_written": False}
        return harness.run(kernel, arrays, template, **how)
    by_name = dict(zip(kernel.inputs, arrays, strict=True))
    shapes = [tuple(shape) for shape in output_shapes]
    call = stand_ins.Call(kernel, by_name, dict(template), grid, threadgroup, shapes, list(output_dtypes))
    return function(call)
