"""Caches of one sequence: making, filling, reading."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache

from .batch_kv import next_step, round_up
from .layouts import Cache, keeps_tokens, leaf_tensors, leaves, named_tensors, set_leaf_tensors


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
