"""The ledger: the cap at every instant, who goes first, what a dead engine leaves, what can't be removed."""
# ruff: noqa: F811 -- `ledger` is a fixture of ledger_files.py

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
from kv_fakes import FILE_DISK_BYTES, Rig, bytes_on_disk, chain, files_in, lone_key, temps_in
from ledger_files import (
    NS,
    PAGE,
    account,
    file_name,
    ledger,  # noqa: F401
    name,
    numbers,
    put,
    store,
)

import omlxd.kv.ledger.ledger as ledger_module
from omlxd.common.units import MOST_CACHE
from omlxd.kv.files.paths import disk_bytes
from omlxd.kv.ledger.ledger import UNDELETABLE_LIMIT, Ledger, LedgerBusy

# --------------------------------------------------------------------- the cap


def test_the_cap_holds_whatever_is_stored(ledger, tmp_path):
    for number in range(50):
        assert store(ledger, number, 1 + number % 4)
    assert ledger.stats().evicted_files == 50 - len(files_in(tmp_path))


def test_grants_that_are_out_count_as_used(ledger):
    assert ledger.reserve(6 * PAGE) == 6 * PAGE
    assert ledger.reserve(5 * PAGE) == 0
    assert ledger.reserve(4 * PAGE) == 4 * PAGE
    assert ledger.reserve(1) == 0
    ledger.released(6 * PAGE)
    assert ledger.reserve(6 * PAGE) == 6 * PAGE


@pytest.mark.parametrize("nbytes", [0, -1, 11 * PAGE])
def test_what_can_never_be_granted_evicts_nothing(ledger, tmp_path, nbytes):
    store(ledger, 1)
    assert ledger.reserve(nbytes) == 0
    assert numbers(tmp_path) == [1]


def test_a_cap_of_nothing_grants_nothing_and_keeps_nothing(tmp_path):
    put(tmp_path, name(1))
    ledger = Ledger(tmp_path, 0)
    ledger.open()
    assert files_in(tmp_path) == [] and ledger.reserve(1) == 0
    ledger.close()


def test_storing_a_file_again_counts_it_once(ledger):
    store(ledger, 1, 3)
    store(ledger, 1, 3)
    assert ledger.stats().bytes_used == 3 * PAGE and ledger.stats().files == 1


