"""The products between a layer's attention and the next one's in one launch, `omlxd_layer_products`.

Four follow each other: what attention gives by the weight behind it, SwiGLU's gate and values, its weight
behind these, and the next layer's queries, keys and values, or the model's head. As launches of their own
each waits for the last block of the one before, and only then asks for its weights. Here their blocks follow
each other in one grid. A block asks for its first weights, waits until all blocks of the product before have
counted themselves, and then asks for what these computed. Blocks begin in their order, as CUB's scans rely
on, too, so those that a block waits for have begun.

The device function is that of products_kernel.py, and so are the bits.

Milliseconds of a decode step, 8B shape in bfloat16, one H100, no launch graphs:

| launches of a layer's products              | 1 x 500 | 1 x 16,000 | 4 x 16,000 up | 32 short |
|---------------------------------------------|---------|------------|---------------|----------|
| four                                        | 6.03    | 7.16       | 10.06         | 9.40     |
| one                                         | 5.68    | 6.75       | 9.59          | 9.14     |
| one, of twice as many blocks                | 5.72    | 6.82       | 9.81          | 9.28     |
| one, of blocks that go on with what is next | 5.76    | 6.86       | 9.80          | 9.17     |

Other forms for eight rows, as products_kernel.py has them, on another: (1, 1, 2, 4, 2, 2), which is in use,
5.66 and 6.81; (1, 1, 1, 8, 2, 2) 5.73 and 6.85, (1, 1, 1, 5, 3, 2) 5.87 and 7.06, (2, 1, 1, 5, 2, 1) 6.01 and
7.17. Copies by a policy that has weights leave the second cache first are an illegal instruction there.
Attention as the first blocks of this launch: 5.57, 6.63 and 9.69 where it took 5.65, 6.70 and 9.62 (1 x 500,
1 x 16,000, 4 x 16,000 up), in 300 lines; parts of 512 tokens, and copies in two stages, took longer there.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import mlx.core as mx

from . import cuda_driver, nvrtc
from .attention_source import TYPES
from .products_kernel import FORMS, SET, SQUARES, WARPS, call_of, kernel_source

PLACES = 32
"""Numbers between two counters, each of which has a line of the cache to itself."""


class LayerProducts(NamedTuple):
    """What follows attention in a layer, and the next layer's first products.

    weights  (outputs, inputs) each: behind attention, of the gate, of what it lets through, behind these;
             then of the next layer's queries, keys and values, or of the head
    biases   of each, or None
    norms    of the MLP's input, and of the next layer's
    """

    weights: Sequence[mx.array]
    biases: Sequence[mx.array | None]
    norms: tuple[mx.array, mx.array]
    eps: float

    @property
    def kind(self) -> tuple[str, tuple[bool, ...]]:
        """What launches are compiled for, with a form."""
        return TYPES[self.weights[0].dtype], tuple(bias is not None for bias in self.biases)


_BODY = """
  Products<T> p = {};
  p.rows = rows;
  p.parts = (hidden + 15) / 16;
  p.eps = __int_as_float(eps);
  int block = blockIdx.x;
  int* done = const_cast<int*>(counters);
  if (block < blocks0) {
    p.x = x; p.k = wide; p.w[0] = w0; p.n[0] = hidden; p.bias[0] = bias0; p.y[0] = sum0;
    p.residual = residual; p.scaled = norm0; p.next = scaled0; p.next_squares = squares0;
    FIRST(p, block, blocks0, 0, nullptr, 0);
    omlxd_count<0>(done, blocks0);
    return;
  }
  block -= blocks0;
  if (block < blocks1) {
    p.x = scaled0; p.k = hidden; p.w[0] = w1; p.w[1] = w2; p.n[0] = p.n[1] = ffn; p.bias[0] = bias1;
    p.bias[1] = bias2; p.y[0] = inner; p.squares = squares0;
    GATE_UP(p, block, blocks1, 0, done, blocks0);
    omlxd_count<1>(done, blocks1);
    return;
  }
  block -= blocks1;
  if (block < blocks2) {
    p.x = inner; p.k = ffn; p.w[0] = w3; p.n[0] = hidden; p.bias[0] = bias3; p.y[0] = sum1;
    p.residual = sum0; p.scaled = norm1; p.next = scaled1; p.next_squares = squares1;
    DOWN(p, block, blocks2, 0, done + PLACES, blocks1);
    omlxd_count<2>(done, blocks2);
    return;
  }
  block -= blocks2;
  p.x = scaled1; p.k = hidden; p.squares = squares1;
  OF_NEXTS
  NEXTS(p, block, blocks3, 0, done + 2 * PLACES, blocks2);
  omlxd_count<3>(done, blocks3);
