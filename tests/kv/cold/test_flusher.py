"""When blocks are written: write-back, what leaves RAM, the last flush."""

from __future__ import annotations

import errno
import threading

from faulty_fs import Fault, FaultyFileSystem
from kv_fakes import (
    BLOCK,
    HASHES,
    KEYS,
    Rig,
    bytes_of,
    chain,
    files_in,
    lone_key,
    on_disk,
)

from omlxd.kv.cold import flusher as flusher_module
from omlxd.kv.cold.writer import StoreWriter


def test_write_back_writes_what_leaves_ram(tmp_path):
    rig = Rig(tmp_path, hot=6, write_back=True)
    rig.serve(KEYS)
    assert files_in(tmp_path) == [] and len(rig.flusher.unwritten.due) == 6
    rig.serve([lone_key(100)])
    assert on_disk(rig) == [False] * 5 + [True]
    rig.serve([lone_key(101)])
    assert on_disk(rig) == [False] * 4 + [True] * 2
    assert rig.restore(KEYS) == [bytes_of(h) for h in HASHES], "from both tiers"
    rig.check()
    rig.drop()


def test_a_block_that_leaves_ram_is_served_by_its_writer_until_its_file_is_in_place(tmp_path):
    rig = Rig(tmp_path, hot=1, write_back=True)
    rig.compute(KEYS[:1]).free()
    rig.compute([lone_key(9)]).free()
    assert rig.pool.get_cached_block(HASHES[0]) is None
    assert rig.restore(KEYS[:1]) == [bytes_of(HASHES[0])]
    rig.check()
    rig.settle()
    assert rig.restore(KEYS[:1]) == [bytes_of(HASHES[0])]
    rig.drop()


def test_a_block_computed_again_while_it_is_being_written_is_known_to_be_on_disk(tmp_path):
    rig = Rig(tmp_path, hot=1, write_back=True)
    rig.compute(KEYS[:1]).free()
    rig.compute([lone_key(9)]).free()
    rig.compute(KEYS[:1]).free()
    rig.settle()
    block = rig.pool.get_cached_block(HASHES[0])
    assert block is not None and block.on_disk and HASHES[0] not in rig.flusher.unwritten.due
    rig.check()
    rig.drop()


def test_what_no_writer_takes_as_it_leaves_ram_is_counted(tmp_path):
    rig = Rig(tmp_path, hot=6, write_back=True, max_queue_bytes=2 * len(bytes_of(b"")))
    rig.serve(KEYS)
    rig.pool.evict(1 << 30)
    assert rig.flusher.left_unwritten == 4
    rig.settle()
    assert sum(on_disk(rig)) == 2 and rig.flusher.unwritten.due_bytes == 0
    rig.check()
    rig.drop()


def test_idle_blocks_are_written_root_first(tmp_path, monkeypatch):
    rig = Rig(tmp_path, write_back=True)
    now = [0.0]
    rig.flusher.unwritten._clock = lambda: now[0]
    rig.serve(KEYS)
    now[0] = 20.0
    rig.serve([lone_key(50)])
    rig.tick()
    assert files_in(tmp_path) == []
    now[0] = flusher_module.IDLE_S + 1
    rig.flusher.tick()
    rig.writer.step()
    rig.writer.step()
    rig.pump()
    assert on_disk(rig) == [True] * 2 + [False] * 4
    rig.settle()
    assert on_disk(rig) == [True] * 6 and not rig.cold.has(lone_key(50).block_hash)
    rig.check()
    rig.drop()


def test_the_last_flush_takes_the_newest_chain_first_and_each_root_to_leaf(tmp_path):
    rig = Rig(tmp_path, write_back=True)
    trunk = list(range(2 * BLOCK))
    old, new = chain([*trunk, *range(100, 108)]), chain([*trunk, *range(200, 208)])
    lone = lone_key(77)
    for keys in (old, [lone], new):
        rig.serve(keys)
    order = [entry.key.block_hash for entry in rig.flusher.unwritten.root_first()]
    wanted = [*new, lone, *old[2:]]
    assert order == [key.block_hash for key in wanted]
    assert rig.store.close(5) and all(on_disk(rig, wanted))
    rig.drop()


def test_the_last_flush_waits_for_room_in_the_queue_and_meets_its_deadline(tmp_path):
    rig = Rig(tmp_path, write_back=True)
    rig.serve(KEYS)
    writer = StoreWriter(rig.cold, rig.lease, max_queue_bytes=1, threads=2)
    rig.use_writer(writer)
    assert rig.store.close(60) and on_disk(rig) == [True] * 6
    rig.drop()

    rig = Rig(tmp_path / "late", write_back=True)
    rig.serve(KEYS)
    gate = threading.Event()
    store = rig.cold.store
    rig.cold.store = lambda *a: (gate.wait(120), store(*a))  # type: ignore[method-assign]
    writer = StoreWriter(rig.cold, rig.lease, max_queue_bytes=1, threads=1)
    rig.use_writer(writer)
    assert not rig.store.close(0.05)
    gate.set()
    assert writer.flush(60) and on_disk(rig) == [True] + [False] * 5, "the root was first"
    rig.drop()


def test_write_back_without_a_hot_tier_writes_at_once(tmp_path):
    rig = Rig(tmp_path, hot=0, write_back=True)
    rig.serve(KEYS)
    assert on_disk(rig) == [True] * 6
    rig.drop()


def test_write_back_holds_back_what_is_not_admitted(tmp_path):
    rig = Rig(tmp_path, hot=6, write_back=True, admission="second-use")
    rig.serve(KEYS)
    rig.serve(KEYS[:3])
    rig.pool.evict(1 << 30)
    rig.settle()
    assert on_disk(rig) == [True] * 3 + [False] * 3 and rig.flusher.left_unwritten == 0
    rig.drop()


def test_a_leaf_that_is_on_disk_is_not_written_again_when_its_root_was_lost(tmp_path):
    rig = Rig(tmp_path)
    rig.serve(KEYS)
    rig.drop()
    (tmp_path / rig.cold.path_of(HASHES[0])).unlink()
    for hot in (0, 100):
        rig = Rig(tmp_path, hot=hot)
        rig.serve(KEYS)
        assert rig.writer.stats.written == (hot == 0), "the root, once"
        assert rig.restore(KEYS) == [bytes_of(h) for h in HASHES]
        rig.check()
        rig.drop()


def test_a_file_that_cannot_be_read_is_written_anew(tmp_path):
    rig = Rig(tmp_path, hot=0, fs=FaultyFileSystem())
    rig.serve(KEYS[:1])
    fs = rig.cold._fs
    fs.fault = Fault(fs.count + 3, "error", errno.EIO)  # is it there, open, read
    rig.serve(KEYS[:1])
    assert rig.store.stats.lost == 1 and rig.writer.stats.written == 2
    rig.drop()