def test_sizes_are_counted_in_whole_pages(tmp_path):
    assert [disk_bytes(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]
    put(tmp_path, name(1))
    (tmp_path / name(1)).write_bytes(b"x" * (PAGE + 1))
    ledger = Ledger(tmp_path, 10 * PAGE)
    ledger.open()
    account(ledger)
    assert ledger.stats().bytes_used == 2 * PAGE
    ledger.close()


def test_the_cap_holds_over_all_models(ledger, tmp_path):
    for number in range(30):
        assert ledger.reserve(PAGE)
        ledger.stored([put(tmp_path, name(number, f"model{number % 3}"))])
        account(ledger)
    assert numbers(tmp_path) == list(range(20, 30))


# --------------------------------------------------------------------- who goes first


def test_the_least_recently_used_goes_first(ledger, tmp_path):
    for number in range(10):
        store(ledger, number)
    ledger.touched([name(0), name(3), name(99)])
    store(ledger, 10, 3)
    assert numbers(tmp_path) == [0, 3, 5, 6, 7, 8, 9, 10]
    store(ledger, 11, 4)
    assert numbers(tmp_path) == [0, 3, 9, 10, 11]


def test_recency_survives_in_the_files_times(tmp_path):
    for number, age in enumerate([5, 1, 4, 2, 3]):
        put(tmp_path, name(number), mtime=1_000_000_000_000 - age * 1000)
    ledger = Ledger(tmp_path, 3 * PAGE)
    ledger.open()
    assert numbers(tmp_path) == [1, 3, 4]
    account(ledger)
    store(ledger, 9)
    assert numbers(tmp_path) == [1, 3, 9]
    ledger.close()


def test_a_limit_that_nobody_set_is_the_same_after_a_restart_and_grows_with_its_disk(tmp_path, monkeypatch):
    GB = 10**9 // PAGE * PAGE
    room = [30 * GB]
    monkeypatch.setattr(ledger_module, "disk_room", lambda root: room[0])
    ledger = Ledger(tmp_path, None)
    ledger.open()
    assert ledger.cold_cache_bytes == ledger.capacity() == 15 * GB
    for number in range(14):
        assert ledger.reserve(GB)
        path, _ = put(tmp_path, name(number))
        os.truncate(tmp_path / path, GB)
        ledger.stored([(path, GB)])
        room[0] -= GB
    assert ledger.stats().cold_cache_bytes == 15 * GB and ledger.stats().evicted_files == 0
    for _ in range(2):
        ledger.close()
        ledger = Ledger(tmp_path, None)
        ledger.open()
        assert (ledger.cold_cache_bytes, ledger.stats().files) == (15 * GB, 14)
    room[0] += 200 * GB
    assert ledger.check_folder() and ledger.cold_cache_bytes == MOST_CACHE
    room[0] = -GB  # Others fill the disk: the limit stays until a restart, and what is free is theirs.
    assert ledger.reserve(GB) == GB
    assert (ledger.cold_cache_bytes, ledger.capacity()) == (MOST_CACHE, ledger.stats().bytes_used)
    assert ledger.stats().evicted_files == 2
    ledger.close()
    ledger = Ledger(tmp_path, 50 * GB)
    ledger.open()
    assert ledger.cold_cache_bytes == 50 * GB, "one that was set is kept"
    ledger.close()


def test_a_smaller_cap_is_met_at_once(tmp_path):
    for number in range(10):
        put(tmp_path, name(number), mtime=10**12 + number)
    ledger = Ledger(tmp_path, 4 * PAGE)
    ledger.open()
    assert numbers(tmp_path) == [6, 7, 8, 9]
    account(ledger)
    ledger.close()


@pytest.mark.parametrize("reopen", [False, True])
def test_a_leaf_goes_before_its_parent(tmp_path, reopen):
    """Written root first, by a request, and evicted leaf first: in the account and from the files alone."""
    keys = chain(range(24))
    rig = Rig(tmp_path, cap=6)
    rig.serve(keys)
    assert len(files_in(tmp_path)) == 6
    if reopen:
        rig.drop()
        rig = Rig(tmp_path, cap=6)
    for number in range(1, 6):
        rig.serve([lone_key(1000 + number)])
        assert [rig.cold.has(k.block_hash) for k in keys] == [True] * (6 - number) + [False] * number
    rig.check()
    rig.drop()


def test_a_shared_root_outlives_its_branches(tmp_path):
    trunk = list(range(8))
    branches = [chain([*trunk, *range(100 * b, 100 * b + 8)]) for b in range(1, 4)]
    rig = Rig(tmp_path, cap=8)
    for keys in branches:
        rig.serve(keys)
    assert len(files_in(tmp_path)) == 8
    for number in range(5):
        rig.serve([lone_key(1000 + number)])
    assert [rig.cold.has(k.block_hash) for k in branches[2]] == [True, True, True, False]
    assert not any(rig.cold.has(k.block_hash) for keys in branches[:2] for k in keys[2:])
    rig.drop()


# --------------------------------------------------------------------- trouble


def test_an_undeletable_file_wedges_nothing_and_stays_on_the_account(ledger, tmp_path, monkeypatch, caplog):
    for number in range(10):
        store(ledger, number)
    stuck = tmp_path / name(0)
    unlink = os.unlink

    def refuse(path, *args, **kwargs):
        if Path(path) == stuck:
            raise PermissionError(13, "no", str(path))
        unlink(path, *args, **kwargs)

    monkeypatch.setattr(os, "unlink", refuse)
    for number in range(10, 40):
        assert store(ledger, number)
    assert numbers(tmp_path) == [0, *range(31, 40)]
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) <= 4
    monkeypatch.undo()
    for number in range(40, 50):
        assert store(ledger, number)
    assert 0 not in numbers(tmp_path)


def test_a_folder_where_nothing_can_be_removed_refuses_space(tmp_path, monkeypatch, caplog):
    for number in range(200):
        put(tmp_path, name(number))
    ledger = Ledger(tmp_path, 200 * PAGE)
    ledger.open()
    tries: list[str] = []

    def refuse(path, *args, **kwargs):
        tries.append(str(path))
        raise OSError(30, "read-only", str(path))

    monkeypatch.setattr(os, "unlink", refuse)
    assert ledger.reserve(PAGE) == 0
    assert len(tries) == UNDELETABLE_LIMIT and len(caplog.records) == 1
    account(ledger)
    monkeypatch.undo()
    assert ledger.reserve(PAGE) == PAGE
    account(ledger, slack=PAGE)
    ledger.close()


def test_a_file_removed_by_somebody_else_is_no_trouble(ledger, tmp_path):
    for number in range(10):
        store(ledger, number)
    (tmp_path / name(0)).unlink()
    assert store(ledger, 10)
    account(ledger)


def test_a_dropped_file_that_is_still_there_still_counts(ledger, tmp_path):
    """Or there again: an engine may have stored it anew before its removal is heard of."""
    store(ledger, 1)
    store(ledger, 2)
    (tmp_path / name(2)).unlink()
    ledger.dropped([name(1), name(2), name(3)])
    account(ledger)
    assert ledger.stats().files == 1
    evicted_log = [ledger.evicted_log.of(name(number)) for number in (1, 2, 3)]
    assert [removal and removal.what for removal in evicted_log] == ["damaged"] * 3


