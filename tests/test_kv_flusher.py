"""When blocks are written: admission policies, write-back, another try after a fault, the last flush."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

import pytest
from faulty_fs import Fault, FaultyFileSystem
from kv_fakes import BLOCK, NAMESPACE, Rig, bytes_of, chain, files_in, lone_key, payload_of

from omlxd.kv import flusher as flusher_module
from omlxd.kv.admission import SEEN_EACH, SecondUse, admission_of
from omlxd.kv.cold_health import PAUSE_S, ColdHealth
from omlxd.kv.hashing import hash_blocks
from omlxd.kv.store_writer import StoreWriter

KEYS = chain(range(6 * BLOCK))
HASHES = [key.block_hash for key in KEYS]


def on_disk(rig: Rig, keys=KEYS) -> list[bool]:
    return [rig.cold.has(key.block_hash) for key in keys]


# --------------------------------------------------------------------- admission


def test_second_use_writes_what_a_second_request_finds_hot(tmp_path):
    rig = Rig(tmp_path, admission="second-use")
    rig.serve(KEYS)
    assert files_in(tmp_path) == [] and rig.flusher.held_back == 6
    rig.serve(KEYS[:3])
    assert on_disk(rig) == [True] * 3 + [False] * 3
    rig.serve(KEYS)
    assert on_disk(rig) == [True] * 6 and rig.writer.stats.written == 6
    rig.serve(KEYS)
    assert rig.writer.stats.written == 6
    rig.check()
    rig.drop()


@pytest.mark.parametrize("hot", [0, 2])
def test_second_use_writes_what_is_computed_twice(tmp_path, hot):
    rig = Rig(tmp_path, hot=hot, admission="second-use")
    rig.serve(KEYS[:2])
    rig.pool.evict(1 << 30)
    assert files_in(tmp_path) == []
    rig.serve(KEYS[:2])
    assert on_disk(rig, KEYS[:2]) == [True] * 2
    rig.check()
    rig.drop()


def test_second_use_forgets_at_a_restart(tmp_path):
    rig = Rig(tmp_path, admission="second-use")
    rig.serve(KEYS)
    rig.drop()
    rig = Rig(tmp_path, admission="second-use")
    rig.serve(KEYS)
    assert files_in(tmp_path) == []
    rig.drop()


def test_min_length_goes_by_the_prompt(tmp_path):
    rig = Rig(tmp_path, admission=f"min-length:{4 * BLOCK}")

    def ask(keys, tokens: int) -> None:
        table = rig.store.new_table()
        rig.store.extend_match(table, [k.block_hash for k in keys], len(keys))
        for index in range(len(table.blocks), len(keys)):
            table.append(BLOCK)
            rig.store.put(table, index, keys[index], payload_of(keys[index].block_hash), tokens)
        table.free()
        rig.settle()

    ask(KEYS[:3], 3 * BLOCK)
    assert files_in(tmp_path) == []
    ask(KEYS, 6 * BLOCK)
    assert on_disk(rig) == [True] * 6, "the short prompt's blocks are a long one's too by now"
    rig.check()
    rig.drop()


@pytest.mark.parametrize(
    "text", ["", "never", "min-length", "min-length:", "min-length:-1", "min-length:1e9"]
)
def test_a_policy_that_is_none(text):
    with pytest.raises(ValueError, match="none of always"):
        admission_of(text)


def test_what_was_seen_is_bounded_and_seldom_wrong():
    policy, dice = SecondUse(), random.Random(1)
    size = len(policy._newer) + len(policy._older)
    old = [dice.randbytes(32) for _ in range(1000)]
    assert sum(policy.admits(h, 0) for h in old) == 0
    assert all(policy.admits(h, 0) for h in old)
    wrong = sum(policy.admits(dice.randbytes(32), 0) for _ in range(SEEN_EACH))
    assert wrong < SEEN_EACH * 0.01
    assert all(policy.admits(h, 0) for h in old), "one filter back"
    for _ in range(2 * SEEN_EACH):
        policy.admits(dice.randbytes(32), 0)
    assert sum(policy.admits(h, 0) for h in old) < 50, "forgotten"
    assert len(policy._newer) + len(policy._older) == size


# --------------------------------------------------------------------- write-back


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


def test_a_block_that_leaves_ram_has_no_name_until_its_file_is_in_place(tmp_path):
    rig = Rig(tmp_path, hot=1, write_back=True)
    rig.compute(KEYS[:1]).free()
    rig.compute([lone_key(9)]).free()
    assert rig.pool.get_cached_block(HASHES[0]) is None and rig.restore(KEYS[:1]) == []
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
    writer = StoreWriter(rig.cold, rig.space, max_queue_bytes=1, threads=2)
    rig.use_writer(writer)
    assert rig.store.close(60) and on_disk(rig) == [True] * 6
    rig.drop()

    rig = Rig(tmp_path / "late", write_back=True)
    rig.serve(KEYS)
    gate = threading.Event()
    store = rig.cold.store
    rig.cold.store = lambda *a: (gate.wait(120), store(*a))  # type: ignore[method-assign]
    writer = StoreWriter(rig.cold, rig.space, max_queue_bytes=1, threads=1)
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


# --------------------------------------------------------------------- after a fault


def test_refused_space_is_asked_for_again_and_quietly(tmp_path, caplog):
    rig = Rig(tmp_path)
    rig.ledger.cap = 0
    rig.serve(KEYS)
    assert files_in(tmp_path) == [] and rig.writer.health.is_on
    rig.ledger.cap = 1 << 30
    rig.tick()
    assert files_in(tmp_path) == [], "too soon"
    rig.writer.resume()
    rig.tick()
    assert on_disk(rig) == [True] + [False] * 5, "one tries first"
    rig.tick()
    assert on_disk(rig) == [True] * 6 and caplog.records == []
    rig.check()
    rig.drop()


def test_what_a_full_queue_dropped_is_written_later(tmp_path):
    rig = Rig(tmp_path, max_queue_bytes=2 * len(bytes_of(b"")))
    rig.serve(KEYS)
    assert sum(on_disk(rig)) == 2 and rig.writer.stats.dropped_full == 4
    for _ in range(2):
        rig.tick()
    assert on_disk(rig) == [True] * 6
    rig.check()
    rig.drop()


def test_a_block_whose_file_never_works_is_given_up(tmp_path):
    rig = Rig(tmp_path)
    (tmp_path / rig.cold.path_of(HASHES[1])).mkdir(parents=True)
    rig.serve(KEYS)
    for _ in range(10):
        rig.tick()
    assert rig.writer.stats.failed == flusher_module.TRIES
    assert not rig.flusher.unwritten.due and rig.restore(KEYS) == [bytes_of(h) for h in HASHES]
    rig.check()
    rig.drop()


def test_a_disk_that_is_dead_for_long_costs_no_block_its_tries(tmp_path, caplog):
    fs = FaultyFileSystem(Fault(1, "error forever", errno.EIO))
    rig = Rig(tmp_path, fs=fs)
    rig.serve(KEYS)
    for _ in range(10):
        rig.writer.resume()
        rig.tick()
    assert len(rig.flusher.unwritten.due) == 6 and len(caplog.records) == 1
    fs.fault = None
    rig.writer.resume()
    rig.tick()
    rig.tick()
    assert on_disk(rig) == [True] * 6 and len(caplog.records) == 2
    rig.drop()


def test_what_waits_to_be_written_is_bounded_by_the_hot_tier(tmp_path):
    rig = Rig(tmp_path, hot=4, fs=FaultyFileSystem(Fault(1, "error forever", errno.ENOSPC)))
    for number in range(40):
        rig.serve([lone_key(number)])
        rig.check()
    assert len(rig.flusher.unwritten.due) == 4
    assert rig.flusher.unwritten.due_bytes == rig.pool.hot_bytes
    assert rig.flusher.left_unwritten == 36
    rig.drop()


def test_a_disk_that_cannot_be_read_is_left_alone_and_comes_back(tmp_path, caplog):
    fs = FaultyFileSystem()
    rig = Rig(tmp_path, hot=0, fs=fs)
    rig.serve(KEYS)
    now = [0.0]
    rig.writer.health._clock = lambda: now[0]
    fs.fault = Fault(fs.count + 1, "error forever", errno.EIO)
    is_file = rig.cold._fs.is_file
    rig.cold._fs.is_file = lambda path: os.path.isfile(path)  # type: ignore[method-assign]
    assert rig.restore(KEYS) == [] and not rig.writer.health.is_on
    count = fs.count
    for _ in range(5):
        assert rig.restore(KEYS) == []
    assert fs.count == count, "not even looked at"
    assert [r.message.split(":")[0] for r in caplog.records] == ["cold tier off"]
    fs.fault, now[0] = None, PAUSE_S
    rig.cold._fs.is_file = is_file  # type: ignore[method-assign]
    assert rig.restore(KEYS) == [bytes_of(h) for h in HASHES]
    assert [r.message.split(":")[0] for r in caplog.records] == ["cold tier off", "cold tier on"]
    rig.check()
    rig.drop()


def test_one_unreadable_file_is_not_the_disks_fault(tmp_path):
    rig = Rig(tmp_path, hot=0)
    rig.serve(KEYS)
    rig.cold._fs = FaultyFileSystem(Fault(2, "error", errno.EACCES))
    rig.restore(KEYS)
    assert rig.writer.health.is_on
    rig.drop()


def test_health_lets_one_store_try_at_a_time(caplog):
    now = [0.0]
    health = ColdHealth(lambda: now[0])
    failed = OSError(errno.ENOSPC, "full")
    assert health.may_store() == "yes"
    health.store_failed(failed)
    assert health.may_store() == "no"
    now[0] = PAUSE_S
    assert [health.may_store() for _ in range(3)] == ["probe", "no", "no"]
    health.store_failed(failed)
    assert health.may_store() == "no" and not health.is_on
    now[0] = 2 * PAUSE_S
    assert health.may_store() == "probe"
    health.probe_over()
    assert health.may_store() == "probe"
    health.stored()
    assert health.may_store() == "yes" and health.is_on and len(caplog.records) == 2
    health.read_failed(OSError(errno.EIO, "dead"))
    health.store_failed(failed)
    assert not health.may_read()
    now[0] = 3 * PAUSE_S
    assert health.may_store() == "probe"
    health.stored()
    assert not health.is_on, "reads have not worked yet"
    health.was_read()
    assert health.is_on and health.may_read() and len(caplog.records) == 4


def test_keys_of_what_waits_are_small(tmp_path: Path):
    rig = Rig(tmp_path, write_back=True)
    tokens = [200_000 + i for i in range(BLOCK)]
    rig.serve(chain(tokens))
    (entry,) = rig.flusher.unwritten.due.values()
    assert list(entry.key.tokens) == tokens and entry.key.tokens.itemsize == 4  # type: ignore[union-attr]
    assert entry.key.block_hash == hash_blocks(NAMESPACE, tokens, BLOCK)[0]
    rig.drop()


def test_a_store_begun_before_the_one_that_failed_does_not_turn_the_tier_on(caplog):
    """Two writers on a disk that fills: each small file that still fits would else say that it works."""
    now = [0.0]
    health = ColdHealth(lambda: now[0])
    health.store_failed(OSError(errno.ENOSPC, "No space left on device"))
    health.stored()
    assert not health.stores_on and not health.is_on and health.may_store() == "no"
    now[0] = PAUSE_S
    assert health.may_store() == "probe"
    health.stored()
    assert health.stores_on and health.is_on
    assert [record.message[:13] for record in caplog.records] == ["cold tier off", "cold tier on:"]
