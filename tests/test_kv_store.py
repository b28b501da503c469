"""The store: budgets, twins, limits, losses, order, and a writer that can't keep up."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest
from faulty_fs import Fault, FaultyFileSystem
from kv_fakes import (
    BLOCK,
    FILE_DISK_BYTES,
    LAYOUT,
    ArrayPayload,
    ManualWriter,
    Rig,
    bytes_of,
    chain,
    empty_payload,
    files_in,
    lone_key,
    payload_of,
)

from omlxd.kv.block_pool import BlockPool
from omlxd.kv.flusher import Flusher
from omlxd.kv.space import LedgerSpace
from omlxd.kv.store import KVStore
from omlxd.kv.store_writer import StoreWriter

KEYS = chain(range(24))
HASHES = [key.block_hash for key in KEYS]


@pytest.fixture
def rig(tmp_path: Path):
    rig = Rig(tmp_path)
    yield rig
    rig.drop()


def all_bytes(keys=KEYS) -> list[bytes]:
    return [bytes_of(key.block_hash) for key in keys]


def hot(rig: Rig, keys=KEYS) -> list[bool]:
    return [
        (b := rig.pool.get_cached_block(k.block_hash)) is not None and b.payload is not None for k in keys
    ]


# --------------------------------------------------------------------- matching


def test_a_hit_is_served_from_ram_and_after_a_restart_from_disk(tmp_path):
    rig = Rig(tmp_path)
    rig.serve(KEYS)
    assert rig.restore(KEYS) == all_bytes()
    rig.drop()
    rig = Rig(tmp_path)
    assert rig.pool.num_cached == 0
    assert rig.restore(KEYS) == all_bytes()
    assert all(hot(rig)), "what was read is kept hot"
    rig.check()
    rig.drop()


@pytest.mark.parametrize("limit", [-1, 0, 1, 5, 6, 99])
def test_a_match_stops_at_the_limit(rig, limit):
    rig.serve(KEYS)
    table = rig.store.new_table()
    assert rig.store.extend_match(table, HASHES, limit) == max(0, min(limit, 6))
    table.free()
    rig.check()


def test_a_match_stops_at_the_first_miss(tmp_path):
    rig = Rig(tmp_path)
    rig.serve(KEYS)
    rig.drop()
    os.unlink(tmp_path / rig.cold.path_of(HASHES[2]))
    rig = Rig(tmp_path)
    assert rig.restore(KEYS) == all_bytes()[:2]
    rig.drop()


def test_a_match_extends_a_table_later(rig):
    """Two requests share a prefix: the second goes on where the first has got to."""
    second = rig.store.new_table()
    first = rig.compute(KEYS[:3])
    assert rig.store.extend_match(second, HASHES, 5) == 3
    first.append(BLOCK)
    rig.store.put(first, 3, KEYS[3], payload_of(HASHES[3]))
    assert rig.store.extend_match(second, HASHES, 5) == 1
    assert second.num_tokens == 4 * BLOCK and first.blocks[:4] == second.blocks
    rig.store.cut(second, 1)
    assert second.num_tokens == BLOCK and first.blocks[1].ref_cnt == 2  # the table and the writer
    first.free()
    second.free()
    rig.settle()
    rig.check()


def test_a_branch_hits_its_trunk_and_nothing_else(rig):
    rig.serve(KEYS)
    branch = chain([*range(8), *range(500, 516)])
    assert len(rig.restore(branch)) == 2
    rig.serve(branch)
    assert rig.restore(branch) == all_bytes(branch) and rig.restore(KEYS) == all_bytes()


@pytest.mark.parametrize("hot", [0, 100])
def test_a_request_does_not_evict_what_it_stands_on(tmp_path, hot):
    """The oldest chain is hit and extended on a full disk: its own stores must take others' space."""
    rig = Rig(tmp_path, hot=hot, cap=6)
    rig.serve(KEYS[:3])
    for number in range(3):
        rig.serve([lone_key(100 + number)])
    assert len(files_in(tmp_path)) == 6
    rig.compute(KEYS, matched=3).free()
    rig.settle()
    assert all(rig.cold.has(h) for h in HASHES)
    rig.drop()


