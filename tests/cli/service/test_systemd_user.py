"""`omlxd service` under a real `systemd --user`, every verb, with a real model (see user_manager.py)."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from daemon import PATIENCE_S, free_port, prose, restored, wait_until
from user_manager import UID, UserManager

from omlxd.cli.service.plan import THROTTLE_S
from omlxd.cli.service.systemd import SERVICE, SOCKET
from omlxd.models.demo import build_demo

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def user() -> Iterator[UserManager]:
    if missing := UserManager.missing():
        pytest.skip(missing)
    try:
        made = UserManager()
    except OSError as error:
        pytest.skip(f"no systemd of its own here: {error}")
    try:
        try:
            made.login()
        except AssertionError as error:
            pytest.skip(f"systemd does not start here: {error}")
        build_demo(made.home / "demo")
        demo = made.home / "demo"
        for path in (demo, *demo.rglob("*")):  # Its folder is its owner's alone.
            os.chown(path, UID, UID)
        yield made
    finally:
        made.close()


class Service:
    """The service in the user's hands; `answer` connects to its port."""

    def __init__(self, user: UserManager):
        self.user = user
        self.port = free_port()
        self.flags = ("--", "--port", str(self.port), "--model", str(user.home / "demo"))

    def __call__(self, *words: str, status: int = 0) -> str:
        """What `omlxd service words` prints; fails unless it ends with `status`."""
        done = self.user.omlxd("service", *words)
        assert done.returncode == status, (words, done.returncode, done.stdout)
        return done.stdout

    def answer(self, prompt: str) -> dict[str, object]:
        asked = {"model": "demo", "prompt": prompt, "max_tokens": 2, "temperature": 0}
        deadline = time.monotonic() + PATIENCE_S
        with httpx.Client(trust_env=False) as http:
            while True:
                answer = http.post(f"http://127.0.0.1:{self.port}/v1/completions", json=asked)
                if answer.status_code == 200:
                    return answer.json()["usage"]["omlxd"]
                assert answer.status_code == 503 and time.monotonic() < deadline, answer.text

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def pid(self) -> int:
        return int(self.user.show("MainPID", SERVICE))

    def state(self) -> tuple[str, str]:
        """(of the service, of its socket)"""
        return self.user.show("ActiveState", SERVICE), self.user.show("ActiveState", SOCKET)

    def own_setting(self, text: str) -> None:
        """A drop-in of the owner's, as `systemctl --user edit` writes it; "" removes it."""
        folder = self.user.home / f".config/systemd/user/{SERVICE}.d"
        shutil.rmtree(folder, ignore_errors=True)
        if text:
            folder.mkdir()
            (folder / "own.conf").write_text(f"[Service]\n{text}\n")
        assert self.user.run("systemctl", "--user", "daemon-reload").returncode == 0


@pytest.fixture
def service(user: UserManager) -> Iterator[Service]:
    made = Service(user)
    yield made
    user.omlxd("service", "uninstall")
    made.own_setting("")


def test_on_demand(service: Service):
    assert service("status", status=4).startswith("not installed")
    assert "the daemon starts at the first connection" in service("install", *service.flags)
    assert service("status").startswith("waiting: the first connection starts it")
    assert service.user.processes() == []

    first = service.answer(prose(150))
    assert first["computed"] and service("status").startswith(f"running, process {service.pid()}")
    # READY=1 and its words came: without them the service would still be `activating`.
    assert service.state() == ("active", "active")
    assert service.user.show("StatusText", SERVICE) == f"listening on http://127.0.0.1:{service.port}"
    assert (
        "active (running)" in service.user.run("systemctl", "--user", "status", "--no-pager", SERVICE).stdout
    )
    logged = service("logs", "-n", "200")
    assert "loaded demo" in logged and "listening on" in logged

    # SIGKILL: started again by itself, and what was computed is still there.
    before = service.pid()
    service.user.root("kill", "-KILL", str(before))
    wait_until(lambda: service.user.show("NRestarts", SERVICE) == "1", THROTTLE_S + 20)
    assert restored(service.answer(prose(150))) and service.pid() not in (0, before)
    assert sum("omlxd.engine" in line for line in service.user.processes()) == 1

    # A clean end stays ended, but the port is open, and the next connection starts it.
    before = service.pid()
    service.user.root("kill", "-TERM", str(before))
    wait_until(lambda: service.state() == ("inactive", "active"), 30)
    assert service.user.show("SubState", SERVICE) == "dead"  # And not `auto-restart`.
    assert service("status").startswith("waiting")
    assert restored(service.answer(prose(150))) and service.pid() not in (0, before)

    # A restart loses nobody: whoever connects meanwhile is answered afterwards.
    before = service.pid()
    assert service("restart") == "started again\n"
    assert restored(service.answer(prose(150))) and service.pid() != before

    began = time.monotonic()
    assert service("stop") == "stopped\n"
    print(f"stop took {time.monotonic() - began:.1f} s")
    assert service.state() == ("inactive", "inactive") and not service.listens()
    assert service.user.show("Result", SERVICE) == "success" and service.user.processes() == []
    assert service("status", status=3).startswith("stopped")
    assert service("start") == "started\n"
    assert service("status").startswith("running") and service.listens()
    service("stop")
    assert service("restart") == "started again\n"
    assert service.state() == ("active", "active")
    assert "uninstalled" in service("uninstall")
    _nothing_is_left(service)


