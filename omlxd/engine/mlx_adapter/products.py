"""Products of few rows with 16-bit weights on CUDA: a row's result has the same bits whoever shares the pass.

MLX hands a product of one row to a kernel of its own and one of several rows to cuBLAS, whose sums come in
another order. So an answer depended on who else was decoding. The kernel of products_kernel.py takes 1 to
`MOST_ROWS` rows, adds in one order, and does in the same launch what stands around a product in a layer:
RMSNorm before it, biases, silu(gate) * up, the residual after it.

`prepare` compiles and checks it for the shapes of a model's weights, beside MLX's own in results and in time;
a shape whose check fails goes on by MLX. It never runs on Metal or a CPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from .device import backend
from .products_kernel import MOST_ROWS, TYPES, run

log = logging.getLogger(__name__)

CLOSE = 0.006
"""Largest difference from the product in float32, as a share of the results' root mean square times the
largest result's size: half a unit of bfloat16's last place is 0.004."""

SLOWER = 1.1
"""Times MLX's own that it may take, over the passes of `_ROWS`: a difference of clocks is no reason to add in
another order after a restart."""

_ROWS = (1, 8, 32)

_in_use: dict[tuple[int, int, Any], bool] = {}
_own_linear, _own_as_linear = nn.Linear.__call__, nn.Embedding.as_linear


def usable(weights: Sequence[mx.array]) -> bool:
    """Whether the kernel is in use for all of these."""
    return all(_in_use.get((*weight.shape, weight.dtype), False) for weight in weights)


def products(
    x: mx.array,
    weights: Sequence[mx.array],
    *,
    norm: mx.array | None = None,
    eps: float = 0.0,
    residual: mx.array | None = None,
    silu: bool = False,
    biases: Sequence[mx.array | None] | None = None,
) -> list[mx.array]:
    """x of (..., K) times each of `weights` (N, K), in one launch where the kernel is in use: (..., N) each.

    norm      (K,): x goes through RMSNorm with this weight and `eps` first
    residual  (..., N), added to the product of the only weight
    silu      `weights` are a gate and the values that it lets through: the one result is silu(gate) * up
    biases    (N,) or None for each weight
    """
    biases = biases or [None] * len(weights)
    if x.size > MOST_ROWS * x.shape[-1] or x.dtype != weights[0].dtype or not usable(weights):
        return _plain(x, weights, norm, eps, residual, silu, biases)
    if norm is not None and x.dtype == mx.float16:  # x times a norm's weight may be too large for it.
        x, norm = mx.fast.rms_norm(x, norm, eps), None
    return run(x, weights, norm, eps, residual, silu, biases)


def _plain(
    x: mx.array,
    weights: Sequence[mx.array],
    norm: mx.array | None,
    eps: float,
    residual: mx.array | None,
    silu: bool,
    biases: Sequence[mx.array | None],
) -> list[mx.array]:
    """`products` by MLX's own operations."""
    if norm is not None:
        x = mx.fast.rms_norm(x, norm, eps)
    out = [
        x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    if silu:
        out = [nn.silu(out[0]) * out[1]]
    return out if residual is None else [out[0] + residual]


def install() -> None:
    """Let every `nn.Linear`, and an `nn.Embedding` that ends a model, multiply few rows by `products`."""
    linear, embedding = cast(Any, nn.Linear), cast(Any, nn.Embedding)
    linear.__call__, embedding.as_linear = _linear, _as_linear


def uninstall() -> None:
    linear, embedding = cast(Any, nn.Linear), cast(Any, nn.Embedding)
    linear.__call__, embedding.as_linear = _own_linear, _own_as_linear


def _linear(self: Any, x: mx.array) -> mx.array:
    weight = self["weight"]
    if x.size <= MOST_ROWS * x.shape[-1] and x.dtype == weight.dtype and usable([weight]):
        return products(x, [weight], biases=[self.get("bias")])[0]
    return _own_linear(self, x)


def _as_linear(self: Any, x: mx.array) -> mx.array:
    weight = self["weight"]
    if x.size <= MOST_ROWS * x.shape[-1] and x.dtype == weight.dtype and usable([weight]):
        return products(x, [weight])[0]
    return _own_as_linear(self, x)


def prepare(model: Any) -> None:
    """Check the kernel for each shape of `model`'s weights, and install it if it is in use for any."""
    if backend() != "cuda":
        return
    began = time.perf_counter()
    shapes: dict[tuple[int, int, Any], list[mx.array]] = {}
    for _, module in model.named_modules():
        if type(module) in (nn.Linear, nn.Embedding):
            weight = module["weight"]
            if weight.dtype in TYPES and weight.shape[1] % 8 == 0:
                shapes.setdefault((*weight.shape, weight.dtype), []).append(weight)
    for shape, weights in shapes.items():
        if shape not in _in_use:
            _in_use[shape] = _checked(weights)
    if any(_in_use.get(shape) for shape in shapes):
        install()
        log.info("products of up to %d rows checked in %.1f s", MOST_ROWS, time.perf_counter() - began)


def _checked(weights: list[mx.array]) -> bool:
    """Whether the kernel gives what it should for weights of one shape, in no more time than MLX; a line in
    the log."""
    name = f"products of {weights[0].shape[1]} by {weights[0].shape[0]}"
    try:
        far = _difference(weights[0])
        if not far < CLOSE:  # NaN too
            log.warning("%s: by MLX's own kernels: ours differ by %.3g", name, far)
            return False
        ours, own = _seconds(weights, _ours), _seconds(weights, _mlx_own)
    except Exception as error:
        log.warning("%s: by MLX's own kernels: ours do not run here (%s)", name, error)
        return False
    times = ", ".join(
        f"{rows} rows {a * 1e6:.0f} and {b * 1e6:.0f}" for rows, a, b in zip(_ROWS, ours, own, strict=True)
    )
    good = sum(ours) <= SLOWER * sum(own)
    whose = "omlxd's kernel" if good else "MLX's own kernels"
    log.info("%s: by %s (within %.4f; microseconds of ours and of MLX's: %s)", name, whose, far, times)
    return good


def _ours(x: mx.array, weight: mx.array) -> mx.array:
    return run(x, [weight], None, 0.0, None, False, [None])[0]


def _mlx_own(x: mx.array, weight: mx.array) -> mx.array:
    return x @ weight.T


def _difference(weight: mx.array) -> float:
    """The largest from the product in float32; infinite where a row's bits depend on the other rows."""
    rows, width = weight.shape
    x = mx.random.normal((MOST_ROWS, width), key=mx.random.key(0)).astype(weight.dtype)
    out = _ours(x, weight)
    for some in (1, 7, 8, 9, 17):
        if not mx.array_equal(_ours(x[-some:], weight), out[-some:]).item():
            return float("inf")
    far = 0.0
    for part in (slice(0, 1024), slice(max(0, rows - 1024), rows)):
        want = x.astype(mx.float32) @ weight[part].astype(mx.float32).T
        size = mx.abs(want).max() + 1e-30
        far = max(far, (mx.abs(out[:, part].astype(mx.float32) - want).max() / size).item())
    return far if far == far else float("inf")


def _seconds(weights: list[mx.array], one: Callable[[mx.array, mx.array], mx.array]) -> list[float]:
    """Of one product, for each of `_ROWS`; over several weights, so that they don't come from a cache."""
    many = max(1, min(len(weights), (1 << 28) // weights[0].nbytes))
    taken = []
    for rows in _ROWS:
        x = mx.random.normal((rows, weights[0].shape[1]), key=mx.random.key(1)).astype(weights[0].dtype)
        all_of_them = mx.compile(lambda x: [one(x, weight) for weight in weights[:many]])
        best = float("inf")
        for _ in range(4):
            mx.synchronize()
            began = time.perf_counter()
            mx.eval(all_of_them(x))
            mx.synchronize()
            best = min(best, time.perf_counter() - began)
        taken.append(best / many)
    return taken
