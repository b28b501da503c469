"""An engine that makes no progress is noticed and restarted; one that is only slow, or idle, is not."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from daemon import Daemon, wait_until
from engine_processes import (
    STALL_S,
    ask,
    collect,
    engine,
    package_on_the_path,  # noqa: F401
    until,
    up,
    words,
)

from omlxd.chat import Failed
from omlxd.common.stacks import SIGNAL
from omlxd.front.engines.client import EngineProcess


async def test_an_engine_that_stops_is_noticed_by_its_lack_of_progress(caplog: pytest.LogCaptureFixture):
    async with engine(stall_s=STALL_S) as made:
        await up(made)
        other = made.generate(ask("one sleep:300"))
        events = await collect(made, "one stop two")
        failed = events[-1]
        assert isinstance(failed, Failed) and "no progress" in failed.message and failed.retry_after
        assert isinstance([event async for event in other][-1], Failed)
        assert "where its threads stand" in caplog.text
        await up(made)


@pytest.mark.slow
def test_a_daemon_shows_where_it_stands_by_a_signal(tmp_path: Path):
    with Daemon(tmp_path) as daemon:

        def engine_shows_its_loop() -> bool:
            os.kill(daemon.engine_pid(), SIGNAL)  # Again where the thread has only just been started.
            time.sleep(0.2)
            return "schedule/scheduler.py" in daemon.logged()

        os.kill(daemon.process.pid, SIGNAL)
        for place in ("tasks:\n", "in EngineLink._send_all"):
            wait_until(lambda place=place: place in daemon.logged(), why=daemon.logged)
        wait_until(engine_shows_its_loop, why=daemon.logged)
        assert daemon.state() == "ready"


@pytest.mark.slow
async def test_a_frozen_thread_is_noticed_though_the_engine_answers_pings():
    async with engine(stall_s=STALL_S) as made:
        await up(made)
        asking = asyncio.create_task(collect(made, "one hang"))
        while not asking.done():
            await made.stats()
            await asyncio.sleep(0.05)
        failed = asking.result()[-1]
        assert isinstance(failed, Failed) and "no progress" in failed.message


async def held_up(made: EngineProcess, works: Callable[[float], Awaitable[bool]]) -> None:
    """`works(patience)` in an engine that is not ended for it.

    Where the machine held the engine itself up, it is tried again: then with twice the patience.
    """
    for _ in range(4):
        await up(made)
        starts = made.supervisor.starts
        if await works(made.supervisor.restarts.patience_s) and made.supervisor.starts == starts:
            return
    raise AssertionError("it was ended each time")


@pytest.mark.slow
async def test_silent_work_and_idleness_are_no_stall():
    async with engine(stall_s=STALL_S) as made:

        async def idle_and_then_silent(patience: float) -> bool:
            pid = made.supervisor.pid
            await asyncio.sleep(1.5 * patience)
            assert made.supervisor.pid == pid, "who has nothing to do is no stall, however slow the machine"
            return words(await collect(made, f"steps:{int(15 * patience)} done")) == ["done"]

        await held_up(made, idle_and_then_silent)


@pytest.mark.slow
async def test_a_front_that_did_not_run_itself_blames_no_engine():
    """As after a machine slept: what the engine said meanwhile is not read yet."""
    async with engine(stall_s=STALL_S) as made:

        async def asleep_meanwhile(patience: float) -> bool:
            working = asyncio.create_task(collect(made, f"one steps:{int(20 * patience)} done"))
            await until(lambda: made._requests.requests)
            await asyncio.sleep(0.5)
            time.sleep(1.5 * patience)
            return words(await working) == ["one", "done"]

        await held_up(made, asleep_meanwhile)


@pytest.mark.slow
async def test_a_load_that_stops_is_ended_and_tried_again(tmp_path: Path):
    async with engine("--stop-on-load", "--notes", str(tmp_path), stall_s=STALL_S) as made:
        failed = (await collect(made, "x"))[-1]
        assert isinstance(failed, Failed) and "no progress" in failed.message
        await up(made, "x")


@pytest.mark.slow
async def test_patience_grows_for_a_machine_that_is_only_slow(tmp_path: Path):
    async with engine("--notes", str(tmp_path), stall_s=1.0) as made:
        for stalls in (1, 2):
            began = time.monotonic()
            failed = (await collect(made, "one gate two"))[-1]
            assert isinstance(failed, Failed) and "no progress" in failed.message
            assert time.monotonic() - began >= stalls and made.supervisor.restarts.stalls == stalls
        assert made.supervisor.restarts.patience_s == 4.0
        (tmp_path / "gate").touch()
        await up(made, "one gate two")
