"""Where the KV of a pass's rows lies: the tables that both kernels of kernels.py read.

They are made once a pass, and all layers of a kind use them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from .kernels import (
    ALL_FINE,
    FINE,
    LARGE,
    MOST_LAUNCHES,
    PART_FIELDS,
    PLAIN,
    SMALL,
    Packing,
    queries_of,
)


class Shared(NamedTuple):
    """A segment of so many tokens, from position `start` on, which these rows have."""

    start: int
    tokens: int
    rows: tuple[int, ...]


class Shape(NamedTuple):
    """What layers of a kind have in common.

    fresh   whether the pass's new tokens come beside, and are to be put into the tails
    window  tokens that one sees; 0: all
    """

    heads: int
    kv_heads: int
    width: int
    dtype: mx.Dtype
    scale: float
    window: int = 0
    packing: Packing = PLAIN
    fresh: bool = True
    sinks: bool = False


@dataclass(slots=True, frozen=True)
class Launch:
    """A launch of `spans`: its table, units of work, and slots of results."""

    table: mx.array
    units: int
    slots: int


@dataclass(slots=True, frozen=True)
class Plan:
    rows: int
    new: int
    launches: tuple[Launch, ...]
    merge: mx.array


def spans_of(first: int, end: int, fine: int) -> tuple[int, int]:
    """The first span of tokens `first` to `end`, and how many they take."""
    first_span, last = _span(first, fine), _span(end - 1, fine)
    return first_span, last - first_span + 1


def cuts(first: int, end: int, fine: int) -> list[slice]:
    """The spans of tokens `first` to `end`, as slices of these."""
    number, spans = spans_of(first, end, fine)
    starts = [
        span * SMALL if span < fine else fine * SMALL + (span - fine) * LARGE
        for span in range(number, number + spans)
    ]
    ends = [min(end, start) for start in (*starts[1:], end)]
    return [slice(max(first, start) - first, stop - first) for start, stop in zip(starts, ends, strict=True)]


def _span(token: int, fine: int) -> int:
    return token // SMALL if token < fine * SMALL else fine + (token - fine * SMALL) // LARGE


class _Part(NamedTuple):
    """Tokens `first` to `end`, token t in column (t - start) % capacity, of arrays that `rows` read.

    is_tail  the one row's own, whose last tokens are the pass's new ones; else all are before those
    """

    first: int
    end: int
    start: int
    capacity: int
    rows: tuple[int, ...]
    is_tail: bool


class Layout:
    """Where layers of a kind have their rows' KV, until rows join or leave, or arrays grow.

    shared  segments; those of a row in its order
    tails   of each row: the position of its first token, and its capacity
    """

    def __init__(self, shape: Shape, shared: Sequence[Shared], tails: Sequence[tuple[int, int]]):
        self.shape, self._tails = shape, tails
        self._shared = [
            _Part(start, start + tokens, start, tokens, rows, False) for start, tokens, rows in shared
        ]
        self._newest: tuple[int, tuple[int, ...]] = 0, ()
        self._plan: Plan | None = None

    def plan(self, new: int, ends: tuple[int, ...]) -> Plan:
        """The tables of a pass of `new` tokens a row, which are in `ends`: tokens of each tail. Layers of a
        pass ask alike."""
        if self._plan is None or self._newest != (new, ends):
            self._newest, self._plan = (new, ends), self._planned(new, ends)
        return self._plan

    def _planned(self, new: int, ends: Sequence[int]) -> Plan:
        """Raises RuntimeError for more parts than one merge joins."""
        shape, window = self.shape, self.shape.window
        parts = [*self._shared]
        for row, ((start, capacity), tokens) in enumerate(zip(self._tails, ends, strict=True)):
            end = start + tokens
            first = max(0, end - window - new + 1) if window else start
            parts.append(_Part(first, end, start, capacity, (row,), True))
        each = shape.packing.most_parts
        if len(parts) > each * MOST_LAUNCHES:
            raise RuntimeError(f"the rows' KV is in {len(parts)} parts, more than one pass reads")
        entries: list[list[int]] = [[] for _ in ends]
        launches = [
            self._launch(number, new, parts[at : at + each], entries)
            for number, at in enumerate(range(0, len(parts), each))
        ]
        starts = [2 + len(ends) + 1]
        for own in entries:
            starts.append(starts[-1] + len(own))
        table = [int(shape.sinks), new, *starts, *(number for own in entries for number in own)]
        return Plan(len(ends), new, tuple(launches), _numbers(table))

    def _launch(self, number: int, new: int, parts: Sequence[_Part], entries: Sequence[list[int]]) -> Launch:
        """The launch over some parts. Notes in `entries` of each row where its results will be."""
        shape, members = self.shape, list[int]()
        scale = struct.unpack("i", struct.pack("f", shape.scale))[0]
        header = [len(parts), shape.heads, shape.kv_heads, new, scale, shape.window]
        table = [*header, new if shape.fresh else 0, 0]
        members_at, units, slots = len(table) + len(parts) * len(PART_FIELDS), 0, 0
        most = queries_of(shape.dtype, shape.width)
        for array, part in enumerate(parts):
            fine = ALL_FINE if shape.window else FINE
            first_span, spans = spans_of(part.first, part.end, fine)
            count = len(part.rows)
            blocks = -(-count * (shape.heads // shape.kv_heads) * new // most)
            table += [units, array, first_span, blocks, members_at + len(members), count]
            table += [slots, part.first, part.end, part.start, part.capacity, fine]
            table.append(part.rows[0] if part.is_tail else -1)
            for member, row in enumerate(part.rows):
                entries[row].extend((number, slots + member, spans, count))
            members += part.rows
            units, slots = units + spans * blocks, slots + spans * count
        return Launch(_numbers(table + members), units, slots)


def _numbers(table: Sequence[int]) -> mx.array:
    """MLX gives a kernel arrays of less than 8 numbers in another address space."""
    return mx.array([*table, *[0] * (8 - len(table))], mx.int32)
