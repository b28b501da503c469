"""The products between a layer's attention and the next one's in one launch, `omlxd_layer_products`, and the
next attention, where few rows share a segment, and several layers.

Four follow each other: what attention gives by the weight behind it, SwiGLU's gate and values, its weight
behind these, and the next layer's queries, keys and values, or the model's head. As launches of their own
each waits for the last block of the one before, and only then asks for its weights. Here their blocks follow
each other in one grid. A block asks for its first weights, waits until all blocks of the product before have
counted themselves, and then asks for what these computed. Blocks begin in their order, as CUB's scans rely
on, too, so those that a block waits for have begun.

So does attention: its KV is on its way while the last products are computed, and their queries are all that
it waits for. The device functions are those of products_kernel.py and fused_attention.py, so the bits are.

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

With attention, a third and a fourth H100; a part is what a block of attention reads:

| layers, launches         | 1 x 500 | 1 x 16,000 | 4 x 16,000 up |
|--------------------------|---------|------------|---------------|
| 1, two                   | 5.66    | 6.67       | 9.48          |
| 1, one                   | 5.54    | 6.51       | 9.33          |
| the same, parts of 704   | 5.55    | 6.60       | 9.37          |
| the same, parts of 512   | 5.60    | 6.70       | 9.47          |
|                          |         |            |               |
| 1, two                   | 5.70    | 6.77       | 9.55          |
| 1, one                   | 5.56    | 6.58       | 9.45          |
| 5, one, which is in use  | 5.42    | 6.40       | 9.33, 9.40    |
| 7, one                   | 5.43    | 6.41       | 9.45          |
| 35, one                  | 5.48    | 6.42       | 9.44          |

With up to `SET` rows, where it was up to 8, tokens a second without guesses: 16 streams of SmolLM2 4,900 to
5,100, and 7,700 to 7,800; 32 streams of 500 tokens, 8B shape, 3,480 and 3,610 (one host each). With up to 128
rows, in steps of 16 rows of SmolLM2: a pass with 60 guesses 2.4 and 1.6, one with 112 3.0 and 1.9.

As the first blocks of a launch, which wait for the one before, attention gained 0.07 and 0.07, and lost 0.05.
Of 171 microseconds of a layer in its own launch behind 16,000 tokens, 138 were products, 29 what attention
had left to do behind them (its KV takes 20), and 4 the way to the next launch.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..attention.fused_attention import ARGUMENTS, OWN, Heads, Launch, Shape, device_source, shared_bytes
from ..compile import driver as cuda_driver
from ..compile import kernel_store
from ..compile.source import MOST_ROWS, TYPES
from .products_kernel import FORMS, SET, SQUARES, WARPS, call_of, form_of, kernel_source

MOST_SHARED = 228 * 1024 // 2 - 1024
"""Bytes of shared memory of a block, where two share an H100's multiprocessor. CUDA takes 1,024 of each."""

AT_ONCE = 5
"""Layers of a launch, at most."""

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
    def shapes(self) -> tuple[Any, ...]:
        """Equal for layers that one launch may compute."""
        biases = (None if bias is None else bias.shape for bias in self.biases)
        return *((weight.shape, weight.dtype) for weight in self.weights), *biases, self.eps

    @property
    def kind(self) -> tuple[str, tuple[bool, ...]]:
        """What launches are compiled for, with a form."""
        return TYPES[self.weights[0].dtype], tuple(bias is not None for bias in self.biases)


