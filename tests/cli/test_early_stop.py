"""`omlxd serve` is told to stop while it starts: as real processes, with the real engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from daemon import PATIENCE_S, demo_model, wait_until

from tests.front.process.test_serve import REPO

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="/proc tells which signals are caught")

MOMENTS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 1.0)
"""Seconds after the first line of ours, which are anywhere in the start on a busy machine."""
MARK = "OMLXD_TEST_EARLY_STOP"


class Started:
    """A daemon, its first line of ours just executed."""

    def __init__(self, home: Path, *command: str):
        self._mark = str(home)
        self._says = home / "says.txt"
        environ = {name: value for name, value in os.environ.items() if not name.startswith("OMLXD_")}
        home.mkdir(exist_ok=True)
        with self._says.open("w") as says:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "omlxd", *command],
                env=environ | {"PYTHONPATH": str(REPO), MARK: self._mark},
                stdout=says,
                stderr=says,
            )

    def wait_for_first_line(self) -> None:
        """Python by itself catches SIGINT, but not SIGTERM."""
        wait_until(lambda: self.process.poll() is not None or _catches(self.process.pid, signal.SIGTERM))

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def said(self) -> str:
        return self._says.read_text()

    def left(self) -> list[str]:
        """Processes of this start that still run."""
        return [" ".join(cmdline) for process in psutil.process_iter() if (cmdline := self._ours(process))]

    def _ours(self, process: psutil.Process) -> list[str]:
        try:
            if process.status() == psutil.STATUS_ZOMBIE or process.environ().get(MARK) != self._mark:
                return []
            return process.cmdline() or ["?"]
        except psutil.Error:
            return []


def _catches(pid: int, number: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    made: list[Started] = []

    def go(*command: str) -> Started:
        made.append(Started(tmp_path / "home", *command))
        return made[-1]

    yield go
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def serve(start, home: Path) -> Started:
    return start("serve", "--port", "0", "--base-path", str(home / "base"), "--model", str(demo_model()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "moment"),
    [*((signal.SIGTERM, moment) for moment in MOMENTS), (signal.SIGINT, 0.0), (signal.SIGINT, 0.1)],
)
def test_a_daemon_that_starts_ends_in_order(start, tmp_path, number, moment):
    daemon = serve(start, tmp_path)
    daemon.wait_for_first_line()
    time.sleep(moment)
    assert daemon.end(number) == 0, daemon.said()
    assert "Traceback" not in daemon.said()
    wait_until(lambda: not daemon.left(), why=lambda: f"left: {daemon.left()}")
    assert not [*tmp_path.rglob("*.sock"), *tmp_path.rglob(".probe")]


@pytest.mark.parametrize("verb", ["serve", "engine"])
def test_the_handler_comes_before_what_takes_time(verb):
    told = """
import signal, sys
install, loaded = signal.signal, []
signal.signal = lambda *given: loaded.append(set(sys.modules)) or install(*given)
sys.argv[0] = "omlxd"
before = set(sys.modules)
import omlxd.cli.main
print(*loaded[-1] - before)
"""
    done = subprocess.run([sys.executable, "-c", told, verb], cwd=REPO, capture_output=True, text=True)
    assert set(done.stdout.split()) <= {
        "omlxd",
        "omlxd.cli",
        "omlxd.cli.main",
        "omlxd.common",
        "omlxd.common.early_stop",
        "__future__",
    }


@pytest.mark.parametrize("verb", [["status"], ["key", "list"], ["--help"]])
def test_other_verbs_keep_python_s_own_handlers(verb):
    told = f"""
import signal, sys
sys.argv = ["omlxd", *{verb}]
import omlxd.cli.main
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
    done = subprocess.run([sys.executable, "-c", told], cwd=REPO, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True"]


def test_a_signal_that_is_ignored_stays_so():
    told = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.argv = ["omlxd", "serve"]
import omlxd.cli.main
print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
print(signal.getsignal(signal.SIGTERM) is omlxd.cli.main.early_stop._end)
"""
    done = subprocess.run([sys.executable, "-c", told], cwd=REPO, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True"]
