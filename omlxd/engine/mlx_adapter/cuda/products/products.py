"""Products of few rows with 16-bit weights on CUDA: a row's result has the same bits whoever shares the pass.

MLX hands a product of one row to a kernel of its own and one of several rows to cuBLAS, whose sums come in
another order. So an answer depended on who else was decoding, also by the experts that DeepSeek's kind of
router (`MoEGate`) chose. The kernel of products_kernel.py takes 1 to `SET` rows, for fused_step.py up to
`MOST_ROWS`, and adds in one order. RMSNorm before a product and biases are of the same launch;
layer_products.py has a layer's products in one.

`prepare` compiles and checks it for the shapes of a model's weights, beside MLX's own in results and in time;
a shape whose check fails goes on by MLX.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from .. import prompt_shapes
from ..attention.fused_attention import Heads, Launch, Shape
from ..compile import kernel_store
from ..compile.source import MOST_ROWS, TYPES
from . import embedding_kernel, layer_products
from .layer_products import LayerProducts
from .products_kernel import FORMS, SET, run

log = logging.getLogger(__name__)

CLOSE = 0.006
"""Largest difference from the product in float32, as a share of the results' root mean square times the
largest result's size: half a unit of bfloat16's last place is 0.004."""

SLOWER = 1.25
"""Times MLX's own that it may take, for all of a model's products with each of `_ROWS` up to `SET` together,
and with each beyond it: what a noisy clock says is no reason to add in another order after a restart."""

TURNS = 5
"""Of each in the measurement."""

_ROWS = (1, 8, SET, 2 * SET, MOST_ROWS)

_in_use: dict[tuple[Any, ...], int] = {}
"""Rows that the kernel takes at most, by a weight's shape and type; 0: it is not in use."""

_own_linear, _own_as_linear = nn.Linear.__call__, nn.Embedding.as_linear


def most_rows(weights: Sequence[mx.array]) -> int:
    """Rows that the kernel takes at most for all of these; 0: it is not in use for one."""
    return min(_in_use.get((*weight.shape, weight.dtype), 0) for weight in weights)


