"""CUDA kernel of products of few rows with 16-bit weights; products.py says when it runs."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from ..compile import driver as cuda_driver
from ..compile import kernel_store
from ..compile.source import TYPES, source

SET = 32
"""Rows of x that a block of threads computes at most. Of more, other blocks compute the next ones, at the
same time by the same weights."""

WARPS = 8
"""Parts of K, each added by a warp of its own. So it and `CHUNKS` belong to the order of sums, and are one
for any number of rows; what a `Form` says is not."""

CHUNKS = 4
"""Times 32 of K: what a warp adds before it goes on where the other warps' next pieces end."""


SQUARES = 16
"""Results whose squares are added to one number, for the RMSNorm that follows."""


class Form(NamedTuple):
    """How the work is dealt out."""

    sixteens: int
    """Rows of a weight, in sixteens, for a warp."""
    groups: int
    """Of `WARPS` warps, in a block of threads."""
    chunks: int
    """Times 32 of K: what is on its way from memory together."""
    stages: int
    blocks: int
    """Of a multiprocessor."""
    buffers: int
    """Of a block's sums: with two, warps wait once for each other."""

    @property
    def tile(self) -> int:
        """Rows of a weight that a block computes at once."""
        return 16 * self.sixteens * self.groups

    def shared(self, eights: int) -> int:
        """Bytes of shared memory of a block."""
        ring = WARPS * self.groups * self.stages * self.chunks * (2 * self.sixteens + eights) * 512
        return ring + WARPS * 8 * eights * (self.buffers * (self.tile + 4) + 1) * 4


FORMS = {1: Form(1, 1, 2, 4, 2, 2), 2: Form(2, 1, 2, 3, 1, 2), 4: Form(2, 1, 1, 4, 1, 1)}
"""By the rows of x in eights, at most. Microseconds for weights in bfloat16 (K by N) and their share of
3.35 TB/s, over weights of 300 MB in turns, on one H100 (50 forms, by a script that is not kept):

| rows | 4096 by 4096 | 4096 by 24,576 | 12,288 by 4096 | 4096 by 151,936 |
|------|--------------|----------------|----------------|-----------------|
| 1    | 13.4, 0.75   | 67.5, 0.89     | -              | -               |
| 8    | 13.7, 0.73   | 69.3, 0.87     | 36.4, 0.83     | 412, 0.90       |
| 16   | 14.5, 0.69   | 73.4, 0.82     | 39.2, 0.77     | 436, 0.85       |
| 32   | 16.0, 0.63   | 77.9, 0.77     | 41.3, 0.73     | 461, 0.81       |

(16 and 32 rows: with hints of 128 bytes in place of 256.) A kernel that only reads took 13.1 for 33 MB, and
1.2 GB at a share of 0.94. No better were: x from L2 as it is needed (32 rows: 17.4,
84.2, 44.6, 481), bulk copies, the next launch's weights fetched into L2 meanwhile, and four launches as one
with barriers of the grid.
"""


def form_of(rows: int) -> tuple[int, int]:
    """(key of `FORMS`, sets of rows that blocks of their own compute) for `rows` of x."""
    return next(eights for eights in FORMS if min(rows, SET) <= 8 * eights), -(-rows // SET)


def source_of(kind: str, eights: int, biases: tuple[bool, ...], norm: bool = False) -> tuple[str, str]:
    """(function, CUDA source) of a launch with a weight for each of `biases`."""
    form, weights = FORMS[eights], range(len(biases))
    flags = "".join(str(int(flag)) for flag in (norm, *biases))
    function = f"omlxd_products_{kind}_{eights}_{flags}"
    parameters = [("const T*", "x", "x"), *(("const T*", f"w{i}", f"w[{i}]") for i in weights)]
    parameters += [("const T*", "norm", "norm")] if norm else []
    parameters += [("const T*", f"bias{i}", f"bias[{i}]") for i in weights if biases[i]]
    parameters += [("T*", f"y{i}", f"y[{i}]") for i in weights]
    parameters += [("const int", name, name) for name in ("rows", "k")]
    parameters += [("const int", f"n{i}", f"n[{i}]") for i in weights]
    arguments = [*(f"{kind_of} {name}" for kind_of, name, _ in parameters), "const int eps"]
    fields = " ".join(f"p.{field} = {name};" for _, name, field in parameters)
    # In the largest form x of the grid says which of x's rows are a block's.
    block = f"blockIdx.y, gridDim.y, blockIdx.x * {SET}" if 8 * eights == SET else "blockIdx.x, gridDim.x, 0"
    words = {"FUNCTION": function, "TAKES": ", ".join(arguments), "BOUNDS": bounds_of(form)}
    words |= {"FIELDS": fields, "PRODUCTS": call_of(eights, norm=norm), "BLOCK": block}
    return function, source(["products", "products_launch"], words, kind)


def call_of(
    eights: int,
    *,
    norm: bool = False,
    silu: bool = False,
    squares: bool = False,
    scaled: bool = False,
    late: bool = False,
) -> str:
    """The device function that computes products, of T."""
    form = FORMS[eights]
    constants = [eights, form.sixteens, form.groups, WARPS, CHUNKS, form.chunks, form.stages, form.buffers]
    flags = [norm, silu, squares, scaled, late]
    return f"omlxd_products<T, {', '.join(str(one).lower() for one in [*constants, *flags])}>"


def bounds_of(form: Form) -> str:
    """A launch's threads, and its blocks of a multiprocessor."""
    return f"{32 * WARPS * form.groups}, {form.blocks}"


@cache
def code(*form: Any) -> tuple[str, bytes]:
    """(function, machine code)."""
    function, made = source_of(*form)
    return function, kernel_store.machine_code(made)


@lru_cache(512)
def _launch(
    shape: tuple[int, ...],
    dtype: Any,
    lengths: tuple[int, ...],
    biases: tuple[bool, ...],
    norm: bool,
    eps: float,
) -> Callable[..., list[mx.array]]:
    """One launch as a compiled function: it costs the host 11 microseconds, else 19."""
    rows = math.prod(shape[:-1])
    eights, sets = form_of(rows)
    form = FORMS[eights]
    function, machine_code = code(TYPES[dtype], eights, biases, norm)
    tiles, threads = sum(-(-length // form.tile) for length in lengths), 32 * WARPS * form.groups
    blocks = min(tiles, -(-form.blocks * cuda_driver.multiprocessors() // sets))
    (bits,) = struct.unpack("i", struct.pack("f", eps))  # MLX refuses every float here.

    def launch(*arrays: mx.array) -> list[mx.array]:
        return mx.fast.precompiled_cuda_kernel(
            name=function,
            compiled_source=machine_code,
            inputs=arrays,
            scalars=[rows, shape[-1], *lengths, bits],
            output_shapes=[(*shape[:-1], length) for length in lengths],
            output_dtypes=[dtype] * len(lengths),
            grid=(sets * threads, blocks, 1) if 8 * eights == SET else (blocks * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            shared_memory=form.shared(eights),
            ensure_row_contiguous=True,
        )

    return mx.compile(launch)


def run(
    x: mx.array,
    weights: Sequence[mx.array],
    biases: Sequence[mx.array | None],
    norm: mx.array | None = None,
    eps: float = 0.0,
) -> list[mx.array]:
    """`products` by the kernel."""
    launch = _launch(
        tuple(x.shape),
        x.dtype,
        tuple(weight.shape[0] for weight in weights),
        tuple(bias is not None for bias in biases),
        norm is not None,
        eps,
    )
    # In the order of the arguments that `source_of` writes.
    return launch(x, *weights, *(one for one in (norm, *biases) if one is not None))
