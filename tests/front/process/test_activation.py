"""Sockets that a service manager opened: both protocols, what is wrong with them, readiness."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from daemon import PATIENCE_S, free_port

from omlxd.cli.service.manager import ServiceError, addresses
from omlxd.config import load_settings
from omlxd.front.process import sockets
from omlxd.front.process.notify import Notifier
from omlxd.front.process.sockets import ActivationError, CannotListen, inherited_sockets, open_sockets
from tests.models.test_resolve import make

REPO = Path(__file__).resolve().parents[3]
STUB = Path(__file__).parents[2] / "support" / "stub_engine.py"
ACTIVATE = shutil.which("systemd-socket-activate")


@pytest.fixture
def listening() -> Iterator[list[socket.socket]]:
    """An IPv4 and an IPv6 socket that listen on loopback."""
    made = [socket.create_server(("127.0.0.1", 0))]
    with contextlib.suppress(OSError):
        made.append(socket.create_server(("::1", 0), family=socket.AF_INET6))
    yield made
    for one in made:
        with contextlib.suppress(OSError):  # What was adopted closes it, too.
            one.close()


# --------------------------------------------------------------------------- systemd's protocol


def run_with_fds(fds: list[int], code: str, **variables: str) -> str:
    """What `code` prints, run with `fds` as its descriptors from 3 on, and LISTEN_PID its own."""
    launcher = (
        "import fcntl, os, sys\n"
        f"away = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in {fds}]\n"
        "for at, fd in enumerate(away): os.dup2(fd, 3 + at)\n"
        "os.environ['LISTEN_PID'] = os.environ.get('AS_PID') or str(os.getpid()); "
        "os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    )
    environ = {**os.environ, "PYTHONPATH": str(REPO), "LISTEN_FDS": str(len(fds)), **variables}
    done = subprocess.run(
        [sys.executable, "-c", launcher, code], env=environ, pass_fds=fds, capture_output=True, text=True
    )
    return done.stdout + done.stderr


SHOW = (
    "import os\n"
    "from omlxd.errors import ConfigError\n"
    "from omlxd.front.process.sockets import inherited_sockets\n"
    "try:\n"
    "    found = inherited_sockets()\n"
    "    print(*[s.getsockname()[1] for s in found], any(s.get_inheritable() for s in found))\n"
    "except ConfigError as error:\n"
    "    print('refused:', error.message)\n"
    "print(*[n for n in os.environ if n.startswith('LISTEN_')])\n"
)


def test_every_socket_of_systemd_is_taken_and_no_child_hears_of_them(listening: list[socket.socket]):
    said = run_with_fds([one.fileno() for one in listening], SHOW, LISTEN_FDNAMES="omlxd.socket:omlxd.socket")
    ports = " ".join(str(one.getsockname()[1]) for one in listening)
    assert said == f"{ports} False\n\n"


def test_sockets_for_another_process_are_none(listening: list[socket.socket]):
    assert run_with_fds([listening[0].fileno()], SHOW, AS_PID="1") == "False\n\n"


def test_what_does_not_listen_is_refused(listening: list[socket.socket]):
    with socket.create_connection(listening[0].getsockname()) as connected:
        assert "refused: descriptor 3 " in run_with_fds([connected.fileno()], SHOW)
    with open(os.devnull) as nothing:
        assert "is no socket" in run_with_fds([nothing.fileno()], SHOW)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        assert "is no TCP socket" in run_with_fds([datagrams.fileno()], SHOW)


def test_a_number_that_is_none_is_refused():
    with pytest.raises(ActivationError, match="LISTEN_FDS"):
        inherited_sockets({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "many"})


# --------------------------------------------------------------------------- launchd's call


def test_launchd_is_asked_for_its_sockets_by_name(listening: list[socket.socket]):
    asked = []

    def launchd(name: str) -> list[int]:
        asked.append(name)
        return [one.fileno() for one in listening]

    found = inherited_sockets({"XPC_SERVICE_NAME": "dev.omlxd.serve"}, launchd)
    assert asked == ["Listeners"]
    assert [one.getsockname() for one in found] == [one.getsockname() for one in listening]
    for one in found:
        one.detach()
    assert inherited_sockets({}, launchd) == [] and asked == ["Listeners"]


def test_what_launchd_refuses_is_told():
    def launchd(name: str) -> list[int]:
        raise OSError(errno.EALREADY, os.strerror(errno.EALREADY))

    with pytest.raises(ActivationError, match="launchd would not hand over its sockets"):
        inherited_sockets({"XPC_SERVICE_NAME": "dev.omlxd.serve"}, launchd)


FAKE_LAUNCHD = r"""
#include <errno.h>
#include <stdlib.h>
#include <string.h>
/* FAKE_LAUNCHD: "Name=3,4", or "errno=N". */
int launch_activate_socket(const char *name, int **fds, size_t *count) {
    const char *said = getenv("FAKE_LAUNCHD");
    if (!said) return ESRCH;
    if (!strncmp(said, "errno=", 6)) return atoi(said + 6);
    size_t length = strlen(name);
    if (strncmp(said, name, length) || said[length] != '=') return ENOENT;
    *fds = malloc(16 * sizeof(int));
    *count = 0;
    for (const char *at = said + length; at && *count < 16; at = strchr(at, ','))
        (*fds)[(*count)++] = atoi(++at);
    return 0;
}
"""


@pytest.fixture(scope="session")
def fake_launchd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with launchd's call, to be preloaded: the ctypes code runs as it would on a Mac."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no C compiler, or no LD_PRELOAD")
    folder = tmp_path_factory.mktemp("launchd")
    (folder / "fake.c").write_text(FAKE_LAUNCHD)
    library = folder / "fake.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "fake.c"], check=True)
    return library


@pytest.mark.parametrize(
    ("said", "result"),
    [
        ("Listeners=7,9", "[7, 9]"),
        ("Other=7", "[]"),
        (f"errno={errno.ESRCH}", "[]"),
        (f"errno={errno.EALREADY}", f"OSError {errno.EALREADY}"),
    ],
)
def test_the_call_itself(fake_launchd: Path, said: str, result: str):
    code = (
        "from omlxd.front.process.sockets import launch_activate_socket\n"
        "try: print(launch_activate_socket('Listeners'))\n"
        "except OSError as error: print('OSError', error.errno)\n"
    )
    environ = {**os.environ, "LD_PRELOAD": str(fake_launchd), "FAKE_LAUNCHD": said, "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.stdout == result + "\n", done.stderr


@pytest.mark.skipif(
    sys.platform == "darwin" or hasattr(ctypes.CDLL(None), "launch_activate_socket"), reason="macOS has it"
)
def test_without_the_call_there_are_no_sockets():
    assert sockets.launch_activate_socket("Listeners") == []


# --------------------------------------------------------------------------- for real


def serve_command(home: Path, *flags: str) -> tuple[list[str], dict[str, str]]:
    folder = home / "tiny"
    if not folder.exists():
        make(folder)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMLXD_")}
    environ |= {
        "PYTHONPATH": str(REPO),
        "OMLXD_ENGINE_COMMAND": shlex.join([sys.executable, str(STUB), "--load-s", "600"]),
    }
    command = [sys.executable, "-m", "omlxd", "serve", "--base-path", str(home), "--model", str(folder)]
    return [*command, *flags], environ


@contextlib.contextmanager
def activated(tmp_path: Path, *addresses: str, flags: tuple[str, ...] = ()):
    """systemd-socket-activate listening on `addresses`; it becomes the daemon at the first connection."""
    assert ACTIVATE is not None
    command, environ = serve_command(tmp_path, *flags)
    keep = [
        f"--setenv={name}={value}" for name, value in environ.items() if re.match("PYTHON|OMLXD|LANG", name)
    ]
    listen = [f"--listen={address}" for address in addresses]
    with (tmp_path / "said.txt").open("w+") as said:
        process = subprocess.Popen(
            [ACTIVATE, *listen, *keep, *command], env=environ, stdout=said, stderr=said
        )
        try:
            while "Listening on" not in (tmp_path / "said.txt").read_text():
                assert process.poll() is None, (tmp_path / "said.txt").read_text()
                time.sleep(0.01)
            yield process, tmp_path / "said.txt"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


needs_systemd = pytest.mark.skipif(ACTIVATE is None, reason="systemd-socket-activate is not here")


@needs_systemd
def test_the_first_connection_starts_the_daemon_and_is_answered_before_the_model_is_there(tmp_path: Path):
    port = free_port()
    with activated(tmp_path, f"127.0.0.1:{port}", flags=("--port", "1")) as (process, said):
        began = time.monotonic()
        health = httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
        took = time.monotonic() - began
        print(f"cold accept through socket activation: {took:.3f} s")
        assert health.status_code == 200 and health.json()["models"][0]["state"] == "loading"
        assert f"listening on http://127.0.0.1:{port} (model tiny)" in said.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


@needs_systemd
def test_both_addresses_of_localhost(tmp_path: Path):
    try:
        addresses = f"127.0.0.1:{free_port()}", f"[::1]:{free_port(socket.AF_INET6)}"
    except OSError:
        pytest.skip("no IPv6 here")
    with activated(tmp_path, *addresses) as (process, _):
        for address in addresses:
            assert httpx.get(f"http://{address}/health", trust_env=False).status_code == 200
        rebound = httpx.get(
            f"http://{addresses[0]}/v1/models", headers={"host": "evil.example"}, trust_env=False
        )
        assert rebound.status_code == 400
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


@needs_systemd
def test_a_socket_that_others_can_reach_needs_a_key(tmp_path: Path):
    port = free_port()
    with activated(tmp_path, f"0.0.0.0:{port}") as (process, said):
        socket.create_connection(("127.0.0.1", port)).close()
        assert process.wait(PATIENCE_S) == 2
        assert "0.0.0.0 can be reached by other machines, so a key is needed" in said.read_text()


def test_connections_wait_at_the_managers_socket_while_the_daemon_starts_again(tmp_path: Path):
    """The manager keeps the socket, so a restart refuses nobody."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as kept:
        url = f"http://127.0.0.1:{kept.getsockname()[1]}"
        command, environ = serve_command(tmp_path)
        launcher = (
            f"import os, sys; os.dup2({kept.fileno()}, 3); os.set_inheritable(3, True)\n"
            "os.environ |= {'LISTEN_FDS': '1', 'LISTEN_PID': str(os.getpid())}\n"
            "os.execv(sys.argv[1], sys.argv[1:])"
        )

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [sys.executable, "-c", launcher, *command],
                env=environ,
                pass_fds=[kept.fileno()],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

        first = start()
        try:
            assert httpx.get(url + "/health", trust_env=False).status_code == 200
            first.send_signal(signal.SIGTERM)
            assert first.wait(PATIENCE_S) == 0
            waiting = socket.create_connection(kept.getsockname())
            waiting.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            first = start()
            waiting.settimeout(PATIENCE_S)
            assert waiting.recv(1000).startswith(b"HTTP/1.1 200")
            waiting.close()
        finally:
            first.kill()
            first.wait()


