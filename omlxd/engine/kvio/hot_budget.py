"""How many bytes the hot tier may hold now.

A fixed limit is taken as it is. Without one the tier grows into what memory safely allows: what the
machine has free, less a reserve, and never more than half of it. Hot blocks are copies of KV that
can be had again, so they must be the first to give way: the figure is read afresh twice a second.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx

from ...common.units import available_ram, total_ram
from ...kv.block_pool import BlockPool
from ...kv.store import KVStore
from .. import mlx_adapter

REFRESH_S = 0.5
RESERVE_FRACTION = 0.1
RESERVE_BYTES = 2 << 30
MOST_FRACTION = 0.5


WAIT_S = 0.5
"""How long a trim waits for writers: the engine's thread does nothing else meanwhile."""


def evict_unused(store: KVStore, wait_s: float = WAIT_S) -> None:
    """Evict hot blocks that no request uses. None is lost: what no writer takes in time stays in RAM."""
    deadline = time.monotonic() + wait_s
    flusher = store.flusher
    largest = max((entry.nbytes for entry in flusher.unwritten.due.values()), default=0) if flusher else 0
    while True:
        if flusher is not None and flusher.unwritten.due:
            room = flusher.writer.wait_for_room(2 * largest, deadline - time.monotonic())
            if not (room and flusher.health.stores_on):
                return
        if not store.pool.evict(1):
            return


class HotBudget:
    """Call it for the budget in bytes. `limit` None: as much as is safe; `used`: the tier's bytes now.

    parts  processes that have the machine's memory in common, this one among them
    share  what the front leaves to this engine beside the others; None: all
    promised  bytes that requests which were admitted have still to take
    """

    def __init__(self, limit: int | None, used: Callable[[], int], parts: int = 1):
        self._limit, self._parts = limit, parts
        self._used = used
        self._read_at = float("-inf")
        self._budget = 0
        self.share: int | None = None
        self.promised: Callable[[], int] = lambda: 0

    def __call__(self) -> int:
        own = self._own()
        return own if self.share is None else min(own, self.share)

    def _own(self) -> int:
        if self._limit is not None:
            return self._limit
        now = time.monotonic()
        if now - self._read_at >= REFRESH_S:
            self._read_at = now
            total, available = memory()
            if mlx_adapter.backend() == "metal":  # `memory` does not see what other programs hold there.
                available = min(available, available_ram(self._used()) + mx.get_cache_memory())
            reserve = max(RESERVE_BYTES, int(total * RESERVE_FRACTION))
            # On other backends each process has a GPU of its own.
            parts = self._parts if mlx_adapter.backend() in ("cpu", "metal") else 1
            spare = max(0, self._used() + (available - reserve) // parts - self.promised())
            self._budget = min(int(total * MOST_FRACTION) // parts, spare)
        return self._budget


class HotTiers:
    """The hot tiers of one process, which divide `budget`.

    Equal parts; a tier that uses less than its part leaves the rest to the others. One that holds more than
    its part gives way when it is trimmed.
    """

    def __init__(self, limit: int | None, parts: int = 1):
        self._pools: list[BlockPool] = []
        self.budget = HotBudget(limit, lambda: sum(pool.hot_bytes for pool in self._pools), parts)

    def part_of(self, pool: BlockPool) -> Callable[[], int]:
        """Take in `pool`; returns what says how many bytes it may hold now."""
        self._pools.append(pool)

        def part() -> int:
            total = self.budget()
            alike = total // len(self._pools)
            return total - sum(min(other.hot_bytes, alike) for other in self._pools if other is not pool)

        return part

    def leave(self, pool: BlockPool) -> None:
        """`pool` is closed and has no part in the budget any more."""
        self._pools.remove(pool)


def memory() -> tuple[int, int]:
    """(total, available) bytes where MLX's arrays live: the GPU's own memory, or the machine's.

    A backend may ask its driver what other processes hold (6 µs a call on an H100's host).
    """
    if mlx_adapter.backend() == "cpu":
        total = total_ram()
        return total, min(total, available_ram() + mx.get_cache_memory())
    info: dict[str, Any] = {}
    with contextlib.suppress(Exception):
        info = cast(dict[str, Any], mx.device_info())
    total = int(info.get("max_recommended_working_set_size") or info.get("total_memory") or 0)
    total = total or int(info.get("memory_size") or total_ram())
    available = total - mx.get_active_memory()
    if (free := mlx_adapter.attention_backend().free_memory()) is not None:
        # What other processes hold is not ours to count on; what MLX has freed but keeps is.
        available = min(available, free + mx.get_cache_memory())
    return total, max(0, available)
