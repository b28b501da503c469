"""The daily write budget: what it refuses, when it resumes, and what a crash or a bad disk makes of it."""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path
from typing import get_args

import pytest
from faulty_fs import Crash, Fault, FaultyFileSystem, Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_fakes import files_in

from omlxd.kv.files.fs import FileSystem
from omlxd.kv.files.paths import WRITES_NAME
from omlxd.kv.ledger.ledger import Ledger
from omlxd.kv.ledger.write_budget import AHEAD, SAVE_S, WriteBudget

MB = 1 << 20
PAGE = 4096


class Days:
    def __init__(self) -> None:
        self.today = "2026-01-31"

    def __call__(self) -> str:
        return self.today


@pytest.fixture
def days() -> Days:
    return Days()


def opened(root: Path, limit: int, days: Days, fs: FileSystem | None = None) -> WriteBudget:
    budget = WriteBudget(root, limit, fs, days)
    budget.open()
    return budget


def test_it_grants_up_to_the_limit_and_again_the_next_day(tmp_path, days, caplog):
    budget = opened(tmp_path, 100 * MB, days)
    assert budget.spend(60 * MB) and not budget.spend(60 * MB) and budget.spend(40 * MB)
    for _ in range(5):
        assert not budget.spend(1)
    assert budget.used_up and budget.spent == 100 * MB
    assert [r.getMessage() for r in caplog.records] == [
        "SSD cache: today's write budget of 104 MB is used up; new blocks stay in RAM until tomorrow"
    ]
    days.today = "2026-02-01"
    assert not budget.used_up and budget.spent == 0
    assert budget.spend(100 * MB) and not budget.spend(1)
    assert len(caplog.records) == 2


def test_what_is_given_back_can_be_spent(tmp_path, days):
    budget = opened(tmp_path, 10 * MB, days)
    assert budget.spend(10 * MB)
    budget.give_back(4 * MB)
    assert not budget.spend(5 * MB) and budget.spend(4 * MB)
    days.today = "2026-02-01"
    budget.give_back(4 * MB)  # granted yesterday
    assert budget.spent == 0


def test_a_clean_restart_keeps_the_exact_sum_and_a_crash_no_less(tmp_path, days):
    budget = opened(tmp_path, 0, days)
    assert budget.spend(5 * MB)
    budget.close()
    budget = opened(tmp_path, 0, days)
    assert budget.spent == 5 * MB
    assert budget.spend(3 * MB)
    crashed = opened(tmp_path, 0, days)
    assert 8 * MB <= crashed.spent <= 8 * MB + AHEAD
    days.today = "2026-02-01"
    assert opened(tmp_path, 0, days).spent == 0


def test_the_sum_on_file_never_passes_a_limit(tmp_path, days):
    budget = opened(tmp_path, 10 * MB, days)
    assert budget.spend(1 * MB)
    assert opened(tmp_path, 10 * MB, days).spent == 10 * MB


