"""Caches of a batch: joining, leaving, taking a row's KV and state out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache

from .caches import GROW_STEP, round_up, state_tensors
from .layouts import Cache, leaf_tensors, leaves


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
        self.step = max(GROW_STEP, round_up(self._idx // 4))


def merge(caches: Sequence[Cache]) -> Cache:
    """One batch cache of several single ones, layer by layer. Copies all of them."""
    return [_merge_layer(layers) for layers in zip(*caches, strict=True)]


def _merge_layer(layers: Sequence[Any]) -> Any:
    if isinstance(layers[0], CacheList):
        members = zip(*(layer.caches for layer in layers), strict=True)
        return CacheList(*(_merge_layer(member) for member in members))
    if type(layers[0]) is KVCache:
        merged = EvenBatchKVCache.merge(list(layers))
        if isinstance(merged, EvenBatchKVCache):
            merged._changed()
        return merged
    return type(layers[0]).merge(list(layers))


def extend(batch: Cache, single: Cache) -> None:
    """Add a row to a batch cache. Copies the batch."""
    for into, layer in zip(batch, single, strict=True):
        into.extend(_merge_layer([layer]))


def keep_rows(batch: Cache, rows: Sequence[int]) -> None:
    """Drop every other row of a batch cache."""
    for layer in batch:
        layer.filter(list(rows))


def row_tensors(batch: Cache, row: int, length: int, start: int, stop: int) -> dict[str, mx.array]:
    """Per-token KV of tokens `start` to `stop` of one row of a batch; lazy slices, evaluate them soon.

    length  tokens that the row holds
    """
    views: dict[str, mx.array] = {}
    for name, layer in leaves(batch):
        if not isinstance(layer, BatchKVCache):
            continue
        shift = layer._idx - length
        for tensor, array in leaf_tensors(name, layer):
            views[tensor] = array[row : row + 1, :, shift + start : shift + stop]
    return views


def row_states(batch: Cache, row: int) -> dict[str, mx.array]:
    """`state_tensors` of one row of a batch."""
    return state_tensors([_extract(layer, row) for layer in batch])


def _extract(layer: Any, row: int) -> Any:
    if hasattr(layer, "caches"):
        return CacheList(*(_extract(member, row) for member in layer.caches))
    # Per-token KV is not looked at, and taking it out would copy all of it.
    return KVCache() if isinstance(layer, BatchKVCache) else layer.extract(row)
