"""Blocks that prove worth nothing after they were stored: found no more, in either tier, from that moment on.

`BAD` stands for a payload of a NaN: any test that reads it again fails by the oracle of kv_fakes.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_fakes import BLOCK, HASHES, KEYS, LAYOUT, Rig, all_bytes, chain, empty_payload, files_in

from omlxd.kv.block_pool import BlockTable
from omlxd.kv.cold import flusher, writer

OWN = dict.fromkeys(HASHES[2:], False)
BAD = 0xEE


def denied(path: str) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


def store_bad(rig: Rig, matched: int = 2) -> BlockTable:
    """A request that finds the first `matched` of KEYS and stores nonsense for the rest."""
    table = rig.store.new_table()
    assert rig.store.extend_match(table, HASHES, matched) == matched
    for index in range(matched, len(KEYS)):
        table.append()
        assert rig.store.put(table, index, KEYS[index], empty_payload(BAD)) is False
    return table


@contextlib.contextmanager
def removal_fails(rig: Rig, table: BlockTable, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Withdraw all blocks while no file can be removed."""
    with monkeypatch.context() as patch:
        patch.setattr(rig.cold._fs, "unlink", denied)
        rig.store.withdraw(dict.fromkeys(HASHES, False))
        end(rig, table)
        yield


def end(rig: Rig, table: BlockTable) -> None:
    table.free()
    rig.store.record_use(HASHES)
    rig.settle()


@pytest.mark.parametrize("written", [0, 1, 4], ids=["all on their way", "one in place", "all in place"])
@pytest.mark.parametrize("hot", [100, 0])
@pytest.mark.parametrize("write_back", [False, True])
def test_what_is_withdrawn_is_in_no_tier_and_what_it_stands_on_stays(tmp_path, written, hot, write_back):
    rig = Rig(tmp_path, hot=hot, write_back=write_back)
    rig.serve(KEYS[:2])
    rig.tick()
    table = store_bad(rig)
    for _ in range(written):
        rig.writer.step()
    rig.store.withdraw(OWN)
    assert [bool(rig.store.where(h)) for h in HASHES] == [True, True, False, False, False, False]
    rig.check([table])
    end(rig, table)
    rig.check()
    assert rig.restore(KEYS) == all_bytes(KEYS[:2])
    rig.drop()
    again = Rig(tmp_path)
    assert len(again.restore(KEYS)) <= 2
    assert len(files_in(tmp_path)) == again.ledger.stats().files
    again.drop()


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("hot", [100, 0])
def test_what_is_computed_again_is_kept_again(tmp_path, settled, hot):
    rig = Rig(tmp_path, hot=hot)
    rig.serve(KEYS[:2])
    table = store_bad(rig)
    rig.writer.step()
    rig.store.withdraw(OWN)
    if settled:
        end(rig, table)
    good = rig.compute(KEYS, matched=2)
    rig.check([good] if settled else [good, table])
    if not settled:
        end(rig, table)
    end(rig, good)
    rig.tick()
    rig.check()
    if settled or hot:  # With no RAM to keep it in meanwhile, the newest may be lost.
        assert rig.restore(KEYS) == all_bytes()
    rig.drop()
    rig = Rig(tmp_path)
    assert rig.restore(KEYS) == all_bytes()[: 6 if settled or hot else 2]
    rig.drop()


def test_another_s_branch_and_another_s_references_stay(tmp_path):
    rig = Rig(tmp_path)
    table = store_bad(rig, matched=0)
    other = rig.store.new_table()
    assert rig.store.extend_match(other, HASHES, 3) == 3
    branch = chain(range(500, 500 + 3 * BLOCK))
    rig.serve(branch)
    rig.store.withdraw(dict.fromkeys(HASHES, False))
    rig.check([table, other])
    end(rig, table)
    end(rig, other)
    rig.check()
    assert rig.restore(KEYS) == [] and rig.restore(branch) == all_bytes(branch)
    rig.drop()


