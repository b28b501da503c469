"""Vision towers in small parts: what an image computes keeps nobody waiting for a layer of seconds.

On a CPU the matrix products and the attention of a tower are cut by rows, each part of at most `PART`
multiplications, and `pause` runs after each. Rows don't depend on one another, and the cuts on nothing but
shapes, so an image's features are the same whoever waits. A GPU's layers take milliseconds, and stay whole.
tools/bench/tower_gap.py measures the longest wait beside an image.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...runtime.device import backend

PART = 1 << 30
"""Multiplications: 20 ms at 100 GFLOP/s."""
LEAST_ROWS = 64

Pause = Callable[[mx.array], None]

_state = threading.local()


@contextmanager
def in_parts(pause: Pause) -> Iterator[None]:
    """Cut what this thread computes; `pause` gets the result of each part, not evaluated."""
    _state.pause = pause if backend() == "cpu" else None
    try:
        yield
    finally:
        _state.pause = None


def _pause() -> Pause | None:
    return getattr(_state, "pause", None)


def _run(pause: Pause, result: mx.array) -> None:
    _state.pause = None  # It may compute something else.
    pause(result)
    _state.pause = pause


def cut_products(model: Any) -> None:
    """Let the matrix products of an mlx-vlm model's tower be cut; those of its language model are not."""
    kinds: dict[Any, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.QuantizedLinear) and not name.startswith("language_model"):
            kind = type(module)
            module.__class__ = kinds.setdefault(kind, _cut_kind(kind))


def _cut_kind(kind: Any) -> Any:
    def __call__(layer: Any, x: mx.array) -> mx.array:
        pause = _pause()
        rows = x.size // x.shape[-1]
        outputs, inputs = layer.weight.shape[0], x.shape[-1]
        size = _rows_of(inputs * outputs)
        if pause is None or rows <= size:
            return kind.__call__(layer, x)
        flat = x.reshape(rows, inputs)
        parts: list[mx.array] = []
        for start in range(0, rows, size):
            parts.append(kind.__call__(layer, flat[start : start + size]))
            _run(pause, parts[-1])
        return mx.concatenate(parts).reshape(*x.shape[:-1], outputs)

    return type(kind.__name__, (kind,), {"__call__": __call__})


def cut_attention() -> None:
    """Let attention of a tower be cut; and that of no tokens give none: cuDNN ends the process there.

    The towers of Qwen2.5-VL and GLM-4V ask for the latter, for most sizes of images.
    """
    if (attend := mx.fast.scaled_dot_product_attention).__module__ == __name__:
        return

    def scaled_dot_product_attention(q: mx.array, k: Any, v: Any, *args: Any, **kwargs: Any) -> mx.array:
        rows, mask = q.shape[2], kwargs.get("mask")
        if not rows:
            return q
        pause = _pause()
        if pause is None or args or isinstance(mask, str):
            return attend(q, k, v, *args, **kwargs)
        size = _rows_of(q.shape[0] * q.shape[1] * k.shape[2] * (q.shape[3] + v.shape[3]))
        if rows <= size:
            return attend(q, k, v, **kwargs)
        for each in (q, k, v):  # Else the first part would compute all that leads to them.
            _run(pause, each)
        parts: list[mx.array] = []
        for start in range(0, rows, size):
            if mask is not None and mask.shape[-2] == rows:
                kwargs["mask"] = mask[..., start : start + size, :]
            parts.append(attend(q[:, :, start : start + size], k, v, **kwargs))
            _run(pause, parts[-1])
        return mx.concatenate(parts, axis=2)

    mx.fast.scaled_dot_product_attention = scaled_dot_product_attention


def _rows_of(per_row: int) -> int:
    return max(LEAST_ROWS, PART // max(1, per_row))
