"""Per-token KV of a batch, and how arrays of KV grow."""

from __future__ import annotations

from typing import Any, cast

from mlx_lm.models.cache import BatchKVCache

from . import attention
from .device import backend

GROW_STEP = 256
"""Tokens; capacities are multiples of it, as mlx-lm's own are.

MLX's CUDA backend hands attention of single tokens to cuDNN only then, and else to a kernel of its own, which
is slower the longer the context, and faster for batches of short ones. Milliseconds a step, 8B shape in
bfloat16 on an H100 (medians of a noisy host's, up to three runs):

| rows × context | multiples of 256 | 64 more |
|----------------|------------------|---------|
| 1 × 8,192      | 8.1              | 9.0     |
| 1 × 16,000     | 7.8              | 11.2    |
| 1 × 32,768     | 9.0              | 15.4    |
| 1 × 98,304     | 11.0             | 30.0    |
| 8 × 512        | 16.2             | 11.5    |
| 8 × 4,096      | 11.7             | 14.7    |
| 8 × 16,384     | 15.0             | 29.0    |
| 32 × 512       | 16.7             | 13.5    |
| 32 × 2,048     | 16.3             | 22.3    |

cuDNN's sums come in another order from run to run, so that bits differ even between two cold runs.
"""

SHORT = 1024
"""Tokens up to which a batch on CUDA stays with MLX's own kernel."""


def round_up(tokens: int) -> int:
    """A capacity, in tokens."""
    return -(-tokens // GROW_STEP) * GROW_STEP


def next_step(length: int) -> int:
    """Tokens by which an array of `length` grows: geometrically, since growing copies all of it."""
    return max(GROW_STEP, round_up(length // 4))


def _batch_capacity(tokens: int) -> int:
    capacity = round_up(tokens)
    return capacity + 64 if capacity <= SHORT and backend() == "cuda" else capacity


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
            self.step = _batch_capacity(self._idx + max(more, self._idx // 4)) - self._idx
        return super().update_and_fetch(keys, values)

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> Any:
        if self._padded is None:
            self._padded = any(cast(list[int], self.left_padding.tolist()))
        if N == 1 and not self._padded and not return_array and not kwargs.get("window_size"):
            return None
        mask = super().make_mask(N, return_array, **kwargs)
        if N == 1 and not kwargs.get("window_size"):
            attention.note_plain_mask(mask)
        return mask

    def extend(self, other: Any) -> None:
        super().extend(other)
        self._changed()

    def filter(self, batch_indices: Any) -> None:
        super().filter(batch_indices)
        self._changed()
        if self.keys is None or self.keys.shape[2] <= SHORT or backend() != "cuda":
            return
        if self.keys.shape[2] % GROW_STEP:
            # Padding that nobody needs any more was cut off in front: the next token makes it even again.
            self.keys = self.keys[..., : self._idx, :]
            self.values = self.values[..., : self._idx, :]

    def _changed(self) -> None:
        self._padded = None
