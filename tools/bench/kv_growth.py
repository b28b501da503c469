"""How often KV is copied as an answer outgrows its room: `python -m tools.bench.kv_growth`.

Exact, for one row in arrays of its own, whatever the model and the machine.
"""

from __future__ import annotations

import argparse
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from omlxd.engine.mlx_adapter import round_up
from omlxd.wire import KV_RESERVE

WIDTH = 32


def capacities(cache: Any, prompt: int, answer: int, reserve: int) -> list[int]:
    """Tokens that the arrays of `cache`, which is empty, have room for, in turn; all but the last are copied.

    The answer's tokens come one by one; those that find room are put there together, which changes nothing.
    """
    cache.step = round_up(prompt + min(answer, reserve))
    held: list[int] = []
    more = prompt
    while more:
        new = mx.zeros((1, 1, more, WIDTH))
        cache.update_and_fetch(new, new)
        mx.eval(cache.keys, cache.values)
        keys = cache.keys[0] if isinstance(cache.keys, list) else cache.keys
        if not held or keys.shape[2] != held[-1]:
            held.append(keys.shape[2])
        left = prompt + answer - cache.offset
        more = min(left, max(1, held[-1] - cache.offset))
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--answer", type=int, default=8192)
    parser.add_argument("--kv-reserve", type=int, nargs="+", default=[KV_RESERVE, 8192])
    args = parser.parse_args()
    for reserve in args.kv_reserve:
        held = capacities(KVCache(), args.prompt, args.answer, reserve)
        rooms = ", ".join(f"{tokens:,}" for tokens in held)
        print(
            f"prompt {args.prompt}, answer {args.answer}, kv-reserve {reserve}: "
            f"copied {len(held) - 1} times, {sum(held[:-1]):,} tokens in all (room for {rooms})"
        )


if __name__ == "__main__":
    main()