_BODY = """
  Products<T> p = {};
  p.rows = rows;
  p.parts = (hidden + 15) / 16;
  p.eps = __int_as_float(eps);
  const int sets = (rows + SET - 1) / SET, of_attention = ACROSS;
  const int each = (blocks0 + blocks1 + blocks2 + blocks3) * sets + of_attention;
  const int layer = LAYERS > 1 ? blockIdx.x / each : 0;
  int block = blockIdx.x - layer * each;
  int* done = const_cast<int*>(counters) + layer * COUNTED * PLACES;
  CHOOSE
  if (block < blocks0 * sets) {
    p.x = layer ? ATTENDED : x; p.k = wide; p.w[0] = w0; p.n[0] = hidden; p.bias[0] = bias0; p.y[0] = sum0;
    p.residual = layer ? sum1 : residual; p.scaled = norm0; p.next = scaled0; p.next_squares = squares0;
    FIRST(p, block / sets, blocks0, block % sets * SET, layer ? done - PLACES : done,
          layer ? of_attention : 0);
    omlxd_count(done, blocks0 * sets);
    return;
  }
  block -= blocks0 * sets;
  if (block < blocks1 * sets) {
    p.x = scaled0; p.k = hidden; p.w[0] = w1; p.w[1] = w2; p.n[0] = p.n[1] = ffn; p.bias[0] = bias1;
    p.bias[1] = bias2; p.y[0] = inner; p.squares = squares0;
    GATE_UP(p, block / sets, blocks1, block % sets * SET, done, blocks0 * sets);
    omlxd_count(done + PLACES, blocks1 * sets);
    return;
  }
  block -= blocks1 * sets;
  if (block < blocks2 * sets) {
    p.x = inner; p.k = ffn; p.w[0] = w3; p.n[0] = hidden; p.bias[0] = bias3; p.y[0] = sum1;
    p.residual = sum0; p.scaled = norm1; p.next = scaled1; p.next_squares = squares1;
    DOWN(p, block / sets, blocks2, block % sets * SET, done + PLACES, blocks1 * sets);
    omlxd_count(done + 2 * PLACES, blocks2 * sets);
    return;
  }
  block -= blocks2 * sets;
  if (block < blocks3 * sets) {
    p.x = scaled1; p.k = hidden; p.squares = squares1;
    OF_NEXTS
    NEXTS(p, block / sets, blocks3, block % sets * SET, done + 2 * PLACES, blocks2 * sets);
    LAST
    return;
  }
  ATTENTION
"""

_ATTENTION = """block -= blocks3 * sets;
  if (threadIdx.x >= 32 * WARPS) return;
  extern __shared__ uint4 its_rings[];
  omlxd_attend(block % across_blocks, block / across_blocks, its_rings, done + 3 * PLACES, blocks3 * sets,
               GIVEN);
  if (omlxd_count(done + 4 * PLACES, of_attention) && layer == LAYERS - 1)
    omlxd_begin_again(const_cast<int*>(counters));
"""

_COUNT = """
// A block is done. True: all of `blocks` are, and this thread is the one to know.
__device__ inline bool omlxd_count(int* done, int blocks) {
  __syncthreads();
  if (threadIdx.x) return false;
  __threadfence();
  return atomicAdd(done, 1) == blocks - 1;
}
// The very last one of all makes the counters ready for the next launch.
__device__ inline void omlxd_begin_again(int* counters) {
  for (int i = 0; i < LAYERS * COUNTED; i++) counters[PLACES * i] = 0;
}
"""


