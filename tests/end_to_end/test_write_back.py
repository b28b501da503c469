"""Write-back and admission through real processes: what a clean stop keeps, what a kill loses."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from daemon import Daemon, own_usage, prose, wait_until

from tests.end_to_end.test_persistence import assert_restored_from_disk, block_files, text_of

LONG = prose(300)
BACK = ("--hot-cache-write", "back", "--hot-cache-max-size", "200MB")
"""Of a size of its own: `auto` writes early on a machine that has no memory left."""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.mark.slow
def test_a_clean_stop_writes_what_is_in_ram_and_a_kill_loses_no_more_than_that(home: Path):
    other = prose(300, seed=8)
    with Daemon(home, *BACK) as daemon:
        first = daemon.messages(LONG, max_tokens=40)
        assert block_files(daemon) == []
        assert own_usage(daemon.messages(LONG, max_tokens=40))["cached_hot"] > 0
        assert daemon.stop() == 0
        written = len(block_files(daemon))
        assert written > 0 and "not every block was stored" not in daemon.logged()
    with Daemon(home, *BACK) as daemon:
        assert_restored_from_disk(daemon.messages(LONG, max_tokens=40), first)
        second = daemon.messages(other, max_tokens=40)
        daemon.kill_engine()  # The front's end would leave it a moment to write in.
        assert len(block_files(daemon)) == written
        daemon.kill()
    with Daemon(home, *BACK) as daemon:
        assert_restored_from_disk(daemon.messages(LONG, max_tokens=40), first)
        again = daemon.messages(other, max_tokens=40)
        assert own_usage(again)["cached_cold"] == 0 and text_of(again) == text_of(second)


@pytest.mark.slow
def test_an_engine_whose_front_is_gone_flushes_nothing_wrong(home: Path):
    """The front is killed, and its engine ends by itself: what it still writes is whole."""
    with Daemon(home, *BACK) as daemon:
        first = daemon.messages(LONG, max_tokens=40)
        daemon.kill()
    with Daemon(home, *BACK) as daemon:
        again = daemon.messages(LONG, max_tokens=40)
        assert text_of(again) == text_of(first)
        assert "failed" not in daemon.logged() and "removed" not in daemon.logged()


@pytest.mark.slow
def test_blocks_that_leave_ram_are_written(home: Path):
    with Daemon(home, *BACK, "--hot-cache-max-size", "1MB") as daemon:
        first = daemon.messages(LONG)
        for seed in range(1, 4):
            daemon.messages(prose(300, seed=seed))
        wait_until(lambda: bool(block_files(daemon)), why=daemon.logged)
        wait_until(lambda: not daemon.figure("kv_store_queue_bytes"), why=daemon.logged)
        again = daemon.messages(LONG)
        assert own_usage(again)["cached_cold"] > 0 and text_of(again) == text_of(first)


@pytest.mark.slow
def test_second_use_writes_on_the_second_request(home: Path):
    with Daemon(home, "--ssd-cache-admission", "second-use") as daemon:
        first = daemon.messages(LONG, max_tokens=8)
        assert daemon.stop() == 0
        assert block_files(daemon) == []
    with Daemon(home, "--ssd-cache-admission", "second-use") as daemon:
        daemon.messages(LONG, max_tokens=8)
        daemon.messages(LONG, max_tokens=8)
        assert daemon.stop() == 0
    with Daemon(home) as daemon:
        assert_restored_from_disk(daemon.messages(LONG, max_tokens=8), first)


@pytest.mark.slow
def test_a_daily_budget_that_is_used_up_leaves_ram_alone(home: Path):
    if time.strftime("%H:%M") >= "23:45":
        pytest.skip("the budget's day may end before the test does")
    with Daemon(home, "--ssd-cache-daily-write-budget", "1MB") as daemon:
        answers = [daemon.messages(prose(600, seed=n)) for n in range(6)]
        assert own_usage(daemon.messages(prose(600, seed=5)))["cached_hot"] > 0
        assert daemon.stop() == 0
        size = sum(path.stat().st_size for path in block_files(daemon))
        assert 0 < size <= 1_000_000
        assert daemon.logged().count("write budget of 1 MB is used up") == 1
    with Daemon(home, "--ssd-cache-daily-write-budget", "1MB") as daemon:
        assert text_of(daemon.messages(prose(600, seed=0))) == text_of(answers[0])
        daemon.messages(prose(600, seed=9))
        assert daemon.stop() == 0
        assert sum(path.stat().st_size for path in block_files(daemon)) == size
