"""What a model keeps, learnt from a cache of one token: per-token KV, state at a position, or neither.

Caches of one sequence: making, filling, reading.

Caches of a batch: joining, leaving, taking a row's KV and state out.
"""
# MERGED: docstrings of layouts.py, caches.py, batches.py (join by hand)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from ...kv.layout import Group, KVLayout
from .batch_kv import EvenBatchKVCache, next_step, round_up
from .device import SAFETENSORS_DTYPE
from .quantised import PARTS, PackedKV, QuantisedKVCache

Cache = list[Any]
"""One cache object a layer, of one sequence or of a batch."""


@dataclass(slots=True, frozen=True)
class StateTensor:
    """One tensor of state. `shape` is a batch of one's; `window` > 0: axis 2 is a window of that size."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    window: int


@dataclass(slots=True, frozen=True)
class StateLayout:
    """Everything that a model keeps at a position besides per-token KV."""

    tensors: tuple[StateTensor, ...]

    def shape(self, tensor: StateTensor, position: int) -> tuple[int, ...]:
        """Shape after `position` tokens."""
        if not tensor.window:
            return tensor.shape
        return (*tensor.shape[:2], min(position, tensor.window), *tensor.shape[3:])

    def at(self, position: int) -> KVLayout:
        """The layout of a checkpoint after `position` tokens: a group a tensor, flat."""
        groups = [Group((t.name,), 1, prod(self.shape(t, position)), t.dtype) for t in self.tensors]
        return KVLayout(tuple(groups))

    def shapes(self, position: int) -> dict[str, tuple[int, ...]]:
        """Shapes after `position` tokens, by name."""
        return {t.name: self.shape(t, position) for t in self.tensors}

    def nbytes(self, position: int) -> int:
        """Bytes of a checkpoint after `position` tokens."""
        return self.at(position).nbytes(1)

    def facts(self) -> list[list[object]]:
        """Plain JSON, for the namespace."""
        return [[t.name, list(t.shape), t.dtype, t.window] for t in self.tensors]


def leaves(cache: Cache) -> list[tuple[str, Any]]:
    """(name, cache) of every layer, the members of a `CacheList` each for itself."""
    found: list[tuple[str, Any]] = []
    for index, layer in enumerate(cache):
        _add_leaves(f"layers.{index}", layer, found)
    return found


def _add_leaves(name: str, layer: Any, found: list[tuple[str, Any]]) -> None:
    if isinstance(layer, CacheList):
        for index, member in enumerate(layer.caches):
            _add_leaves(f"{name}.{index}", member, found)
    else:
        found.append((name, layer))


def keeps_tokens(leaf: Any) -> bool:
    """It holds one entry a token, of one sequence, and nothing else."""
    return type(leaf) in (KVCache, QuantisedKVCache)


def leaf_tensors(name: str, leaf: Any) -> list[tuple[str, Any]]:
    """Arrays of one cache as it keeps them, by name; None where it has none yet."""
    if isinstance(leaf, ArraysCache):
        return [(f"{name}.state.{i}", array) for i, array in enumerate(leaf.cache)]
    pair = [(f"{name}.keys", leaf.keys), (f"{name}.values", leaf.values)]
    if isinstance(leaf, PackedKV):
        none = [None] * len(PARTS)
        return [
            (f"{tensor}.{part}", array)
            for tensor, parts in pair
            for part, array in zip(PARTS, parts or none, strict=True)
        ]
    return pair


def set_leaf_tensors(name: str, leaf: Any, arrays: Mapping[str, mx.array]) -> None:
    """The inverse of `leaf_tensors`, for a cache that `keeps_tokens`."""
    for attribute in ("keys", "values"):
        tensor = f"{name}.{attribute}"
        packed = isinstance(leaf, PackedKV)
        setattr(leaf, attribute, [arrays[f"{tensor}.{p}"] for p in PARTS] if packed else arrays[tensor])


def reuse_obstacle(cache: Cache) -> str:
    """Empty when all that the model keeps can be stored and brought back; else the reason why not."""
    found = [leaf for _, leaf in leaves(cache)]
    others = {
        type(leaf).__name__
        for leaf in found
        if not keeps_tokens(leaf) and type(leaf) not in (RotatingKVCache, ArraysCache)
    }
    if others:
        return f"layers of this model keep {', '.join(sorted(others))}: state that omlxd can't store yet"
    if any(isinstance(leaf, RotatingKVCache) and leaf.keep for leaf in found):
        return "layers of this model keep their first tokens beside a window: omlxd can't store that yet"
    arrays = [array for leaf in found for _, array in leaf_tensors("", leaf)]
    if any(array is None for array in arrays):
        return "a layer of this model keeps no state of its own"
    if any(array.dtype not in SAFETENSORS_DTYPE for array in arrays):
        return "its state has a type that can't be stored"
    return ""


def is_batchable(cache: Cache) -> bool:
    return all(
        hasattr(type(leaf), "merge") and not (isinstance(leaf, RotatingKVCache) and leaf.keep)
        for _, leaf in leaves(cache)
    )


def layout_of(cache: Cache) -> KVLayout:
    members: dict[tuple[int, int, str], list[str]] = {}
    for name, array in named_tensors(cache):
        shape = (array.shape[1], array.shape[3], SAFETENSORS_DTYPE[array.dtype])
        members.setdefault(shape, []).append(name)
    return KVLayout(tuple(Group(tuple(names), *shape) for shape, names in members.items()))


def states_of(cache: Cache) -> StateLayout:
    found: list[StateTensor] = []
    for name, leaf in leaves(cache):
        if keeps_tokens(leaf):
            continue
        window = leaf.max_size if isinstance(leaf, RotatingKVCache) else 0
        found += [
            StateTensor(tensor, tuple(array.shape), SAFETENSORS_DTYPE[array.dtype], window)
            for tensor, array in leaf_tensors(name, leaf)
        ]
    return StateLayout(tuple(found))


def named_tensors(cache: Cache) -> list[tuple[str, mx.array]]:
    return [
        tensor for name, leaf in leaves(cache) if keeps_tokens(leaf) for tensor in leaf_tensors(name, leaf)
    ]


def new_cache(model: Any, capacity: int) -> Cache:
    """An empty cache whose first allocation holds `capacity` tokens, where the class allows it.

    Growing copies the whole array (facts: 1.6 times the peak, quadratic time), and at admission
    the size is known.
    """
    cache = make_prompt_cache(model)
    for _, leaf in leaves(cache):
        if keeps_tokens(leaf):
            leaf.step = round_up(capacity)
    return cache


def filled_cache(model: Any, arrays: dict[str, mx.array], length: int) -> Cache:
    """A cache over `arrays` (by layout name, each (1, heads, capacity, dim)) holding `length` tokens."""
    cache = make_prompt_cache(model)
    for name, leaf in leaves(cache):
        if keeps_tokens(leaf):
            set_leaf_tensors(name, leaf, arrays)
            leaf.offset = length
            leaf.step = next_step(length)
    return cache


def after_prefill(cache: Cache, length: int) -> None:
    """Grow geometrically from here on, not by the size of the first allocation."""
    for _, leaf in leaves(cache):
        if keeps_tokens(leaf):
            leaf.step = next_step(length)


def append_tokens(cache: Cache, arrays: dict[str, mx.array], start: int, count: int, capacity: int) -> None:
    """Write `count` tokens of KV at position `start` of a plain cache.

    arrays    by layout name, each (1, heads, count, dim), in the type that the cache keeps
    capacity  tokens to allocate for when the cache is still empty
    """
    for name, leaf in leaves(cache):
        if not keeps_tokens(leaf):
            continue
        held = dict(leaf_tensors(name, leaf))
        for tensor in held:
            new = arrays[tensor]
            have = held[tensor]
            if have is None or have.shape[2] < start + count:
                room = round_up(max(capacity, start + count))
                _, heads, _, dim = new.shape
                grown = mx.zeros((1, heads, room, dim), dtype=new.dtype)
                if have is not None and start:
                    grown[..., :start, :] = have[..., :start, :]
                have = grown
            have[..., start : start + count, :] = new
            held[tensor] = have
        set_leaf_tensors(name, leaf, held)
        leaf.offset = start + count


def tensors(cache: Cache) -> dict[str, mx.array]:
    """The per-token KV arrays by the layout's names, as they are now; keep no reference.

    A live reference or view makes MLX copy the whole array at the next append.
    """
    return dict(named_tensors(cache))


def state_tensors(cache: Cache) -> dict[str, mx.array]:
    """State that exists only at the cache's position, by name, in canonical form; lazy."""
    found: dict[str, mx.array] = {}
    for name, leaf in leaves(cache):
        if isinstance(leaf, RotatingKVCache):
            for tensor, array in leaf_tensors(name, leaf):
                ordered = leaf._temporal_order(array)
                found[tensor] = ordered[..., -min(leaf.offset, leaf.max_size) :, :]
        elif isinstance(leaf, ArraysCache):
            found |= dict(leaf_tensors(name, leaf))
    return found


def put_states(cache: Cache, states: dict[str, mx.array], position: int) -> None:
    """Set the state after `position` tokens. `states` as `state_tensors` gave them."""
    for name, leaf in leaves(cache):
        if isinstance(leaf, RotatingKVCache):
            leaf.keys, leaf.values = states[f"{name}.keys"], states[f"{name}.values"]
            leaf.offset, leaf._idx = position, leaf.keys.shape[2]
        elif isinstance(leaf, ArraysCache):
            leaf.cache = [states[f"{name}.state.{i}"] for i in range(len(leaf.cache))]


def state_arrays(cache: Cache) -> list[mx.array]:
    """Every array of a cache, of whatever class: what must be evaluated after a chunk."""
    return arrays_of([layer.state for layer in cache])


def arrays_of(tree: Any) -> list[mx.array]:
    """Every array in nested lists and tuples."""
    if isinstance(tree, mx.array):
        return [tree]
    return [a for child in tree for a in arrays_of(child)] if isinstance(tree, list | tuple) else []


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
