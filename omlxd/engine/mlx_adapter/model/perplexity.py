"""Perplexity of a text by KV type.

The text is one sequence, computed in chunks, so that tokens attend to KV as the cache keeps it. Rows of equal
bits use omlxd's own caches. Keys in 8 bits with values in 4 have no cache there: mlx-lm's attention takes one
number of bits for both (0.32.2). That row rounds K and V to what such a cache would hold, and keeps them
plain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..cache.kinds import Cache, quantise_obstacle, quantised, state_arrays
from ..cache.packed import Quantisation
from .load import context_length, read_model

CHUNK = 64
GROUPS = (64, 32)


class RoundedKVCache(KVCache):
    """A `KVCache` of numbers that have been through `keys` and `values`."""

    def __init__(self, keys: Quantisation, values: Quantisation):
        super().__init__()
        self._how = keys, values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        rounded = (how.unpack(how.pack(a)) for how, a in zip(self._how, (keys, values), strict=True))
        return super().update_and_fetch(*rounded)


@dataclass
class Result:
    """`likeliest`: the model's first choice after each token."""

    perplexity: float
    likeliest: list[int]


def measure(model: Any, cache: Cache, tokens: list[int]) -> Result:
    """Compute `tokens` from an empty `cache`."""
    total, likeliest = 0.0, list[int]()
    for start in range(0, len(tokens) - 1, CHUNK):
        chunk = tokens[start : start + CHUNK]
        logits = model(mx.array([chunk]), cache=cache)[0].astype(mx.float32)
        targets = mx.array(tokens[start + 1 : start + 1 + len(chunk)])
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        picked = mx.take_along_axis(logprobs[: len(targets)], targets[:, None], axis=-1)
        best = mx.argmax(logits, axis=-1)
        mx.eval(picked, best, state_arrays(cache))
        total -= cast(float, picked.sum().item())
        likeliest += cast(list[int], best.tolist())
    return Result(math.exp(total / (len(tokens) - 1)), likeliest)


def table(model: Any, tokens: list[int]) -> Iterator[dict[str, Any]]:
    """A row a KV type: its perplexity, and the share of places whose first choice rounding leaves alone."""

    def fresh() -> Cache:
        return make_prompt_cache(model)

    sample = fresh()
    mx.eval(model(mx.array([[0]]), cache=sample))
    how = next(
        (Quantisation(8, group) for group in GROUPS if not quantise_obstacle(sample, Quantisation(8, group))),
        None,
    )
    plain = measure(model, fresh(), tokens)
    own = state_arrays(sample)[0].dtype.size * 8  # 16, or 32 of a model whose weights are.
    yield _row(str(own), plain, plain, len(tokens))
    if how is None:
        yield {"kv": "8, 4", "trouble": quantise_obstacle(sample, Quantisation(8, GROUPS[-1]))}
        return
    eight, four = how, Quantisation(4, how.group)
    caches: dict[str, Callable[[], Cache]] = {
        "8": lambda: quantised(fresh(), eight),
        "4": lambda: quantised(fresh(), four),
        "keys 8, values 4": lambda: [
            RoundedKVCache(eight, four) if type(layer) is KVCache else layer for layer in fresh()
        ],
    }
    for name, cache in caches.items():
        yield _row(name, measure(model, cache(), tokens), plain, len(tokens))


def _row(name: str, result: Result, plain: Result, tokens: int) -> dict[str, Any]:
    same = sum(a == b for a, b in zip(result.likeliest, plain.likeliest, strict=True))
    return {
        "kv": name,
        "tokens": tokens,
        "perplexity": result.perplexity,
        "same_choice": same / len(plain.likeliest),
    }


def measure_folder(folder: Path, text: str, most: int, float32: bool) -> Iterator[dict[str, Any]]:
    """`table` of the model in `folder` and the first `most` tokens of `text`."""
    model, tokenizer, config, _ = read_model(folder, float32)
    return table(model, tokenizer.encode(text)[: min(most, context_length(config))])