def test_the_file_is_not_written_for_every_block(tmp_path, days):
    fs = FaultyFileSystem()
    budget = opened(tmp_path, 0, days, fs)
    before = fs.count
    for _ in range(1000):
        assert budget.spend(AHEAD // 500)
    assert fs.count - before <= 2 * 6


@pytest.mark.parametrize("content", [b"", b"{}", b"nonsense", b"\xff" * 9000, b'{"day": 1, "bytes": "x"}'])
def test_a_file_that_makes_no_sense_counts_as_a_day_used_up(tmp_path, days, content, caplog):
    (tmp_path / WRITES_NAME).write_bytes(content)
    budget = opened(tmp_path, 10 * MB, days)
    assert not budget.spend(1) and budget.used_up and len(caplog.records) == 1
    days.today = "2026-02-01"
    assert budget.spend(10 * MB)
    assert opened(tmp_path, 0, days).spend(1), "with no limit there is nothing to refuse"


@pytest.mark.parametrize("in_its_place", ["folder", "link"])
def test_a_folder_or_a_link_in_its_place_stops_nothing(tmp_path, days, in_its_place):
    path = tmp_path / WRITES_NAME
    target = tmp_path / "target"
    target.write_text('{"day": "2026-01-31", "bytes": 5}')
    path.mkdir() if in_its_place == "folder" else path.symlink_to(target)
    budget = opened(tmp_path, 0, days)
    assert budget.spend(MB)
    budget.close()
    assert json.loads(target.read_text())["bytes"] == 5


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_fault_at_every_operation(tmp_path, days, kind):
    """Never an exception, never more than was granted unseen: what the next life finds is enough."""
    for at in range(1, 200):
        root = tmp_path / str(at)
        root.mkdir()
        fs = FaultyFileSystem(Fault(at, kind, errno.EIO))
        granted = 0
        try:
            for _ in range(2):
                budget = opened(root, 0, days, fs)
                for _ in range(5):
                    assert budget.spend(20 * MB)
                    granted += 20 * MB
                budget.close()
        except Crash:
            assert kind.startswith("crash")
            # The grant that was being asked for was never given.
            assert opened(root, 0, days).spent >= granted
        else:
            after = opened(root, 0, days)
            # A disk that failed may have kept the sum of an earlier moment: that is all it could take.
            assert after.spent >= granted or fs.hit
            assert after.spend(1)
        assert [p.name for p in root.iterdir() if p.name.endswith(".tmp")] == []
        if not fs.hit:
            break
    assert 20 < at < 199


# --------------------------------------------------------------------- what was written

STEPS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 10**12)),
    st.tuples(st.just("pass"), st.floats(0, 2 * SAVE_S)),
    st.tuples(st.sampled_from(["midnight", "restart", "kill"]), st.just(0)),
)


@settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=50)
@given(steps=st.lists(STEPS, max_size=30))
def test_the_sum_of_all_days_never_falls_but_for_what_a_kill_had_not_saved(tmp_path_factory, steps):
    root, days, now = tmp_path_factory.mktemp("cache"), Days(), [0.0]

    def begin() -> WriteBudget:
        budget = WriteBudget(root, 0, None, days, lambda: now[0])
        budget.open()
        return budget

    account, today, ever, recent = begin(), 0, 0, list[tuple[float, int, str]]()
    for step, much in steps:
        if step == "write":
            account.wrote(int(much))
            account.save_written()
            today, ever = today + int(much), ever + int(much)
            recent.append((now[0], int(much), days.today))
        elif step == "pass":
            now[0] += much
            account.save_written()
        elif step == "midnight":
            days.today = f"{days.today[:8]}{int(days.today[8:]) + 1:02}"
            today = 0
        elif step == "restart":
            account.close()
            account = begin()
        else:
            account = begin()
            tail = sum(nbytes for at, nbytes, _ in recent if now[0] - at < SAVE_S)
            assert ever - tail <= account.written_ever <= ever
            assert account.written_today <= today
            today, ever, recent = account.written_today, account.written_ever, []
        assert (account.written_today, account.written_ever) == (today, ever)


def test_what_was_written_is_saved_once_in_a_while(tmp_path, days):
    now, fs = [0.0], FaultyFileSystem()
    account = WriteBudget(tmp_path, 0, fs, days, lambda: now[0])
    account.open()
    before = fs.count
    for _ in range(1000):
        now[0] += SAVE_S / 100
        account.wrote(PAGE)
        account.save_written()
    assert fs.count - before <= 10 * 6
    assert opened(tmp_path, 0, days).written_ever >= 900 * PAGE


def test_a_file_of_an_earlier_release_begins_to_count(tmp_path, days):
    (tmp_path / WRITES_NAME).write_text('{"day": "2026-01-31", "bytes": 5}')
    account = opened(tmp_path, 0, days)
    assert (account.spent, account.written_today, account.written_ever) == (5, 0, 0)


# --------------------------------------------------------------------- in the ledger


def store(ledger: Ledger, number: int) -> bool:
    if not ledger.reserve(PAGE):
        return False
    path = f"{'a' * 32}/00/{number:064x}.safetensors"
    (ledger.root / path).parent.mkdir(parents=True, exist_ok=True)
    (ledger.root / path).write_bytes(bytes(PAGE))
    ledger.stored([(path, PAGE)])
    return True


