"""A layer's KV of one row, in arrays of its own that kernels are told of by address."""

from __future__ import annotations

import weakref
from typing import Any

from ...cache import tails
from ..compile import driver as cuda_driver


class Tail(tails.Tail):
    """`address`: its row in the table of `Tails`; empty until a kernel needs it."""

    __slots__ = ("address",)

    def __init__(self, keys: Any, values: Any):
        super().__init__(keys, values)
        self.address: list[int] = []

    @property
    def is_known(self) -> bool:
        """Whether `address` is of these arrays, not of those before they grew."""
        return self.address[-1:] == [self.capacity]

    def grow(self, first: int, end: int, capacity: int) -> None:
        if self.address:
            written.pop(self.address[0], None)
        super().grow(first, end, capacity)

    def let_go(self) -> None:
        """Note that no kernel writes here any more. A tail that is freed before waits for the GPU."""
        if self.address:
            written.pop(self.address[0], None)
            self.address = []

    def __del__(self) -> None:
        if self.address:  # MLX does not know what a kernel writes to that was told addresses.
            cuda_driver.wait()


written: weakref.WeakValueDictionary[int, Tail] = weakref.WeakValueDictionary()
"""Tails by the address of their first array. The kernel writes there, which MLX does not see: it lets copies
of a cache share arrays."""
