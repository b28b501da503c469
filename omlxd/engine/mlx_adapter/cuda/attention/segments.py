"""Which rows hold which segments (cache/segments.py), and where these lie: what kernels are told of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import mlx.core as mx

from ...cache.segments import Segment, SequenceKVCache
from ..compile import launch

MOST_STEP = 4
"""Segments. A step over packed ones is compiled anew for each multiple of these that a row has."""


class Places(NamedTuple):
    """Which rows hold which segments: the same for all layers.

    holders  (row, index) of a holder of each segment
    table    (segments, 1 + 2 * rows) in int32: how many rows hold one, then each such row and the segment's
             index among its own
    counts   (rows,) in int32: segments of each row
    most     of these, the largest
    widest   rows that hold one, at most
    """

    holders: list[tuple[int, int]]
    table: mx.array
    counts: mx.array
    most: int
    widest: int


def places_of(rows: Sequence[Sequence[object]]) -> Places:
    """Of these rows' segments."""
    known: dict[int, int] = {}
    return _places(tuple(tuple(known.setdefault(id(one), len(known)) for one in row) for row in rows))


@lru_cache(64)
def _places(rows: tuple[tuple[int, ...], ...]) -> Places:
    held: dict[int, list[tuple[int, int]]] = {}
    for row, numbers in enumerate(rows):
        for index, number in enumerate(numbers):
            held.setdefault(number, []).append((row, index))
    every, width = list(held.values()), 2 * len(rows)
    table = mx.array([[len(own), *sum(own, ()), *[0] * (width - 2 * len(own))] for own in every], mx.int32)
    counts = mx.array([len(numbers) for numbers in rows], mx.int32)
    mx.eval(table, counts)
    return Places([own[0] for own in every], table, counts, max(map(len, rows)), max(map(len, every)))


class Shared(NamedTuple):
    """KV of a layer that rows hold in segments.

    addresses  (segments, 2) in uint64: of keys and values, each (1, KV heads, tokens, width)
    The rest as `Places` has it.
    """

    addresses: mx.array
    table: mx.array
    counts: mx.array
    tokens: int
    most: int
    widest: int


class Addresses:
    """Where the arrays of a segment lie: a backend keeps it with the segment.

    table  (layers, parts): of each layer's `parts`, as `launch.addresses_of` has them
    """

    def __init__(self, segment: Segment):
        self._layers = segment.layers
        arrays = [array for layer in self._layers for array in segment.parts(layer)]
        self.table = launch.addresses_of(arrays).reshape(len(self._layers), -1)
        self._numbers: dict[str, list[int]] = {}

    def of_layer(self, layer: str) -> list[int]:
        """The row of `table` for the layer of this name."""
        if not self._numbers:
            found = cast(list[list[int]], self.table.tolist())
            self._numbers = dict(zip(self._layers, found, strict=True))
        return self._numbers[layer]


def addresses_of(segment: Segment) -> Addresses:
    """The addresses of `segment`, which they are kept with."""
    if segment.on_device is None:
        segment.on_device = Addresses(segment)
    return segment.on_device


def shared_in(layer: Any) -> Shared | None:
    """What the kernel reads beside the tails of `layer`, of one row or a batch; None: no segment, or packed
    ones, which the tails' table tells of."""
    if not isinstance(layer, SequenceKVCache):
        return getattr(layer, "shared", None)
    if layer.on_device is None and layer.segments and layer.how is None:
        layer.on_device = shared_of([layer.segments], layer.layer)
    return layer.on_device


def addresses_before(held: Sequence[Segment], layer: str, most: int, parts: int) -> list[int]:
    """What a row of the table of `Tails` has of segments: tokens, and addresses of the `parts` of `most`
    segments."""
    found = [number for segment in held for number in addresses_of(segment).of_layer(layer)]
    return [sum(segment.tokens for segment in held), *found, *[0] * (parts * (most - len(held)))]


def shared_of(rows: Sequence[Sequence[Segment]], layer: str) -> Shared:
    """What these rows hold, in a layer; one of them has a segment."""
    places = places_of(rows)
    held = [rows[row][index] for row, index in places.holders]
    at = _addresses(held)[held[0].layers.index(layer)]
    return Shared(at, places.table, places.counts, held[0].tokens, places.most, places.widest)


def shared_by(layer: Any, counts: Sequence[int], size: int) -> Shared:
    """`shared_in`, which is not None, for a pass of `size` rows: the tokens of each row of `layer`, `counts`
    of them, and nobody's."""
    rows = [layer.segments] if isinstance(layer, SequenceKVCache) else layer.segments
    tokens = [own for own, count in zip(rows, counts, strict=True) for _ in range(count)]
    return shared_of([*tokens, *[()] * (size - len(tokens))], layer.layer)


def _addresses(held: list[Segment]) -> list[mx.array]:
    """Of each layer; the newest ones are kept, since layers ask one by one."""
    global _known
    if [known() for known in _known[0]] != held:
        addresses = list(mx.stack([addresses_of(segment).table for segment in held], axis=1))
        mx.eval(addresses)
        _known = [weakref.ref(segment) for segment in held], addresses
    return _known[1]


_known: tuple[list[weakref.ref[Segment]], list[mx.array]] = [], []