# --------------------------------------------------------------------- the hot tier


def test_no_hot_tier_serves_from_disk_alone(tmp_path):
    rig = Rig(tmp_path, hot=0)
    rig.serve(KEYS)
    assert rig.pool.hot_bytes == 0
    assert rig.restore(KEYS) == all_bytes()
    assert rig.pool.hot_bytes == 0 and rig.pool.num_cached == 6, "no name was evicted in vain"
    assert not rig.store.wants(HASHES[0])
    rig.check()
    rig.drop()


def test_a_hot_tier_of_two_blocks_still_serves_all(tmp_path):
    rig = Rig(tmp_path, hot=2)
    rig.serve(KEYS)
    assert rig.pool.hot_bytes <= 2 * LAYOUT.nbytes(BLOCK)
    for _ in range(3):
        assert rig.restore(KEYS) == all_bytes()
        assert rig.pool.hot_bytes <= 2 * LAYOUT.nbytes(BLOCK)
        rig.check()
    rig.drop()


def test_a_budget_of_less_than_a_block_is_none(tmp_path):
    rig = Rig(tmp_path, hot=0.5)
    rig.serve(KEYS)
    assert rig.pool.hot_bytes == 0 and rig.restore(KEYS) == all_bytes()
    rig.drop()


def test_a_payload_larger_than_the_budget_evicts_nothing(rig):
    rig.serve(KEYS)
    rig.hot = 0.5
    other = lone_key(99)
    table = rig.compute([other])
    assert all(hot(rig)), "it could not have fitted"
    table.free()
    rig.settle()


def test_a_shrinking_budget_is_met_leaf_first(rig):
    rig.serve(KEYS)
    rig.hot = 3
    rig.store.trim_hot()
    assert hot(rig) == [True] * 3 + [False] * 3
    rig.hot = 0
    rig.store.trim_hot()
    assert rig.pool.hot_bytes == 0 and rig.restore(KEYS) == all_bytes()
    rig.check()


def test_leaves_leave_ram_before_their_parents_though_written_after_them(rig):
    """The writer lets go of a chain root first, after the request has: the order must not be its."""
    table = rig.compute(KEYS)
    table.free()
    rig.store.record_use(HASHES)
    rig.settle()
    for left in range(5, -1, -1):
        rig.pool.evict(1)
        assert hot(rig) == [True] * left + [False] * (6 - left)


def test_a_block_being_written_does_not_leave_ram(rig):
    rig.compute(KEYS).free()
    rig.hot = 0
    rig.store.trim_hot()
    assert all(hot(rig)), "readable nowhere else yet"
    rig.check()
    rig.settle()
    rig.store.trim_hot()
    assert rig.pool.hot_bytes == 0 and rig.restore(KEYS) == all_bytes()


def test_no_cold_tier_at_all():
    pool = BlockPool(0)
    budget = 4 * LAYOUT.nbytes(BLOCK)
    store = KVStore(block_size=BLOCK, pool=pool, hot_budget=lambda: budget, post=lambda f: f())
    table = store.new_table()
    for index, key in enumerate(KEYS):
        table.append(BLOCK)
        assert store.wants(key.block_hash)
        store.put(table, index, key, payload_of(key.block_hash))
    assert store.stats.not_kept == 2 and pool.hot_bytes == budget
    table.free()
    store.record_use(HASHES)
    table = store.new_table()
    assert store.extend_match(table, HASHES, 6) == 4
    table.free()
    assert store.close(1)
    pool.check({})


# --------------------------------------------------------------------- putting


def test_putting_twice_keeps_and_writes_one(rig):
    table = rig.compute(KEYS[:1])
    rig.store.put(table, 0, KEYS[0], payload_of(HASHES[0]))
    rig.settle()
    rig.store.put(table, 0, KEYS[0], payload_of(HASHES[0]))
    table.free()
    rig.settle()
    assert rig.writer.stats.written == 1 and rig.pool.hot_bytes == LAYOUT.nbytes(BLOCK)
    assert not rig.store.wants(HASHES[0])
    rig.check()


