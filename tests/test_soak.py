"""Kill loops and a short soak: nothing wedged, nothing leaked, and an answer to every request."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from daemon import Daemon, body, wait_until

ROOT = Path(__file__).parents[1]

spec = importlib.util.spec_from_file_location("soak", ROOT / "tools" / "soak.py")
assert spec and spec.loader
soak = importlib.util.module_from_spec(spec)
sys.modules["soak"] = soak
spec.loader.exec_module(soak)

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(soak, "ANSWER_S", 300.0)  # On a busy machine a load takes its time.
    report = soak.soak(tmp_path, 25, seed=1, every_s=2.5)
    print(report.text(25))
    assert not report.improper, report.text(25)
    assert sum(report.answers.values()) > 3
    assert report.events["full disk"] == 1


@linux
@pytest.mark.slow
def test_the_front_is_killed_again_and_again_under_load(tmp_path: Path):
    chance = random.Random(2)
    for _ in range(3):
        with Daemon(tmp_path) as daemon:
            stop = threading.Event()

            def ask(daemon: Daemon = daemon, stop: threading.Event = stop) -> None:
                with contextlib.suppress(httpx.HTTPError):
                    while not stop.is_set():
                        daemon.post("/v1/messages", body(daemon.model, f"kettle {time.time()} " * 50))

            asking = [threading.Thread(target=ask) for _ in range(3)]
            for thread in asking:
                thread.start()
            time.sleep(chance.uniform(0.1, 1.5))
            stop.set()
            daemon.kill()  # Fails if an engine outlives its front.
            for thread in asking:
                thread.join()
    with Daemon(tmp_path) as daemon:
        daemon.messages("once more")
        assert "corrupt" not in daemon.logged()
        assert daemon.stop() == 0
    left = [path for path in (tmp_path / "omlxd" / "cache").rglob("*") if ".tmp" in path.name]
    assert not left


@linux
@pytest.mark.slow
def test_an_engine_is_killed_at_every_moment_and_comes_back_warm(tmp_path: Path):
    """Loading, prefill, decode, writing; by several signals."""
    chance = random.Random(3)
    with Daemon(tmp_path, "--stall-timeout", "3s") as daemon:
        daemon.messages("the beginning " * 200)
        descriptors = daemon.front().num_fds()
        for round in range(5):
            number = chance.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGSTOP])
            outcome: list[httpx.Response] = []
            given = body(daemon.model, "the beginning " * 200 + f"and {round} " * 300, max_tokens=30)
            asking = threading.Thread(target=lambda: outcome.append(daemon.post("/v1/messages", given)))  # noqa: B023
            asking.start()
            time.sleep(chance.uniform(0.0, 0.8))
            for pid in daemon.engines():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            asking.join()
            assert outcome and outcome[0].status_code in (200, 503), outcome and outcome[0].text
            if outcome[0].status_code == 503:
                assert outcome[0].headers["retry-after"] and outcome[0].json()["error"]["message"]
        wait_until(lambda: _served(daemon), 300, daemon.logged)
        wait_until(lambda: len(daemon.engines()) == 1 and _zombies(daemon) == 0)
        wait_until(lambda: daemon.front().num_fds() <= descriptors + 5)
        assert daemon.stop() == 0


def _served(daemon: Daemon) -> bool:
    answer = daemon.post("/v1/messages", body(daemon.model, "the beginning " * 200))
    return answer.status_code == 200 and answer.json()["usage"]["cache_read_input_tokens"] > 0


def _zombies(daemon: Daemon) -> int:
    return sum(child.status() == psutil.STATUS_ZOMBIE for child in daemon.front().children())
