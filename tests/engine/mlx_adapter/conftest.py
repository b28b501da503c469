"""What tests of attention share: a kernel of MLX's ops in place of the one that runs on CUDA alone."""

from __future__ import annotations

import sys
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import BatchKVCache, KVCache

from omlxd.engine.mlx_adapter import attention, attention_kernel


class Reference:
    """Attends row by row over each row's own columns. Counts its calls, and those of several new tokens."""

    calls = several = 0
    most_new = attention_kernel.MOST_NEW

    def __call__(
        self, queries: Any, keys: Any, values: Any, places: tuple[list[int], list[int]], scale: float
    ) -> mx.array:
        Reference.calls += 1
        Reference.several += queries.shape[2] > 1
        rows = [
            mx.fast.scaled_dot_product_attention(
                queries[row : row + 1],
                keys[row : row + 1, :, start:end],
                values[row : row + 1, :, start:end],
                scale=scale,
                mask="causal",
            )
            for row, (start, end) in enumerate(zip(*places, strict=True))
        ]
        return mx.concatenate(rows)

    def step(
        self, queries: Any, fresh: Any, held: Any, starts: mx.array, ends: mx.array, scale: float
    ) -> tuple[mx.array, mx.array, mx.array]:
        """As `Kernel.step`, for a compiled step; makes new arrays instead of writing in place."""
        keys, values = (
            mx.put_along_axis(array, mx.broadcast_to((ends - 1)[:, None, None, None], new.shape), new, axis=2)
            for array, new in zip(held, fresh, strict=True)
        )
        columns = mx.arange(keys.shape[2])
        seen = (columns >= starts[:, None]) & (columns < ends[:, None])
        out = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=seen[:, None, None]
        )
        return out, keys, values


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch):
    """What `install` changes is put back after the test, in modules that the test imports too."""
    before = base.scaled_dot_product_attention
    known = set(sys.modules)
    monkeypatch.setattr(BatchKVCache, "keys_and_values", BatchKVCache.keys_and_values)
    monkeypatch.setattr(KVCache, "update_and_fetch", KVCache.update_and_fetch)
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and hasattr(module, "scaled_dot_product_attention"):
            monkeypatch.setattr(module, "scaled_dot_product_attention", attention._mlx_own)
    kernel = Reference()
    Reference.calls = Reference.several = 0

    def install() -> None:
        monkeypatch.setattr(attention, "backend", lambda: "cuda")
        monkeypatch.setattr(attention, "kernel_for", lambda queries, keys: kernel)
        attention.install()

    yield install
    for name in set(sys.modules) - known:
        if name.startswith("mlx_lm.models.") and hasattr(sys.modules[name], "scaled_dot_product_attention"):
            cast(Any, sys.modules[name]).scaled_dot_product_attention = before
