"""KV of a batch whose rows keep no arrays of their own (rows.py), and how arrays of KV grow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache

from ..attention import hooks as attention
from ..attention.backend import current
from ..runtime.arrays import note_outgrown

GROW_STEP = 256
"""Tokens; capacities are multiples of it, as mlx-lm's own are.

MLX's CUDA backend hands attention of single tokens to cuDNN only then, and else to a kernel of its own, which
is slower the longer the context, and faster for batches of short ones. Milliseconds a step, 8B shape in
bfloat16 on an H100 (medians of a noisy host's, up to three runs):

| rows × context | multiples of 256 | 64 more |
|----------------|------------------|---------|
| 1 × 8,192      | 8.1              | 9.0     |
| 1 × 16,000     | 7.8              | 11.2    |
| 1 × 32,768     | 9.0              | 15.4    |
| 1 × 98,304     | 11.0             | 30.0    |
| 8 × 512        | 16.2             | 11.5    |
| 8 × 4,096      | 11.7             | 14.7    |
| 8 × 16,384     | 15.0             | 29.0    |
| 32 × 512       | 16.7             | 13.5    |
| 32 × 2,048     | 16.3             | 22.3    |

cuDNN's sums come in another order from run to run, so that bits differ even between two cold runs.
"""

HALF_UP_TO = 4096
"""Tokens: an array of one row grows by half of what it holds, up to so many. A longer one by a quarter."""

MOST_ROOM = 1024
"""Tokens that a batch grows by at most: to copy it so often costs a token 25 microseconds (8 rows of 32,000,
an 8B shape), and a quarter of them all would be 9 GB."""


def round_up(tokens: int, step: int = GROW_STEP) -> int:
    """A capacity, in tokens."""
    return -(-tokens // step) * step


def next_step(length: int) -> int:
    """Tokens by which an array that holds `length` grows: geometrically, since growing copies all of it.

    By a half as long as that is cheap, by a quarter above; to a multiple of `GROW_STEP`. 8,192 tokens after
    300, with room for 1,024 of them, are 5 copies of 20,992 tokens in all (tools/bench/kv_growth.py).
    """
    room = max(1, length // 4, min(length // 2, HALF_UP_TO))
    return round_up(length + room) - length


class GrowingStep:
    """`step` of a cache of one sequence: tokens of its first arrays, as set; then those by which they grow.

    mlx-lm's is a constant: what suits a row of 300 tokens copies all of its KV every 256. Only what makes
    arrays reads it, so a read of a cache that has some says that they are outgrown.
    """

    def __get__(self, cache: Any, owner: type | None = None) -> int:
        if cache is None:
            return GROW_STEP
        if cache.keys is None:
            return cache.__dict__.get("first_step", GROW_STEP)
        note_outgrown()
        return next_step(cache.offset)

    def __set__(self, cache: Any, tokens: int) -> None:
        cache.__dict__["first_step"] = tokens


cast(Any, KVCache).step = GrowingStep()


def _batch_capacity(tokens: int) -> int:
    capacity = round_up(tokens)
    return capacity + 64 if capacity <= current().uneven_up_to else capacity


def put_tokens(array: mx.array, new: mx.array, ends: Sequence[int]) -> mx.array:
    """`array` (rows, heads, capacity, dim) with `new` (rows, heads, n, dim) from column `ends[row]` on.

    SmolLM2's 30 layers, 4 rows, a CPU: 0.3 ms for one token, as against 0.1 where all rows end alike.
    """
    columns = _columns(tuple(ends), new.shape[2])
    return mx.put_along_axis(array, mx.broadcast_to(columns, new.shape), new, axis=2)


@lru_cache(maxsize=1)  # Layers of a pass ask alike.
def _columns(ends: tuple[int, ...], count: int) -> mx.array:
    columns = np.array(ends, np.int32)[:, None] + np.arange(count, dtype=np.int32)
    return mx.array(columns[:, None, :, None])


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


class EvenBatchKVCache(BatchKVCache):
    """A batch cache that asks for no mask while its rows lie evenly, and grows geometrically.

    A mask of an array forces attention out of its fused kernel on CUDA: 8 rows of 4,096 tokens take
    21 ms with one and 11 without (H100, tools/bench/gpu.py). One token a row needs none where every
    column is that row's.

    Row r lies in columns `starts[r]` to `ends[r]`. All end alike, but where rows took different numbers of
    guesses (`trim_rows`): `_idx` is then the end of the longest.
    """

    _starts: list[int] | None = None
    _ends: list[int] | None = None  # None: all end at `_idx`.

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
        """Of one cache: a batch of one, which has the cache's arrays."""
        if len(caches) != 1 or caches[0].keys is None:
            return super().merge(caches)
        own, batch = caches[0], cls([0])
        batch.keys, batch.values, batch._idx = own.keys, own.values, own.offset
        batch.offset = batch.offset + own.offset
        return batch

    def _set_starts(self, starts: list[int]) -> None:
        self._starts, self.left_padding = starts, mx.array(starts)

    def _set_ends(self, ends: list[int]) -> None:
        self._idx = max(ends)
        self._ends = ends if min(ends) < self._idx else None

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        more, ends = keys.shape[2], self._ends
        if self.keys is None or self._idx + more > self.keys.shape[2]:
            self._set_step(more)
        super().update_and_fetch(keys, values)
        if ends is not None:
            held = cast(list[Any], [self.keys, self.values])
            self.keys, self.values = (
                put_tokens(array, new, ends) for array, new in zip(held, (keys, values), strict=True)
            )
            self._ends = [end + more for end in ends]
        return self.keys_and_values()

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
        if not isinstance(keys, mx.array) or keys.shape[2] <= short or not short:
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
