"""The cold tier's account where something goes wrong: grants, unreadable folders, a disk that hangs."""
# ruff: noqa: F811 -- `ledger` is a fixture of ledger_files.py

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from kv_fakes import Rig
from ledger_files import NS, PAGE, ledger, name, put  # noqa: F401

import omlxd.kv.ledger.ledger as ledger_module
from omlxd.kv.cold.writer import MOST_ACTIONS, StoreWriter
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