def _nothing_is_left(service: Service) -> None:
    folder = service.user.home / ".config/systemd/user"
    assert [path for path in folder.rglob("*") if "omlxd" in path.name] == []
    units = service.user.run("systemctl", "--user", "list-units", "--all", "--no-legend", "omlxd*").stdout
    files = service.user.run("systemctl", "--user", "list-unit-files", "--no-legend", "omlxd*").stdout
    assert (units.strip(), files.strip()) == ("", "")
    assert service.user.processes() == [] and not service.listens()
    assert service("status", status=4).startswith("not installed")
    assert service("uninstall") == "there was no service\n"


def test_a_login_starts_what_was_installed_and_a_logout_ends_it(service: Service):
    service("install", *service.flags)
    service.user.logout()
    assert not service.listens()
    service.user.login()
    # The port is there from login on, the daemon only once somebody wants it.
    assert service("status").startswith("waiting") and service.user.processes() == []
    assert service.answer("kettle")

    assert "the daemon starts at login" in service("install", "--at-login", *service.flags)
    assert service("status").startswith("running")
    service.user.logout()
    assert service.user.processes() == [] and not service.listens()
    service.user.login()
    wait_until(lambda: service("status").startswith("running"), 30)
    assert service.answer("kettle")
    service.own_setting("RestartSec=1")
    service.user.root("kill", "-KILL", str(service.pid()))
    wait_until(lambda: service.user.show("NRestarts", SERVICE) == "1", 30)
    wait_until(lambda: service.state()[0] == "active", 30)
    service.own_setting("")

    # Back to the other form: the next login does not start it any more.
    service("install", *service.flags)
    assert service("status").startswith("waiting")
    assert service.user.show("UnitFileState", SERVICE) == "disabled"
    service("uninstall")
    _nothing_is_left(service)
    service.user.logout()
    service.user.login()
    assert not service.listens() and service.user.processes() == []


def test_settings_that_make_no_sense_are_not_tried_again_and_are_told(service: Service):
    settings = service.user.home / "own.toml"
    settings.write_text("[serve]\n")
    service("install", *service.flags, "--config", str(settings))
    assert service.answer("kettle")
    settings.write_text("[serve]\nno-such-setting = 1\n")
    assert "`omlxd service logs` tells why" in service("restart", status=1)
    assert service("status", status=3).startswith("failed, with status 2")
    assert "no-such-setting" in service("logs")
    assert service.user.show("NRestarts", SERVICE) == "0"
    # Whoever connects meanwhile may have it tried again and again, until systemd gives up the port.
    with socket.create_connection(("127.0.0.1", service.port)):
        wait_until(lambda: service.state() == ("failed", "failed"), 60)
    settings.write_text("[serve]\n")
    assert service("start") == "started\n"
    assert service.answer("kettle")
    settings.write_text("[serve]\nno-such-setting = 1\n")
    service("restart", status=1)
    assert service("uninstall")
    _nothing_is_left(service)


def test_one_that_hangs_is_ended_in_time_with_its_engine(service: Service):
    service("install", *service.flags)
    service.own_setting("TimeoutStopSec=2")
    assert service.answer("kettle")
    group = service.user.show("ControlGroup", SERVICE)  # SIGSTOP would not do: systemd sends SIGCONT, too.
    service.user.root("sh", "-c", f"echo 1 > /sys/fs/cgroup{group}/cgroup.freeze")
    service("stop")
    assert service.user.show("Result", SERVICE) == "timeout" and service.user.processes() == []


def test_one_whose_loop_hangs_is_noticed_by_the_watchdog(service: Service):
    service("install", *service.flags)
    service.own_setting("WatchdogSec=10\nTimeoutAbortSec=1\nRestartSec=1")
    assert service.answer("kettle")
    before = service.pid()
    time.sleep(12)
    assert service.pid() == before  # It is told in time that all is well.
    service.user.root("kill", "-STOP", str(before))
    wait_until(lambda: service.pid() not in (0, before), 30)
    assert service.answer("kettle")
    assert json.loads(
        service.user.omlxd("status", "--json", "--url", f"http://127.0.0.1:{service.port}").stdout
    )


def test_an_answer_under_way_ends_before_the_service_stops(service: Service):
    service("install", *service.flags)
    service.answer("kettle")
    asked = {"model": "demo", "prompt": "kettle", "max_tokens": 60, "temperature": 0, "stream": True}
    url = f"http://127.0.0.1:{service.port}/v1/completions"
    with httpx.stream("POST", url, json=asked, trust_env=False) as answer:
        lines = answer.iter_lines()
        next(lines)
        service("restart")
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]", rest[-3:]
    assert service.answer("kettle")


def test_its_files_are_the_users_alone(service: Service):
    service("install", *service.flags)
    service.answer(prose(100))
    service("stop")
    home = Path(service.user.home)
    own = [home / ".omlxd", *(home / ".omlxd").rglob("*")]
    assert len(own) > 3 and all(path.stat().st_mode & 0o077 == 0 for path in own)