def source_of(
    eights: int,
    kind: str,
    biases: tuple[bool, ...],
    attention: tuple[Heads, Shape] | None = None,
    layers: int = 1,
) -> tuple[str, str]:
    """(function, CUDA source). `biases`: whether each weight has one. `attention`: with which each of
    `layers` ends."""
    weights, nexts = range(len(biases)), range(len(biases) - 4)
    its = [argument.rsplit(" ", 1) for argument in ARGUMENTS] if attention is not None else []
    made = {"q": "y0", "k": "y1", "v": "y2"}
    if attention is not None and not attention[0].norm:
        made |= {"q_norm": "y0", "k_norm": "y1"}
    named = [(its_kind, name) for its_kind, name in its if name not in made]
    is_read = [its_kind.startswith("const") and its_kind.endswith("*") for its_kind, _ in named]
    own = [("const T*", name) for name in (*(f"w{i}" for i in weights), "norm0", "norm1")]
    own += [("const T*", f"bias{i}") for i in weights if biases[i]]
    own += [(its_kind, f"its_{name}") for its_kind, name in named if name in OWN]
    arguments = ["const T* x", "const T* residual"]
    arguments += [f"{its_kind} {name}_{layer}" for layer in range(layers) for its_kind, name in own]
    arguments += [
        f"{its_kind} its_{name}"
        for (its_kind, name), read in zip(named, is_read, strict=True)
        if read and name not in OWN
    ]
    arguments += ["const int* counters", "T* sum0", "T* scaled0", "float* squares0", "T* inner", "T* sum1"]
    arguments += ["T* scaled1", "float* squares1", *(f"T* y{i}" for i in nexts)]
    arguments += [f"{its_kind} its_{name}" for its_kind, name in named if not its_kind.startswith("const")]
    numbers = ["rows", "wide", "hidden", "ffn", "eps", *(f"n{i}" for i in nexts)]
    numbers += [f"blocks{i}" for i in range(4)]
    if attention is not None:
        numbers += [f"its_{name}" for its_kind, name in named if its_kind == "const int"]
        numbers += ["across_blocks", "down_blocks"]
    arguments += [f"const int {name}" for name in numbers]
    late = partial(call_of, eights, late=True)
    words = {
        "CHOOSE": "".join(f"{its_kind} {name} = {_chosen(name, layers)};\n  " for its_kind, name in own),
        "FIRST": call_of(eights, scaled=True, late=layers > 1),
        "GATE_UP": late(silu=True, squares=True),
        "DOWN": late(scaled=True),
        "NEXTS": late(squares=True),
        "OF_NEXTS": " ".join(
            f"p.w[{i}] = w{i + 4}; p.n[{i}] = n{i}; p.bias[{i}] = bias{i + 4}; p.y[{i}] = y{i};"
            for i in nexts
        ),
        "LAST": "if (IS_DONE) omlxd_begin_again(const_cast<int*>(counters));"
        if attention is None
        else "IS_DONE;",
        "IS_DONE": "omlxd_count(done + 3 * PLACES, blocks3 * sets)",
        "ATTENTION": "" if attention is None else _ATTENTION,
        "ATTENDED": "x" if attention is None else "its_out",
        "GIVEN": ", ".join(made.get(name, f"its_{name}") for _, name in its),
        "ACROSS": "0" if attention is None else "across_blocks * down_blocks",
        "COUNTED": "4" if attention is None else "5",
        "LAYERS": str(layers),
        "PLACES": str(PLACES),
        "SET": str(SET),
    }
    body = "".join(f"  const T* bias{i} = nullptr;\n" for i in weights if not biases[i]) + _BODY
    function = f"omlxd_layer_products_{kind}_{eights}_{''.join(str(int(has)) for has in biases)}"
    before = _COUNT
    if attention is not None:
        name, source = device_source(*attention, late=True)
        function, before = f"{function}_{layers}_{name}", source + before
    source = kernel_source(kind, FORMS[eights], function, arguments, body, before=before)
    for word, meaning in words.items():  # In this order: some stand in another.
        source = re.sub(rf"\b{word}\b", lambda _, meaning=meaning: meaning, source)
    return function, source


def _chosen(name: str, layers: int) -> str:
    """The argument of this name that is the layer's."""
    *others, last = (f"{name}_{layer}" for layer in range(layers))
    return "".join(f"layer == {layer} ? {other} : " for layer, other in enumerate(others)) + last


@cache
def code(*form: Any) -> tuple[str, bytes]:
    """(function, machine code)."""
    function, source = source_of(*form)
    return function, kernel_store.machine_code(source)


