"""What tests of attention share: a kernel of MLX's ops in place of the one that runs on CUDA alone."""

from __future__ import annotations

import sys
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import RotatingKVCache

from omlxd.engine.mlx_adapter import attention, attention_kernel


class Reference:
    """Attends row by row over each row's own columns. Counts its calls, and those of several new tokens."""

    calls = several = steps = 0
    most_new = attention_kernel.MOST_NEW

    def __call__(
        self,
        queries: Any,
        keys: Any,
        values: Any,
        places: tuple[list[int], list[int]],
        scale: float,
        *,
        window: int = 0,
        sinks: mx.array | None = None,
    ) -> mx.array:
        new, rows = queries.shape[2], []
        Reference.calls += 1
        Reference.several += new > 1
        for row, (start, end) in enumerate(zip(*places, strict=True)):
            columns, own = mx.arange(start, end), mx.arange(end - new, end)[:, None]
            assert end <= keys.shape[2] or (window and new == 1), "a ring is in order after several tokens"
            rows.append(
                mx.fast.scaled_dot_product_attention(
                    queries[row : row + 1],
                    *(array[row : row + 1, :, columns % keys.shape[2]] for array in (keys, values)),
                    scale=scale,
                    mask=(columns <= own) & (columns > own - (window or end)),
                    sinks=sinks,
                )
            )
        return mx.concatenate(rows)

    def step(
        self,
        queries: Any,
        fresh: Any,
        held: Any,
        starts: mx.array,
        ends: mx.array,
        scale: float,
        sinks: mx.array | None = None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """As `Kernel.step`, for a compiled step; makes new arrays instead of writing in place."""
        Reference.steps += 1
        ring = held[0].shape[2]
        newest = ((ends - 1) % ring)[:, None, None, None]
        keys, values = (
            (
                mx.put_along_axis(array, mx.broadcast_to(newest, new.shape), new, axis=2)
                for array, new in zip(held, fresh, strict=True)
            )
            if fresh
            else held
        )
        columns = (starts[:, None] + mx.arange(ring)) % ring
        inorder = (mx.take_along_axis(array, columns[:, None, :, None], axis=2) for array in (keys, values))
        seen = mx.arange(ring) < (ends - starts)[:, None]
        out = mx.fast.scaled_dot_product_attention(
            queries, *inorder, scale=scale, mask=seen[:, None, None], sinks=sinks
        )
        return out, keys, values


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch):
    """What `install` changes is put back after the test, in modules that the test imports too."""
    before = base.scaled_dot_product_attention
    known = set(sys.modules)
    for cache in attention.NOTED:
        for name in ("update_and_fetch", "keys_and_values"):
            monkeypatch.setattr(cache, name, getattr(cache, name))
    monkeypatch.setattr(RotatingKVCache, "make_mask", RotatingKVCache.make_mask)
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and hasattr(module, "scaled_dot_product_attention"):
            monkeypatch.setattr(module, "scaled_dot_product_attention", attention._mlx_own)
    kernel = Reference()
    Reference.calls = Reference.several = Reference.steps = 0

    def install() -> None:
        monkeypatch.setattr(attention, "backend", lambda: "cuda")
        monkeypatch.setattr(attention, "kernel_for", lambda *_: kernel)
        attention.install()

    yield install
    for name in set(sys.modules) - known:
        if name.startswith("mlx_lm.models.") and hasattr(sys.modules[name], "scaled_dot_product_attention"):
            cast(Any, sys.modules[name]).scaled_dot_product_attention = before
