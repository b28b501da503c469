"""The one function that mlx-lm's models call for attention, in place of `scaled_dot_product_attention`.

A cache that attends by itself comes first (`attend` of cache/rows.py and cache/segments.py), then the current
backend (backend.py), then MLX's own. What this module knows of arrays is which cache gave them out, and what
a mask hides: kernels that read a cache's own arrays ask for both.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models import base

from .backend import AttentionCall, current

mlx_own = base.scaled_dot_product_attention


def install() -> None:
    """Let every model of mlx-lm attend by `attend`, and the backend patch what it needs. Call it often."""
    current().install()
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and hasattr(module, "scaled_dot_product_attention"):
            cast(Any, module).scaled_dot_product_attention = attend


def attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's `scaled_dot_product_attention`.

    `attend` of a cache takes all but `cache`, and gives None where its rows are read as any other's.
    """
    holder = cache if cache is not None else giver_of(keys, values)
    if (own := getattr(holder, "attend", None)) is not None:
        out = own(queries, keys, values, scale, mask, sinks)
        if out is not None:
            return out
    return by_backend(AttentionCall(queries, keys, values, cache, scale, mask, sinks))


def by_backend(call: AttentionCall) -> mx.array:
    """Attention by the current backend, or MLX's own where that leaves it."""
    out = current().forward(call)
    return mlx_own(*call) if out is None else out


_given_out: dict[int, tuple[Any, Any, Any]] = {}
"""By the identity of keys: weak references to them, to the values and to the cache that gave both out.

A model may derive other arrays from them for its attention; the kernel reads the cache's own. Layers that
share another's KV attend without its cache.
"""


def note_given(keys: mx.array, values: mx.array, cache: Any) -> None:
    """Note that `cache` gave out `keys` and `values`."""
    at = id(keys)
    gone = weakref.ref(keys, lambda _: _given_out.pop(at, None))
    _given_out[at] = gone, weakref.ref(values), weakref.ref(cache)


def giver_of(keys: Any, values: Any) -> Any:
    """The cache that gave out both; None: none is known."""
    given = _given_out.get(id(keys))
    return given[2]() if given is not None and given[0]() is keys and given[1]() is values else None


def giver_of_keys(keys: Any) -> Any:
    """The cache that gave out `keys`, whatever values come with them; None: none is known."""
    given = _given_out.get(id(keys))
    return given[2]() if given is not None else None


def is_causal_mask(mask: Any, new: int, even: bool, window: int = 0) -> bool:
    """Whether `mask` hides nothing but what lies outside of a row or a window, and what comes after one of
    `new` tokens.

    even  each column is every row's
    """
    if isinstance(mask, mx.array):
        return _masks.get(id(mask)) == window
    return even and mask == (None if new == 1 else "causal")


_masks: dict[int, int] = {}
"""Windows, or 0, of the masks that hide nothing but what the kernels do without; by their identity."""


def note_mask(mask: Any, window: int = 0) -> None:
    """Note that `mask` hides what lies outside of a row, what comes after a token, and what comes `window` or
    more before it, and nothing else: the kernel does without it."""
    if isinstance(mask, mx.array):
        at = id(mask)
        _masks[at] = window
        weakref.finalize(mask, _masks.pop, at, None).atexit = False
