"""What each rank holds: it says so with every `Pong`, wherever it runs, and rank 0 tells the front."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import psutil

from ....common.units import process_memory
from ....kv.store import KVStore
from ....wire.plan import Pong
from ...mlx_adapter import LinkTimes
from ...schedule.counts import Counts

OLD_S = 300.0
"""Seconds after which the link is timed again, if steps went over it."""

_SUMMED = (
    *("mlx_active_bytes", "mlx_peak_bytes", "mlx_cache_bytes"),
    *("kv_hot_bytes", "kv_unwritten_blocks", "kv_store_queue_bytes"),
)
_EACH = ("kv_hot_budget_bytes", *(f"mlx_{what}_limit_bytes" for what in ("cache", "memory", "wired")))
"""Figures that are as large on each rank."""
_SHOWN = ("pid", "resident_bytes", "mlx_active_bytes", "kv_hot_bytes", "kv_cold_tier_on", "kv_cold_disk_full")
"""Figures of each rank by itself, as `rank_<number>_<name>`."""

_process = psutil.Process()


def stores(store: KVStore | None) -> bool:
    """Whether the disk of this process works. Any thread."""
    return store is None or store.flusher is None or store.flusher.health.is_on


def held(store: KVStore | None) -> Pong:
    """What this process holds. Any thread."""
    flusher = store.flusher if store is not None else None
    active = mx.get_active_memory()
    return Pong(
        pid=os.getpid(),
        resident_bytes=process_memory(_process),
        mlx_active_bytes=active,
        mlx_peak_bytes=max(active, mx.get_peak_memory()),
        mlx_cache_bytes=mx.get_cache_memory(),
        kv_hot_bytes=store.pool.hot_bytes if store is not None else 0,
        kv_unwritten_blocks=len(flusher.unwritten.due) if flusher is not None else 0,
        kv_store_queue_bytes=flusher.writer.queued_bytes if flusher is not None else 0,
        kv_cold_tier_on=stores(store),
        kv_cold_disk_full=flusher is not None and flusher.health.is_full,
    )


class LinkFigures:
    """The link's times beside what a decode step takes: the share of it that its sums take.

    That is the link alone, timed while nothing is computed. What ranks wait for the one that computes longest
    is not in it. `counts`: of rank 0's scheduler.
    """

    def __init__(self, counts: Counts, clock: Callable[[], float] = time.monotonic):
        self._counts, self._clock = counts, clock
        self._times, self._at = LinkTimes(), clock()
        self._before = 0, 0.0
        self._step_s = 0.0

    def take(self, times: LinkTimes) -> None:
        """The link was timed."""
        self._times, self._at = times, self._clock()
        self._before = self._counts.decodes, self._counts.decode_s

    @property
    def is_old(self) -> bool:
        """Whether to time it again. Without a step since, nobody has used it."""
        return self._counts.decodes > self._before[0] and self._clock() - self._at > OLD_S

    def add_to(self, values: dict[str, float]) -> None:
        """Any thread."""
        times, (steps, seconds) = self._times, self._before
        if (count := self._counts.decodes - steps) > 0:
            self._step_s = (self._counts.decode_s - seconds) / count
        values["link_exchanges_per_step"] = times.exchanges
        values["link_latency_us"] = 1e6 * times.step_s / max(1, times.exchanges)
        values["link_bytes_per_s"] = times.bytes_per_s
        values["link_step_share"] = min(1.0, times.step_s / self._step_s) if self._step_s else 0.0


def add_figures(values: dict[str, float], ranks: Sequence[Pong]) -> None:
    """Make `values`, rank 0's, those of all `ranks`, and add those of each. Any thread."""
    values["ranks"] = len(ranks)
    for name in _SUMMED:
        values[name] = values.get(name, 0.0) + sum(getattr(rank, name) for rank in ranks[1:])
    for name in values.keys() & _EACH:
        values[name] *= len(ranks)
    off = [rank for rank in ranks if not rank.kv_cold_tier_on]
    if off and "kv_cold_tier_on" in values:
        values["kv_cold_tier_on"] = False
        values["kv_cold_disk_full"] = all(rank.kv_cold_disk_full for rank in off)
    for number, rank in enumerate(ranks):
        values.update({f"rank_{number}_{name}": getattr(rank, name) for name in _SHOWN})
        if rank.kv_cold_bytes >= 0:  # Of the others the front knows.
            values[f"rank_{number}_cold_bytes"] = rank.kv_cold_bytes