def products(
    x: mx.array,
    weights: Sequence[mx.array],
    *,
    norm: mx.array | None = None,
    eps: float = 0.0,
    biases: Sequence[mx.array | None] | None = None,
) -> list[mx.array]:
    """x of (..., K) times each of `weights` (N, K), in one launch where the kernel is in use: (..., N) each.

    norm    (K,): x goes through RMSNorm with this weight and `eps` first
    biases  (N,) or None for each weight
    """
    biases = biases or [None] * len(weights)
    is_ours = x.size <= most_rows(weights) * x.shape[-1] and x.dtype == weights[0].dtype
    if norm is not None and not (
        is_ours and x.dtype == mx.bfloat16
    ):  # x times it may pass what float16 holds.
        x, norm = mx.fast.rms_norm(x, norm, eps), None
    if is_ours:
        return run(x, weights, biases, norm, eps)
    return [_plain(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def of_layer(x: mx.array, residual: mx.array, layer: LayerProducts) -> list[mx.array]:
    """As `layer_products.run`, for any number of rows: in one launch, or by MLX's own operations."""
    weights, biases, (norm, next_norm), eps = layer
    if x.size <= most_rows(weights) * x.shape[-1] and x.dtype == weights[0].dtype:
        return layer_products.run(x, residual, [layer])
    behind, gate, up, down, *nexts = (
        partial(_plain, weight=w, bias=b) for w, b in zip(weights, biases, strict=True)
    )
    total = residual + behind(x)
    x = mx.fast.rms_norm(total, norm, eps)
    total = total + down(swiglu(gate(x), up(x)))
    x = mx.fast.rms_norm(total, next_norm, eps)
    return [total, *(own(x) for own in nexts)]


def of_layers(
    x: mx.array, residual: mx.array, layers: Sequence[LayerProducts], attentions: Sequence[Launch]
) -> list[mx.array]:
    """The residual behind the last of layers, and what the last attention gives of the queries, keys and
    values behind it: in one launch, or in more with the same bits."""
    rows, weights = residual.shape[0], layers[0].weights
    at_once = rows <= most_rows(weights) and x.dtype == weights[0].dtype
    if at_once and layer_products.takes(attentions[0]):
        return layer_products.run(x, residual, layers, attentions)
    for layer, attention in zip(layers, attentions, strict=True):
        residual, *new = of_layer(x, residual, layer)
        x = attention.run(new)
    return [residual, x]


def compile_ahead(
    layers: Sequence[LayerProducts],
    attention: tuple[Heads, Shape] | None = None,
    at_once: Iterable[int] = (),
) -> None:
    """Compile the launches that `of_layer` uses for these layers, and those of `at_once` layers that end with
    `attention`, all at the same time. NVRTC takes up to a second for one.

    Raises what NVRTC raises.
    """
    most = min(most_rows(layer.weights) for layer in layers)
    jobs: set[tuple[Any, ...]] = set()
    for kind, biases in {layer.kind for layer in layers} if most else ():
        jobs |= {(layer_products.code, eights, kind, biases) for eights in FORMS}
        if attention is not None and len(biases) > 5:  # None follows the head.
            forms = [(eights, n) for eights in FORMS for n in at_once]
            jobs |= {(layer_products.code, eights, kind, biases, attention, n) for eights, n in forms}
    if jobs:
        with ThreadPoolExecutor(len(jobs), thread_name_prefix="nvrtc") as aside:
            list(aside.map(lambda job: job[0](*job[1:]), jobs))


def compile_activations(model: Any) -> None:
    """Have MLX compile, or find on disk, what most models do between two products (4.2 s on an H100's host),
    and check what needs no weights. Call it while weights are read, when nothing else is computed."""
    for dtype in {module["scales" if "scales" in module else "weight"].dtype for module in _linears(model)}:
        if dtype in (mx.bfloat16, mx.float16, mx.float32):
            x = mx.zeros((1, 8), dtype)
            mx.eval(swiglu(x, x))
    if (heads := prompt_shapes.heads_of(model)) is not None:
        prompt_shapes.keeps_bits(*heads, False)
    plain = [module for module in _linears(model) if type(module) is nn.Linear]
    prompt_shapes.check_ahead([module for module in plain if module["weight"].dtype in TYPES])


def _linears(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, nn.Linear | nn.QuantizedLinear)]


def _plain(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)


def install() -> None:
    """Let every `nn.Linear`, and an `nn.Embedding` that ends a model, multiply few rows by `products`."""
    linear, embedding = cast(Any, nn.Linear), cast(Any, nn.Embedding)
    linear.__call__, embedding.as_linear = _linear, _as_linear


def uninstall() -> None:
    linear, embedding = cast(Any, nn.Linear), cast(Any, nn.Embedding)
    linear.__call__, embedding.as_linear = _own_linear, _own_as_linear


def _linear(self: Any, x: mx.array) -> mx.array:
    weight = self["weight"]
    if x.dtype == weight.dtype and (least := prompt_shapes.least_rows(self)):
        return prompt_shapes.linear(self, x, least)
    if x.size <= SET * x.shape[-1] and x.dtype == weight.dtype and most_rows([weight]):
        return products(x, [weight], biases=[self.get("bias")])[0]
    return _own_linear(self, x)


def _as_linear(self: Any, x: mx.array) -> mx.array:
    weight = self["weight"]
    if x.size <= SET * x.shape[-1] and x.dtype == weight.dtype and most_rows([weight]):
        return products(x, [weight])[0]
    return _own_as_linear(self, x)


def _gate(kind: Any) -> Any:
    """The class of a router of experts that does no more with its weight than multiply by it."""

    def __call__(self: Any, x: mx.array) -> Any:
        weight = self["weight"]
        if x.size > SET * x.shape[-1] or x.dtype != weight.dtype or not most_rows([weight]):
            return kind.__call__(self, x)
        return _of_scores(kind, self, products(x, [weight])[0])

    return type(kind.__name__, (kind,), {"__call__": __call__})


def _of_scores(kind: Any, gate: Any, scores: mx.array) -> Any:
    """What `gate` makes of these products with its weight: it multiplies them by an identity matrix."""
    weight = gate["weight"]
    gate["weight"] = mx.eye(len(weight), dtype=weight.dtype)
    try:
        return kind.__call__(gate, scores)
    finally:
        gate["weight"] = weight


def _needs_scores_alone(gate: Any) -> bool:
    """Whether `gate` gives the same by its products alone."""
    weight, kind = gate["weight"], type(gate)
    x = mx.random.normal((1, 1, weight.shape[1]), key=mx.random.key(3)).astype(weight.dtype)
    try:
        got, want = _of_scores(kind, gate, x @ weight.T), kind.__call__(gate, x)
        return all(mx.array_equal(a, b).item() for a, b in zip(got, want, strict=True))
    except Exception:
        return False


def prepare(model: Any) -> None:
    """Check the kernel for each shape of `model`'s weights, and its time for all of them; install it."""
    began = time.perf_counter()
    embedding_kernel.install()
    shapes: dict[tuple[int, int, Any], list[mx.array]] = {}
    linears: list[nn.Linear] = []
    gates: list[Any] = []
    for _, module in model.named_modules():
        is_gate = type(module).__name__ == "MoEGate" and "weight" in module
        if (is_gate or type(module) in (nn.Linear, nn.Embedding)) and module["weight"].dtype in TYPES:
            weight = module["weight"]
            if type(module) is nn.Linear:
                linears.append(module)
            if is_gate:
                gates.append(module)
            if weight.shape[1] % 8 == 0:
                shapes.setdefault((*weight.shape, weight.dtype), []).append(weight)
    if linears:
        prompt_shapes.check_products(linears)
        install()
    right = {shape: weights for shape, weights in shapes.items() if _is_right(shape, weights[0])}
    if not right:
        return
    counts = sorted((*map(str, shape), len(weights)) for shape, weights in right.items())
    known = kernel_store.knows("rows of products", counts)
    every = [weight for weights in right.values() for weight in weights]
    most, ours, own = kernel_store.remembered("rows of products", counts, partial(_most_of, every), _is_ours)
    _in_use.update(dict.fromkeys(right, most))
    if most:
        install()
        for gate in gates:
            if _needs_scores_alone(gate):
                gate.__class__ = _gate(type(gate))
    log.info(
        "products: %s, %s in %.1f s; milliseconds of all, ours and MLX's: %s",
        f"of up to {most} rows by omlxd's kernel" if most else "by MLX's own kernels",
        "remembered" if known else "checked",
        time.perf_counter() - began,
        ", ".join(
            f"{rows} rows {a * 1e3:.2f} and {b * 1e3:.2f}"
            for rows, a, b in zip(_ROWS, ours, own, strict=True)
        ),
    )


def _most_of(weights: Sequence[mx.array]) -> tuple[int, list[float], list[float]]:
    """(rows that the kernel takes at most for all of these, 0: none; seconds as `_seconds` gives them)."""
    ours, own = _seconds(weights)
    few = _ROWS.index(SET) + 1
    most = SET if sum(ours[:few]) <= SLOWER * sum(own[:few]) else 0
    for rows, a, b in zip(_ROWS[few:], ours[few:], own[few:], strict=True):
        if not most or a > SLOWER * b:
            break
        most = rows
    return most, ours, own


def _is_ours(found: tuple[int, list[float], list[float]]) -> bool:
    return found[0] > 0


def _is_right(shape: tuple[int, int, Any], weight: mx.array) -> bool:
    """Whether the kernel gives what it should for weights of one shape; if not, a line in the log."""
    try:
        check = partial(_difference, weight)
        far = kernel_store.remembered("products", shape, check, lambda far: far < CLOSE)
    except Exception as error:
        log.warning(
            "products of %d by %d: ours do not run here (%s); by MLX's own kernels", *shape[:2], error
        )
        return False
    if not far < CLOSE:  # NaN too
        log.warning("products of %d by %d: ours differ by %.3g; by MLX's own kernels", *shape[:2], far)
        return False
    return True


def _ours(x: mx.array, weight: mx.array) -> mx.array:
    return run(x, [weight], [None])[0]


def _mlx_own(x: mx.array, weight: mx.array) -> mx.array:
    return x @ weight.T


def _difference(weight: mx.array) -> float:
    """The largest from the product in float32; infinite where a row's bits depend on the other rows."""
    rows, width = weight.shape
    x = mx.random.normal((MOST_ROWS, width), key=mx.random.key(0)).astype(weight.dtype)
    out = _ours(x, weight)
    for some in (1, 7, 8, 9, 17, 33, 70):
        if not mx.array_equal(_ours(x[-some:], weight), out[-some:]).item():
            return float("inf")
    far = 0.0
    for part in (slice(0, 1024), slice(max(0, rows - 1024), rows)):
        want = x.astype(mx.float32) @ weight[part].astype(mx.float32).T
        size = mx.abs(want).max() + 1e-30
        far = max(far, cast(float, (mx.abs(out[:, part].astype(mx.float32) - want).max() / size).item()))
    return far if far == far else float("inf")


def _seconds(weights: Sequence[mx.array]) -> tuple[list[float], list[float]]:
    """Of the products of all of these, for each of `_ROWS`: (ours, MLX's own), in turns, the best of each."""
    taken: tuple[list[float], list[float]] = ([], [])
    functions = [
        mx.compile(lambda xs, one=one: [one(x, weight) for x, weight in zip(xs, weights, strict=True)])
        for one in (_ours, _mlx_own)
    ]
    for rows in _ROWS:
        drawn = {
            (width, dtype): mx.random.normal((rows, width), key=mx.random.key(1)).astype(dtype)
            for width, dtype in {(weight.shape[1], weight.dtype) for weight in weights}
        }
        xs = [drawn[weight.shape[1], weight.dtype] for weight in weights]
        mx.eval(xs)
        best = [float("inf")] * 2
        for turn in range(2 * (TURNS + 1)):
            mx.synchronize()
            began = time.perf_counter()
            mx.eval(functions[turn % 2](xs))
            if turn > 1:  # The first ones are traced.
                best[turn % 2] = min(best[turn % 2], time.perf_counter() - began)
        for times, one in zip(taken, best, strict=True):
            times.append(one)
    return taken
