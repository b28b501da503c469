"""Caches of a batch: joining, leaving, taking a row's KV and state out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache

from .batch_kv import EvenBatchKVCache
from .caches import state_tensors
from .layouts import Cache, leaf_tensors, leaves


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
