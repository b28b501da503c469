"""The cold tier's account where something goes wrong: grants, unreadable folders, a disk that hangs."""
# ruff: noqa: F811 -- `ledger` is a fixture of ledger_files.py

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from kv_fakes import Rig, bytes_on_disk
from ledger_files import NS, PAGE, ledger, name, put, store  # noqa: F401

import omlxd.kv.ledger.ledger as ledger_module
from omlxd.kv.cold.writer import MOST_ACTIONS, StoreWriter
from omlxd.kv.files.fs import FileSystem, put_in_place
from omlxd.kv.files.paths import LOCK_NAME
from omlxd.kv.ledger.ledger import Ledger
from omlxd.kv.ledger.write_budget import WriteBudget


def write(ledger: Ledger, number: int, pages: int = 1) -> tuple[str, int]:
    return put(ledger.root, name(number), pages)


def disk_fails(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EIO, "Input/output error")


def test_nothing_is_evicted_for_a_grant_that_can_not_be_given(ledger: Ledger):
    """What others were granted can't be evicted: files would go, and the grant be refused all the same."""
    for number in range(4):
        assert ledger.reserve(PAGE)
        ledger.stored([write(ledger, number)])
    assert ledger.reserve(5 * PAGE) == 5 * PAGE
    assert ledger.reserve(6 * PAGE) == 0
    assert ledger.stats().files == 4 and ledger.stats().evicted_files == 0
    assert ledger.reserve(5 * PAGE) == 5 * PAGE, "what does fit is granted, and evicts for it"
    assert ledger.stats().files == 0


def test_a_dead_engines_grant_comes_back_once_its_folder_can_be_read(ledger: Ledger, monkeypatch):
    monkeypatch.setattr(ledger_module, "JUDGE_S", 0.0)
    ledger.engine_loaded(NS, str(ledger.root))
    assert ledger.reserve(6 * PAGE)
    write(ledger, 1)  # Written, and not told.
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", disk_fails)
        ledger.engine_gone(6 * PAGE, 4242, NS)
        assert ledger.stats().reserved == 6 * PAGE, "the cap holds, whatever it wrote"
        assert ledger.reserve(5 * PAGE) == 0
    assert ledger.reserve(5 * PAGE) == 5 * PAGE
    stats = ledger.stats()
    assert (stats.reserved, stats.bytes_used) == (5 * PAGE, PAGE)


def fits(ledger: Ledger, may_be_written: int) -> None:
    """What lies on the disk and what may still be written there is on the account, and below the cap."""
    stats = ledger.stats()
    real = bytes_on_disk(ledger.root) + may_be_written
    assert real <= stats.bytes_used + stats.reserved <= stats.cold_cache_bytes


def test_a_record_that_a_dead_engine_had_replaced_by_a_larger_one_counts_as_it_is(ledger: Ledger):
    assert ledger.reserve(5 * PAGE)
    ledger.stored([write(ledger, 1)])
    write(ledger, 1, pages=3)
    ledger.engine_gone(4 * PAGE, 77)
    assert ledger.stats().bytes_used == 3 * PAGE and ledger.stats().reserved == 0
    fits(ledger, 0)


def test_a_dead_engine_gives_back_no_more_than_its_own_grant(ledger: Ledger):
    """Three engines: one dies, one has written what it has not said yet, one may still write."""
    dead, late, other = ledger.reserve(PAGE), ledger.reserve(3 * PAGE), ledger.reserve(3 * PAGE)
    files = [write(ledger, number) for number in range(3)]
    ledger.engine_gone(dead, 77)
    fits(ledger, other)
    ledger.stored(files)
    assert ledger.stats().bytes_used == late and ledger.stats().reserved == other
    fits(ledger, other)


def test_a_grant_that_is_out_counts_when_the_folder_is_back(ledger: Ledger):
    aside = ledger.root.with_name(f"{ledger.root.name}-aside")
    assert ledger.reserve(10 * PAGE)
    for number in range(4):
        write(ledger, number)  # And not said yet.
    ledger.root.rename(aside)
    ledger.check_folder()
    aside.rename(ledger.root)
    ledger.check_folder()
    fits(ledger, 6 * PAGE)


