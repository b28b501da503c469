"""What requests took goes back."""

from __future__ import annotations

import asyncio
import contextlib

import psutil
import pytest

from omlxd.common import heap
from omlxd.front.process.heap import GROWN, keep_heap_trimmed


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


@pytest.mark.skipif(not psutil.LINUX, reason="what the C library keeps differs")
def test_freed_memory_that_lies_between_blocks_in_use_goes_back():
    blocks = [bytes(60_000) for _ in range(1000)]
    kept = blocks[::50]
    full = psutil.Process().memory_info().rss
    del blocks
    heap.give_memory_back()
    assert psutil.Process().memory_info().rss < full - 40_000_000 and kept
