"""What commands say of a daemon that does not answer as it should."""

import http.server
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from omlxd.cli.daemon import client as daemon_client
from omlxd.cli.daemon.client import Daemon, DaemonError, NoDaemon
from omlxd.cli.doctor import network
from omlxd.cli.main import main
from omlxd.config import load_settings
from omlxd.config.address import FILE_NAME, JOIN_NAME, record_address, record_join


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_one_that_is_slow_is_not_told_to_be_started(silent: str):
    with pytest.raises(DaemonError, match="does not answer within 1 s") as caught:
        Daemon(silent).status(1.0)
    assert not isinstance(caught.value, NoDaemon)


def test_none_at_all_is(silent: str):
    with pytest.raises(NoDaemon, match="Nothing answers"):
        Daemon("http://127.0.0.1:1").status()


def test_a_program_that_only_has_the_last_daemons_process_id_is_no_daemon(tmp_path: Path, monkeypatch):
    """Where the system lists no locks, its id may be another program's by now."""
    monkeypatch.setattr(daemon_client, "_PROC_LOCKS", tmp_path / "none")
    monkeypatch.setattr(daemon_client, "ANSWER_S", 0.2)
    settings = load_settings({}, {"OMLXD_BASE_PATH": str(tmp_path), "OMLXD_PORT": "9"})
    settings.paged_ssd_cache_dir.mkdir()
    (settings.paged_ssd_cache_dir / ".lock").write_text(f"{os.getpid()}\n")
    with socket.create_server(("127.0.0.1", 0)):
        assert daemon_client.find_daemon(None, settings) == Daemon("http://127.0.0.1:9")


def test_a_process_younger_than_the_lock_file_holds_nothing(tmp_path: Path, monkeypatch):
    """After a restart of the machine the last daemon's id is another program's."""
    monkeypatch.setattr(daemon_client, "_PROC_LOCKS", tmp_path / "none")
    lock = tmp_path / ".lock"
    lock.write_text(f"{os.getpid()}\n")
    assert daemon_client.holder(tmp_path) == os.getpid()
    before = psutil.Process().create_time() - 60
    os.utime(lock, (before, before))
    assert daemon_client.holder(tmp_path) is None


def test_an_address_that_a_killed_daemon_left_is_passed_over(tmp_path: Path):
    record_address(tmp_path, "0.0.0.0", 8114)
    assert daemon_client._recorded(tmp_path) == ["http://127.0.0.1:8114"]
    (tmp_path / FILE_NAME).write_text(f"{subprocess_that_ended()} 127.0.0.1 8114\n")
    assert daemon_client._recorded(tmp_path) == []
    for text in ("", "1 2", "x 127.0.0.1 8114"):
        (tmp_path / FILE_NAME).write_text(text)
        assert daemon_client._recorded(tmp_path) == []


def test_a_join_is_told_and_not_asked(tmp_path: Path, monkeypatch, capsys):
    """It speaks TLS, and would log a request by HTTP as one that it refuses."""
    monkeypatch.setenv("OMLXD_BASE_PATH", str(tmp_path))
    monkeypatch.setenv("OMLXD_PORT", "9")
    monkeypatch.setattr(daemon_client, "holder", lambda root: os.getpid())
    settings = load_settings({})
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        record_join(tmp_path, *listening.getsockname())
        assert daemon_client.find_daemon(None) == Daemon("http://127.0.0.1:9")
        with pytest.raises(BlockingIOError):
            listening.accept()
        port = listening.getsockname()[1]
    here = f"`omlxd join` runs here (process {os.getpid()}, at 127.0.0.1:{port}) and "
    assert main(["status"]) == 1
    assert f"No daemon answers at http://127.0.0.1:9, but {here}waits for a lead" in capsys.readouterr().err
    record_join(tmp_path, "127.0.0.1", port, "org/qwen for 10.0.0.1")
    found = network.check_port(settings)
    assert found.text.endswith(f"no daemon listens there, but {here}has a share of org/qwen for 10.0.0.1")
    (tmp_path / JOIN_NAME).write_text(f"{subprocess_that_ended()} 127.0.0.1 {port}\n")
    assert daemon_client.join_here(settings) == ""


def subprocess_that_ended() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_the_address_of_the_one_that_runs_is_always_the_same(tmp_path: Path, monkeypatch):
    """Whatever the order in which the system lists its sockets."""
    places = [(4, "::1", 45497), (6, "127.0.0.1", 11434), (3, "127.0.0.1", 45497)]
    listed = [
        SimpleNamespace(
            fd=fd,
            family=socket.AF_INET6 if ":" in ip else socket.AF_INET,
            laddr=SimpleNamespace(ip=ip, port=port),
            status=psutil.CONN_LISTEN,
        )
        for fd, ip, port in places
    ]
    monkeypatch.setattr(daemon_client, "holder", lambda root: os.getpid())
    monkeypatch.setattr(psutil.Process, "net_connections", lambda self, kind: listed.copy())
    for _ in places:
        listed.append(listed.pop(0))
        assert daemon_client._addresses_of_holder(tmp_path) == [
            *("http://127.0.0.1:45497", "http://127.0.0.1:11434", "http://[::1]:45497")
        ]


def test_a_key_follows_no_redirect(silent: str):
    asked: list[str | None] = []

    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Authorization"])
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{port}/steal")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        port = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(DaemonError, match="status 302; is it omlxd"):
            Daemon(f"http://127.0.0.1:{server.server_port}", "s3cret").status(60)
        server.shutdown()
    assert asked == ["Bearer s3cret"]
