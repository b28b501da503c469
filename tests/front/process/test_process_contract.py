"""The daemon as launchd runs it, from `omlxd service install` to SIGKILL, before a stand-in for launchd."""

from __future__ import annotations

import contextlib
import json
import plistlib
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from daemon import BLOCK, PATIENCE_S, demo_model, own_usage, prose, restored, wait_until
from launchd_standin import DEFAULT_FILES, Launchd, alive

from omlxd.cli.service.launchd import agent
from omlxd.cli.service.plan import make_plan
from omlxd.front.engines import pool
from tests.front.process.test_activation import fake_launchd  # noqa: F401 (a fixture)
from tests.models.test_resolve import make

STUB = Path(__file__).parents[2] / "support" / "stub_engine.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the stand-in preloads a library")


@pytest.fixture
def install(tmp_path: Path, fake_launchd: Path) -> Iterator[Callable[..., Launchd]]:  # noqa: F811
    """Installs the daemon with a stub engine (or a real model) and bootstraps it; ended after the test."""
    made: list[Launchd] = []

    def go(
        *, at_login: bool = False, model: Path | None = None, stub: str = "", **options: object
    ) -> Launchd:
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        folder = model or tmp_path / "tiny"
        if not folder.exists():
            make(folder)
        held = socket.create_server(("127.0.0.1", 0), backlog=128)  # Its port can't be somebody else's.
        flags = {
            "model": str(folder),
            "port": str(held.getsockname()[1]),
            "base_path": str(home / ".omlxd"),
        }
        planned = make_plan(flags, log_file=home / "omlxd.log", at_login=at_login)
        plist = tmp_path / "dev.omlxd.serve.plist"
        plist.write_bytes(plistlib.dumps(agent(planned, home / "stdio.log")))
        engine = shlex.join([sys.executable, str(STUB), "--notes", str(home)]) + f" {stub}"
        extra = {} if model else {"OMLXD_ENGINE_COMMAND": engine}
        import omlxd

        extra["PYTHONPATH"] = str(Path(omlxd.__file__).parents[1])
        made.append(Launchd(plist, home, fake_launchd, held, extra, **options))  # type: ignore[arg-type]
        made[-1].bootstrap()
        return made[-1]

    yield go
    for one in made:
        if one.running():
            one.process.kill()  # type: ignore[union-attr]
        one.bootout()


def url_of(job: Launchd) -> str:
    return f"http://127.0.0.1:{job.sockets[0].getsockname()[1]}"


def complete(job: Launchd, prompt: str) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt}
    answer = httpx.post(url_of(job) + "/v1/completions", json=body, timeout=120, trust_env=False)
    wait_until(job.running)  # The stand-in knows of it, too.
    return answer


def log_of(job: Launchd) -> str:
    return (job.home / "omlxd.log").read_text()


def test_the_first_connection_starts_it_and_it_stays_the_process_that_was_started(install):
    job = install()
    time.sleep(0.3)
    assert job.starts == []
    assert complete(job, "hello there").status_code == 200
    front = psutil.Process(job.process.pid)
    # No fork that exits, no terminal, launchd's folder, and more files than launchd gives by default.
    assert job.running() and len(job.starts) == 1
    assert front.terminal() is None and front.cwd() == "/"
    assert front.rlimit(psutil.RLIMIT_NOFILE)[0] == job.hard_files > DEFAULT_FILES
    assert front.environ()["PATH"] == "/usr/bin:/bin:/usr/sbin:/sbin"
    assert "LISTEN_FDS" not in front.environ()
    wait_until(lambda: "omlxd.access" in log_of(job))  # its line follows the answer's last byte
    assert "omlxd.access" not in job.said()
    job.bootout()
    assert job.exits == [0] and not job.was_killed
    assert "quit" in (job.home / "notes.txt").read_text()


@pytest.mark.slow
def test_a_clean_end_stays_ended_and_the_next_connection_starts_it_again(install):
    job = install()
    assert complete(job, "one").status_code == 200
    job.process.send_signal(signal.SIGTERM)
    wait_until(lambda: job.exits == [0])
    time.sleep(0.5)
    assert len(job.starts) == 1
    assert complete(job, "two").status_code == 200
    wait_until(lambda: len(job.starts) == 2)


@pytest.mark.slow
def test_at_login_a_failure_is_restarted_and_a_clean_end_is_not(install):
    job = install(at_login=True)
    wait_until(lambda: "listening on" in job.said())
    job.process.kill()
    wait_until(lambda: len(job.starts) == 2)
    assert complete(job, "again").status_code == 200
    job.process.send_signal(signal.SIGTERM)
    wait_until(lambda: job.exits == [-signal.SIGKILL, 0])
    time.sleep(0.5)
    assert len(job.starts) == 2


def test_connections_made_while_it_is_down_are_answered_after_the_restart(install):
    job = install()
    assert complete(job, "one").status_code == 200
    job.process.kill()
    wait_until(lambda: not job.running())
    assert complete(job, "two").status_code == 200


