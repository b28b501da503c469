"""What the requests of the last hour hit, and their TTFT: for whoever looks afterwards.

A request that ends is added to the slot of its time. Nothing runs between requests.
"""

from __future__ import annotations

import time
from collections import deque

import msgspec

from ...chat import Usage

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


class LastHour:
    def __init__(self) -> None:
        self._slots: deque[Slot] = deque(maxlen=SLOTS)

    def add(self, usage: Usage, ttft_s: float | None) -> None:
        """A request ended. `ttft_s` None: it gave no token."""
        at = int(time.time()) // SLOT_S * SLOT_S
        if not self._slots or self._slots[-1].at < at:
            self._slots.append(Slot(at))
        slot = self._slots[-1]
        slot.requests += 1
        slot.prompt += usage.prompt_tokens
        slot.cached_hot += usage.cached_hot
        slot.cached_cold += usage.cached_cold
        slot.completion += usage.completion_tokens
        if ttft_s is not None:
            slot.first += 1
            slot.ttft_sum += ttft_s
            slot.ttft_max = max(slot.ttft_max, ttft_s)

    def since(self, at: float) -> list[Slot]:
        """Slots of the last hour that began at `at` or later, oldest first. Empty ones are left out."""
        oldest = max(at, time.time() - SLOT_S * SLOTS)
        return [slot for slot in self._slots if slot.at >= oldest]
