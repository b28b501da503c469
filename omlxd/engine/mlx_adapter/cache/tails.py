"""A batch whose rows keep arrays of their own into which a backend's kernels put new tokens.

Joining and leaving copies nobody's KV, and a row grows alone. Layers may keep all tokens or a window of them,
packed or not, behind segments that rows share or without any. rows.py has the same for MLX's own attention.

A kernel puts new tokens into arrays that MLX takes for unchanged. So nobody else may write there, what is
read of them later is in another evaluation, and none is freed while a kernel may write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map

from .growth import MOST_ROOM, round_up
from .packed import parts_of
from .rows import RowBatch, offsets_of
from .segments import Pair, Segment

MOST_TAKEN_BACK = 16
"""Tokens that a ring holds beside its window. A pass of so many overwrites no token that its first one sees,
and its guesses can be forgotten. Before a longer pass the ring grows."""


class Tail:
    """A layer's KV of one row, behind its segments: keys and values, (1, heads, capacity, dim) each, or lists
    of three such where they are packed. Token t lies in column t % capacity."""

    __slots__ = ("__weakref__", "capacity", "keys", "values")

    def __init__(self, keys: Any, values: Any):
        self.keys, self.values = keys, values
        self.keys, self.values = self._mapped(mx.contiguous)
        self.capacity: int = self.parts[0].shape[2]  # Each layer's steps ask for it.

    def _mapped(self, change: Callable[[mx.array], mx.array]) -> tuple[Any, Any]:
        """Keys and values of changed arrays."""
        return tree_map(change, self.keys), tree_map(change, self.values)

    def copy_arrays(self) -> None:
        """Have arrays that nobody else has."""
        self.keys, self.values = self._mapped(_copy)

    @property
    def parts(self) -> list[mx.array]:
        """Arrays of keys, then of values."""
        return [*parts_of(self.keys), *parts_of(self.values)]

    def grow(self, first: int, end: int, capacity: int) -> None:
        """Have room for `capacity` tokens; those from `first` to `end` stay. Copies this tail alone."""
        self.keys, self.values = self._mapped(lambda part: laid_out(part, first, end, capacity))
        self.capacity = capacity

    def in_order(self, first: int, end: int) -> tuple[Any, Any]:
        """Copies of tokens `first` to `end`: keys and values."""
        return self._mapped(lambda part: _in_order(part, first, end))

    def let_go(self) -> None:
        """Note that no kernel writes here any more."""

    def __deepcopy__(self, memo: object) -> Tail:
        return type(self)(*self._mapped(_copy))


def laid_out(part: mx.array, first: int, end: int, capacity: int, shift: int = 0) -> mx.array:
    """Tokens `first` to `end` of `part`, token t in column (t - shift) % its own capacity, laid out anew."""
    own, at = part.shape[2], first
    out = mx.zeros((*part.shape[:2], capacity, part.shape[3]), part.dtype)
    while at < end:
        column, to = (at - shift) % own, at % capacity
        count = min(end - at, own - column, capacity - to)
        out[:, :, to : to + count] = part[:, :, column : column + count]
        at += count
    return out


def _in_order(part: mx.array, first: int, end: int) -> mx.array:
    column, capacity = first % part.shape[2], part.shape[2]
    behind = part[:, :, : max(0, column + end - first - capacity)]
    # A copy, also of all: whoever reads a view makes the array move.
    return mx.concatenate([part[:, :, column : column + end - first], behind], axis=2)


def _copy(part: mx.array) -> mx.array:
    return part + 0


class TailRowsKVCache(RowBatch):
    """A layer of a batch. Of rows of one class: KVCache, SequenceKVCache, RotatingKVCache.

    window    tokens that a new one sees; 0: all
    how       keys and values are packed so, or None
    ends      tokens of each row, behind its `segments`
    tails     none until the first tokens come, of rows that have none
    """

    gives_views = False
    """A kernel writes there."""
    make_tail: type[Tail] = Tail

    def __init__(self, rows: Sequence[Any]):
        super().__init__()
        first = rows[0]
        self.window: int = getattr(first, "max_size", 0)
        self.how = getattr(first, "how", None)
        self.layer: str = getattr(first, "layer", "")
        for row in rows:
            if row.keys is None and getattr(row, "segments", ()):
                row.open_tail()
        self.segments: list[list[Segment]] = [list(getattr(row, "segments", ())) for row in rows]
        self.bases = [getattr(row, "base", 0) for row in rows]
        """Tokens before each row's tail."""
        self.ends = [row.offset - base for row, base in zip(rows, self.bases, strict=True)]
        self.tails = [self._tail_of(row) for row in rows if row.keys is not None]
        if len(self.tails) not in (0, len(rows)):
            raise RuntimeError("rows with KV and without it don't mix")
        self._newest_offset: tuple[list[int], mx.array] | None = None
        self._fresh: tuple[Any, ...] = ()  # To be put into the tails.
        self._behind: mx.array | None = None  # Once it is computed, new tokens are there.

    def _tail_of(self, row: Any) -> Tail:
        if not self.window:
            return self.make_tail(row.keys, row.values)
        ordered, end = [row._temporal_order(array) for array in (row.keys, row.values)], row.offset
        held, capacity = ordered[0].shape[2], self._room(0, end, 1)
        first = end - min(end, held, self.window)
        return self.make_tail(*(laid_out(array, first, end, capacity, end - held) for array in ordered))

    def changed(self) -> None:
        """Note that rows, or arrays of theirs, are others now."""

    def settle(self) -> None:
        """See to it that what MLX reads of the tails from now on is there."""

    def _room(self, capacity: int, end: int, more: int) -> int:
        """The capacity to have before `more` tokens come behind `end`, now that it is `capacity`."""
        ring = self.window + max(more, MOST_TAKEN_BACK)
        if capacity >= (min(end + more, ring) if self.window else end + more):
            return capacity
        wanted = round_up(end + max(more, min(end // 4, MOST_ROOM)))
        return min(wanted, ring) if self.window else wanted

    def has_room(self, count: int) -> bool:
        """Whether each of `tails` has it for `count` more tokens."""
        held = zip(self.tails, self.ends, strict=True)
        return all(self._room(tail.capacity, end, count) == tail.capacity for tail, end in held)

    def make_room(self, count: int) -> None:
        """For `count` tokens behind each of `tails`."""
        if not self.window and all(
            [end + count <= tail.capacity for tail, end in zip(self.tails, self.ends, strict=True)]
        ):
            return
        for tail, end in zip(self.tails, self.ends, strict=True):
            if (capacity := self._room(tail.capacity, end, count)) > tail.capacity:
                self.settle()
                tail.grow(max(0, end - tail.capacity), end, capacity)
                self.changed()

    @property
    def offset(self) -> mx.array:
        """(rows,): tokens of each row."""
        if self._newest_offset is None or self._newest_offset[0] is not self.ends:
            tokens = tuple([base + end for base, end in zip(self.bases, self.ends, strict=True)])
            self._newest_offset = self.ends, offsets_of(tokens)
        return self._newest_offset[1]

    @property
    def state(self) -> list[mx.array]:
        return [part for tail in self.tails for part in tail.parts]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._give(keys, values)
        self._put(keys, values)
        return keys, values

    def _put(self, keys: mx.array, values: mx.array) -> None:
        """Make room for new tokens, which `attend` puts there."""
        count = keys.shape[2]
        fresh = [self.how.pack(array) for array in (keys, values)] if self.how else [keys, values]
        if not self.tails:
            room = self._room(0, 0, count)
            self.tails = [self.make_tail(*(_empty(held, room) for held in fresh)) for _ in self.ends]
        if [part.dtype for held in fresh for part in parts_of(held)] != [
            p.dtype for p in self.tails[0].parts
        ]:
            raise RuntimeError("new tokens are of another type than the KV before")
        self.make_room(count)
        self.ends = [end + count for end in self.ends]
        self._fresh, self._behind = tuple(fresh), None

    def by_mlx(self, queries: mx.array, scale: float, sinks: Any) -> mx.array:
        """Attention of more new tokens than the kernels take, row by row."""
        new, out = queries.shape[2], list[mx.array]()
        if self._behind is not None:
            mx.eval(self._behind)  # MLX does not know that this put there what it reads.
        for row, end in enumerate(self.ends):
            first = max(0, end - self.window - new + 1) if self.window else 0
            tokens, own = mx.arange(first, end), mx.arange(end - new, end)[:, None]
            whole = self.joined(row, first, end)
            mask: Any = (tokens <= own) & (tokens > own - self.window) if self.window else "causal"
            out.append(
                mx.fast.scaled_dot_product_attention(
                    queries[row : row + 1], *whole, scale=scale, mask=mask, sinks=sinks
                )
            )
        return mx.concatenate(out)

    def joined(self, row: int, first: int, end: int) -> Pair:
        """Copies of keys and values, unpacked: of the row's segments, and of tokens `first` to `end` of its
        tail."""
        held = self.tails[row].in_order(first, end)
        pairs = [one.pair(self.layer) for one in self.segments[row]]
        pairs.append(held if self.how is None else cast(Pair, tuple(map(self.how.unpack, held))))
        keys, values = (mx.concatenate(list(each), axis=2) for each in zip(*pairs, strict=True))
        return keys, values

    def extend(self, other: TailRowsKVCache) -> None:
        if bool(self.tails) != bool(other.tails):
            raise RuntimeError("rows with KV and without it don't mix")
        self.tails, self.ends = self.tails + other.tails, self.ends + other.ends
        self.bases, self.segments = self.bases + other.bases, self.segments + other.segments
        self.changed()

    def filter(self, batch_indices: Sequence[int]) -> None:
        for name in ("tails", "ends", "bases", "segments"):
            held = getattr(self, name)
            setattr(self, name, [held[row] for row in batch_indices] if held else [])
        self.changed()

    def __deepcopy__(self, memo: dict[int, Any]) -> TailRowsKVCache:
        self.settle()
        other = copy(self)
        other.tails, other.segments = deepcopy((self.tails, self.segments), memo)
        other.changed()
        return other

    def advance(self, count: int) -> None:
        """`count` new tokens of each row have been put into the tails."""
        self.ends = [end + count for end in self.ends]

    def trim_rows(self, counts: Sequence[int]) -> None:
        """Forget the last `counts[row]` tokens of each row."""
        self.ends = [end - count for end, count in zip(self.ends, counts, strict=True)]

    def held_by(self, row: int) -> tuple[Any, Sequence[Any]]:
        self.settle()
        return self.tails[row], self.segments[row]

    def window_of(self, row: int) -> dict[str, mx.array]:
        """Copies of keys and values of a row's window, in order."""
        self.settle()
        held = self.tails[row].in_order(max(0, self.ends[row] - self.window), self.ends[row])
        return dict(zip(("keys", "values"), held, strict=True))


def _empty(held: Any, capacity: int) -> Any:
    return tree_map(lambda part: mx.zeros((1, part.shape[1], capacity, part.shape[3]), part.dtype), held)
