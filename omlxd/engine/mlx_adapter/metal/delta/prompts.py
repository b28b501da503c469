"""Prompts through gated delta net by MLX's own kernel for chunks, where the rule lets it.

`mx.fast.gated_delta_update` (MLX 0.32.4) takes eight tokens at a time by products of matrices; mlx-lm 0.32.2
takes them one by one. It rounds decays to the model's type, as MLX's header has it; whether that is near
enough is for the rule to find, with the decays of the model.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
from mlx_lm.models import gated_delta

from .. import rule
from .step import Shape

CLOSE = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 3e-2}
"""Largest difference from mlx-lm's own, by the largest number. Kernels for chunks use fast exponentials."""

CHECKED, TIMED = 200, (128, 1024)
"""Tokens."""

Heads = tuple[int, int, int, int, mx.Dtype]
"""Key heads, value heads, their widths, type."""

_least: dict[Heads, int] = {}
"""Tokens from which on a pass goes by MLX's kernel."""

_asking: list[Any] = []
"""Modules of mlx-lm that ask `update`."""

_own: Any = gated_delta.gated_delta_update


def prepare(module: Any, shape: Shape) -> None:
    """Judge it for `module`, and have the class of `module` ask `update`."""
    code: Any = sys.modules.get(type(module).__module__)
    if getattr(code, "gated_delta_update", None) not in (_own, update):
        return  # mlx-vlm's own
    heads = shape.key_heads, shape.heads, shape.key_width, shape.width, shape.dtype
    if heads not in _least:
        verdict = _judged(heads, shape, module.A_log, module.dt_bias)
        pays = [tokens for tokens in TIMED if verdict.pays(_name(tokens))]
        _least[heads] = pays[0] if verdict.is_right and pays == [*TIMED][-len(pays) :] else 0
    if _least[heads]:
        code.gated_delta_update = update
        _asking.append(code)


def reset() -> None:
    """Have mlx-lm's models compute as they do by themselves. For tests."""
    _least.clear()
    while _asking:
        _asking.pop().gated_delta_update = _own


def is_used(heads: Heads, tokens: int) -> bool:
    """Whether a pass of so many tokens goes by MLX's kernel."""
    least = _least.get(heads, 0)
    return 0 < least <= tokens


def update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    **how: Any,
) -> Any:
    """mlx-lm's `gated_delta_update`."""
    heads = q.shape[2], v.shape[2], q.shape[3], v.shape[3], q.dtype
    is_plain = (
        mask is None and a.ndim == 3 and how.get("use_kernel", True) and not how.keys() - {"use_kernel"}
    )
    if not is_plain or not is_used(heads, q.shape[1]):
        return _own(q, k, v, a, b, A_log, dt_bias, state, mask, **how)
    return by_chunks(q, k, v, a, b, A_log, dt_bias, state)


def by_chunks(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None,
) -> list[mx.array]:
    if state is None:
        state = mx.zeros((len(q), v.shape[2], v.shape[3], q.shape[3]), mx.float32)
    return mx.fast.gated_delta_update(q, k, v, gated_delta.compute_g(A_log, a, dt_bias), mx.sigmoid(b), state)


# --------------------------------------------------------------------------- judging


def _name(tokens: int) -> str:
    return f"{tokens:,} tokens"


def _judged(heads: Heads, shape: Shape, A_log: mx.array, dt_bias: mx.array) -> rule.Verdict:
    """With the decays of the layer."""

    def drawn(tokens: int, rows: tuple[int, ...] = (0,)) -> list[Any]:
        key_heads, value_heads, key_width, width, dtype = heads
        sizes = (
            (key_heads, key_width),
            (key_heads, key_width),
            (value_heads, width),
            (value_heads,),
            (value_heads,),
        )
        parts = [
            mx.concatenate(
                [mx.random.normal((1, tokens, *size), key=mx.random.key(row + 10 * at)) for row in rows]
            )
            for at, size in enumerate(sizes)
        ]
        q, k, *others = (part.astype(dtype) for part in parts)
        q, k = gated_delta.normalize_qk(q, k, inv_scale=key_width**-0.5, eps=1e-6)
        state = mx.random.normal((1, value_heads, width, key_width), key=mx.random.key(9))
        return [q, k, *others, A_log, dt_bias, mx.repeat(state, len(rows), 0)]

    def timed(tokens: int) -> rule.Timed:
        q, k, v, *others = drawn(tokens)
        return rule.Timed(
            _name(tokens),
            lambda x: by_chunks(q, k, x, *others)[0],
            lambda x: _own(q, k, x, *others)[0],
            v,
        )

    return rule.judged(
        rule.Case(
            "gated_delta_update of MLX",
            str(shape),
            lambda: by_chunks(*drawn(CHECKED)),
            lambda: _own(*drawn(CHECKED)),
            CLOSE[heads[4]],
            lambda: [
                (alone, joint[1:])
                for alone, joint in zip(
                    by_chunks(*drawn(CHECKED, (1,))), by_chunks(*drawn(CHECKED, (0, 1))), strict=True
                )
            ],
            lambda: [timed(tokens) for tokens in TIMED],
        )
    )
