"""KV of a batch whose rows keep no arrays of their own (rows.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache

from ..attention import hooks as attention
from ..attention.backend import current
from ..runtime.arrays import note_outgrown
from .growth import GROW_STEP, MOST_ROOM, put_tokens, round_up
from .packed import MaybePacked, Quantisation, is_packed, parts_of


def _batch_capacity(tokens: int) -> int:
    capacity = round_up(tokens)
    return capacity + 64 if capacity <= current().uneven_up_to else capacity


@lru_cache(maxsize=1)  # Layers of a pass ask alike: 30 of 16 rows took 0.5 ms, and take 0.15.
def _fewer(lengths: mx.array, counts: tuple[int, ...]) -> mx.array:
    return lengths - mx.array(counts)


def side_by_side(lengths: Sequence[int], end: int, capacity: int, *arrays: mx.array) -> mx.array:
    """The rows of `arrays`, (rows, heads, columns, dim) each, one behind the other. Their first `lengths`
    columns end at column `end` of `capacity`; the others are zeros."""
    _, heads, _, width = arrays[0].shape
    joint = mx.zeros((sum(array.shape[0] for array in arrays), heads, capacity, width), arrays[0].dtype)
    first = 0
    for length, array in zip(lengths, arrays, strict=True):
        joint[first : first + array.shape[0], :, end - length : end] = array[..., :length, :]
        first += array.shape[0]
    return joint


class EvenBatchKVCache(MaybePacked, BatchKVCache):
    """A batch cache, packed or not, that asks for no mask while its rows lie evenly, and grows geometrically.

    A mask of an array forces attention out of its fused kernel on CUDA: 8 rows of 4,096 tokens take
    21 ms with one and 11 without (H100, tools/bench/gpu.py). One token a row needs none where every
    column is that row's.

    Row r lies in columns `starts[r]` to `ends[r]`. All end alike, but where rows took different numbers of
    guesses (`trim_rows`): `_idx` is then the end of the longest. Padding of packed KV is zeros: no weight, no
    scale, no bias.
    """

    _starts: list[int] | None = None
    _ends: list[int] | None = None  # None: all end at `_idx`.

    def __init__(self, left_padding: list[int], how: Quantisation | None = None):
        super().__init__(left_padding)
        self.how = how

    @property
    def starts(self) -> list[int]:
        if self._starts is None:
            self._starts = cast(list[int], self.left_padding.tolist())
        return self._starts

    @property
    def ends(self) -> list[int]:
        return self._ends or [self._idx] * self.left_padding.shape[0]

    @property
    def is_even(self) -> bool:
        """Whether each column is every row's."""
        return self._ends is None and not any(self.starts)

    @classmethod
    def merge(cls, caches: Any) -> Any:
        """Of one cache: a batch of one, which has the cache's arrays.

        Raises RuntimeError for a class whose `size()` is not its tokens: mlx-lm would leave those out.
        """
        first, *others = caches
        if others and any(cache.size() != cache.offset for cache in caches):
            raise RuntimeError(f"{type(first).__name__} has no size of its own, so it can't be batched")
        if first.keys is None:
            return cls([0] * len(caches), first.how) if is_packed(first) else super().merge(caches)
        if others and not is_packed(first):
            return super().merge(caches)
        batch = cls([0], getattr(first, "how", None))
        batch.keys, batch.values, batch._idx = first.keys, first.values, first.offset
        batch.offset = batch.offset + first.offset
        for cache in others:
            batch.extend(cls.merge([cache]))
        return batch

    def _set_starts(self, starts: list[int]) -> None:
        self._starts, self.left_padding = starts, mx.array(starts)

    def _set_ends(self, ends: list[int]) -> None:
        self._idx = max(ends)
        self._ends = ends if min(ends) < self._idx else None

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        more, ends = keys.shape[2], self._ends
        if self.keys is None or self._idx + more > parts_of(self.keys)[0].shape[2]:
            self._set_step(more)
        if self.how is not None:
            self._write(keys, values, self._idx, ends)
            self._set_ends([end + more for end in self.ends])
            self.offset = self.offset + more
            return self._read(self._idx, more)
        super().update_and_fetch(keys, values)
        if ends is not None:
            held = cast(list[Any], [self.keys, self.values])
            self.keys, self.values = (
                put_tokens(array, new, ends) for array, new in zip(held, (keys, values), strict=True)
            )
            self._ends = [end + more for end in ends]
        return self.keys_and_values()

    def keys_and_values(self) -> Any:
        return super().keys_and_values() if self.how is None else self._read_again(self._idx)

    def places(self) -> tuple[list[int], list[int], bool]:
        return self.starts, self.ends, self.is_even

    def _set_step(self, more: int) -> None:
        """Before the arrays grow for `more` tokens."""
        if self.keys is not None:
            note_outgrown()
        room = max(more, min(self._idx // 4, MOST_ROOM))
        self.step = _batch_capacity(self._idx + room) - self._idx

    def advance(self, offset: mx.array, count: int = 1) -> None:
        """`count` new tokens of each row have been put into the arrays. `offset`: tokens of each row now."""
        self._idx += count
        self.offset = offset
        if self._ends is not None:
            self._ends = [end + count for end in self._ends]

    def trim_rows(self, counts: Sequence[int]) -> None:
        """Forget the last `counts[row]` tokens of each row."""
        self._set_ends([end - count for end, count in zip(self.ends, counts, strict=True)])
        self.offset = _fewer(self.offset, tuple(counts))

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> Any:
        even = self._ends is None
        if N == 1 and self.is_even and not return_array and not kwargs.get("window_size"):
            return None
        mask = super().make_mask(N, return_array, **kwargs) if even else self._uneven_mask(N, **kwargs)
        if not kwargs.get("window_size"):
            attention.note_mask(mask)
        return mask

    def _uneven_mask(self, count: int, window_size: int | None = None) -> mx.array:
        """(rows, 1, count, columns): whether a new token sees a column."""
        columns = mx.arange(self._idx + count)
        own = mx.array(self.ends)[:, None, None, None] + mx.arange(count)[:, None]
        mask = (columns <= own) & (columns >= self.left_padding[:, None, None, None])
        return mask & (own < columns + window_size) if window_size else mask

    def extend(self, other: Any) -> None:
        longest = max(self._idx, other._idx)
        ends = [end + longest - cache._idx for cache in (self, other) for end in cache.ends]
        starts = [start + longest - cache._idx for cache in (self, other) for start in cache.starts]
        self._extend(other)
        self._set_starts(starts)
        self._set_ends(ends)

    def _extend(self, other: Any) -> None:
        """Copies each row once, into arrays with room for what the next steps add."""
        if self.keys is None or other.keys is None:
            super().extend(other)
            return
        end = max(self._idx, other._idx)
        capacity = _batch_capacity(end + max(1, min(end // 4, MOST_ROOM)))
        moved = partial(side_by_side, (self._idx, other._idx), end, capacity)
        for name in ("keys", "values"):
            setattr(self, name, tree_map(moved, getattr(self, name), getattr(other, name)))
            setattr(other, name, None)
        self.offset = mx.concatenate([self.offset, other.offset])
        self._idx = end

    def filter(self, batch_indices: Any) -> None:
        """As mlx-lm's, without waiting for the device.

        Padding that nobody needs any more goes, but where our kernel skips it and it is less than half: what
        is cut off in front would be copied once more, when the next step wants arrays in one piece.
        """
        starts, ends = ([of[row] for row in batch_indices] for of in (self.starts, self.ends))
        rows, spare = mx.array(batch_indices), min(starts)
        if current().reads_own_rows() and 2 * spare < self._idx:
            spare = 0
        self.offset = self.offset[rows]
        if self.keys is not None:
            self.keys, self.values = (
                tree_map(lambda array: array[rows][..., spare:, :], held)
                for held in cast(list[Any], [self.keys, self.values])
            )
        self._set_starts([start - spare for start in starts])
        self._set_ends([end - spare for end in ends])
        keys, values, short = cast(Any, self.keys), cast(Any, self.values), current().uneven_up_to
        if keys is None or self.how is not None or keys.shape[2] <= short or not short:
            return
        if keys.shape[2] % GROW_STEP:
            # Padding that nobody needs any more was cut off in front: the next token makes it even again.
            self.keys, self.values = keys[..., : self._idx, :], values[..., : self._idx, :]


class WindowBatchKVCache(BatchRotatingKVCache):
    """Windows of a batch, whose rows may forget different numbers of tokens."""

    _fewer: list[int] | None = None  # Tokens that each row has had fewer than `_offset`.

    def tokens(self) -> list[int]:
        """That each row has had, as `offset` counts them; without waiting for a step that computes."""
        if self._fewer is None:
            self._fewer = [self._offset - tokens for tokens in cast(list[int], self.offset.tolist())]
        return [self._offset - fewer for fewer in self._fewer]

    def advance(self, offset: mx.array) -> None:
        """A new token of each row has been put into the ring. `offset`: tokens of each row now."""
        if self._idx == self.max_size:
            self._idx, self.rotated = 0, True
        self._idx += 1
        self._offset += 1
        self.offset = offset
        end = self.max_size if self.rotated else self._idx
        self.left_padding = mx.array([max(0, end - tokens) for tokens in self.tokens()])

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        if N > 1:
            self._temporal_order()  # As the pass will: the mask below is of windows in order.
        mask = super().make_mask(N, window_size, return_array)
        if window_size in (None, self.max_size):
            attention.note_mask(mask, self.max_size)
        return mask

    def extend(self, other: Any) -> None:
        super().extend(other)
        self._fewer = None

    def filter(self, batch_indices: Any) -> None:
        super().filter(batch_indices)
        self._fewer = None

    def trim_rows(self, counts: Sequence[int]) -> None:
        """Forget the last `counts[row]` tokens of each row, after a pass of several and fewer than those.

        Such a pass leaves the windows in order, each with as many older tokens as its first one needs.
        """
        if all_rows := min(counts):
            # In one piece: a compiled step writes the next tokens into them.
            self.keys, self.values = (
                mx.contiguous(array[..., :-all_rows, :])
                for array in cast(list[Any], [self.keys, self.values])
            )
            self._idx -= all_rows
            self._offset -= all_rows
            self.offset = self.offset - all_rows
        if max(counts) > all_rows:
            # Moves rows to the right edge. What comes round to the left is dropped with the next token.
            more = [count - all_rows for count in counts]
            self._lengths = self.offset - mx.array(more)
            self.finalize()
            if self._fewer is not None:
                self._fewer = [fewer + count for fewer, count in zip(self._fewer, more, strict=True)]
