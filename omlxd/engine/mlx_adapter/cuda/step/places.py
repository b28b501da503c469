"""Where a decode step puts the next token of each row, and the room for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from ...cache.batch import EvenBatchKVCache
from ...cache.joining import COPIED
from ...cache.kinds import Cache, arrays_of
from ..attention import attend
from ..rows.addressed_rows import AddressedKVCache
from ..rows.tail import Tail


@dataclass(slots=True, frozen=True)
class Next:
    """Where the next token of each row goes, in all layers of one window.

    layer    one of them
    lengths  tokens of each row, with the next one
    """

    layer: Any
    starts: list[int]
    ends: list[int]
    lengths: list[int]

    def arrays(self, counts: Sequence[int], size: int) -> tuple[mx.array, mx.array, mx.array]:
        """(size,) each: start, end and tokens before it of each next token. A row has as many of these as
        `counts` says, one row's behind the other's; zeros fill the arrays up."""
        rows = list(zip(self.starts, self.ends, self.lengths, counts, strict=True))
        places = (
            [start for start, _, _, count in rows for _ in range(count)],
            [end + i for _, end, _, count in rows for i in range(count)],
            [length - 1 + i for _, _, length, count in rows for i in range(count)],
        )
        # One array, cut into these three, takes the host 0.1 ms longer (CUDA).
        starts, ends, offset = (mx.array(at + [0] * (size - len(at)), mx.int32) for at in places)
        return starts, ends, offset


def window_of(layer: Any) -> int:
    return layer.window if isinstance(layer, AddressedKVCache) else getattr(layer, "max_size", 0)


def _next(layer: Any, count: int = 1) -> Next | None:
    """None: the arrays have no room for `count` tokens, or keep their first tokens beside a window."""
    if isinstance(layer, AddressedKVCache):
        lengths = [base + end + 1 for base, end in zip(layer.bases, layer.ends, strict=True)]
        return Next(layer, *layer.places(1, 1), lengths) if layer.has_room(count) else None
    alone, ring = isinstance(layer, KVCache | RotatingKVCache), shape_of(layer)[2]
    if window := window_of(layer):
        lengths = [tokens + 1 for tokens in ([layer.offset] if alone else layer.tokens())]
        grows = ring < window and (layer.offset if alone else layer._offset) >= ring
        if ring > window or grows or getattr(layer, "keep", 0):
            return None
        return Next(layer, *attend.window_places(lengths, layer._idx % window + 1, ring, window), lengths)
    base = getattr(layer, "base", 0)
    ends = [layer.offset - base] if alone else layer.ends
    starts = [0] if alone else layer.starts
    if max(ends) + count > ring:
        return None
    lengths = [base + end + 1 - start for start, end in zip(starts, ends, strict=True)]
    return Next(layer, starts, [end + 1 for end in ends], lengths)


def places_with_room(cache: Cache, windows: list[int], count: int, grows: str) -> dict[int, Next] | None:
    """`_next` of the first layer of each window; None: arrays have no room for `count` tokens.

    windows  of each layer
    grows    whether arrays are made contiguous, with room: "first"; "late": where they have none; "": never
    """

    def found() -> dict[int, Next | None]:
        return {window: _next(cache[windows.index(window)], count) for window in dict.fromkeys(windows)}

    places = found()
    if grows == "first" or (grows == "late" and not all(places.values())):
        make_room(cache, count)
        places = found()
    every = {window: at for window, at in places.items() if at is not None}
    return every if len(every) == len(places) else None


def advance(layer: Any, keys: Any, values: Any, window: int, offset: mx.array, count: int) -> None:
    """Have `layer` hold what a step of `count` tokens a row left: `keys`, `values`. `offset`: behind it."""
    if isinstance(layer, AddressedKVCache):
        layer.advance(count)
        return
    layer.keys, layer.values = keys, values
    if isinstance(layer, RotatingKVCache):
        layer._idx = layer._idx % window + 1
        layer.offset += 1
    elif isinstance(layer, KVCache):
        layer.offset += count
    elif count > 1:
        layer.advance(offset, count)
    else:
        layer.advance(offset)


def tails_in(layer: Any) -> Sequence[Tail]:
    """Of a batch whose rows have tails of their own; else none."""
    return getattr(layer, "tails", ())


def shape_of(layer: Any, name: str = "keys") -> tuple[int, ...]:
    """Of the array of keys (or values), or of the first where they are packed; (rows, …) of rows' tails."""
    if tails := tails_in(layer):
        return len(tails), *tails[0].parts[0].shape[1:]
    held = getattr(layer, name)
    return tuple((held[0] if isinstance(held, list) else held).shape)


def make_room(cache: Cache, count: int) -> None:
    """Make the KV's arrays contiguous, with room for `count` tokens of each row.

    Some layers at a time: MLX keeps what a launch graph reads until it ran, and a fused step is one graph.
    """
    waiting: list[mx.array] = []
    for layer in cache:
        if tails_in(layer):
            layer.make_room(count)
            continue
        layer.update_and_fetch(*(_blank(layer, held, count) for held in (layer.keys, layer.values)))
        layer.unread = None  # What a layer with segments gave out.
        if isinstance(layer, EvenBatchKVCache):
            layer.trim_rows([count] * layer.offset.shape[0])
        else:
            layer.offset -= count
        waiting += arrays_of([layer.keys, layer.values])
        if sum(array.nbytes for array in waiting) > COPIED:
            mx.eval(waiting)
            waiting.clear()


def _blank(layer: Any, held: Any, count: int) -> mx.array:
    """Zeros for `count` tokens of each row, as what `held` keeps is made of."""
    if not isinstance(held, list):
        return mx.zeros((*held.shape[:2], count, held.shape[3]), held.dtype)
    words, scales, _ = held
    return mx.zeros((*words.shape[:2], count, words.shape[3] * 32 // layer.how.bits), scales.dtype)
