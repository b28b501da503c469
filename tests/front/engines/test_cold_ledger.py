"""The cold tier's start: the folder is readable once it is locked, writable once it is counted."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kv_fakes import bytes_on_disk

from omlxd.errors import Unavailable
from omlxd.front.engines.ledger import cold_ledger
from omlxd.front.engines.ledger.cold_ledger import ColdLedger
from omlxd.kv.files.fs import subfolders
from omlxd.kv.ledger import ledger as ledger_module
from omlxd.kv.ledger.ledger import Ledger, LedgerBusy
from omlxd.wire import Grant, Reserve

CAP = 10_000_000

NS = "a" * 32
OLD = f"{0:064x}.safetensors"


@pytest.fixture
def slow_stock(monkeypatch: pytest.MonkeyPatch):
    """Taking stock begins, and goes on only once this is set."""
    may_go_on = threading.Event()
    take_stock = Ledger.take_stock

    def slow(ledger: Ledger, between: Callable[[], None]) -> int:
        assert may_go_on.wait(120)
        return take_stock(ledger, between)

    monkeypatch.setattr(Ledger, "take_stock", slow)
    yield may_go_on
    may_go_on.set()


@pytest.mark.slow
async def test_the_folder_is_there_to_read_before_it_is_counted(tmp_path: Path, slow_stock: threading.Event):
    (tmp_path / NS / "00").mkdir(parents=True)
    (tmp_path / NS / "00" / OLD).write_bytes(bytes(4096))
    cold = ColdLedger(tmp_path, CAP)
    assert await cold.open() == str(tmp_path)
    answers: asyncio.Queue[Grant] = asyncio.Queue()
    cold.account(answers.put_nowait, 77).handle(Reserve(ticket=1, nbytes=4096))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(answers.get(), 0.1)
    other = ColdLedger(tmp_path, CAP)
    assert await other.open() == ""  # Locked from the first moment.
    slow_stock.set()
    assert (await asyncio.wait_for(answers.get(), 60)).nbytes == 4096
    stats = await cold.ledger_stats()
    assert stats is not None and (stats.bytes_used, stats.reserved) == (4096, 4096)
    for ledger in (other, cold):
        await ledger.close()


async def test_a_lease_is_a_small_part_of_the_cap_or_one_file(tmp_path: Path):
    cold = ColdLedger(tmp_path, CAP)
    await cold.open()
    answers: asyncio.Queue[Grant] = asyncio.Queue()
    account = cold.account(answers.put_nowait, 77)
    share = CAP // cold_ledger.LEASE_SHARE
    for nbytes, least, granted in (
        (share, 4096, share),
        (share + 1, 4096, 4096),
        (8 * share, 4 * share, 4 * share),
        (8 * share, 0, 8 * share),
        (2 * CAP, CAP, 0),
    ):
        account.handle(Reserve(ticket=1, nbytes=nbytes, least=least))
        assert (await asyncio.wait_for(answers.get(), 60)).nbytes == granted
    await cold.close()


async def test_a_folder_that_cannot_be_counted_is_only_read_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    fails = [True]

    def listed(folder: Path, ours: Callable[[str], bool]) -> list[os.DirEntry[str]]:
        if fails:
            raise OSError(5, os.strerror(5), str(tmp_path / NS))
        return subfolders(folder, ours)

    monkeypatch.setattr(ledger_module, "subfolders", listed)
    cold = ColdLedger(tmp_path, CAP)
    assert await cold.open() == str(tmp_path)
    answers: asyncio.Queue[Grant] = asyncio.Queue()
    cold.account(answers.put_nowait, 77).handle(Reserve(ticket=1, nbytes=4096))
    assert (await asyncio.wait_for(answers.get(), 60)).nbytes == 0
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and "only read until it can be counted" in warnings[0]
    with pytest.raises(LedgerBusy):
        Ledger(tmp_path, CAP).lock()
    fails.clear()
    cold.account(answers.put_nowait, 78).handle(Reserve(ticket=1, nbytes=4096))
    assert (await asyncio.wait_for(answers.get(), 60)).nbytes == 4096
    await cold.close()


async def test_a_walk_rests_until_somebody_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cold_ledger, "WALK_S", 0.0)
    monkeypatch.setattr(cold_ledger, "PAUSE_S", 600.0)
    for number in range(50):
        (tmp_path / NS / f"{number:02x}").mkdir(parents=True)
        (tmp_path / NS / f"{number:02x}" / OLD).write_bytes(bytes(4096))
    cold = ColdLedger(tmp_path, CAP)
    assert await cold.open() == str(tmp_path)
    stats = await asyncio.wait_for(cold.ledger_stats(), 60)
    assert stats is not None and stats.files == 50
    await cold.close()

    cold = ColdLedger(tmp_path, CAP)
    await cold.open()
    await asyncio.wait_for(cold.close(), 60)
    Ledger(tmp_path, CAP).lock()


async def test_a_folder_that_goes_and_comes_back_is_noticed_while_nobody_asks_for_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cold_ledger, "LOOK_S", 0.01)
    root, aside, looked = tmp_path / "cache", tmp_path / "aside", list[str]()
    cold = ColdLedger(root, CAP)
    assert await cold.open() == str(root)
    stat = os.stat

    def noted(path: str, *args: object, **named: bool) -> os.stat_result:
        if str(path).startswith(str(root)):
            looked.append(threading.current_thread().name)
        return stat(path, *args, **named)

    monkeypatch.setattr(os, "stat", noted)
    for away in (1, 0):
        root.rename(aside) if away else aside.rename(root)
        async with asyncio.timeout(60):
            while (stats := cold.peek()) is None or stats.folder_away != away:
                await asyncio.sleep(0.01)
    assert looked and all(thread.startswith("cold-ledger") for thread in looked), "not on the event loop"
    await cold.close()


def test_a_lock_alone_grants_nothing(tmp_path: Path):
    ledger = Ledger(tmp_path, CAP)
    ledger.lock()
    assert ledger.reserve(4096) == 0
    assert ledger.take_stock() == 0
    assert ledger.reserve(4096) == 4096
    ledger.close()


async def test_files_that_nobody_used_for_the_time_to_live_go_and_no_others(tmp_path: Path):
    now = time.time()
    ages = {OLD: 100.0, f"{1:064x}.safetensors": 5.0, f"{2:064x}.record": 100.0, f"{3:064x}.txt": 100.0}
    (tmp_path / NS / "00").mkdir(parents=True)
    for name, age in ages.items():
        (tmp_path / NS / "00" / name).write_bytes(bytes(4096))
        os.utime(tmp_path / NS / "00" / name, (now - age, now - age))
    for ttl_s, gone in ((float("inf"), 0), (1000.0, 0), (50.0, 2)):
        cold = ColdLedger(tmp_path, CAP, ttl_s=ttl_s)
        await cold.open()
        await cold.ledger_stats()
        assert await cold.remove_unused() == gone
        stats = await cold.ledger_stats()
        assert stats is not None and stats.files == 3 - gone
        await cold.close()
    assert sorted(path.name[62:] for path in (tmp_path / NS / "00").iterdir()) == ["01.safetensors", "03.txt"]


async def test_a_daemon_looks_by_itself_for_files_that_nobody_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cold_ledger, "LOOK_S", 0.01)
    (tmp_path / NS / "00").mkdir(parents=True)
    file = tmp_path / NS / "00" / OLD
    file.write_bytes(bytes(4096))
    os.utime(file, (1.0, 1.0))
    cold = ColdLedger(tmp_path, CAP, ttl_s=60.0)
    await cold.open()
    async with asyncio.timeout(60):
        while file.exists():
            await asyncio.sleep(0.01)
    await cold.close()


async def test_backups_leave_a_folder_out_that_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: asyncio.Queue[Path] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(
        cold_ledger,
        "leave_out_of_backups",
        lambda folder: loop.call_soon_threadsafe(asked.put_nowait, folder),
    )
    cold, other = ColdLedger(tmp_path, CAP), ColdLedger(tmp_path, CAP)
    assert await cold.open() == str(tmp_path) and await other.open() == ""
    assert await asyncio.wait_for(asked.get(), 60) == tmp_path
    await cold.close()
    await other.close()
    assert asked.empty()


async def test_what_an_engine_wrote_for_an_adapter_counts_when_it_dies(tmp_path: Path):
    """Under the base's grant, to the adapter's namespace, and not told yet."""
    cold, base, tuned = ColdLedger(tmp_path, CAP), "a" * 32, "b" * 32
    await cold.open()
    answers: asyncio.Queue[Grant] = asyncio.Queue()
    host, guest = cold.account(answers.put_nowait, 77), cold.account(answers.put_nowait, 77)
    host.model_loaded(base, "/models/base")
    guest.model_loaded(tuned, "/models/base/tuned")
    host.handle(Reserve(ticket=1, nbytes=CAP // 2))
    assert (await asyncio.wait_for(answers.get(), 60)).nbytes == CAP // 2
    for namespace in (base, tuned):
        (tmp_path / namespace / "00").mkdir(parents=True)
        (tmp_path / namespace / "00" / OLD).write_bytes(bytes(4096))
        (tmp_path / namespace / "00" / f"{OLD}.77-5.tmp").write_bytes(bytes(4096))
    guest.process_ended()
    host.process_ended()
    stats = await cold.ledger_stats()
    assert stats is not None and stats.bytes_used == bytes_on_disk(tmp_path) == 2 * 4096
    assert stats.reserved == 0 and not cold._hosts
    await cold.close()


async def test_a_look_for_what_nobody_uses_that_fails_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("LOOK_S", "EXPIRY_S", "WALK_S"):
        monkeypatch.setattr(cold_ledger, name, 0.01)
    cold, looks = ColdLedger(tmp_path, CAP, ttl_s=1000.0), list[int]()

    def fails(*_: object) -> Any:
        looks.append(1)
        raise OSError(24, os.strerror(24))

    monkeypatch.setattr(cold_ledger, "subfolders", fails)
    await cold.open()
    async with asyncio.timeout(60):
        while len(looks) < 3:
            await asyncio.sleep(0.01)
    await cold.close()


@pytest.mark.parametrize("hangs", ["lock", "probe", "later"])
async def test_a_folder_that_never_answers_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: str
):
    """A dead mount: no model waits for it, nor does the end."""
    monkeypatch.setattr(cold_ledger, "ANSWER_S", 0.2 if hangs != "later" else 60.0)
    monkeypatch.setattr(cold_ledger, "CLOSE_S", 0.2)
    answers = threading.Event()
    cold = ColdLedger(tmp_path / "cache", 1 << 20)
    if hangs == "lock":
        monkeypatch.setattr(Ledger, "lock", lambda self: answers.wait(60))
    elif hangs == "probe":
        monkeypatch.setattr(ColdLedger, "_probe", lambda self: answers.wait(60))
    try:
        assert isinstance(await cold.claim(), OSError) == (hangs == "lock")
        assert bool(await cold.open()) == (hangs == "later")
        if hangs == "later":
            pending = cold.submit(lambda ledger: int(answers.wait(60)))
        else:
            assert cold.folder == "" and await cold.submit(lambda ledger: 1) == 0
        await cold.close()
        assert not answers.is_set() and (hangs != "later" or not pending.done())
    finally:
        answers.set()


async def test_a_folder_that_stops_answering_is_left_out_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A load gets no folder, and an owner a sentence; nobody else waits, and the end does not."""
    answers = threading.Event()
    cold = ColdLedger(tmp_path / "cache", 1 << 20)
    folder = str(tmp_path / "cache")
    assert await cold.open() == await cold.open() == folder
    monkeypatch.setattr(cold_ledger, "ANSWER_S", 0.05)
    monkeypatch.setattr(cold_ledger, "CLOSE_S", 0.05)
    try:
        monkeypatch.setattr(cold, "_look_into", lambda: answers.wait(60))
        stuck = cold.submit(lambda ledger: int(answers.wait(60)))
        for _ in range(3):
            assert await cold.open() == ""
        with pytest.raises(Unavailable, match="does not answer"):
            await cold.pins()
        assert cold.folder == folder and not stuck.done()
        answers.set()
        while not await cold.open():
            await asyncio.sleep(0.01)
        assert (await cold.pins()).pins == []
        said = [line.message for line in caplog.records if "answer" in line.message]
        assert len(said) == 2 and "without the SSD cache" in said[0] and "answers again" in said[1]
        await stuck
        answers.clear()
        cold.submit(lambda ledger: int(answers.wait(60)))
        await cold.close()
        assert not answers.is_set()
    finally:
        answers.set()
