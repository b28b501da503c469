"""The writer: a queue that is full, a disk that is, callbacks that fail, an end with a deadline."""
# ruff: noqa: F811 -- `rig` is a fixture of kv_fakes.py

from __future__ import annotations

import errno
import os
import threading
import time

import pytest
from faulty_fs import Fault, FaultyFileSystem
from kv_fakes import (
    BLOCK,
    FILE_DISK_BYTES,
    HASHES,
    KEYS,
    LAYOUT,
    ArrayPayload,
    ManualWriter,
    Rig,
    all_bytes,
    bytes_of,
    chain,
    files_in,
    lone_key,
    payload_of,
    rig,  # noqa: F401
)

from omlxd.kv.cold.flusher import Flusher
from omlxd.kv.cold.writer import StoreWriter
from omlxd.kv.files.fs import FileSystem
from omlxd.kv.ledger.lease import LedgerLease
from omlxd.kv.store import KVStore


def test_a_full_queue_drops_the_newest_and_counts_it(tmp_path):
    rig = Rig(tmp_path, hot=0, max_queue_bytes=3 * LAYOUT.nbytes(BLOCK))
    rig.compute(KEYS).free()
    assert rig.writer.stats.dropped_full == 3 == rig.store.stats.not_kept
    rig.settle()
    assert rig.restore(KEYS) == all_bytes()[:3]
    rig.drop()


def test_one_block_always_fits_the_queue(tmp_path):
    rig = Rig(tmp_path, max_queue_bytes=1)
    rig.serve(KEYS[:1])
    assert rig.writer.stats.written == 1
    rig.drop()


def test_refused_space_pauses_the_writer_and_serving_goes_on(tmp_path):
    rig = Rig(tmp_path, cap=0)
    rig.serve(KEYS)
    assert rig.writer.stats.refused == 6 and files_in(tmp_path) == []
    assert rig.restore(KEYS) == all_bytes(), "from RAM"
    rig.serve([lone_key(50)])
    assert rig.writer.stats.refused == 7
    rig.check()
    rig.drop()


def test_a_full_disk_pauses_the_writer_with_one_line_and_gives_the_grant_back(tmp_path, caplog):
    rig = Rig(tmp_path, fs=FaultyFileSystem(Fault(3, "error forever", errno.ENOSPC)))
    rig.cold._fs.unlink = lambda path: os.unlink(path)  # a full disk still removes
    rig.compute(KEYS).free()
    rig.settle()
    assert (rig.writer.stats.failed, rig.writer.stats.refused) == (1, 5)
    assert rig.ledger.stats().reserved == 0 and not rig.writer.health.is_on
    assert [r.message.split(":")[0] for r in caplog.records] == ["cold tier off"]
    assert files_in(tmp_path) == [] and rig.restore(KEYS) == all_bytes()
    rig.writer.resume()
    rig.tick()
    assert (rig.writer.stats.failed, len(caplog.records)) == (2, 1), "one block tries the disk, unsaid"
    rig.cold._fs.fault = None
    rig.serve([lone_key(50)])
    assert rig.writer.stats.refused == 7 and rig.writer.stats.written == 0
    rig.writer.resume()
    rig.serve([lone_key(51)])
    assert rig.writer.stats.written == 1 and rig.writer.health.is_on
    assert [r.message.split(":")[0] for r in caplog.records] == ["cold tier off", "cold tier on"]
    rig.tick()
    assert rig.writer.stats.written == 8 and not rig.flusher.unwritten.due, "and what was refused is written"
    rig.drop()
    rig = Rig(tmp_path)
    assert rig.restore(KEYS) == all_bytes()
    rig.check()
    rig.drop()


def test_a_temporary_file_that_cannot_be_removed_keeps_its_grant(tmp_path):
    rig = Rig(tmp_path, fs=FaultyFileSystem(Fault(5, "error forever", errno.EIO)), cap=1)
    rig.compute(KEYS[:1]).free()
    rig.settle()
    assert rig.ledger.stats().reserved == FILE_DISK_BYTES
    rig.cold._fs.fault = None
    rig.writer.resume()
    rig.serve([lone_key(7)])
    assert rig.writer.stats.refused == 1
    rig.check()
    rig.drop()
    rig = Rig(tmp_path, cap=1)
    assert files_in(tmp_path) == []
    rig.drop()


def test_a_folder_in_a_blocks_place_costs_that_block_only(rig, tmp_path):
    (tmp_path / rig.cold.path_of(HASHES[1])).mkdir(parents=True)
    rig.serve(KEYS)
    assert rig.writer.stats.failed == 1 and rig.writer.stats.written == 5
    assert rig.restore(KEYS) == all_bytes()
    rig.check()


def test_a_folder_that_is_away_pauses_the_writer_with_one_line(tmp_path, caplog):
    (tmp_path / "here").touch()
    rig = Rig(tmp_path, fs=FileSystem(str(tmp_path / "here")))
    rig.serve(KEYS[:1])
    (tmp_path / "here").rename(tmp_path / "away")
    rig.serve(KEYS)
    assert (rig.writer.stats.written, rig.writer.stats.failed, rig.writer.stats.refused) == (1, 1, 4)
    assert [r.message.split(":")[0] for r in caplog.records] == ["cold tier off"]
    (tmp_path / "away").rename(tmp_path / "here")
    rig.writer.resume()
    rig.serve([lone_key(50)])
    assert rig.writer.health.is_on and rig.writer.stats.written == 2
    rig.drop()


