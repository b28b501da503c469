"""Two SIGTERMs, at whatever moment: the daemon ends with the status that it promises, 0 or 1, as real
processes. The first ends it in order (0); a second one what is not yet at its end, at once (1)."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import PATIENCE_S
from fast_or_slow import rest_slow

from tests.front.process.test_serve import REPO, STUB, Daemon
from tests.models.test_resolve import make

HELD_SERVE = Path(__file__).parents[2] / "support" / "held_serve.py"


class Held:
    """A daemon before a stub engine that waits at `moment`, see held_serve.py."""

    def __init__(self, home: Path, moment: str, *flags: str):
        if not (home / "tiny").exists():
            make(home / "tiny")
        environ = {name: value for name, value in os.environ.items() if not name.startswith("OMLXD_")}
        engine = shlex.join([sys.executable, str(STUB)])
        serve = ["serve", "--port", "0", "--base-path", str(home), "--model", str(home / "tiny"), *flags]
        self.process = subprocess.Popen(
            [sys.executable, str(HELD_SERVE), moment, *serve],
            env=environ | {"PYTHONPATH": str(REPO), "OMLXD_ENGINE_COMMAND": engine},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def wait_for(self, words: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if words in line:
                return
        raise AssertionError(f"it ended before {words!r}: {self.process.wait(PATIENCE_S)}")

    def signal(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def go_on(self) -> int:
        """Its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    made: list[Held] = []

    def go(*given: str) -> Held:
        made.append(Held(tmp_path, *given))
        return made[-1]

    yield go
    for one in made:
        one.process.kill()
        one.process.communicate()


@pytest.mark.parametrize("moment", rest_slow(["drain", "flush", "cache closes"], "flush"))
def test_a_second_signal_while_something_ends_is_its_end(start, moment):
    daemon = start(moment)
    daemon.wait_for("listening")
    daemon.signal()
    daemon.wait_for("held")
    daemon.signal()
    assert daemon.process.wait(PATIENCE_S) == 1


@pytest.mark.parametrize("moment", rest_slow(["all has ended", "log closes"], "log closes"))
def test_once_all_has_ended_a_second_signal_changes_nothing(start, moment):
    daemon = start(moment)
    daemon.wait_for("listening")
    daemon.signal()
    daemon.wait_for("held")
    for _ in range(3):
        daemon.signal()
    assert daemon.go_on() == 0


def test_before_the_first_thing_is_started_one_signal_is_enough(start):
    daemon = start("settings")
    daemon.wait_for("held")
    daemon.signal()
    assert daemon.process.wait(PATIENCE_S) == 0


def test_while_it_starts_the_first_signal_waits_and_the_second_does_not(start):
    daemon = start("cache lock")
    daemon.wait_for("held")
    while daemon.process.poll() is None:  # Two that come too close together are one.
        daemon.signal()
        time.sleep(0.02)
    assert daemon.process.returncode == 1
    again = start("cache lock")
    again.wait_for("held")
    again.signal()
    assert again.go_on() == 0


def test_a_start_that_is_refused_keeps_its_status(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        daemon = start("python ends", "--port", str(taken.getsockname()[1]))
        daemon.wait_for("held")
        daemon.signal()
        assert daemon.go_on() == 1


@pytest.mark.slow
def test_two_signals_at_any_two_moments_of_an_end(tmp_path: Path):
    """A stop takes some tens of milliseconds before a stub engine; Python's own end as long again."""
    seen: list[int] = []
    for step in range(24):
        home = tmp_path / str(step)
        home.mkdir()
        daemon = Daemon(home)
        daemon.process.send_signal(signal.SIGTERM)
        time.sleep(step * 0.008)
        daemon.process.send_signal(signal.SIGTERM)  # Nothing happens if it has ended, but for its status.
        seen.append(daemon.process.wait(PATIENCE_S))
        daemon.process.stdout.close()  # type: ignore[union-attr]
        daemon.log.close()
    print(f"{seen.count(1)} ended at once, {seen.count(0)} in order")
    assert set(seen) <= {0, 1}, seen


@pytest.mark.slow
def test_two_signals_at_any_moment_of_a_start(tmp_path: Path):
    from tests.cli.test_early_stop import Started, serve

    seen: list[int] = []
    for step in range(24):
        daemon = serve(lambda *command, step=step: Started(tmp_path / str(step), *command), tmp_path)
        daemon.wait_for_first_line()
        time.sleep(step * 0.03)
        daemon.process.send_signal(signal.SIGTERM)
        time.sleep(0.01 * (step % 3))
        seen.append(daemon.end(signal.SIGTERM))
        assert "Traceback" not in daemon.said()
    assert set(seen) <= {0, 1}, seen
