"""The one module that touches mlx-lm's internals. Pinned to mlx-lm 0.32.2.

What it relies on, each assumption tested in tests/test_mlx_adapter.py:
- `KVCache` keeps `keys` and `values` of shape (1, heads, capacity, dim) and `offset`; it grows by
  `step` tokens, an attribute that an instance may override;
- a cache class that can be batched has `merge`; its batch class has `extend`, `filter`, `_idx`;
- a batch cache is padded on the left, so row r of length n lies in columns `_idx - n` to `_idx`;
- `model(tokens, cache=cache)` gives logits of shape (batch, tokens, vocabulary).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
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


@dataclass(slots=True)
class LoadedModel:
    """A model ready to run. `layout` None: its KV can't be reused, and `kv_reuse` says why."""

    model: Any
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    context_length: int
    vocab_size: int
    weight_bytes: int
    layout: KVLayout | None
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
        weight_bytes=_tree_bytes(model.parameters()),
        layout=None if obstacle else _layout_of(cache),
        kv_reuse=obstacle,
        batchable=_batchable(cache),
    )


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


def _reuse_obstacle(cache: Cache) -> str:
    """Empty when every layer keeps plain per-token KV; else the reason why prefixes aren't reused."""
    others = sorted({type(c).__name__ for c in cache if type(c) is not KVCache})
    if others:
        return f"layers of this model keep {', '.join(others)}: state that is not per token"
    if any(c.keys is None for c in cache):
        return "a layer of this model keeps no KV of its own"
    if any(array.dtype not in _SAFETENSORS_DTYPE for c in cache for array in (c.keys, c.values)):
        return "its KV has a type that can't be stored"
    return ""


def _batchable(cache: Cache) -> bool:
    return all(
        hasattr(type(c), "merge") and not (isinstance(c, RotatingKVCache) and getattr(c, "keep", 0))
        for c in cache
    )


def _layout_of(cache: Cache) -> KVLayout:
    members: dict[tuple[int, int, str], list[str]] = {}
    for name, array in _named(cache):
        shape = (array.shape[1], array.shape[3], _SAFETENSORS_DTYPE[array.dtype])
        members.setdefault(shape, []).append(name)
    return KVLayout(tuple(Group(tuple(names), *shape) for shape, names in members.items()))


def _named(cache: Cache) -> list[tuple[str, mx.array]]:
    named: list[tuple[str, mx.array]] = []
    for index, layer in enumerate(cache):
        named.append((f"layers.{index}.keys", layer.keys))
        named.append((f"layers.{index}.values", layer.values))
    return named


def tensors(cache: Cache) -> dict[str, mx.array]:
    """The KV arrays of a plain cache by the layout's names, as they are now; keep no reference.

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
    for layer in cache:
        if type(layer) is KVCache:
            layer.step = round_up(capacity)
    return cache


def filled_cache(model: Any, arrays: dict[str, mx.array], length: int) -> Cache:
    """A cache over `arrays` (by layout name, each (1, heads, capacity, dim)) holding `length` tokens."""
    cache = make_prompt_cache(model)
    for index, layer in enumerate(cache):
        layer.keys = arrays[f"layers.{index}.keys"]
        layer.values = arrays[f"layers.{index}.values"]
        layer.offset = length
        layer.step = max(GROW_STEP, round_up(length // 4))
    return cache


def after_prefill(cache: Cache, length: int) -> None:
    """Grow geometrically from here on, not by the size of the first allocation."""
    for layer in cache:
        if type(layer) is KVCache:
            layer.step = max(GROW_STEP, round_up(length // 4))


def append_tokens(cache: Cache, arrays: dict[str, mx.array], start: int, count: int, capacity: int) -> None:
    """Write `count` tokens of KV at position `start` of a plain cache.

    arrays    by layout name, each (1, heads, count, dim), in the compute type
    capacity  tokens to allocate for when the cache is still empty
    """
    for index, layer in enumerate(cache):
        for attribute in ("keys", "values"):
            new = arrays[f"layers.{index}.{attribute}"]
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


def merge(caches: Sequence[Cache]) -> Cache:
    """One batch cache of several single ones, layer by layer. Copies all of them."""
    return [type(layers[0]).merge(list(layers)) for layers in zip(*caches, strict=True)]


def extend(batch: Cache, single: Cache) -> None:
    """Add a row to a batch cache. Copies the batch."""
    for into, layer in zip(batch, single, strict=True):
        into.extend(type(layer).merge([layer]))


def keep_rows(batch: Cache, rows: Sequence[int]) -> None:
    """Drop every other row of a batch cache."""
    for layer in batch:
        layer.filter(list(rows))


def row_tensors(batch: Cache, row: int, length: int, start: int, stop: int) -> dict[str, mx.array]:
    """Tokens `start` to `stop` of one row of a batch of plain caches; lazy slices, evaluate them soon.

    length  tokens that the row holds
    """
    views: dict[str, mx.array] = {}
    for index, layer in enumerate(batch):
        shift = layer._idx - length
        views[f"layers.{index}.keys"] = layer.keys[row : row + 1, :, shift + start : shift + stop]
        views[f"layers.{index}.values"] = layer.values[row : row + 1, :, shift + start : shift + stop]
    return views
