"""The one module that touches mlx-lm's internals. Pinned to mlx-lm 0.32.2.

What it relies on, each assumption tested in tests/test_mlx_adapter.py:
- `KVCache` keeps `keys` and `values` of shape (1, heads, capacity, dim) and `offset`; it grows by
  `step` tokens, an attribute that an instance may override;
- a cache class that can be batched has `merge`; its batch class has `extend`, `filter`, `_idx`;
- a batch cache is padded on the left, so row r of length n lies in columns `_idx - n` to `_idx`;
- state that exists only at a position is a `RotatingKVCache`'s last `max_size` tokens in temporal
  order, or an `ArraysCache`'s arrays; `extract(row)` takes either out of a batch;
- `model(tokens, cache=cache)` gives logits of shape (batch, tokens, vocabulary), by an `lm_head` or by
  `as_linear` of its embedding.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load as mlx_load

from ..kv.layout import Group, KVLayout

Cache = list[Any]
"""One cache object a layer, of one sequence or of a batch."""

GROW_STEP = 256
"""Tokens; capacities are multiples of it, as mlx-lm's own are."""

_SAFETENSORS_DTYPE = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.uint8: "U8",
}
_BY_NAME = {name: dtype for dtype, name in _SAFETENSORS_DTYPE.items()}


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


@dataclass(slots=True)
class LoadedModel:
    """A model ready to run.

    layout   its per-token KV; without groups when it keeps none
    states   its state that exists only at a position; without tensors when it keeps none
    Both None: its KV can't be reused, and `kv_reuse` says why.
    """

    model: Any
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    context_length: int
    vocab_size: int
    weight_bytes: int
    layout: KVLayout | None
    states: StateLayout | None
    kv_reuse: str
    batchable: bool

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", "unknown"))


def versions() -> dict[str, str]:
    """What computes the KV: part of the namespace, since a release may mend a model."""
    return {"mlx": version("mlx"), "mlx-lm": version("mlx-lm"), "backend": backend()}


def backend() -> str:
    """`cpu`, `metal` or `cuda`."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if sys.platform == "darwin" else "cuda"


def load(path: Path) -> LoadedModel:
    """Load weights and tokenizer, and learn the KV layout from a forward pass of one token.

    Call on the engine thread: MLX's streams are a thread's own. Raises what mlx-lm raises.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    model, tokenizer, config = mlx_load(str(path), return_config=True)  # type: ignore[misc]
    weight_bytes = _tree_bytes(model.parameters())
    last_position_only(model)
    cache = make_prompt_cache(model)
    logits = model(mx.array([[0]]), cache=cache)
    mx.eval(logits)
    obstacle = _reuse_obstacle(cache)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        context_length=_context_length(config),
        vocab_size=int(logits.shape[-1]),
        weight_bytes=weight_bytes,
        layout=None if obstacle else _layout_of(cache),
        states=None if obstacle else _states_of(cache),
        kv_reuse=obstacle,
        batchable=_batchable(cache),
    )


class _LastPosition:
    """A call on (batch, tokens, hidden) that looks at the last token alone."""

    def __init__(self, inner: Any):
        self._inner = inner

    def __call__(self, x: mx.array) -> mx.array:
        return self._inner(x[:, -1:] if x.ndim == 3 else x)


