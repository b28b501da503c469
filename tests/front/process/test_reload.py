"""SIGHUP: what changes at once, what waits, what changes nothing."""

from __future__ import annotations

import logging
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from daemon import PATIENCE_S, wait_until

from omlxd.config import load_settings
from omlxd.front.http.settings import KeyRing
from omlxd.front.process.notify import Notifier
from omlxd.front.process.reload import Reloader
from tests.front.process.test_activation import manager, serve_command  # noqa: F401 (one is a fixture)
from tests.front.process.test_serve import start  # noqa: F401 (a fixture)


def write(home: Path, text: str) -> None:
    home.mkdir(exist_ok=True)
    (home / "omlxd.toml").write_text("[serve]\n" + text)


class Pool:
    """Stands for a pool whose models take on new settings."""

    def __init__(self):
        self.applied = []

    def apply_settings(self, settings: object) -> None:
        self.applied.append(settings)


def reloader(home: Path, pool: object, *, loopback: bool = True, flags: dict[str, str] | None = None):
    def read():
        return load_settings({"base_path": str(home), **(flags or {})}, {})

    settings = read()
    keys = KeyRing(settings.api_key)
    logs = SimpleNamespace(apply_settings=lambda new: None, reopen=lambda: None)
    made = Reloader(
        settings,
        read,
        logs=logs,
        keys=keys,
        notify=Notifier({}),
        pool=pool,
        loopback=loopback,  # type: ignore
    )
    return made, keys


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "omlxd.front.process.reload"]


def test_live_settings_change_and_the_others_are_named(tmp_path: Path, caplog):
    caplog.set_level(logging.INFO)
    write(tmp_path, "port = 1\nlog-level = 'info'\n")
    pool = Pool()
    reload, keys = reloader(tmp_path, pool)
    write(tmp_path, "port = 2\nlog-level = 'debug'\napi-key = 'new'\nmodel-ttl = '3m'\nblock-size = 128\n")
    reload()
    assert reload.settings.log_level == "debug" and reload.settings.port == 1
    assert keys.name_of([b"new"]) == "--api-key"
    assert pool.applied[0].model_ttl == 180 and pool.applied[0].port == 1
    read, at_load, later = told(caplog)
    assert set(read.removeprefix("configuration read again: ").split(", ")) == {
        *("--api-key", "--model-ttl", "--log-level")
    }
    assert at_load == "--block-size: changed for models that are loaded from now on"
    assert later == "--port: changed, but only at the next start"
    caplog.clear()
    reload()
    assert "--port: changed, but only at the next start" in caplog.text and "new" not in caplog.text.split()


def test_a_broken_file_changes_nothing_and_is_told_in_one_line(tmp_path: Path, caplog):
    write(tmp_path, "api-key = 'k'\n")
    pool = Pool()
    reload, keys = reloader(tmp_path, pool)
    write(tmp_path, "log-level = 'debug'\nport = 'x'\n")
    reload()
    assert reload.settings.log_level == "info" and keys.name_of([b"k"]) and pool.applied == []
    (line,) = told(caplog)
    assert "all stays as it was" in line and "line 3 (port)" in line


def test_a_wrong_line_that_a_flag_overrides_is_warned_of(tmp_path: Path, caplog):
    reload, _ = reloader(tmp_path, Pool(), flags={"port": "3"})
    write(tmp_path, "port = 'x'\n")
    reload()
    (line,) = told(caplog)
    assert "line 2 (port): 'x' is no whole number" in line and line.endswith("--port overrides it.")


def test_a_key_that_protects_an_open_address_is_not_taken_away(tmp_path: Path, caplog):
    write(tmp_path, "api-key = 'k'\n")
    reload, keys = reloader(tmp_path, Pool(), loopback=False)
    write(tmp_path, "")
    reload()
    assert keys.required and "without a key" in caplog.text


def test_on_a_running_daemon(start, tmp_path: Path):  # noqa: F811
    write(tmp_path, "log-level = 'warning'\napi-key = 'first'\n")
    daemon = start()

    def status(key: str) -> int:
        return httpx.get(daemon.url + "/v1/models", headers={"x-api-key": key}, trust_env=False).status_code

    def nick() -> int:
        body = {"model": "nick", "prompt": "x"}
        headers = {"x-api-key": "second"}
        return httpx.post(
            daemon.url + "/v1/completions", json=body, headers=headers, trust_env=False
        ).status_code

    assert status("first") == 200 and "omlxd.access" not in daemon.logged()
    live = "log-level = 'info'\napi-key = 'second'\n"
    write(tmp_path, f"{live}if-cache-busy = 'no-ssd'\n[models.tiny]\naliases = ['nick']\n")
    daemon.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "configuration read again" in daemon.logged())
    assert (status("first"), status("second")) == (401, 200)
    assert nick() == 200
    for said in ("[models]", "--if-cache-busy: changed, but only at the next start", "omlxd.access"):
        wait_until(lambda said=said: said in daemon.logged(), why=daemon.logged)
    write(tmp_path, "log-level = [\n")
    daemon.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "all stays as it was" in daemon.logged())
    assert status("second") == 200
    assert daemon.stop() == 0
    assert "first" not in daemon.logged() and "second" not in daemon.logged()


def test_under_nohup_it_is_ignored_and_that_is_told(start, tmp_path: Path):  # noqa: F811
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Inherited.
    try:
        daemon = start()
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_until(lambda: "SIGHUP is ignored, as under nohup" in daemon.logged(), why=daemon.logged)
    daemon.process.send_signal(signal.SIGHUP)
    assert daemon.complete("up").status_code == 200
    assert daemon.stop() == 0 and "configuration read again" not in daemon.logged()


def test_systemd_is_told_of_the_reload(tmp_path: Path, manager):  # noqa: F811
    command, environ = serve_command(tmp_path, "--port", "0")
    environ["NOTIFY_SOCKET"] = manager.getsockname()
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        assert manager.recv(999).startswith(b"READY=1\n")
        process.send_signal(signal.SIGHUP)
        assert manager.recv(999).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
        assert manager.recv(999).startswith(b"READY=1")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a pseudo-terminal of Linux")
def test_a_terminal_that_closes_ends_it_in_order(tmp_path: Path):
    """Started by hand, it must not live on without its window."""
    command, environ = serve_command(tmp_path, "--port", "0")
    try:
        pid, terminal = pty.fork()
    except OSError as error:
        pytest.skip(f"no pseudo-terminal here: {error}")
    if pid == 0:
        os.execve(command[0], command, environ)
    ended = 0, 0
    try:
        said = b""
        while b"listening on" not in said:
            said += os.read(terminal, 4096)
        os.close(terminal)
        deadline = time.monotonic() + PATIENCE_S
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        if not ended[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