def test_a_bug_in_a_payload_neither_ends_the_writer_nor_keeps_the_grant(rig, caplog):
    class Broken(ArrayPayload):
        def buffers(self):
            raise ValueError("a bug")

    table = rig.store.new_table()
    table.append()
    rig.store.put(table, 0, KEYS[0], Broken(payload_of(HASHES[0]).arrays))
    table.free()
    rig.settle()
    assert rig.writer.stats.failed == 1 and rig.ledger.stats().reserved == 0
    rig.serve(KEYS[1:2])
    assert rig.writer.stats.written == 1
    rig.check()


def test_a_failing_callback_does_not_end_the_writer(rig, caplog):
    def fail(ok: bool) -> None:
        raise RuntimeError("the engine has gone")

    writer = StoreWriter(rig.cold, rig.lease, max_queue_bytes=1 << 20, threads=1)
    for key in KEYS:
        assert writer.submit(key, payload_of(key.block_hash), fail)
    assert writer.flush(60) and writer.stats.written == 6 and writer.queued_bytes == 0
    writer.close()


def test_a_closed_writer_takes_nothing_more(rig):
    writer = StoreWriter(rig.cold, rig.lease, max_queue_bytes=1 << 20, threads=2)
    done: list[bool] = []
    for key in KEYS:
        writer.submit(key, payload_of(key.block_hash), done.append)
    writer.close()
    writer.close()
    assert not writer.submit(KEYS[0], payload_of(HASHES[0]), done.append)
    writer.after_queued(lambda: pytest.fail("closed"))
    assert writer.flush(60) and done == [True] * 6
    for thread in writer._threads:
        thread.join(60)
        assert not thread.is_alive()


def test_an_action_waits_for_what_was_queued_before_it_and_for_nothing_else(rig):
    writer = ManualWriter(rig.cold, rig.lease)
    order: list[str] = []

    def submit(number: int) -> None:
        writer.submit(KEYS[number], payload_of(HASHES[number]), lambda ok: order.append(str(number)))

    writer.after_queued(lambda: order.append("first"))
    submit(0)
    submit(1)
    writer.after_queued(lambda: order.append("a"))
    writer.after_queued(lambda: order.append("b"))
    submit(2)
    held = [writer._queue.get_nowait() for _ in range(4)]
    assert not writer.flush() or True
    for job in (held[0], held[3], held[2], held[1]):
        writer._work(job)
    assert order == ["first", "2", "1", "0", "a", "b"]
    assert writer.flush()


def test_flush_meets_its_deadline(rig):
    gate = threading.Event()

    class Slow(LedgerLease):
        def take(self, nbytes: int) -> bool:
            gate.wait(120)
            return super().take(nbytes)

    writer = StoreWriter(rig.cold, Slow(rig.ledger), max_queue_bytes=1 << 20, threads=1)
    store = KVStore(
        block_size=BLOCK,
        pool=rig.pool,
        hot_budget=lambda: 1 << 20,
        post=rig.posted.append,
        cold=rig.cold,
        flusher=Flusher(rig.pool, writer, rig.posted.append),
        lease=rig.lease,
    )
    table = store.new_table()
    table.append()
    store.put(table, 0, KEYS[0], payload_of(HASHES[0]))
    began = time.monotonic()
    assert store.close(0.05) is False
    assert time.monotonic() - began < 60  # The gate would keep it for twice that.
    gate.set()
    assert writer.flush(60), "what was queued is still written"
    rig.pump()
    table.free()
    rig.check()


def test_real_threads_and_a_real_engine_loop(tmp_path):
    """Four writers, one engine thread, many chains: everything ends where it should."""
    rig = Rig(tmp_path, hot=20, cap=60)
    writer = StoreWriter(rig.cold, rig.lease, max_queue_bytes=1 << 20, threads=4)
    rig.use_writer(writer)
    chains = [chain([n, *range(23)]) for n in range(30)]
    for turn in range(60):
        keys = chains[turn % 30]
        table = rig.store.new_table()
        rig.store.extend_match(table, [k.block_hash for k in keys], 5)
        for index, (key, block) in enumerate(zip(keys, list(table.blocks), strict=False)):
            data = rig.read(key, block)
            if data is None:
                table.truncate(index)
                break
            assert data == bytes_of(key.block_hash)
        for index in range(len(table.blocks), 6):
            table.append()
            if rig.store.wants(keys[index].block_hash, index):
                rig.store.put(table, index, keys[index], payload_of(keys[index].block_hash))
        rig.store.record_use([k.block_hash for k in keys])
        table.free()
        rig.pump()
    assert rig.store.close(60)
    rig.pump()
    rig.check()
    assert rig.ledger.stats().reserved == 0 and writer.stats.failed == 0
    rig.drop()
