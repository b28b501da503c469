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
import struct
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..attention.fused_attention import (
    ARGUMENTS,
    FILES,
    OWN,
    Heads,
    Launch,
    Shape,
    device_source,
    shared_bytes,
)
from ..compile import driver as cuda_driver
from ..compile import kernel_store
from ..compile.source import MOST_ROWS, TYPES, source
from .products_kernel import FORMS, SET, SQUARES, WARPS, bounds_of, call_of, form_of

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


def source_of(
    eights: int,
    kind: str,
    biases: tuple[bool, ...],
    attention: tuple[Heads, Shape] | None = None,
    layers: int = 1,
) -> tuple[str, str]:
    """(function, CUDA source). `biases`: whether each weight has one. `attention`: with which each of
    `layers` ends."""
    function = f"omlxd_layer_products_{kind}_{eights}_{''.join(str(int(has)) for has in biases)}"
    numbers: dict[str, float] = {"SET": SET, "LAYERS": layers, "PLACES": PLACES}
    numbers["COUNTED"] = 4 if attention is None else 5
    words, files = dict[str, str | int](), ["products"]
    made = {"q": "y0", "k": "y1", "v": "y2"}
    if attention is not None:
        name, its_numbers, words = device_source(*attention, late=True)
        function, numbers, files = f"{function}_{layers}_{name}", numbers | its_numbers, [*files, *FILES]
        made |= {} if attention[0].norm else {"q_norm": "y0", "k_norm": "y1"}
    its = [_split(argument) for argument in ARGUMENTS] if attention is not None else []
    own, takes = _arguments(biases, [one for one in its if one[1] not in made], layers)
    late, nexts = partial(call_of, eights, late=True), range(len(biases) - 4)
    chosen = [f"{its_kind} {name} = {_chosen(name, layers)};" for its_kind, name in own]
    chosen += [f"const T* bias{i} = nullptr;" for i, has in enumerate(biases) if not has]
    words |= {
        **{"FUNCTION": function, "TAKES": ", ".join(takes), "BOUNDS": bounds_of(FORMS[eights])},
        "ATTENDS": int(attention is not None),
        "GIVEN": ", ".join(made.get(name, f"its_{name}") for _, name in its),
        "CHOOSE": " ".join(chosen),
        "FIRST": call_of(eights, scaled=True, late=layers > 1),
        "GATE_UP": late(silu=True, squares=True),
        "DOWN": late(scaled=True),
        "NEXTS": late(squares=True),
        "OF_NEXTS": " ".join(
            f"p.w[{i}] = w{i + 4}; p.n[{i}] = n{i}; p.bias[{i}] = bias{i + 4}; p.y[{i}] = y{i};"
            for i in nexts
        ),
    }
    return function, source([*files, "layer_products"], words, kind, numbers)


def _split(argument: str) -> tuple[str, str]:
    """(type, name)."""
    its_kind, _, name = argument.rpartition(" ")
    return its_kind, name


def _arguments(
    biases: tuple[bool, ...], its: Sequence[tuple[str, str]], layers: int
) -> tuple[list[tuple[str, str]], list[str]]:
    """(type and name of each that is a layer's own; all of them, each layer's own by its number).

    its  those of attention, but for what the launch makes; none: there is no attention
    """
    weights, nexts = range(len(biases)), range(len(biases) - 4)
    own = [("const T*", name) for name in (*(f"w{i}" for i in weights), "norm0", "norm1")]
    own += [("const T*", f"bias{i}") for i in weights if biases[i]]
    own += [(its_kind, f"its_{name}") for its_kind, name in its if name in OWN]
    arrays = [one for one in its if one[0].endswith("*") and one[1] not in OWN]
    takes = ["const T* x", "const T* residual"]
    takes += [f"{its_kind} {name}_{layer}" for layer in range(layers) for its_kind, name in own]
    takes += [f"{its_kind} its_{name}" for its_kind, name in arrays if its_kind.startswith("const")]
    takes += ["const int* counters", "T* sum0", "T* scaled0", "float* squares0", "T* inner", "T* sum1"]
    takes += ["T* scaled1", "float* squares1", *(f"T* y{i}" for i in nexts)]
    takes += [f"{its_kind} its_{name}" for its_kind, name in arrays if not its_kind.startswith("const")]
    numbers = ["rows", "wide", "hidden", "ffn", "eps", *(f"n{i}" for i in nexts)]
    numbers += [f"blocks{i}" for i in range(4)]
    numbers += [f"its_{name}" for its_kind, name in its if its_kind == "const int"]
    numbers += ["across_blocks", "down_blocks"] if its else []
    return own, [*takes, *(f"const int {name}" for name in numbers)]


def _chosen(name: str, layers: int) -> str:
    """The argument of this name that is the layer's."""
    *others, last = (f"{name}_{layer}" for layer in range(layers))
    return "".join(f"layer == {layer} ? {other} : " for layer, other in enumerate(others)) + last


@cache
def code(*form: Any) -> tuple[str, bytes]:
    """(function, machine code)."""
    function, made = source_of(*form)
    return function, kernel_store.machine_code(made)


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