def last_position_only(model: Any) -> None:
    """Make `model` give logits of shape (batch, 1, vocabulary): only the last position is ever sampled.

    The head of a 64-token chunk is otherwise a third of its time (CPU, tools/bench's `cpu` shape:
    1,364 ms with all positions, 943 without). What a model does with its logits after the head, such
    as capping, stays as it is. A head of another name than `lm_head` or tied embeddings is left alone.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            module.as_linear = _LastPosition(module.as_linear)
        if isinstance(head := getattr(module, "lm_head", None), nn.Module) and "vision" not in name:
            module.lm_head = _LastPosition(head)


def _context_length(config: dict[str, Any]) -> int:
    for holder in (config, config.get("text_config") or {}):
        for key in ("max_position_embeddings", "max_sequence_length", "n_positions", "seq_length"):
            if isinstance(value := holder.get(key), int) and value > 0:
                return value
    return 32768


def _tree_bytes(tree: Any) -> int:
    if isinstance(tree, mx.array):
        return tree.nbytes
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return sum(_tree_bytes(child) for child in children)


def _leaves(cache: Cache) -> list[tuple[str, Any]]:
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


def _reuse_obstacle(cache: Cache) -> str:
    """Empty when all that the model keeps can be stored and brought back; else the reason why not."""
    leaves = [leaf for _, leaf in _leaves(cache)]
    others = {
        type(leaf).__name__ for leaf in leaves if type(leaf) not in (KVCache, RotatingKVCache, ArraysCache)
    }
    if others:
        return f"layers of this model keep {', '.join(sorted(others))}: state that omlxd can't store yet"
    if any(isinstance(leaf, RotatingKVCache) and leaf.keep for leaf in leaves):
        return "layers of this model keep their first tokens beside a window: omlxd can't store that yet"
    arrays = [array for leaf in leaves for _, array in _leaf_tensors("", leaf)]
    if any(array is None for array in arrays):
        return "a layer of this model keeps no state of its own"
    if any(array.dtype not in _SAFETENSORS_DTYPE for array in arrays):
        return "its state has a type that can't be stored"
    return ""


def _leaf_tensors(name: str, leaf: Any) -> list[tuple[str, Any]]:
    """Arrays of one cache as it keeps them; None where it has none yet."""
    if isinstance(leaf, ArraysCache):
        return [(f"{name}.state.{i}", array) for i, array in enumerate(leaf.cache)]
    return [(f"{name}.keys", leaf.keys), (f"{name}.values", leaf.values)]


def _batchable(cache: Cache) -> bool:
    return all(
        hasattr(type(leaf), "merge") and not (isinstance(leaf, RotatingKVCache) and leaf.keep)
        for _, leaf in _leaves(cache)
    )


def _layout_of(cache: Cache) -> KVLayout:
    members: dict[tuple[int, int, str], list[str]] = {}
    for name, array in _named(cache):
        shape = (array.shape[1], array.shape[3], _SAFETENSORS_DTYPE[array.dtype])
        members.setdefault(shape, []).append(name)
    return KVLayout(tuple(Group(tuple(names), *shape) for shape, names in members.items()))


def _states_of(cache: Cache) -> StateLayout:
    found: list[StateTensor] = []
    for name, leaf in _leaves(cache):
        if type(leaf) is KVCache:
            continue
        window = leaf.max_size if isinstance(leaf, RotatingKVCache) else 0
        found += [
            StateTensor(tensor, tuple(array.shape), _SAFETENSORS_DTYPE[array.dtype], window)
            for tensor, array in _leaf_tensors(name, leaf)
        ]
    return StateLayout(tuple(found))


def _named(cache: Cache) -> list[tuple[str, mx.array]]:
    return [
        tensor
        for name, leaf in _leaves(cache)
        if type(leaf) is KVCache
        for tensor in _leaf_tensors(name, leaf)
    ]


def tensors(cache: Cache) -> dict[str, mx.array]:
    """The per-token KV arrays by the layout's names, as they are now; keep no reference.

    A live reference or view makes MLX copy the whole array at the next append.
    """
    return dict(_named(cache))


def storage_dtype(dtype: str) -> Any:
    """The MLX type in which bytes of safetensors type `dtype` are kept: one that Python can view."""
    return mx.uint16 if dtype == "BF16" else _BY_NAME[dtype]


def compute_dtype(dtype: str) -> Any:
    """The MLX type that a model computes with."""
    return _BY_NAME[dtype]


# --------------------------------------------------------------------------- caches of one sequence


def round_up(tokens: int) -> int:
    """A capacity, in tokens."""
    return -(-tokens // GROW_STEP) * GROW_STEP


def new_cache(model: Any, capacity: int) -> Cache:
    """An empty cache whose first allocation holds `capacity` tokens, where the class allows it.

    Growing copies the whole array (facts: 1.6 times the peak, quadratic time), and at admission
    the size is known.
    """
    cache = make_prompt_cache(model)
    for _, leaf in _leaves(cache):
        if type(leaf) is KVCache:
            leaf.step = round_up(capacity)
    return cache


def filled_cache(model: Any, arrays: dict[str, mx.array], length: int) -> Cache:
    """A cache over `arrays` (by layout name, each (1, heads, capacity, dim)) holding `length` tokens."""
    cache = make_prompt_cache(model)
    for name, leaf in _leaves(cache):
        if type(leaf) is KVCache:
            leaf.keys, leaf.values = arrays[f"{name}.keys"], arrays[f"{name}.values"]
            leaf.offset = length
            leaf.step = max(GROW_STEP, round_up(length // 4))
    return cache


def after_prefill(cache: Cache, length: int) -> None:
    """Grow geometrically from here on, not by the size of the first allocation."""
    for _, leaf in _leaves(cache):
        if type(leaf) is KVCache:
            leaf.step = max(GROW_STEP, round_up(length // 4))


def append_tokens(cache: Cache, arrays: dict[str, mx.array], start: int, count: int, capacity: int) -> None:
    """Write `count` tokens of KV at position `start` of a plain cache.

    arrays    by layout name, each (1, heads, count, dim), in the compute type
    capacity  tokens to allocate for when the cache is still empty
    """
    for name, layer in _leaves(cache):
        if type(layer) is not KVCache:
            continue
        for attribute in ("keys", "values"):
            new = arrays[f"{name}.{attribute}"]
            have = getattr(layer, attribute)
            if have is None or have.shape[2] < start + count:
                room = round_up(max(capacity, start + count))
                _, heads, _, dim = new.shape
                grown = mx.zeros((1, heads, room, dim), dtype=new.dtype)
                if have is not None and start:
                    grown[..., :start, :] = have[..., :start, :]
                have = grown
            have[..., start : start + count, :] = new
            setattr(layer, attribute, have)
        layer.offset = start + count


def state_tensors(cache: Cache) -> dict[str, mx.array]:
    """State that exists only at the cache's position, by name, in canonical form; lazy."""
    found: dict[str, mx.array] = {}
    for name, leaf in _leaves(cache):
        if isinstance(leaf, RotatingKVCache):
            for tensor, array in _leaf_tensors(name, leaf):
                ordered = leaf._temporal_order(array)
                found[tensor] = ordered[..., -min(leaf.offset, leaf.max_size) :, :]
        elif isinstance(leaf, ArraysCache):
            found |= dict(_leaf_tensors(name, leaf))
    return found


