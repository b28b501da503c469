"""A map of bounded size that drops its least recently used entries."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedMap(Generic[K, V]):
    """Keys in the order of their last use. Thread-safe.

    max_cost   sum of the costs at most
    cost_of    cost of a value; constant while the value is in the map: `pop` it to change it
    max_items  entries at most
    least      entries that stay whatever they cost
    """

    def __init__(
        self,
        max_cost: int = sys.maxsize,
        cost_of: Callable[[V], int] = lambda _: 1,
        *,
        max_items: int = sys.maxsize,
        least: int = 0,
    ):
        self.max_cost, self._max_items, self._least = max_cost, max_items, least
        self._cost_of = cost_of
        self._entries: OrderedDict[K, V] = OrderedDict()
        self.cost = 0
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def values(self) -> Iterator[V]:
        """Yield the values, most recently used first."""
        return reversed(self._entries.values())

    def peek(self, key: K) -> V | None:
        """Return a value without using it."""
        return self._entries.get(key)

    def get(self, key: K) -> V | None:
        """Return a value, which is the most recently used then."""
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> None:
        """Add or replace an entry, which is the most recently used then; drop what exceeds the bounds."""
        with self._lock:
            self.pop(key)
            self._entries[key] = value
            self.cost += self._cost_of(value)
            while len(self._entries) > self._least and (
                self.cost > self.max_cost or len(self._entries) > self._max_items
            ):
                self.cost -= self._cost_of(self._entries.popitem(last=False)[1])

    def clear(self) -> int:
        """Remove all entries; returns their number."""
        with self._lock:
            count = len(self._entries)
            self._entries.clear()
            self.cost = 0
            return count

    def pop(self, key: K) -> V | None:
        """Remove an entry and return its value."""
        with self._lock:
            value = self._entries.pop(key, None)
            if value is not None:
                self.cost -= self._cost_of(value)
            return value