def test_a_ledger_whose_day_is_used_up_refuses_and_evicts_nothing(tmp_path, days, caplog):
    caplog.set_level(logging.INFO)
    ledger = Ledger(tmp_path, 4 * PAGE, WriteBudget(tmp_path, 6 * PAGE, today=days))
    ledger.open()
    assert [store(ledger, n) for n in range(8)] == [True] * 6 + [False] * 2
    stats = ledger.stats()
    assert (stats.written_bytes_total, stats.written_today_bytes) == (6 * PAGE, 6 * PAGE)
    assert (stats.daily_write_budget_bytes, stats.write_budget_used_up) == (6 * PAGE, 1)
    assert (stats.evicted_files, len(files_in(tmp_path)), stats.reserved) == (2, 4, 0)
    ledger.close()

    ledger = Ledger(tmp_path, 4 * PAGE, WriteBudget(tmp_path, 6 * PAGE, today=days))
    ledger.open()
    assert not store(ledger, 8)
    days.today = "2026-02-01"
    assert store(ledger, 8) and ledger.stats().write_budget_used_up == 0
    assert (ledger.stats().written_today_bytes, ledger.stats().written_ever_bytes) == (PAGE, 7 * PAGE)
    ledger.close()


def test_what_an_engine_was_granted_and_did_not_write_comes_back(tmp_path, days):
    ledger = Ledger(tmp_path, 100 * PAGE, WriteBudget(tmp_path, 6 * PAGE, today=days))
    ledger.open()
    ledger.engine_loaded("a" * 32, str(tmp_path))
    assert ledger.reserve(6 * PAGE) and not ledger.reserve(PAGE)
    (tmp_path / ("a" * 32) / "00").mkdir(parents=True)
    (tmp_path / ("a" * 32) / "00" / f"{1:064x}.safetensors").write_bytes(bytes(PAGE))
    ledger.engine_gone(6 * PAGE, 77, "a" * 32)
    stats = ledger.stats()
    assert (stats.written_today_bytes, stats.bytes_used, stats.reserved) == (PAGE, PAGE, 0)
    assert [store(ledger, n) for n in range(2, 9)] == [True] * 5 + [False] * 2
    ledger.close()


def test_what_was_out_at_midnight_counts_for_the_new_day_after_a_restart(tmp_path, days):
    budget = opened(tmp_path, 0, days)
    assert budget.spend(5 * MB)
    budget.outstanding = lambda: 2 * MB
    days.today = "2026-02-01"
    assert budget.spent == 2 * MB
    budget.close()
    assert opened(tmp_path, 0, days).spent == 2 * MB


def test_what_was_out_at_midnight_counts_where_its_engine_died_and_the_folder_comes_back(tmp_path, days):
    ledger = Ledger(tmp_path / "cache", 10 * PAGE, WriteBudget(tmp_path / "cache", 0, None, days))
    ledger.open()
    assert ledger.reserve(4 * PAGE)
    ledger.root.rename(tmp_path / "away")
    ledger.engine_gone(4 * PAGE, 77, "a" * 32)
    days.today = "2026-02-01"
    (tmp_path / "away").rename(ledger.root)
    assert ledger.check_folder()
    assert (ledger.stats().reserved, ledger.stats().written_today_bytes) == (0, 4 * PAGE)
    ledger.close()


def test_a_lock_alone_leaves_the_sum_as_it_is(tmp_path, days):
    (tmp_path / WRITES_NAME).write_text('{"day": "2026-01-31", "bytes": 5}')
    ledger = Ledger(tmp_path, PAGE, WriteBudget(tmp_path, today=days))
    ledger.lock()
    ledger.close()
    assert json.loads((tmp_path / WRITES_NAME).read_text())["bytes"] == 5


def test_who_looks_at_midnight_while_the_sum_is_written_loses_nothing_of_the_new_day(tmp_path, days):
    """The status page and the event loop look from threads of their own."""

    class Midnight(FileSystem):
        def sync(self, fd: int) -> None:
            super().sync(fd)
            days.today = "2026-02-01"
            looks.append((budget.used_up, budget.spent))

    looks: list[tuple[bool, int]] = []
    budget = opened(tmp_path, 0, days, Midnight())
    assert budget.spend(5 * MB) and budget.spend(7 * MB)
    assert opened(tmp_path, 0, days).spent >= 7 * MB and looks == [(False, 0), (False, 7 * MB)]
