"""A batch on Metal whose rows keep arrays of their own (cache/tails.py), which two launches a layer read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx

from ...attention.backend import AttentionCall
from ...cache.packed import Quantisation, parts_of
from ...cache.segments import OWN_MASK, Pair, Segment
from ...cache.tails import TailRowsKVCache
from ...runtime.arrays import CLOSE, distance
from . import launch
from .kernels import MOST_NEW, PLAIN, Packing
from .plan import Layout, Shape, Shared


def packing_of(how: Quantisation | None) -> Packing:
    return PLAIN if how is None else Packing(how.bits, how.group)


class SpanRowsKVCache(TailRowsKVCache):
    """A layer of a batch, of one row, too.

    `attend` raises RuntimeError where a layer wants other attention than the kernels'.
    """

    def __init__(self, rows: Sequence[Any]):
        super().__init__(rows)
        self.changed()

    def changed(self) -> None:
        self._layout: Layout | None = None
        self._bound: list[list[mx.array]] = []

    def settle(self) -> None:
        """MLX does not see what a kernel writes: a copy, say, could be made beside it."""
        if self._behind is not None:
            mx.eval(self._behind)

    @property
    def state(self) -> list[mx.array]:
        """Whoever evaluates it has new tokens in their places."""
        return [*super().state, *([] if self._behind is None else [self._behind])]

    def extend(self, other: TailRowsKVCache) -> None:
        other.settle()
        super().extend(other)

    def _put(self, keys: mx.array, values: mx.array) -> None:
        before = self._behind
        super()._put(keys, values)
        self._behind = before  # Until `attend` has a newer one.

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        """(rows, heads, n, width), once `update_and_fetch` got the KV of these n tokens: `keys`, `values`."""
        given = self.keys_and_values()
        if mask is not OWN_MASK or given[0] is not keys or given[1] is not values:
            raise RuntimeError("a layer masks more than what comes after a token, or reads other KV")
        self.pending, new = False, queries.shape[2]
        if new > MOST_NEW:
            self._put_by_mlx()
            return self.by_mlx(queries, scale, sinks)
        layout = self._layout
        if layout is None or layout.shape.scale != scale:
            layout = self._laid_out(queries, scale, sinks is not None)
        fresh = [part for held in self._fresh for part in parts_of(held)]
        plan = layout.plan(new, tuple(self.ends))
        out = launch.attend(queries, layout.shape, plan, self._bound, fresh, sinks)
        self._behind = out
        if self.is_checked:
            mx.eval(out)  # So that the new token is in its place.
            if not (far := distance(out, self.by_mlx(queries, scale, sinks))) < CLOSE:  # NaN too
                raise RuntimeError(f"attention differs by {far:.3g} from MLX's own")
        return out

    def _laid_out(self, queries: mx.array, scale: float, sinks: bool) -> Layout:
        held = self.tails[0].parts[0]
        kv_heads, dtype = held.shape[1], self.tails[0].parts[-1].dtype
        if queries.dtype != dtype:
            raise RuntimeError("queries are of another type than the KV")
        shape = Shape(
            *(queries.shape[1], kv_heads, queries.shape[3], dtype, scale),
            window=self.window,
            packing=packing_of(self.how),
            sinks=sinks,
        )
        shared = sharing(self.segments)
        tails = tuple((base, tail.capacity) for base, tail in zip(self.bases, self.tails, strict=True))
        self._layout = layout = layout_of(shape, tuple(at for _, at in shared), tails)
        parts = [*(one.parts(self.layer) for one, _ in shared), *(tail.parts for tail in self.tails)]
        self._bound = launch.bound(parts, shape.packing)
        return layout

    def _put_by_mlx(self) -> None:
        """Put new tokens into the tails, for MLX's own attention."""
        self.settle()
        fresh = [part for held in self._fresh for part in parts_of(held)]
        for row, (tail, end) in enumerate(zip(self.tails, self.ends, strict=True) if fresh else ()):
            for part, new in zip(tail.parts, fresh, strict=True):
                put(part, new[row : row + 1], end - new.shape[2])
        self._fresh, self._behind = (), None

    def joined(self, row: int, first: int, end: int) -> Pair:
        tail = self.tails[row]
        if self.window or self.how is not None or self.segments[row]:
            return super().joined(row, first, end)
        return tail.keys[..., first:end, :], tail.values[..., first:end, :]


@lru_cache(maxsize=32)
def layout_of(shape: Shape, shared: tuple[Shared, ...], tails: tuple[tuple[int, int], ...]) -> Layout:
    """Layers of a kind have one."""
    return Layout(shape, shared, tails)


def sharing(segments: Sequence[Sequence[Segment]]) -> list[tuple[Segment, Shared]]:
    """Each segment, and who has it; those of a row in its order, since rows with a segment in common have all
    before it in common."""
    found: dict[int, tuple[Segment, int, list[int]]] = {}
    for row, own in enumerate(segments):
        start = 0
        for segment in own:
            found.setdefault(id(segment), (segment, start, []))[2].append(row)
            start += segment.tokens
    return [(one, Shared(start, one.tokens, tuple(rows))) for one, start, rows in found.values()]


def put(part: mx.array, new: mx.array, start: int) -> None:
    """Put the tokens of `new` into `part` from token `start` on, token t into column t % capacity."""
    capacity, count, at = part.shape[2], new.shape[2], 0
    while at < count:
        column = (start + at) % capacity
        some = min(count - at, capacity - column)
        part[..., column : column + some, :] = new[..., at : at + some, :]
        at += some


def over_segments(call: AttentionCall) -> mx.array | None:
    """Attention of one row that is in no batch to its segments, and to its tail, whose arrays have the new
    tokens; None: MLX's own products must."""
    queries, cache = call.queries, call.cache
    held = [*parts_of(call.keys), *parts_of(call.values)]
    if queries.shape[2] > MOST_NEW or queries.dtype != held[-1].dtype or held[0] is None:
        return None
    shape = Shape(
        *(queries.shape[1], held[0].shape[1], queries.shape[3], queries.dtype, call.scale),
        packing=packing_of(cache.how),
        fresh=False,
        sinks=call.sinks is not None,
    )
    shared, tail = sharing([cache.segments]), (cache.base, held[0].shape[2])
    layout = layout_of(shape, tuple(at for _, at in shared), (tail,))
    plan = layout.plan(queries.shape[2], (cache.offset - cache.base,))
    parts = [*(one.parts(cache.layer) for one in cache.segments), held]
    return launch.attend(queries, shape, plan, launch.bound(parts, shape.packing), (), call.sinks)