def put_states(cache: Cache, states: dict[str, mx.array], position: int) -> None:
    """Set the state after `position` tokens. `states` as `state_tensors` gave them."""
    for name, leaf in _leaves(cache):
        if isinstance(leaf, RotatingKVCache):
            leaf.keys, leaf.values = states[f"{name}.keys"], states[f"{name}.values"]
            leaf.offset, leaf._idx = position, leaf.keys.shape[2]
        elif isinstance(leaf, ArraysCache):
            leaf.cache = [states[f"{name}.state.{i}"] for i in range(len(leaf.cache))]


def row_states(batch: Cache, row: int) -> dict[str, mx.array]:
    """`state_tensors` of one row of a batch."""
    return state_tensors([_extract(layer, row) for layer in batch])


def _extract(layer: Any, row: int) -> Any:
    if hasattr(layer, "caches"):
        return CacheList(*(_extract(member, row) for member in layer.caches))
    # Per-token KV is not looked at, and taking it out would copy all of it.
    return KVCache() if isinstance(layer, BatchKVCache) else layer.extract(row)


def state_arrays(cache: Cache) -> list[mx.array]:
    """Every array of a cache, of whatever class: what must be evaluated after a chunk."""
    found: list[mx.array] = []
    _collect([layer.state for layer in cache], found)
    return found


def _collect(tree: Any, found: list[mx.array]) -> None:
    if isinstance(tree, mx.array):
        found.append(tree)
    elif isinstance(tree, list | tuple):
        for child in tree:
            _collect(child, found)


# --------------------------------------------------------------------------- caches of a batch


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
    for name, layer in _leaves(batch):
        if not isinstance(layer, BatchKVCache):
            continue
        shift = layer._idx - length
        for tensor, array in _leaf_tensors(name, layer):
            views[tensor] = array[row : row + 1, :, shift + start : shift + stop]
    return views
