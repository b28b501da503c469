"""The machine stays awake while requests run: when the program starts and ends, and that it ends with us."""

# ruff: noqa: F811 -- `start` is a fixture of test_serve.py

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from awake_programs import AwakePrograms
from daemon import wait_until
from engine_processes import alive, until

from omlxd.cli.daemon.client import find_daemon
from omlxd.cli.watch.status import as_text
from omlxd.front.keep_awake import BEGIN_S, LINGER_S, RETRY_S, KeepAwake, holder
from tests.front.process.test_serve import start  # noqa: F401 (a fixture)

BOTH = pytest.mark.parametrize("platform", ["darwin", "linux"])


class Clock:
    """A clock that a test moves, and its timers."""

    def __init__(self):
        self.now = 0.0
        self._timers: list[asyncio.TimerHandle] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], object], /) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(self.now + delay, callback, (), asyncio.get_running_loop())
        self._timers.append(handle)
        return handle

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for handle in [handle for handle in self._timers if handle.when() <= self.now]:
            self._timers.remove(handle)
            if not handle.cancelled():
                handle._run()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AwakePrograms:
    made = AwakePrograms(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{made.folder}:/usr/bin:/bin")
    return made


def test_neither_keeps_the_display_on():
    assert holder("darwin") == ("caffeinate", "-i", "-w", str(os.getpid()))
    assert "--what=sleep" in holder("linux") and holder("linux")[-1] == "cat"


@BOTH
async def test_one_program_while_requests_follow_one_another(programs: AwakePrograms, platform: str):
    clock = Clock()
    awake = KeepAwake(True, holder(platform), clock)
    awake.begin()
    awake.end()
    clock.advance(LINGER_S)
    assert not awake.held and not programs.pids()  # A short one costs no process.
    awake.begin()
    clock.advance(BEGIN_S)
    await until(lambda: awake.held and programs.pids())
    for _ in range(3):
        awake.end()
        clock.advance(LINGER_S - 0.1)
        awake.begin()
        awake.begin()
    awake.end()
    (program,) = programs.pids()
    assert awake.held and alive(program)
    clock.advance(LINGER_S)
    await until(lambda: not awake.held and not alive(program))
    awake.begin()
    awake.end()
    awake.begin()
    clock.advance(BEGIN_S)  # Short ones, one after the other, keep it awake, too.
    await until(lambda: len(programs.pids()) == 2 and awake.held)
    awake.switch(False)
    await until(lambda: not awake.held)
    awake.switch(True)
    await until(lambda: len(programs.pids()) == 3 and awake.held)
    await awake.close()
    assert not any(map(alive, programs.pids())) and awake.trouble == ""


async def test_a_program_that_fails_is_told_once_and_rarely_tried(programs: AwakePrograms, caplog):
    caplog.set_level(logging.DEBUG, "omlxd")
    clock = Clock()
    awake = KeepAwake(True, holder("linux"), clock)
    tries = programs.folder / "tries.txt"
    programs.write("systemd-inhibit", f'echo >> "{tries}"\necho "Failed to connect to bus" >&2\nexit 1\n')

    async def request(after_s: float) -> None:
        clock.advance(after_s)
        awake.begin()
        clock.advance(BEGIN_S)
        await until(lambda: not awake.held and awake._task is None)
        awake.end()

    for after_s in (0.0, LINGER_S, RETRY_S, RETRY_S):
        await request(after_s)
    assert awake.trouble == "systemd-inhibit: Failed to connect to bus"
    assert not awake.was_held and len(tries.read_text()) == 3 and caplog.text.count(awake.trouble) == 1
    awake = KeepAwake(True, ("no-such-program",), clock)
    await request(LINGER_S)
    assert awake.trouble == "no-such-program: there is none here"
    assert [record.levelname for record in caplog.records] == ["INFO", "DEBUG"]
    await awake.close()


async def test_a_program_that_is_killed_starts_again(programs: AwakePrograms, caplog):
    caplog.set_level(logging.INFO, "omlxd")
    clock = Clock()
    awake = KeepAwake(True, holder("darwin"), clock)

    async def held(times: int) -> None:
        await until(lambda: awake.held and len(programs.pids()) == times)

    async def kill() -> None:
        os.kill(programs.pids()[-1], signal.SIGTERM)
        task = awake._task
        await until(lambda: awake._task is not task)

    awake.begin()
    clock.advance(BEGIN_S)
    await held(1)
    await kill()
    await held(2)  # At once, and then no more.
    assert awake.trouble == "" and "caffeinate: it was ended by signal 15; it is started" in caplog.text
    await kill()
    assert not awake.held and awake.trouble == "caffeinate: it was ended by signal 15"
    clock.advance(RETRY_S)
    await held(3)
    await kill()
    awake.end()
    clock.advance(LINGER_S)
    awake.begin()
    clock.advance(BEGIN_S)  # The next request does not wait: it can be started.
    await held(4)
    awake.end()
    clock.advance(LINGER_S)
    await until(lambda: not awake.held)
    assert awake.trouble == "" and awake.was_held
    await awake.close()


FRONT = """
import asyncio, sys
from omlxd.front.keep_awake import KeepAwake, holder
async def main():
    awake = KeepAwake(True, holder(sys.argv[1]))
    awake.begin()
    while not awake.held:
        await asyncio.sleep(0.01)
    print("held", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_caffeinate_ends_with_a_front_that_is_killed(programs: AwakePrograms):
    front = subprocess.Popen([sys.executable, "-c", FRONT, "darwin"], stdout=subprocess.PIPE, text=True)
    assert front.stdout is not None and front.stdout.readline() == "held\n"
    wait_until(lambda: len(programs.pids()) == 1)
    front.kill()
    front.wait()
    wait_until(lambda: not any(map(alive, programs.pids())))


def test_a_daemon_holds_while_it_is_busy_and_not_after_kill_9(start, programs: AwakePrograms):
    daemon = start(env={"OMLXD_KEEP_AWAKE": "true", "PATH": os.environ["PATH"]})

    def status() -> str:
        return as_text(find_daemon(daemon.url).status(), daemon.url)

    assert daemon.complete("hello").status_code == 200
    assert "keeps the machine awake while it works: yes (not tried yet)" in status()
    assert programs.pids() == []

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError):
            daemon.complete("gate")

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: "yes (now: held)" in status(), why=daemon.logged)
    wait_until(lambda: len(programs.pids()) == 1)
    daemon.process.kill()
    daemon.process.wait()
    asking.join()
    wait_until(lambda: not any(map(alive, programs.pids())))
