"""What a model keeps, learnt from a cache of one token: per-token KV, state at a position, or neither."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from ...kv.layout import Group, KVLayout
from .quantised import PARTS, PackedKV, QuantisedKVCache
from .types import SAFETENSORS_DTYPE

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
