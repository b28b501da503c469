"""A trim gives RAM back, and no block that has yet to be written is lost by it."""

from __future__ import annotations

from pathlib import Path

import pytest
from kv_fakes import BLOCK, LAYOUT, Rig, chain

from omlxd.engine.kvio.hot_budget import evict_unused


@pytest.mark.parametrize("disk_works", [True, False])
def test_a_trim_loses_no_block_that_no_writer_takes(tmp_path: Path, disk_works: bool):
    rig = Rig(tmp_path, write_back=True, max_queue_bytes=4 * LAYOUT.nbytes(BLOCK))
    keys = chain(range(8 * BLOCK))
    rig.compute(keys).free()
    rig.store.record_use([key.block_hash for key in keys])
    rig.pump()
    assert rig.pool.hot_bytes == 8 * LAYOUT.nbytes(BLOCK) and len(rig.flusher.unwritten.due) == 8
    if not disk_works:
        rig.flusher.health.store_failed(OSError("no disk"))
    for _ in range(8):
        evict_unused(rig.store, wait_s=0)
        assert not rig.flusher.left_unwritten
        if disk_works:
            rig.settle()
    assert (rig.pool.hot_bytes == 0) == disk_works
    assert len(rig.restore(keys)) == 8
