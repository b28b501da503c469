"""One step of gated delta net, as Qwen3-Next and Qwen3.5 have it, in one launch.

From what the layer's projections give to what `out_proj` takes: convolution with its state, SiLU, queries and
keys of length 1, decay and rate, the recurrent state, and the norm gated by z. mlx-lm 0.32.2 takes some 14
launches for it. All numbers between are float32. A token's bits depend on nothing but its row's state and its
row's tokens before: neither on other rows nor on how many tokens a pass has.

A threadgroup has a value head of a row: so the state is read and written once a pass, and the norm needs no
second launch. Its threads are 16 simdgroups, which keep the state in registers, 32 numbers a thread. By
arithmetic, of 32 heads of 128 x 128: 2 MB read and 2 MB written a row, 20 µs at 200 GB/s (M2 Pro), 7 at 550
(M4 Max), where a launch costs 2 to 5; 32 threadgroups for one row are one or two a core.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..kernel import Kernel

MOST_NEW = 8
"""Tokens of a row: one, and guesses. Their queries, keys and values lie in threadgroup memory: 24,640 bytes
for heads 256 wide, of Metal's 32,768."""

MOST_WIDTH, SIMDGROUPS = 256, 16
FIELDS = ("NEW", "SHARING", "CHANNELS", "TOKEN", "K_AT", "K_HEAD", "V_AT", "V_GROUP", "Z_TOKEN", "Z_AT")
FIELDS += ("G_TOKEN", "A_AT", "G_GROUP", "EPS")
"""Of the table: numbers of a token's part of an array, and where in it a head's lie. `SHARING`: value heads
of a key head; `GROUP`: of all of a key head's."""


class Shape(NamedTuple):
    """Heads, their widths, and the convolution's taps. `mixed`: a key head's q, k, v and z come one behind
    the other, and its b and a (Qwen3-Next); else all q, all k, all v, and z, b and a by themselves."""

    key_heads: int
    heads: int
    key_width: int
    width: int
    taps: int
    mixed: bool
    dtype: mx.Dtype
    eps: float

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("mlx.core.")
        keys = f"{self.key_heads} key heads of {self.key_width}"
        mixed = ", in one projection" if self.mixed else ""
        return f"{keys}, {self.heads} value heads of {self.width}, {self.taps} taps, {kind}{mixed}"

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_width + self.heads * self.width


@cache
def table_of(shape: Shape, new: int) -> mx.array:
    sharing, all_keys = shape.heads // shape.key_heads, shape.key_heads * shape.key_width
    values = sharing * shape.width
    if shape.mixed:
        group = 2 * shape.key_width + 2 * values
        token, ends = shape.key_heads * group, (2 * shape.key_width, 2 * shape.key_width + values)
        places = [token, shape.key_width, group, ends[0], group, token, ends[1]]
        places += [2 * shape.heads, sharing, 2 * sharing]
    else:
        places = [shape.channels, all_keys, shape.key_width, 2 * all_keys, values, shape.heads * shape.width]
        places += [0, shape.heads, 0, sharing]
    eps = int(np.float32(shape.eps).view(np.int32))
    return mx.array([new, sharing, shape.channels, *places, eps], mx.int32)


@cache
def step_kernel() -> Kernel:
    return Kernel(
        "gated_delta_net_step",
        ["qkv", "z", "b", "a", "conv", "state", "weight", "norm", "rates", "table"],
        ["out", "conv_out", "state_out"],
        Path(__file__).with_name("step.metal").read_text(),
        f"constant constexpr int MOST_NEW = {MOST_NEW};\nconstant constexpr int SIMDGROUPS = {SIMDGROUPS};\n"
        f'enum {{ {", ".join(FIELDS)} }};\n#define UNROLL _Pragma("clang loop unroll(full)")\n',
    )


class Weights(NamedTuple):
    """(channels, taps, 1) of the convolution, (width,) of the norm, and `rates_of` it."""

    conv: mx.array
    norm: mx.array
    rates: mx.array


def rates_of(A_log: mx.array, dt_bias: mx.array) -> mx.array:
    """Both in float32, in one array that is large enough for the address space `device`."""
    rates = mx.concatenate([A_log.astype(mx.float32), dt_bias.astype(mx.float32)])
    return mx.pad(rates, (0, max(0, 8 - rates.size)))


def step(shape: Shape, given: Sequence[mx.array], held: Sequence[mx.array], own: Weights) -> list[mx.array]:
    """(rows, tokens, heads * width), and the new states.

    given  q, k and v, z, b, a, (rows, tokens, any) each; of a `mixed` shape the first two and the last two
           are one array
    held   (rows, taps - 1, channels), and (rows, heads, width, key width) in float32
    """
    rows, new = given[0].shape[:2]
    names = ("T", shape.dtype), ("DK", shape.key_width), ("DV", shape.width), ("TAPS", shape.taps)
    return step_kernel()(
        [*given, *held, *own, table_of(shape, new)],
        template=names,
        grid=(32 * SIMDGROUPS, shape.heads, rows),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=[(rows, new, shape.heads * shape.width), *(array.shape for array in held)],
        output_dtypes=[shape.dtype, shape.dtype, mx.float32],
    )