def test_an_engine_dies_just_as_the_folder_is_back(ledger: Ledger):
    aside = ledger.root.with_name(f"{ledger.root.name}-aside")
    assert ledger.reserve(3 * PAGE)
    ledger.root.rename(aside)
    ledger.check_folder()
    aside.rename(ledger.root)
    write(ledger, 1)
    ledger.engine_gone(3 * PAGE, 77)
    assert (ledger.stats().bytes_used, ledger.stats().reserved) == (PAGE, 0)


@pytest.mark.parametrize("noticed", [False, True])
def test_what_an_engine_says_of_a_folder_that_is_away_is_no_loss(ledger: Ledger, noticed: bool):
    """It dies, or drops a file; nobody can look whether its files are there, and then they are."""
    aside = ledger.root.with_name(f"{ledger.root.name}-aside")
    assert ledger.reserve(6 * PAGE)
    ledger.stored([write(ledger, 1)])
    write(ledger, 2)
    ledger.root.rename(aside)
    if noticed:
        ledger.check_folder()
    ledger.dropped([name(1)])
    ledger.forget([name(1)], remove=False)
    ledger.engine_gone(5 * PAGE, 77)
    assert ledger.stats().reserved == 5 * PAGE
    aside.rename(ledger.root)
    ledger.check_folder()
    assert (ledger.stats().bytes_used, ledger.stats().reserved) == (2 * PAGE, 0)


def test_a_folder_that_is_back_and_can_not_be_read_is_away_still(ledger: Ledger, monkeypatch):
    aside = ledger.root.with_name(f"{ledger.root.name}-aside")
    assert ledger.reserve(PAGE)
    ledger.stored([write(ledger, 1)])
    ledger.root.rename(aside)
    assert ledger.reserve(PAGE) == 0
    aside.rename(ledger.root)
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", disk_fails)
        assert ledger.reserve(PAGE) == 0 and ledger.stats().folder_away == 1
    assert ledger.reserve(PAGE) == PAGE and ledger.stats().bytes_used == PAGE


def test_what_was_granted_yesterday_and_is_written_today_counts_today(tmp_path: Path):
    days = ["2026-01-30"]
    ledger = Ledger(tmp_path, 100 * PAGE, WriteBudget(tmp_path, 10 * PAGE, today=lambda: days[-1]))
    ledger.open()
    assert ledger.reserve(6 * PAGE)
    days.append("2026-01-31")
    assert ledger.reserve(4 * PAGE) and not ledger.reserve(PAGE)
    ledger.stored([write(ledger, 1, pages=2)])
    ledger.released(4 * PAGE)
    assert ledger.stats().written_today_bytes == 2 * PAGE
    assert not ledger.reserve(5 * PAGE) and ledger.reserve(4 * PAGE)
    ledger.close()


@pytest.mark.parametrize("ask", ["dropped", "forget"])
def test_a_file_that_can_not_be_looked_at_still_counts(ledger: Ledger, monkeypatch, ask: str):
    assert ledger.reserve(PAGE)
    ledger.stored([write(ledger, 1)])
    path, _ = write(ledger, 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "lstat", disk_fails)
        ledger.dropped([path]) if ask == "dropped" else ledger.forget([path], remove=False)
    assert ledger.stats().bytes_used == PAGE
    (ledger.root / path).unlink()
    ledger.dropped([path]) if ask == "dropped" else ledger.forget([path], remove=False)
    assert ledger.stats().bytes_used == 0


def test_a_disk_that_hangs_gathers_a_bounded_number_of_uses(tmp_path: Path):
    """Every request has its chain made recent behind the stores: not without end, if these never end."""
    rig = Rig(tmp_path)
    hangs = threading.Event()
    writer = StoreWriter(rig.cold, rig.lease, max_queue_bytes=1 << 20)
    ran: list[int] = []
    for _ in range(2):
        writer.after_queued(lambda: hangs.wait(120) and None)
    for number in range(MOST_ACTIONS + 50):
        writer.after_queued(lambda number=number: ran.append(number))
    hangs.set()
    assert writer.flush(60)
    assert MOST_ACTIONS - 2 <= len(ran) <= MOST_ACTIONS
    writer.after_queued(lambda: ran.append(-1))
    assert writer.flush(30) and ran[-1] == -1
    writer.close()


