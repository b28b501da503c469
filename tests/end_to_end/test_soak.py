"""Kill loops and a short soak: nothing wedged, nothing leaked, and an answer to every request."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest
import soak
from cold_files import settled, unsettled
from daemon import Daemon, body, wait_until
from soaking.leaks import left_of, processes_of, shared_memory_of, sockets_of, temporary_files

from omlxd.common.child_process import KEEP

SMALL = ("--paged-ssd-cache-max-size", "30MB")
"""Less than a lease of space, so that nothing stays granted while an engine has nothing to write."""

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path):
    report = soak.soak(tmp_path, 25, seed=1, every_s=2.5, answer_s=300.0)  # A busy machine takes its time.
    print(report.text(25))
    assert not report.improper, report.text(25)
    assert sum(report.answers.values()) > 3
    assert report.events["full disk"] == 1


def family(daemon: Daemon) -> list[psutil.Process]:
    return [daemon.front(), *daemon.front().children(recursive=True)]


def ended(home: Path) -> None:
    """Wait until nobody of this home lives: template children end just after their engine has."""
    wait_until(lambda: processes_of(home) == [], why=lambda: str(processes_of(home)))


class Asking:
    """Three clients that ask until the daemon is gone, or `stop`.

    answered  whole answers so far
    improper  answers that were neither whole nor an error that says when to try again
    """

    def __init__(self, daemon: Daemon):
        self.answered = 0
        self.improper: list[str] = []
        self._daemon_ = daemon
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(3)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.Client(base_url=self._daemon_.url, timeout=300, trust_env=False) as http,
        ):
            while not self._stopping.is_set():
                content = body(self._daemon_.model, "the beginning " * 200 + f"{time.time()} " * 100)
                answer = http.post("/v1/messages", json={**content, "max_tokens": 30})
                if answer.status_code == 200:
                    self.answered += 1
                    continue
                told = answer.json()["error"]["message"] and answer.headers.get("retry-after")
                if answer.status_code != 503 or not told:
                    self.improper.append(answer.text)
                self._stopping.wait(0.2)

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()


@linux
@pytest.mark.slow
def test_the_front_is_killed_again_and_again_under_load(tmp_path: Path):
    chance, shared = random.Random(2), set()
    for round in range(2):
        with Daemon(tmp_path, *SMALL, wait=round % 2 == 0) as daemon:  # Every other one while it loads.
            asking = Asking(daemon)
            time.sleep(chance.uniform(0.1, 1.5))
            shared |= shared_memory_of(family(daemon))
            port = httpx.URL(daemon.url).port
            daemon.kill()  # Fails if an engine outlives its front.
            asking.stop()
            assert asking.improper == []
        # Processes and sockets: nobody of this home lives, whoever its parent is, and nobody listens.
        ended(tmp_path)
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert left_of(shared) == []
    with Daemon(tmp_path, *SMALL) as daemon:
        daemon.messages("the beginning " * 200)
        assert "corrupt" not in daemon.logged()
        wait_until(lambda: settled(daemon), why=lambda: unsettled(daemon))
        assert daemon.stop() == 0
    assert temporary_files(tmp_path) == []
    ended(tmp_path)


@linux
@pytest.mark.slow
def test_an_engine_is_killed_again_and_again_under_load_and_comes_back_warm(tmp_path: Path):
    chance, shared = random.Random(3), set()
    numbers = [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM, signal.SIGSTOP]
    with Daemon(tmp_path, *SMALL, "--stall-timeout", "3s") as daemon:
        daemon.messages("the beginning " * 200)
        front = daemon.front()
        descriptors, sockets = front.num_fds(), sockets_of(front)
        assert sockets["unix"] and sockets["LISTEN"] in (1, 2)  # On ::1 as well where there is IPv6.
        asking = Asking(daemon)
        for round, number in enumerate(numbers):
            if round % 2 == 0:  # Three that die as they load, in a row, are given up for a minute.
                before = asking.answered
                wait_until(lambda before=before: asking.answered > before, 300, daemon.logged)
            wait_until(lambda: len(daemon.engines()) == 1, why=daemon.logged)
            time.sleep(chance.uniform(0.0, 0.8))
            shared |= shared_memory_of(family(daemon))
            for pid in daemon.engines():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if number != signal.SIGSTOP:  # That one is noticed only after a while.
                wait_until(lambda pid=pid: pid not in daemon.engines(), why=daemon.logged)
        asking.stop()
        assert asking.improper == []
        wait_until(lambda: _served_warm(daemon), 300, daemon.logged)
        for child in front.children():  # The cache's reader would stay for two minutes.
            with contextlib.suppress(psutil.NoSuchProcess):
                if "omlxd.cli.cache.listing.tree" in child.cmdline():
                    child.terminate()
        # One engine and no zombie, no file of a dead engine.
        wait_until(lambda: len(daemon.engines()) == len(front.children()) == 1, 240, lambda: children(front))
        assert len(family(daemon)) <= 2 + KEEP  # Its template children.
        # At most the sockets of the beginning, when the cache's reader or a connection may have had one more.
        wait_until(lambda: not _open(sockets_of(front)) - _open(sockets), why=lambda: str(sockets_of(front)))
        wait_until(lambda: front.num_fds() <= descriptors, why=lambda: f"{front.num_fds()} > {descriptors}")
        wait_until(lambda: settled(daemon), why=lambda: unsettled(daemon))
        assert daemon.stop() == 0
    assert left_of(shared) == [] and temporary_files(tmp_path) == []
    ended(tmp_path)


def children(front: psutil.Process) -> str:
    return str([child.as_dict(["cmdline", "status"]) for child in front.children()])


def _open(sockets: Counter[str]) -> Counter[str]:
    """Without TCP connections that the kernel alone still keeps."""
    return Counter({kind: sockets[kind] for kind in ("unix", "LISTEN", "ESTABLISHED", "CLOSE_WAIT")})


def _served_warm(daemon: Daemon) -> bool:
    answer = daemon.post("/v1/messages", body(daemon.model, "the beginning " * 200))
    return answer.status_code == 200 and answer.json()["usage"]["cache_read_input_tokens"] > 0