@cache
def _counters() -> mx.array:
    """All launches share them: each waits for the one before it, whose result its layer needs."""
    counters = mx.zeros((5 * AT_ONCE * PLACES,), mx.int32)
    mx.eval(counters)
    return counters


def takes(attention: Launch) -> bool:
    """Whether a launch may end with this: two blocks of it share a multiprocessor, too."""
    fits = shared_bytes(attention.heads.width, attention.shape) <= MOST_SHARED
    return fits and attention.shape.tiles == 1


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
    attention: Launch | None,
    layers: int,
) -> Callable[..., list[mx.array]]:
    """`attention`: without its inputs."""
    eights, sets = form_of(rows)
    form = FORMS[eights]
    tiles = [-(-hidden // form.tile), -(-2 * ffn // form.tile), -(-hidden // form.tile)]
    tiles.append(sum(-(-length // form.tile) for length in nexts))
    blocks = [min(count, -(-form.blocks * cuda_driver.multiprocessors() // sets)) for count in tiles]
    threads, shared = 32 * WARPS * form.groups, form.shared(eights)
    (bits,) = struct.unpack("i", struct.pack("f", eps))  # MLX refuses every float here.
    scalars = [rows, wide, hidden, ffn, bits, *nexts, *blocks]
    back = [(hidden, dtype), (hidden, dtype), (-(-hidden // SQUARES), mx.float32)]
    outputs = [
        ((rows, length), its) for length, its in (*back, (ffn, dtype), *back, *((n, dtype) for n in nexts))
    ]
    its_kind, blocks_of_attention = list[Any](), 0
    if attention is not None:
        its_kind = [(attention.heads, attention.shape), layers]
        scalars += [*attention.scalars, *attention.blocks]
        outputs += [*attention.outputs]
        shared = max(shared, shared_bytes(attention.heads.width, attention.shape))
        blocks_of_attention = math.prod(attention.blocks)
    function, machine_code = code(eights, *kind, *its_kind)

    def launch(*arrays: mx.array) -> list[mx.array]:
        return mx.fast.precompiled_cuda_kernel(
            name=function,
            compiled_source=machine_code,
            inputs=arrays,
            scalars=scalars,
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[its for _, its in outputs],
            grid=(layers * (sets * sum(blocks) + blocks_of_attention) * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            shared_memory=shared,
            ensure_row_contiguous=True,
        )

    return mx.compile(launch)


def run(
    x: mx.array, residual: mx.array, layers: Sequence[LayerProducts], attentions: Sequence[Launch] = ()
) -> list[mx.array]:
    """The residual behind a layer (rows, hidden), and the results of the next products. With `attentions`,
    which it `takes`: the residual behind the last of `layers`, and what the last attention gives.

    x           (rows, heads * width), at most `MOST_ROWS` rows: what attention gives
    residual    (rows, hidden), before the first layer
    attentions  behind each layer, alike but for what is a layer's own; up to `AT_ONCE`
    """
    rows, hidden = residual.shape
    assert rows <= MOST_ROWS and len(attentions) in (0, len(layers))
    layer, attention = layers[0], attentions[0] if attentions else None
    ffn, nexts = layer.weights[1].shape[0], tuple(weight.shape[0] for weight in layer.weights[4:])
    its, common = None, list[mx.array]()
    if attention is not None:
        its = attention._replace(
            norms=(), inputs=(), scalars=tuple(attention.scalars), outputs=tuple(attention.outputs)
        )
        common = attention.common
    launch = _launch(rows, x.shape[-1], hidden, ffn, nexts, x.dtype, layer.kind, layer.eps, its, len(layers))
    own: list[mx.array] = []
    for index, one in enumerate(layers):
        own += [*one.weights, *one.norms, *(bias for bias in one.biases if bias is not None)]
        own += attentions[index].own if attentions else []
    _, _, _, _, total, _, _, *results = launch(x, residual, *own, *common, _counters())
    return [total, *results] if attention is None else [total, results[len(nexts)]]
