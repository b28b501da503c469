"""One pass of one row, as every rank makes it: equal calls, in one order, or a sum waits for ever."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ... import mlx_adapter
from ...mlx_adapter import Cache


def time_link(model: Any) -> mlx_adapter.LinkTimes:
    return mlx_adapter.time_link(model, mlx_adapter.new_cache(model, 1))


def compute(model: Any, tokens: list[int] | tuple[int, ...], cache: Cache) -> mx.array:
    """Logits (1, 1, vocabulary) of the last of `tokens`, whose KV goes into `cache`. All is evaluated."""
    logits = model(mx.array([tokens]), cache=cache)
    mx.eval(logits, mlx_adapter.state_arrays(cache))
    return logits