# --------------------------------------------------------------------- an engine dies


def test_what_a_dead_engine_wrote_is_adopted_and_its_grant_comes_back(ledger, tmp_path):
    for number in range(3):
        store(ledger, number)
    assert ledger.reserve(5 * PAGE) == 5 * PAGE
    put(tmp_path, name(10))
    put(tmp_path, name(11))
    put(tmp_path, f"{name(12)}.77-3.tmp")
    ledger.engine_gone(5 * PAGE, 77)
    assert temps_in(tmp_path) == [] and numbers(tmp_path) == [0, 1, 2, 10, 11]
    account(ledger)
    assert ledger.stats().reserved == 0
    for number in range(20, 26):
        store(ledger, number)
    assert numbers(tmp_path) == [2, 10, 11, *range(20, 26)] or len(numbers(tmp_path)) == 10


def test_another_engines_grant_survives_and_its_late_word_counts_once(ledger, tmp_path):
    assert ledger.reserve(2 * PAGE) and ledger.reserve(3 * PAGE)
    late = put(tmp_path, name(1))
    ledger.engine_gone(2 * PAGE, 77)
    assert ledger.stats().reserved == 3 * PAGE and ledger.stats().bytes_used == PAGE
    ledger.stored([late])
    account(ledger, slack=2 * PAGE)
    ledger.released(2 * PAGE)
    account(ledger)


def test_a_file_that_vanishes_during_the_walk_is_no_trouble(ledger, tmp_path, monkeypatch):
    for number in range(5):
        put(tmp_path, f"{NS}/00/{file_name(number)}")
    entries = ledger_module.entries_of

    def vanish(folder):
        found = entries(folder)
        if folder.endswith("00"):
            (tmp_path / NS / "00" / file_name(3)).unlink()
        return found

    monkeypatch.setattr(ledger_module, "entries_of", vanish)
    assert ledger.reserve(5 * PAGE)
    ledger.engine_gone(5 * PAGE, 77)
    assert ledger.stats().files == 4
    account(ledger)


def test_a_block_costs_what_the_format_says(tmp_path):
    rig = Rig(tmp_path, cap=3)
    rig.serve(chain(range(8)))
    assert rig.ledger.stats().bytes_used == 2 * FILE_DISK_BYTES == bytes_on_disk(tmp_path)
    rig.drop()


def test_nothing_is_granted_while_the_folder_is_away_and_all_is_counted_when_it_is_back(
    ledger, tmp_path, caplog
):
    root, aside = ledger.root, tmp_path.parent / f"{tmp_path.name}-aside"
    assert store(ledger, 1) and store(ledger, 2)
    for replacement in (False, True):
        root.rename(aside)
        if replacement:
            root.mkdir()
        caplog.clear()
        for _ in range(3):
            assert ledger.reserve(PAGE) == 0 and ledger.stats().folder_away == 1
        assert [r.levelname for r in caplog.records] == ["WARNING"] and "SSD cache off" in caplog.text
        ledger.dropped([name(1)])
        if replacement:
            assert list(root.iterdir()) == []
            root.rmdir()
        assert not root.exists()
        put(aside, name(7))  # By an engine that had a grant left.
        aside.rename(root)
        assert store(ledger, 3) and ledger.stats().folder_away == 0 and "is back" in caplog.text
        account(ledger)
    with pytest.raises(LedgerBusy):
        Ledger(root, 10 * PAGE).lock()


def test_a_folder_that_came_back_as_another_is_locked_before_it_is_used(ledger, tmp_path):
    """A disk that was plugged in again: the old lock is on a file system that is no more."""
    root, aside = ledger.root, tmp_path.parent / f"{tmp_path.name}-other"
    assert store(ledger, 1)
    shutil.copytree(root, aside)
    root.rename(tmp_path.parent / f"{tmp_path.name}-gone")
    aside.rename(root)
    other = Ledger(root, 10 * PAGE)
    other.lock()
    assert ledger.reserve(PAGE) == 0, "another daemon has it"
    other.close()
    assert store(ledger, 2) and ledger.stats().files == 2
    with pytest.raises(LedgerBusy):
        other.lock()


def test_a_close_leaves_a_folder_that_is_not_ours_alone(tmp_path):
    ledger = Ledger(tmp_path / "cache", 10 * PAGE)
    ledger.open()
    assert store(ledger, 1)
    ledger.root.rename(tmp_path / "aside")
    ledger.root.mkdir()
    ledger.close()
    assert list(ledger.root.iterdir()) == []