"""

_COUNT = """
// A block of product NUMBER is done; the very last one of all makes the counters ready for the next launch.
template <int NUMBER> __device__ inline void omlxd_count(int* done, int blocks) {
  __syncthreads();
  if (threadIdx.x) return;
  __threadfence();
  if (atomicAdd(done + PLACES * NUMBER, 1) == blocks - 1 && NUMBER == 3)
    for (int i = 0; i < 4; i++) done[PLACES * i] = 0;
}
"""


def source_of(eights: int, kind: str, biases: tuple[bool, ...]) -> tuple[str, str]:
    """(function, CUDA source). `biases`: whether each weight has one."""
    weights, nexts = range(len(biases)), range(len(biases) - 4)
    inputs = ["x", "residual", *(f"w{i}" for i in weights), "norm0", "norm1"]
    inputs += [f"bias{i}" for i in weights if biases[i]]
    outputs = ["T* sum0", "T* scaled0", "float* squares0", "T* inner", "T* sum1", "T* scaled1"]
    outputs += ["float* squares1", *(f"T* y{i}" for i in nexts)]
    numbers = ["rows", "wide", "hidden", "ffn", "eps", *(f"n{i}" for i in nexts)]
    numbers += [f"blocks{i}" for i in range(4)]
    arguments = [*(f"const T* {name}" for name in inputs), "const int* counters", *outputs]
    arguments += [f"const int {name}" for name in numbers]
    first, late = partial(call_of, eights, norm=False), partial(call_of, eights, norm=False, late=True)
    words = {
        "FIRST": first(silu=False, squares=False, scaled=True, late=False),
        "GATE_UP": late(silu=True, squares=True, scaled=False),
        "DOWN": late(silu=False, squares=False, scaled=True),
        "NEXTS": late(silu=False, squares=True, scaled=False),
        "OF_NEXTS": " ".join(
            f"p.w[{i}] = w{i + 4}; p.n[{i}] = n{i}; p.bias[{i}] = bias{i + 4}; p.y[{i}] = y{i};"
            for i in nexts
        ),
        "PLACES": str(PLACES),
    }
    body = "".join(f"  const T* bias{i} = nullptr;\n" for i in weights if not biases[i]) + _BODY
    function = f"omlxd_layer_products_{kind}_{eights}_{''.join(str(int(has)) for has in biases)}"
    source = kernel_source(kind, FORMS[eights], function, arguments, body, before=_COUNT)
    return function, re.sub(rf"\b({'|'.join(words)})\b", lambda word: words[word[0]], source)


@cache
def code(*form: Any) -> tuple[str, bytes]:
    """(function, machine code)."""
    function, source = source_of(*form)
    return function, nvrtc.machine_code(source)


@cache
def _counters() -> mx.array:
    """All launches share them: each waits for the one before it, whose result its layer needs."""
    counters = mx.zeros((4 * PLACES,), mx.int32)
    mx.eval(counters)
    return counters


@lru_cache(512)
def _launch(
    rows: int,
    wide: int,
    hidden: int,
    ffn: int,
    nexts: tuple[int, ...],
    dtype: Any,
    kind: tuple[str, tuple[bool, ...]],
    eps: float,
) -> Callable[..., list[mx.array]]:
    eights = next(eights for eights in FORMS if rows <= 8 * eights)
    form = FORMS[eights]
    function, machine_code = code(eights, *kind)
    tiles = [-(-hidden // form.tile), -(-2 * ffn // form.tile), -(-hidden // form.tile)]
    tiles.append(sum(-(-length // form.tile) for length in nexts))
    blocks = [min(count, form.blocks * cuda_driver.multiprocessors()) for count in tiles]
    threads = 32 * WARPS * form.groups
    (bits,) = struct.unpack("i", struct.pack("f", eps))  # MLX refuses every float here.
    back = [(hidden, dtype), (hidden, dtype), (-(-hidden // SQUARES), mx.float32)]
    outputs = [*back, (ffn, dtype), *back, *((length, dtype) for length in nexts)]

    def launch(*arrays: mx.array) -> list[mx.array]:
        return mx.fast.precompiled_cuda_kernel(
            name=function,
            compiled_source=machine_code,
            inputs=arrays,
            scalars=[rows, wide, hidden, ffn, bits, *nexts, *blocks],
            output_shapes=[(rows, length) for length, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
            grid=(sum(blocks) * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            shared_memory=form.shared(eights),
            ensure_row_contiguous=True,
        )

    return mx.compile(launch)


def run(x: mx.array, residual: mx.array, layer: LayerProducts) -> list[mx.array]:
    """The residual behind the layer (rows, hidden), and the results of the next products.

    x         (rows, heads * width), at most `SET` rows: what attention gives
    residual  (rows, hidden), before it
    """
    rows = math.prod(x.shape[:-1])
    assert rows <= SET
    ffn, nexts = layer.weights[1].shape[0], tuple(weight.shape[0] for weight in layer.weights[4:])
    hidden = residual.shape[-1]
    launch = _launch(rows, x.shape[-1], hidden, ffn, nexts, x.dtype, layer.kind, layer.eps)
    biases = (bias for bias in layer.biases if bias is not None)
    given = x, residual, *layer.weights, *layer.norms, *biases, _counters()
    _, _, _, _, total, _, _, *results = launch(*given)
    return [total, *results]
