"""Keys of a prompt as attention reads them, for the machine's owner to look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..cache.kinds import Cache, leaves, state_tensors, token_range
from ..cache.packed import is_packed
from ..cache.segments import SequenceKVCache


class _ReadByMlx(KVCache):
    """Attention of it is MLX's own: what it gives out are not the arrays that it notes (attention/hooks.py),
    and `by_mlx` says so to attention/by_rows.py."""

    by_mlx = True

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        held = super().update_and_fetch(keys, values)
        return cast(Any, held[0])[...], cast(Any, held[1])[...]


def attention_from(model: Any, cache: Cache, token: int, at: int) -> list[mx.array] | None:
    """How the `token` at position `at` attends, a layer each: (query heads, at + 1) float32, of sum 1.

    Its pass is done again, behind what `cache` holds before it. None where a layer keeps anything but plain
    KV, or attends by a function of its own.
    """
    if any(type(leaf) not in (KVCache, SequenceKVCache) or is_packed(leaf) for leaf in cache):
        return None
    before = [_ReadByMlx() for _ in cache]
    held = token_range(cache, 0, at) if at else {}
    for index, fresh in enumerate(before if at else ()):
        fresh.keys, fresh.values = (held[f"layers.{index}.{name}"] for name in ("keys", "values"))
        fresh.offset = at
    weights: list[mx.array] = []
    real = mx.fast.scaled_dot_product_attention

    def noting(queries: mx.array, keys: mx.array, values: mx.array, **kwargs: Any) -> mx.array:
        if kwargs.get("mask") is None and kwargs.get("sinks") is None and queries.shape[:3:2] == (1, 1):
            heads, kv_heads = queries.shape[1], keys.shape[1]
            grouped = queries.astype(mx.float32).reshape(kv_heads, heads // kv_heads, -1)
            scores = grouped @ keys[0].astype(mx.float32).swapaxes(-1, -2) * kwargs["scale"]
            weights.append(mx.softmax(scores, axis=-1).reshape(heads, -1))
        return real(queries, keys, values, **kwargs)

    mx.fast.scaled_dot_product_attention = noting
    try:
        mx.eval(model(mx.array([[token]]), cache=before), weights)
    finally:
        mx.fast.scaled_dot_product_attention = real
    return weights if len(weights) == len(before) else None


def _class_of(leaf: Any) -> str:
    """The name of the class that keeps the same without segments."""
    if type(leaf) is not SequenceKVCache:
        return type(leaf).__name__
    return "QuantisedKVCache" if is_packed(leaf) else "KVCache"


def write_keys(
    file: Path, cache: Cache, tokens: int, values: bool, attention: list[mx.array] | None = None
) -> None:
    """Write the keys, after RoPE, of the `tokens` in `cache` as a safetensors file of float32 arrays.

    An array a layer, `<layer>.keys` (KV heads, tokens, dim), and `<layer>.values` if `values`: of a window
    its last tokens alone. Metadata `omlxd` is a JSON list, a layer each: its cache's class, `keys` null where
    it keeps none (recurrent layers, packed KV), else heads, first token, and each head's mean norm of keys.
    `attention`, of `attention_from`, is `<layer>.attention`, and each query head's `entropy`, in nats, in the
    metadata.
    """
    held = {**token_range(cache, 0, tokens), **state_tensors(cache)}
    arrays: dict[str, mx.array] = {}
    layers: list[dict[str, Any]] = []
    for name, leaf in leaves(cache):
        keys = held.get(f"{name}.keys")
        layers.append({"layer": name, "cache": _class_of(leaf), "keys": None})
        if keys is None or keys.ndim != 4:
            continue
        for part in ("keys", "values") if values else ("keys",):
            arrays[f"{name}.{part}"] = held[f"{name}.{part}"][0, :, :tokens].astype(mx.float32)
        kept = arrays[f"{name}.keys"]
        norms = mx.linalg.norm(kept, axis=-1).mean(axis=-1).tolist()
        heads, count, dim = kept.shape
        if attention:
            weights = arrays[f"{name}.attention"] = attention[len(layers) - 1]
            entropy = mx.abs((weights * mx.log(mx.maximum(weights, 1e-30))).sum(axis=-1))  # No -0.0.
            layers[-1]["entropy"] = entropy.tolist()
        layers[-1]["keys"] = {"kv_heads": heads, "dim": dim, "first_token": tokens - count, "norms": norms}
    mx.save_safetensors(str(file), arrays, {"omlxd": json.dumps(layers)})