def test_putting_what_is_hot_evicts_nothing(tmp_path):
    rig = Rig(tmp_path, hot=2)
    table = rig.compute(KEYS[:2])
    rig.settle()
    rig.store.put(table, 0, KEYS[0], payload_of(HASHES[0]))
    table.free()
    assert hot(rig, KEYS[:2]) == [True, True]
    rig.drop()


def test_a_block_computed_again_is_written_again_if_its_file_has_gone(tmp_path):
    rig = Rig(tmp_path, hot=0)
    rig.serve(KEYS)
    assert rig.restore(KEYS) == all_bytes(), "its name is known now, and said to be on disk"
    (tmp_path / rig.cold.path_of(HASHES[5])).unlink()
    table = rig.compute(KEYS, matched=5)
    table.free()
    rig.settle()
    assert rig.writer.stats.written == 7 and rig.restore(KEYS) == all_bytes()
    rig.check()
    rig.drop()


@pytest.mark.parametrize("budget", [0, 1, 100])
def test_twins_computed_at_once(tmp_path, budget):
    rig = Rig(tmp_path, hot=budget)
    tables = [rig.store.new_table() for _ in range(2)]
    for index, key in enumerate(KEYS):
        for table in tables:
            table.append(BLOCK)
            rig.store.put(table, index, key, payload_of(key.block_hash))
    tables[0].free()
    rig.settle()
    tables[1].free()
    assert rig.writer.stats.written == 6 and rig.writer.stats.written_bytes == 6 * FILE_DISK_BYTES
    rig.check()
    assert rig.restore(KEYS) == all_bytes()
    rig.drop()


def test_wants_spares_the_copy(tmp_path):
    rig = Rig(tmp_path, hot=0)
    assert rig.store.wants(HASHES[0])
    table = rig.compute(KEYS[:1])
    assert not rig.store.wants(HASHES[0]), "it is being written"
    rig.settle()
    table.free()
    rig.drop()


# --------------------------------------------------------------------- the writer


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


def test_a_bug_in_a_payload_neither_ends_the_writer_nor_keeps_the_grant(rig, caplog):
    class Broken(ArrayPayload):
        def buffers(self):
            raise ValueError("a bug")

    table = rig.store.new_table()
    table.append(BLOCK)
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

    writer = StoreWriter(rig.cold, rig.space, max_queue_bytes=1 << 20, threads=1)
    for key in KEYS:
        assert writer.submit(key, payload_of(key.block_hash), fail)
    assert writer.flush(10) and writer.stats.written == 6 and writer.queued_bytes == 0
    writer.close()


def test_a_closed_writer_takes_nothing_more(rig):
    writer = StoreWriter(rig.cold, rig.space, max_queue_bytes=1 << 20, threads=2)
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
    writer = ManualWriter(rig.cold, rig.space)
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

    class Slow(LedgerSpace):
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
        space=rig.space,
    )
    table = store.new_table()
    table.append(BLOCK)
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
    writer = StoreWriter(rig.cold, rig.space, max_queue_bytes=1 << 20, threads=4)
    rig.use_writer(writer)
    chains = [chain([n, *range(23)]) for n in range(30)]
    for turn in range(60):
        keys = chains[turn % 30]
        table = rig.store.new_table()
        rig.store.extend_match(table, [k.block_hash for k in keys], 5)
        for index, (key, block) in enumerate(zip(keys, list(table.blocks), strict=False)):
            data = rig.read(key, block)
            if data is None:
                rig.store.cut(table, index)
                break
            assert data == bytes_of(key.block_hash)
        for index in range(len(table.blocks), 6):
            table.append(BLOCK)
            if rig.store.wants(keys[index].block_hash):
                rig.store.put(table, index, keys[index], payload_of(keys[index].block_hash))
        rig.store.record_use([k.block_hash for k in keys])
        table.free()
        rig.pump()
    assert rig.store.close(20)
    rig.pump()
    rig.check()
    assert rig.ledger.stats().reserved == 0 and writer.stats.failed == 0
    rig.drop()


