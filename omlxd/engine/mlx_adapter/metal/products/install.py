"""Puts the kernels of product.py into MLX's layers of quantised weights, for the shapes where they are used.

A batch's rows, guesses and the ends of prompts are few rows. A row alone stays with MLX's own kernel where
that has the same bits; else it goes by ours, too, if that is not slower: then its bits are equal in company.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from .. import rule
from .product import BITS, MOST, MOST_PAIRS, Weights, few_row_product, gathered_product

CLOSE = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}
"""Differences from MLX's own: both round, and add in other orders."""

TIMED = (1, 2, 4, 8, MOST)
"""Rows whose time is taken. Of experts, tokens: each has `PAIRS` experts."""
PAIRS = 8
SORTED = 64
"""Pairs from which on mlx-lm sorts them by expert, and gives each its own row."""


SAMPLE, SAMPLE_EXPERTS = (4096, 4096), (2048, 768, 32)
"""K and N, and how many experts, of `judge_sample` and `judge_experts`."""


class Shape(NamedTuple):
    """What the verdict depends on."""

    n: int
    k: int
    bits: int
    group: int
    dtype: Any
    experts: int

    def told(self) -> str:
        experts = f"{self.experts} experts, " if self.experts else ""
        kind = str(self.dtype).rpartition(".")[2]
        return f"{experts}{self.k:,} × {self.n:,}, {self.bits} bits, groups of {self.group}, {kind}"


@dataclass(frozen=True, slots=True)
class Taken:
    """The rows of x that a kernel takes, of experts the tokens: none where `most` is 0.

    A layer has it as its attribute `few_rows`: to ask for its shape in each call takes 1.5 µs.
    """

    fewest: int
    most: int
    dtype: Any


_taken: dict[Shape, Taken] = {}

_own: dict[type, Callable[..., mx.array]] = {}


def prepare(model: nn.Module) -> None:
    """Judge the kernels for each shape of quantised weights of `model`, and have MLX's layers call them."""
    kinds = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)
    for _, layer in model.named_modules():
        if isinstance(layer, kinds) and (shape := shape_of(layer)) is not None:
            layer.few_rows = _judge(shape, layer)
    if any(taken.most for taken in _taken.values()):
        _patch()


def judge_sample(bits: int) -> None:
    """Judge the kernel at a layer of an 8B model."""
    _judge_sample(nn.QuantizedLinear(*SAMPLE, False, 64, bits))


def judge_experts() -> None:
    """Judge the kernel at a layer of a 30B model."""
    _judge_sample(QuantizedSwitchLinear(*SAMPLE_EXPERTS, False, 64, 4))


def _judge_sample(layer: nn.Module) -> None:
    layer.set_dtype(mx.float16)
    if (shape := shape_of(layer)) is not None:
        _judge(shape, layer)


def _judge(shape: Shape, layer: Any) -> Taken:
    if shape not in _taken:
        _taken[shape] = Taken(*_judged(shape, layer), shape.dtype)
    return _taken[shape]


def shape_of(layer: Any) -> Shape | None:
    """Return the shape of a layer's weights; None: no kernel reads them."""
    if layer.mode != "affine" or layer.bits not in BITS or layer.get("biases") is None:
        return None
    words, scales = layer["weight"], layer["scales"]
    experts = words.shape[0] if words.ndim == 3 else 0
    k = scales.shape[-1] * layer.group_size
    return Shape(words.shape[-2], k, layer.bits, layer.group_size, scales.dtype, experts)


def _weights(layer: Any) -> Weights:
    added = layer.get("bias")
    return Weights(layer["weight"], layer["scales"], layer["biases"], layer.bits, layer.group_size, added)


# --------------------------------------------------------------------------- the verdict


def _judged(shape: Shape, layer: Any) -> tuple[int, int]:
    if shape.dtype not in CLOSE:
        return 1, 0
    trial = _Experts(shape, layer) if shape.experts else _Rows(shape, layer)
    kernel = "few_row_product of experts" if shape.experts else "few_row_product"
    case = rule.Case(
        kernel,
        shape.told(),
        lambda: [trial.ours(trial.x[:rows]) for rows in TIMED],
        lambda: [trial.mlx(trial.x[:rows]) for rows in TIMED],
        CLOSE[shape.dtype],
        trial.company,
        trial.timed,
    )
    verdict, most = rule.judged(case), 0
    for rows in TIMED[1:]:
        if not verdict.pays(_name(rows)):
            break
        most = rows
    if not most:
        return 1, 0
    alone = trial.x[:1]
    same = mx.array_equal(trial.ours(alone), trial.mlx(alone)).item()
    return 2 if same or not verdict.pays(_name(1)) else 1, most


def _name(rows: int) -> str:
    return f"{rows} row{'s' * (rows > 1)}"


