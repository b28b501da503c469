"""Hits and TTFT of the last hour's requests.

A request that ends is added to the slot of its time. Nothing runs between requests.
"""

from __future__ import annotations

import time
from collections import deque

import msgspec

from ....chat import Usage

SLOT_S, SLOTS = 30, 120


class Slot(msgspec.Struct):
    """Requests that ended in the `SLOT_S` seconds from `at` (since 1970). Tokens, and seconds.

    first     requests that gave a first token; ttft_sum, ttft_max: theirs
    prompt    of these cached_hot from RAM, cached_cold from SSD
    """

    at: int
    requests: int = 0
    first: int = 0
    ttft_sum: float = 0.0
    ttft_max: float = 0.0
    prompt: int = 0
    cached_hot: int = 0
    cached_cold: int = 0
    completion: int = 0

    def add(self, other: Slot) -> None:
        """Add the counts of `other`."""
        for name in self.__struct_fields__[1:]:
            both = getattr(self, name), getattr(other, name)
            setattr(self, name, max(both) if name == "ttft_max" else sum(both))


class LastHour:
    def __init__(self) -> None:
        self._slots: deque[Slot] = deque(maxlen=SLOTS)

    def add(self, usage: Usage, ttft_s: float | None) -> None:
        """Count a request that ended. `ttft_s` None: it gave no token."""
        slot = Slot(
            at=int(time.time()) // SLOT_S * SLOT_S,
            requests=1,
            first=int(ttft_s is not None),
            ttft_sum=ttft_s or 0.0,
            ttft_max=ttft_s or 0.0,
            prompt=usage.prompt_tokens - usage.left_over,
            cached_hot=usage.cached_hot,
            cached_cold=usage.cached_cold,
            completion=usage.completion_tokens,
        )
        while self._slots and self._slots[-1].at >= slot.at:  # A clock that was set back leaves later ones.
            slot.add(self._slots.pop())
        self._slots.append(slot)

    def since(self, at: float) -> list[Slot]:
        """Return the slots that began at `at` or later, oldest first, without empty ones."""
        oldest = max(at, time.time() - SLOT_S * SLOTS)
        return [slot for slot in self._slots if slot.at >= oldest]
