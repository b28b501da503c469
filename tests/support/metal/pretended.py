"""What calls kernels under `--pretend-metal`: this machine's processor, or a stand-in.

A kernel with a stand-in (stand_ins.py) runs itself only where that is little work: at most `MOST_THREADS`
threads, in tests' own process, and a C++ compiler is there. Daemons that tests start take stand-ins: none
waits for a compiler. A kernel without a stand-in always runs itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import mlx.core as mx

from . import build, harness, stand_ins
from .source import Kernel

MOST_THREADS = 4096
"""Some 10 ms for a kernel of a hundred simdgroup operations a thread."""


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
    is_small = "pytest" in sys.modules and prod(grid) <= MOST_THREADS and not build.missing()
    if function is None or is_small:
        how: dict[str, Any] = {"output_shapes": output_shapes, "output_dtypes": output_dtypes}
        return harness.run(
            kernel,
            arrays,
            template,
            grid=grid,
            threadgroup=threadgroup,
            orders=(0,),
            all_written=False,
            **how,
        )
    by_name = dict(zip(kernel.inputs, arrays, strict=True))
    shapes = [tuple(shape) for shape in output_shapes]
    call = stand_ins.Call(kernel, by_name, dict(template), grid, threadgroup, shapes, list(output_dtypes))
    return function(call)