# --------------------------------------------------------------------- loss


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove", "symlink", "folder"])
def test_a_lost_block_is_a_miss_once_and_whole_again_after(tmp_path, damage, known):
    """`known`: the pool believes that the file is there."""
    rig = Rig(tmp_path, hot=0)
    rig.serve(KEYS)
    if known:
        assert rig.restore(KEYS) == all_bytes()
    path = tmp_path / rig.cold.path_of(HASHES[3])
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 4
    path.unlink()
    match damage:
        case "flip":
            path.write_bytes(raw)
        case "truncate":
            path.write_bytes(raw[:-1])
        case "empty":
            path.write_bytes(b"")
        case "symlink":
            path.symlink_to(tmp_path / rig.cold.path_of(HASHES[2]))
        case "folder":
            path.mkdir()
    assert rig.restore(KEYS) == all_bytes()[:3]
    corrupt, lost = rig.store.stats.corrupt, rig.store.stats.lost
    if damage in ("flip", "truncate", "empty"):
        assert (corrupt, lost) == (1, 0)
    else:
        assert corrupt + lost == known
    rig.check()
    table = rig.compute(KEYS, matched=3)
    table.free()
    rig.settle()
    if damage == "folder":
        path.rmdir()
        rig.serve(KEYS)
    assert rig.restore(KEYS) == all_bytes()
    rig.check()
    rig.drop()


def test_losing_a_file_keeps_the_hot_copy(rig, tmp_path):
    rig.serve(KEYS)
    block = rig.pool.get_cached_block(HASHES[0])
    rig.store.lose(block)
    assert block.payload is not None and not block.on_disk
    assert rig.restore(KEYS) == all_bytes()
    rig.check()


def test_losing_a_block_in_use_leaves_the_tables_whole(rig, tmp_path):
    rig.serve(KEYS)
    rig.hot = 0
    rig.store.trim_hot()
    table = rig.store.new_table()
    rig.store.extend_match(table, HASHES, 6)
    twin = table.fork()
    rig.store.lose(table.blocks[5])
    assert table.blocks[5].num_tokens == BLOCK and table.blocks[5].block_hash is None
    rig.pool.check({b.block_id: 2 for b in table.blocks})
    table.free()
    twin.free()
    rig.check()


def test_promoting_into_a_full_hot_tier_evicts_another(tmp_path):
    rig = Rig(tmp_path, hot=1)
    rig.serve(KEYS[:2])
    rig.restore(KEYS[:2])
    rig.check()
    block = rig.pool.get_cached_block(HASHES[1])
    if block is None:
        table = rig.store.new_table()
        rig.store.extend_match(table, HASHES, 2)
        block = table.blocks[1]
        table.free()
    rig.store.promote(block, HASHES[1], payload_of(HASHES[1]))
    assert block.block_hash == HASHES[1] and hot(rig, KEYS[:2]) == [False, True]
    rig.store.promote(block, HASHES[1], payload_of(HASHES[1]))
    rig.store.promote(block, HASHES[0], payload_of(HASHES[0]))
    assert block.payload.tobytes() == bytes_of(HASHES[1])
    rig.check()
    rig.drop()


def test_readers_count_their_losses_exactly(rig):
    rig.serve(KEYS)

    def miss() -> None:
        for _ in range(200):
            assert not rig.store.load_into(lone_key(77), empty_payload().buffers())

    threads = [threading.Thread(target=miss) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rig.store.stats.lost == 800


def test_hits_are_counted_by_tier(rig):
    rig.store.count_match(100, 40, 24)
    rig.store.count_match(10, 0, 0)
    stats = rig.store.stats
    assert (stats.queries, stats.hits_hot, stats.hits_cold) == (110, 40, 24)


def test_the_records_are_bounded_and_the_tiers_still_agree(tmp_path):
    rig = Rig(tmp_path, max_records=4)
    rig.serve(KEYS)
    assert len(rig.pool) == 6, "all six were held at once"
    for number in range(20):
        rig.serve([lone_key(100 + number)])
        rig.check()
    assert len(rig.pool) == 6
    assert rig.restore(KEYS) == all_bytes()
    rig.drop()