def test_a_file_that_was_there_before_is_another_s_and_stays(tmp_path):
    rig = Rig(tmp_path)
    rig.serve(KEYS)
    rig.drop()
    rig = Rig(tmp_path)
    table = rig.store.new_table()
    table.append()
    had_file = rig.store.put(table, 0, KEYS[0], empty_payload(BAD))
    assert had_file and rig.store.where(HASHES[0]) == "hot"
    rig.store.withdraw({HASHES[0]: had_file})
    assert rig.store.where(HASHES[0]) == "cold"
    table.free()
    rig.check()
    assert rig.restore(KEYS) == all_bytes()
    rig.drop()


def test_a_file_that_can_not_be_removed_is_not_read(tmp_path, monkeypatch):
    rig = Rig(tmp_path)
    table = store_bad(rig, matched=0)
    rig.settle()

    monkeypatch.setattr(rig.cold._fs, "unlink", denied)
    rig.store.withdraw(dict.fromkeys(HASHES, False))
    end(rig, table)
    assert len(files_in(tmp_path)) == 6 and rig.restore(KEYS) == []
    assert rig.restore_one(KEYS[3]) is None
    rig.serve(KEYS)  # Hot alone, then.
    assert rig.restore(KEYS) == all_bytes()
    rig.pool.evict(6 * LAYOUT.nbytes(BLOCK))
    assert rig.restore(KEYS) == []
    rig.check()
    rig.drop()


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("queued", [False, True])
def test_no_full_queue_and_no_close_drops_a_removal(tmp_path, monkeypatch, closed, queued):
    monkeypatch.setattr(writer, "MOST_ACTIONS", 1)
    rig = Rig(tmp_path)
    table = store_bad(rig, matched=0)
    if not queued:
        rig.settle()
    rig.store.record_use(HASHES)
    if closed:
        rig.writer.close()
    rig.store.withdraw(dict.fromkeys(HASHES, False))
    while rig.writer.step():
        pass
    rig.pump()
    assert files_in(tmp_path) == [] and rig.restore(KEYS) == []
    table.free()
    rig.drop()


def test_a_removal_that_failed_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(flusher, "RETRY_S", 0.0)
    rig = Rig(tmp_path)
    table = store_bad(rig, matched=0)
    rig.settle()
    with removal_fails(rig, table, monkeypatch):
        rig.tick()
    assert len(files_in(tmp_path)) == 6 and rig.flusher.has_work
    rig.tick()
    assert files_in(tmp_path) == [] and not rig.flusher._removing
    rig.drop()


def test_a_removal_that_failed_is_tried_again_at_the_end(tmp_path, monkeypatch):
    rig = Rig(tmp_path)
    table = store_bad(rig, matched=0)
    rig.settle()
    with removal_fails(rig, table, monkeypatch):
        pass
    assert len(files_in(tmp_path)) == 6
    assert rig.store.close(0)
    assert files_in(tmp_path) == []
    rig.drop()


@pytest.mark.parametrize("gone", [True, False])
def test_what_was_stored_again_before_the_bad_file_went_is_written_at_the_end(tmp_path, monkeypatch, gone):
    rig = Rig(tmp_path)
    table = store_bad(rig, matched=0)
    rig.settle()
    with removal_fails(rig, table, monkeypatch):
        rig.compute(KEYS).free()
        if not gone:
            assert not rig.store.close(0), "nothing is lost without a word"
    if gone:
        assert rig.store.close(0)
        assert [rig.restore_one(key) for key in KEYS] == all_bytes()
    rig.drop()


def test_without_a_cold_tier_it_only_leaves_ram(tmp_path: Path):
    rig = Rig(tmp_path)
    rig.store.cold = rig.store.flusher = None
    table = rig.compute(KEYS)
    rig.store.withdraw(OWN)
    table.free()
    assert [bool(rig.store.where(h)) for h in HASHES] == [True, True, False, False, False, False]
    rig.drop()
