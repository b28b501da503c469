"""What is written after a fault: another try, a disk that comes back, blocks that are given up."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
from faulty_fs import Fault, FaultyFileSystem
from kv_fakes import (
    BLOCK,
    HASHES,
    KEYS,
    NAMESPACE,
    Rig,
    bytes_of,
    chain,
    files_in,
    lone_key,
    on_disk,
)

from omlxd.kv.cold import flusher as flusher_module
from omlxd.kv.cold.health import PAUSE_S, ColdHealth
from omlxd.kv.hashing import hash_blocks


def test_refused_space_is_asked_for_again_and_quietly(tmp_path, caplog):
    rig = Rig(tmp_path)
    rig.ledger.cold_cache_bytes = 0
    rig.serve(KEYS)
    assert files_in(tmp_path) == [] and rig.writer.health.is_on
    rig.ledger.cold_cache_bytes = 1 << 30
    rig.tick()
    assert files_in(tmp_path) == [], "too soon"
    rig.writer.resume()
    rig.tick()
    assert on_disk(rig) == [True] + [False] * 5, "one tries first"
    rig.tick()
    assert on_disk(rig) == [True] * 6 and caplog.records == []
    rig.check()
    rig.drop()


def test_a_look_at_a_disk_that_is_left_alone_drops_nothing(tmp_path):
    rig = Rig(tmp_path)
    rig.ledger.cold_cache_bytes = 0
    rig.serve(KEYS)
    stats = rig.writer.stats
    dropped = stats.refused + stats.failed
    assert dropped == len(KEYS)
    for _ in range(10):
        rig.tick()
    assert stats.refused + stats.failed == dropped
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


def test_a_block_whose_file_can_be_read_again_is_not_written_again(tmp_path):
    """Computed while reads were paused, it was noted to be written; no list keeps it once its file counts."""
    rig = Rig(tmp_path, write_back=True, hot=0)
    rig.serve(KEYS)
    assert all(on_disk(rig))
    rig.hot = 100
    rig.writer.health.read_failed(OSError(errno.ETIMEDOUT, "timed out"))
    rig.compute(KEYS).free()
    assert len(rig.flusher.unwritten.due) == len(KEYS)
    rig.writer.resume()
    rig.compute(KEYS).free()
    assert not rig.flusher.unwritten.due and not rig.flusher.has_work
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


@pytest.mark.parametrize("seed", range(20))
def test_health_says_off_and_on_in_turn_and_has_one_probe_at_a_time(caplog, seed: int):
    """Whatever happens in whatever order; a refusal of space is no fault of the disk's."""
    dice, now = random.Random(seed), [0.0]
    health = ColdHealth(clock=lambda: now[0])
    failing: set[str] = set()
    probes = 0
    for _ in range(300):
        what = dice.choice(["store", "store", "read", "wait"])
        if what == "wait":
            now[0] += dice.choice([1.0, PAUSE_S])
        elif what == "read" and health.may_read():
            if dice.random() < 0.5:
                health.read_failed(OSError(errno.EIO, "no"))
                failing.add("read")
                assert not health.may_read()
            else:
                health.was_read()
                failing.discard("read")
        elif what == "store" and (may := health.may_store()) != "no":
            probes += may == "probe"
            assert may == ("yes" if health.stores_on else "probe") and probes <= 1
            if may == "probe":
                assert health.may_store() == "no"
            end = dice.choice(["stored", "failed", "refused", "over"])
            if end == "stored":
                health.stored()
                failing.discard("store")
            elif end == "failed":
                health.store_failed(OSError(errno.ENOSPC, "full"))
                failing.add("store")
            elif end == "refused":
                health.store_refused()
            elif may == "probe":
                health.probe_over()
            probes = 0
        assert health.is_on == (not failing)
    lines = [record.message.split(":")[0] for record in caplog.records]
    assert lines and all(line == ("cold tier off", "cold tier on")[at % 2] for at, line in enumerate(lines))


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
    assert health.is_full
    health.read_failed(OSError(errno.EIO, "Input/output error"))
    assert not health.is_full  # Its reads fail, too.
    health.was_read()
    now[0] = PAUSE_S
    assert health.may_store() == "probe"
    health.stored()
    assert health.stores_on and health.is_on
    assert [record.message[:13] for record in caplog.records] == ["cold tier off", "cold tier on:"]