# --------------------------------------------------------------------------- readiness


@pytest.fixture
def manager() -> Iterator[socket.socket]:
    # Not in pytest's folder: such an address may have a hundred letters.
    with (
        tempfile.TemporaryDirectory(prefix="omlxd-", dir="/tmp") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made,
    ):
        made.bind(f"{folder}/notify")
        made.settimeout(PATIENCE_S)
        yield made


def test_readiness_and_the_end_are_told(tmp_path: Path, manager: socket.socket):
    command, environ = serve_command(tmp_path, "--port", "0")
    environ |= {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "200000"}
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert re.fullmatch(
            r"READY=1\nSTATUS=listening on http://127\.0\.0\.1:\d+", manager.recv(999).decode()
        )
        assert [manager.recv(999) for _ in range(3)] == [b"WATCHDOG=1"] * 3
        process.send_signal(signal.SIGTERM)
        while (said := manager.recv(999)) == b"WATCHDOG=1":
            pass
        assert said == b"STOPPING=1"
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


async def test_nobody_is_told_when_nobody_asked():
    environ = {"WATCHDOG_USEC": "1000000"}
    notifier = Notifier(environ)
    notifier.ready()
    notifier.watch()
    assert environ == {} and notifier._timer is None
    Notifier({"NOTIFY_SOCKET": "/nowhere/at/all"}).reloading()  # Nor is it an error when nobody listens.


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")
def test_an_abstract_address():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(f"\0omlxd-{os.getpid()}")
        Notifier({"NOTIFY_SOCKET": f"@omlxd-{os.getpid()}"}).stopping()
        assert made.recv(99) == b"STOPPING=1"


# --------------------------------------------------------------------------- a second port


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_what_can_be_no_name_is_told(host: str):
    """Python's own encoding of names refuses it before the system is asked."""
    with pytest.raises(CannotListen, match=r"is no address of this machine"):
        open_sockets(load_settings({"host": host, "api_key": "k"}, {}), guarded=True)
    with pytest.raises(ServiceError, match="is no address of this machine"):
        addresses(host)


def test_a_second_port_is_for_programs_that_look_for_ollama(caplog: pytest.LogCaptureFixture):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port, count in ((free_port(), 1), (taken.getsockname()[1], 0), (0, 0)):
            settings = load_settings({"port": "0", "ollama_port": str(port)}, {})
            own, *others = sockets.open_sockets(settings, guarded=False)
            made = [one for one in others if one.getsockname()[:2] == ("127.0.0.1", port)]
            assert len(made) == count and own.getsockname()[1] not in (0, port)
            for one in (own, *others):
                one.close()
    assert "is left out: Address already in use" in caplog.text