@pytest.mark.slow
def test_with_256_files_at_most_it_serves_on(install):
    job = install(hard_files=256)
    assert complete(job, "up").status_code == 200
    address = job.sockets[0].getsockname()
    with contextlib.ExitStack() as idle:
        for _ in range(150):
            idle.enter_context(contextlib.closing(socket.create_connection(address, timeout=120)))
        assert complete(job, "one").status_code == 200
        # Too many by far: they wait, and the front does not spin meanwhile.
        for _ in range(100):
            idle.enter_context(contextlib.closing(socket.create_connection(address, timeout=120)))
        front = psutil.Process(job.process.pid)

        def rests() -> bool:
            before = sum(front.cpu_times()[:2])
            time.sleep(1)
            return sum(front.cpu_times()[:2]) - before < 0.4

        wait_until(rests)
        # There are files left for what is no connection: a new engine.
        (engine,) = front.children()
        engine.kill()
        wait_until(lambda: "The engine of tiny stopped" in log_of(job), why=lambda: log_of(job))
    assert complete(job, "two").status_code == 200
    log = log_of(job)
    assert 0 < log.count("as many connections are open as files allow") < 5 and "Traceback" not in log


def test_an_answer_under_way_ends_before_the_process_does(install):
    job = install()
    assert complete(job, "up").status_code == 200
    body = {"model": "tiny", "prompt": "one gate two", "stream": True}
    with httpx.stream(
        "POST", url_of(job) + "/v1/completions", json=body, timeout=120, trust_env=False
    ) as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if '"text":"one"' in line)
        job.process.send_signal(signal.SIGTERM)
        wait_until(lambda: ": stopping" in log_of(job))
        (job.home / "gate").touch()
        rest = list(lines)
    assert any("two" in line for line in rest) and "data: [DONE]" in rest
    wait_until(lambda: job.exits == [0])


@pytest.mark.slow
def test_an_answer_that_takes_too_long_is_ended_with_an_error_in_time(install):
    job = install()
    assert complete(job, "up").status_code == 200
    body = {"model": "tiny", "prompt": "one sleep:300 two", "stream": True}
    with httpx.stream(
        "POST", url_of(job) + "/v1/completions", json=body, timeout=120, trust_env=False
    ) as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if '"text":"one"' in line)
        job.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line.startswith("data: ")]
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert "shutting down" in error["message"]
    wait_until(lambda: job.exits == [0])  # Of its own accord, in launchd's time: PATIENCE_S is no more.
    assert job.job["ExitTimeOut"] >= PATIENCE_S > 3 * pool.DRAIN_S


def test_a_second_sigterm_ends_it_at_once(install):
    job = install()
    assert complete(job, "up").status_code == 200
    (engine,) = psutil.Process(job.process.pid).children()
    with contextlib.closing(socket.create_connection(job.sockets[0].getsockname())) as raw:
        body = json.dumps({"model": "tiny", "prompt": "one sleep:600", "stream": True}).encode()
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        raw.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert raw.recv(100)
        job.process.send_signal(signal.SIGTERM)
        wait_until(lambda: ": stopping" in log_of(job))
        job.process.send_signal(signal.SIGTERM)
        wait_until(lambda: job.exits == [1])  # Not 0, which comes when the answer has had its time.
    wait_until(lambda: not alive(engine.pid))


def test_what_does_not_end_is_killed_and_leaves_no_engine(install):
    job = install()
    assert complete(job, "up").status_code == 200
    (engine,) = psutil.Process(job.process.pid).children()
    job.process.send_signal(signal.SIGSTOP)  # Hears no SIGTERM.
    job.job["ExitTimeOut"] = 0.5
    job.bootout()
    assert job.was_killed
    wait_until(lambda: not alive(engine.pid))


@pytest.mark.slow
def test_a_real_model_under_launchd_keeps_its_blocks_through_a_stop_in_mid_answer(install):
    job = install(model=demo_model())
    body = {
        "model": demo_model().name,
        "max_tokens": 8,
        "temperature": 0,
        "messages": [{"role": "user", "content": prose(BLOCK * 2)}],
    }
    with httpx.Client(base_url=url_of(job), timeout=300, trust_env=False) as http:
        first = http.post("/v1/messages", json=body).json()
        with http.stream("POST", "/v1/messages", json={**body, "max_tokens": 400, "stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(line for line in lines if "content_block_delta" in line)
            job.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert any("message_stop" in line or "error" in line for line in rest)
    wait_until(lambda: job.exits == [0])
    with httpx.Client(base_url=url_of(job), timeout=300, trust_env=False) as http:
        again = http.post("/v1/messages", json=body).json()
    assert again["content"] == first["content"]
    assert restored(own_usage(again)) >= BLOCK
    job.bootout()
    assert job.exits == [0, 0] and not job.was_killed
    assert re.search(r"omlxd\.front\S*: (stopping|loaded)", log_of(job))
