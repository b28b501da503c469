"""Keys of a prompt as attention reads them, for the machine's owner to look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from .cache_kinds import Cache, leaves, state_tensors, tensors


def write_keys(file: Path, cache: Cache, tokens: int, values: bool) -> None:
    """Write the keys, after RoPE, of the `tokens` in `cache` as a safetensors file of float32 arrays.

    An array a layer, `<layer>.keys` (KV heads, tokens, dim), and `<layer>.values` if `values`: of a window
    its last tokens alone. Metadata `omlxd` is a JSON list, a layer each: its cache's class, `keys` null where
    it keeps none (recurrent layers, packed KV), else heads, first token, and each head's mean norm of keys.
    """
    held = {**tensors(cache), **state_tensors(cache)}
    arrays: dict[str, mx.array] = {}
    layers: list[dict[str, Any]] = []
    for name, leaf in leaves(cache):
        keys = held.get(f"{name}.keys")
        layers.append({"layer": name, "cache": type(leaf).__name__, "keys": None})
        if keys is None or keys.ndim != 4:
            continue
        for part in ("keys", "values") if values else ("keys",):
            arrays[f"{name}.{part}"] = held[f"{name}.{part}"][0, :, :tokens].astype(mx.float32)
        kept = arrays[f"{name}.keys"]
        norms = mx.linalg.norm(kept, axis=-1).mean(axis=-1).tolist()
        heads, count, dim = kept.shape
        layers[-1]["keys"] = {"kv_heads": heads, "dim": dim, "first_token": tokens - count, "norms": norms}
    mx.save_safetensors(str(file), arrays, {"omlxd": json.dumps(layers)})
