"""Per-token KV of a batch, and how arrays of KV grow."""

from __future__ import annotations

from typing import Any, cast

from mlx_lm.models.cache import BatchKVCache

GROW_STEP = 256
"""Tokens; capacities are multiples of it, as mlx-lm's own are."""


def round_up(tokens: int) -> int:
    """A capacity, in tokens."""
    return -(-tokens // GROW_STEP) * GROW_STEP


def next_step(length: int) -> int:
    """Tokens by which an array of `length` grows: geometrically, since growing copies all of it."""
    return max(GROW_STEP, round_up(length // 4))


class EvenBatchKVCache(BatchKVCache):
    """A batch cache that asks for no mask while no row is padded, and grows geometrically.

    A mask of an array forces attention out of its fused kernel on CUDA: 8 rows of 4,096 tokens take
    21 ms with one and 11 without (H100, tools/bench/gpu.py). One token a row needs none where every
    column is that row's.
    """

    _padded: bool | None = None

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> Any:
        if self._padded is None:
            self._padded = any(cast(list[int], self.left_padding.tolist()))
        if N == 1 and not self._padded and not return_array and not kwargs.get("window_size"):
            return None
        return super().make_mask(N, return_array, **kwargs)

    def extend(self, other: Any) -> None:
        super().extend(other)
        self._changed()

    def filter(self, batch_indices: Any) -> None:
        super().filter(batch_indices)
        self._changed()

    def _changed(self) -> None:
        self._padded = None
        self.step = next_step(self._idx)