def test_a_file_that_is_cleared_before_its_engine_speaks_of_it_counts_for_nothing(ledger: Ledger):
    assert ledger.reserve(PAGE)
    path, nbytes = put(ledger.root, name(1))
    ledger.forget([path], remove=True)
    ledger.stored([(path, nbytes)])
    assert (ledger.stats().files, ledger.stats().bytes_used, ledger.stats().reserved) == (0, 0, 0)


def test_an_old_record_goes_when_all_is_counted_and_not_with_an_engine(ledger):
    """So that what is on the account is there."""
    path, nbytes = put(ledger.root, name(1).replace(".safetensors", ".record"))
    assert ledger.reserve(nbytes)
    ledger.stored([(path, nbytes)])
    os.utime(ledger.root / path, (1, 1))
    ledger.engine_gone(ledger.reserve(PAGE), 77, NS)
    assert (ledger.root / path).exists() and ledger.stats().files == 1
    ledger.take_stock()
    assert not (ledger.root / path).exists() and ledger.stats().files == 0


def test_a_disk_that_others_fill_is_emptied_by_twice_what_is_written(ledger: Ledger, monkeypatch, caplog):
    others = [0]
    monkeypatch.setattr(
        ledger_module, "disk_room", lambda root: 20 * PAGE - others[0] * PAGE - bytes_on_disk(root)
    )
    for number in range(8):
        assert store(ledger, number)
    others[0] = 16
    for number, files in ((8, 7), (9, 6), (10, 5), (11, 4), (12, 4), (13, 4)):
        assert store(ledger, number) and ledger.stats().files == files
    assert ledger.capacity() == 4 * PAGE and ledger.room() == 0
    others[0] = 24
    assert not ledger.reserve(5 * PAGE) and ledger.stats().files == 4, "nothing goes in vain"
    assert "nearly full" in caplog.text
    assert store(ledger, 14) and ledger.stats().files == 3


def test_a_nearly_full_disk_is_told_of_once_and_so_is_its_room(ledger: Ledger, monkeypatch, caplog):
    room = [0]
    monkeypatch.setattr(ledger_module, "disk_room", lambda root: room[0])
    for room[0] in (0, PAGE, 0, PAGE, 0):
        if ledger.reserve(PAGE):
            ledger.released(PAGE)
    full, free = (record.message for record in caplog.records)
    assert "nearly full: nothing new is stored" in full and "has room again" in free


def test_another_folder_in_the_place_of_the_one_that_was_opened_is_counted(tmp_path: Path):
    """Between two looks: a disk for another, or a laptop that slept."""
    other = Ledger(tmp_path / "other", 10 * PAGE)
    other.open()
    for number in range(9):
        put(other.root, name(number))
    other.close()
    ledger = Ledger(tmp_path / "cache", 10 * PAGE)
    ledger.open()
    ledger.root.rename(tmp_path / "gone")
    other.root.rename(ledger.root)
    assert ledger.reserve(8 * PAGE)
    fits(ledger, 8 * PAGE)
    ledger.close()


def test_an_engine_makes_folders_in_the_cache_that_is_back_as_another_file(tmp_path: Path):
    ledger = Ledger(tmp_path / "cache", 10 * PAGE)
    ledger.open()
    fs = FileSystem(str(ledger.root / LOCK_NAME))

    def write(number: int) -> None:
        put_in_place(fs, str(ledger.root / name(number)), lambda fd: os.write(fd, b"x"))

    write(1)
    ledger.root.rename(tmp_path / "gone")
    ledger.check_folder()
    shutil.copytree(tmp_path / "gone", ledger.root)
    with pytest.raises(OSError, match="the cache folder is away"):
        write(2)
    assert ledger.check_folder()
    write(2)
    ledger.close()
