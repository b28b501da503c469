"""A layer's KV of one row, in arrays of its own that kernels are told of by address."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from ...cache.packed import parts_of
from ..compile import driver as cuda_driver


class Tail:
    """A layer's KV of one row, behind its segments: keys and values, (1, heads, capacity, dim) each, or lists
    of three such where they are packed. Token t lies in column t % capacity.

    `address`: its row in the table of `Tails`; empty until a kernel needs it.
    """

    __slots__ = ("__weakref__", "address", "keys", "values")

    def __init__(self, keys: Any, values: Any):
        self.keys, self.values = keys, values
        self.keys, self.values = self._mapped(mx.contiguous)
        self.address: list[int] = []

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

    @property
    def capacity(self) -> int:
        """Tokens."""
        return self.parts[0].shape[2]

    @property
    def is_known(self) -> bool:
        """Whether `address` is of these arrays, not of those before they grew."""
        return self.address[-1:] == [self.capacity]

    def grow(self, first: int, end: int, capacity: int) -> None:
        """Have room for `capacity` tokens; those from `first` to `end` stay. Copies this tail alone."""
        if self.address:
            written.pop(self.address[0], None)
        self.keys, self.values = self._mapped(lambda part: laid_out(part, first, end, capacity))

    def in_order(self, first: int, end: int) -> tuple[Any, Any]:
        """Copies of tokens `first` to `end`: keys and values."""
        return self._mapped(lambda part: _in_order(part, first, end))

    def let_go(self) -> None:
        """Note that no kernel writes here any more. A tail that is freed before waits for the GPU."""
        if self.address:
            written.pop(self.address[0], None)
            self.address = []

    def __deepcopy__(self, memo: object) -> Tail:
        return Tail(*self._mapped(_copy))

    def __del__(self) -> None:
        if self.address:  # MLX does not know what a kernel writes to that was told addresses.
            cuda_driver.wait()


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


written: weakref.WeakValueDictionary[int, Tail] = weakref.WeakValueDictionary()
"""Tails by the address of their first array. The kernel writes there, which MLX does not see: it lets copies
of a cache share arrays."""