class _Rows:
    """Rows by both ways.

    x  (`MOST`, K)
    """

    def __init__(self, shape: Shape, layer: Any):
        self.weights = _weights(layer)._replace(added=None)
        self.x = mx.random.normal((MOST, shape.k), key=mx.random.key(1)).astype(shape.dtype)
        mx.eval(self.x)

    def ours(self, x: mx.array) -> mx.array:
        return few_row_product(x, self.weights)

    def mlx(self, x: mx.array) -> mx.array:
        words, scales, biases, bits, group, _ = self.weights
        return mx.quantized_matmul(x, words, scales, biases, transpose=True, group_size=group, bits=bits)

    def company(self) -> list[tuple[mx.array, mx.array]]:
        others = -self.x
        pairs = list[tuple[mx.array, mx.array]]()
        for rows in TIMED[1:]:
            alone = self.ours(self.x[rows - 1 : rows])
            beside = mx.concatenate([others[: rows - 1], self.x[rows - 1 : rows]])
            pairs.append((alone[0], self.ours(beside)[rows - 1]))
        return pairs

    def timed(self) -> list[rule.Timed]:
        return [
            rule.Timed(_name(rows), partial(_link, self.ours), partial(_link, self.mlx), self.x[:rows])
            for rows in TIMED
        ]


class _Experts(_Rows):
    """Tokens with `PAIRS` experts each, of which some are another token's, too."""

    def __init__(self, shape: Shape, layer: Any):
        super().__init__(shape, layer)
        pairs = min(PAIRS, shape.experts)
        drawn = [mx.random.permutation(shape.experts, key=mx.random.key(at))[:pairs] for at in range(MOST)]
        self.x, self.indices = self.x[:, None, None], mx.stack(drawn)
        mx.eval(self.x, self.indices)

    def ours(self, x: mx.array) -> mx.array:
        return gathered_product(x, self.weights, self.indices[: len(x)])

    def mlx(self, x: mx.array) -> mx.array:
        return self._by_mlx(x, self.indices[: len(x)], False)

    def _by_mlx(self, x: mx.array, indices: mx.array, is_sorted: bool) -> mx.array:
        words, scales, biases, bits, group, _ = self.weights
        how: dict[str, Any] = {"group_size": group, "bits": bits, "transpose": True}
        return mx.gather_qmm(x, words, scales, biases, rhs_indices=indices, sorted_indices=is_sorted, **how)

    def company(self) -> list[tuple[mx.array, mx.array]]:
        """A token's own experts stand in the first rows when it is alone."""
        first = self.x[:1]
        alone = self.ours(first)[0]
        return [(alone, self.ours(mx.concatenate([first, -self.x[1:rows]]))[0]) for rows in TIMED[1:]]

    def timed(self) -> list[rule.Timed]:
        cases = list[rule.Timed]()
        for rows in TIMED:
            x, indices = self.x[:rows], self.indices[:rows]
            if is_sorted := indices.size >= SORTED:
                order = mx.argsort(indices.flatten())
                x, indices = x[:, 0][order // indices.shape[1]], indices.flatten()[order]
            mx.eval(x, indices)
            ours = partial(gathered_product, weights=self.weights, indices=indices)
            mlx = partial(self._by_mlx, indices=indices, is_sorted=is_sorted)
            cases.append(rule.Timed(_name(rows), partial(_link, ours), partial(_link, mlx), x))
        return cases


def _link(product: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    """Return x once more, which needs its product."""
    return x + product(x).reshape(len(x), -1)[:, :1].reshape(len(x), *[1] * (x.ndim - 1)) * 0


# --------------------------------------------------------------------------- the layers


def _patch() -> None:
    if _own:
        return
    for kind, name, call in (
        (nn.QuantizedLinear, "__call__", _linear),
        (nn.QuantizedEmbedding, "as_linear", _as_linear),
        (QuantizedSwitchLinear, "__call__", _switch),
    ):
        _own[kind] = getattr(kind, name)
        setattr(kind, name, call)


def _takes(layer: Any, x: mx.array, rows: int) -> bool:
    taken = getattr(layer, "few_rows", None)
    return taken is not None and taken.fewest <= rows <= taken.most and x.dtype == taken.dtype


def _linear(self: Any, x: mx.array) -> mx.array:
    if _takes(self, x, x.size // x.shape[-1]):
        return few_row_product(x, _weights(self))
    return _own[nn.QuantizedLinear](self, x)


def _as_linear(self: Any, x: mx.array) -> mx.array:
    if _takes(self, x, x.size // x.shape[-1]):
        return few_row_product(x, _weights(self))
    return _own[nn.QuantizedEmbedding](self, x)


def _switch(self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
    pairs, rows = indices.size, x.size // x.shape[-1]
    if 1 < pairs <= MOST_PAIRS and x.shape[-2] == 1:
        # Sorted pairs do not say how many tokens they are of.
        tokens = pairs // indices.shape[-1] if indices.ndim > 1 else -(-pairs // PAIRS)
        if rows in (pairs // indices.shape[-1], pairs) and _takes(self, x, tokens):
            return gathered_product(x, _weights(self), indices)
    return cast(mx.array, _own[QuantizedSwitchLinear](self, x, indices, sorted_indices))


def reset() -> None:
    """Have MLX's layers compute again as they do by themselves. For tests."""
    names: Sequence[tuple[Any, str]] = (
        (nn.QuantizedLinear, "__call__"),
        (nn.QuantizedEmbedding, "as_linear"),
        (QuantizedSwitchLinear, "__call__"),
    )
    for kind, name in names:
        if kind in _own:
            setattr(kind, name, _own.pop(kind))
    _taken.clear()
