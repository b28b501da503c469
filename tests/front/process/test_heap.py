"""What requests took goes back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import psutil
import pytest

from omlxd.common import heap
from omlxd.front.process.heap import GROWN, MOST_SKIPPED, TrimSchedule, keep_heap_trimmed


async def test_the_process_is_trimmed_each_time_that_it_has_grown():
    sizes, trims = iter([100, 100, 100 + GROWN, 10 * GROWN, 50, 50, 60, 50 + 2 * GROWN, 50]), []
    done = asyncio.Event()

    def size() -> int:
        try:
            return next(sizes)
        except StopIteration:
            done.set()
            return 0

    keeper = asyncio.create_task(keep_heap_trimmed(lambda: trims.append(1), size, look_s=0.001))
    await asyncio.wait_for(done.wait(), 60)
    keeper.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await keeper
    assert len(trims) == 2


def trims(*sizes: int, free: int = 0) -> list[int]:
    """At which looks a process is trimmed that has so many times GROWN, of which a trim frees what is over
    `free`."""
    schedule, at = TrimSchedule(GROWN), list[int]()
    for look, size in enumerate(sizes):
        if schedule.wants_trim(size * GROWN):
            at.append(look)
            schedule.trimmed(min(size, free or size) * GROWN)
    return at


def test_what_was_in_use_at_a_trim_is_given_back_once_it_is_free():
    assert trims(*[40] * 12) == [0, 2, 6], "nothing is free, and less and less is tried"
    assert trims(*[40] * 3, 80, 80, 80) == [0, 2, 3, 5], "growth is looked at anew"
    assert trims(40, 40, 40, 2, 2, 2, free=2) == [0, 1, 2], "each helps"
    assert trims(1, 2, 1, 2, 2, 2) == [], "so little is not worth it"
    late = trims(*[40] * 2000)
    assert max(b - a for a, b in itertools.pairwise(late)) == MOST_SKIPPED + 1


@pytest.mark.skipif(not psutil.LINUX, reason="what the C library keeps differs")
def test_freed_memory_that_lies_between_blocks_in_use_goes_back():
    blocks = [bytes(60_000) for _ in range(1000)]
    kept = blocks[::50]
    full = psutil.Process().memory_info().rss
    del blocks
    heap.give_memory_back()
    assert psutil.Process().memory_info().rss < full - 40_000_000 and kept
