"""Per-token KV of a batch, and how arrays of KV grow."""

from __future__ import annotations

from typing import Any, cast

from mlx_lm.models.cache import BatchKVCache

from .types import backend

GROW_STEP = 256
"""Tokens; capacities are multiples of it, as mlx-lm's own are.

MLX's CUDA backend hands attention of single tokens to cuDNN only then, and else to a kernel that is
slower the longer the context. Milliseconds a step, 8B shape in bfloat16 on an H100:

| rows × context    | 1 × 8,192 | 1 × 16,000 | 1 × 32,768 | 1 × 98,304 | 8 × 4,096 | 8 × 16,384 |
|-------------------|-----------|------------|------------|------------|-----------|------------|
| multiples of 256  | 8.1       | 7.8        | 9.0        | 11.0       | 11.2      | 15.0       |
| 64 more           | 8.9       | 11.1       | 15.4       | 30.0       | 14.7      | 29.0       |

cuDNN's sums come in another order from run to run, so that bits differ even between two cold runs.
"""


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

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        more = keys.shape[2]
        if self.keys is None or self._idx + more > self.keys.shape[2]:
            self.step = round_up(self._idx + max(more, self._idx // 4)) - self._idx
        return super().update_and_fetch(keys, values)

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
        if backend() == "cuda" and self.keys is not None and self.keys.shape[2] % GROW_STEP:
            # Padding that nobody needs any more was cut off in front: the next token makes it even again.
            self.keys = self.keys[..., : self._idx, :]
            self.values = self.values[..., : self._idx, :]

    def _changed(self) -> None:
        self._padded = None
