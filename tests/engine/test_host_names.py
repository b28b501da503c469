"""Which names a request may call the daemon by, for each way in which it came to listen."""

import socket
import subprocess
import sys
from pathlib import Path

import httpx
from daemon import PATIENCE_S

from tests.front.process.test_activation import serve_command
from tests.front.process.test_serve import start  # noqa: F401

HAND_OVER = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.set_inheritable(3, True)\n"
    "os.environ |= {'LISTEN_FDS': '1', 'LISTEN_PID': str(os.getpid())}\n"
    "os.execv(sys.argv[2], sys.argv[2:])"
)


def status(url: str, host: str, **headers: str) -> int:
    return httpx.get(url + "/v1/models", headers={"host": host, **headers}, trust_env=False).status_code


def test_the_address_that_it_was_told_to_listen_on_is_a_name_of_it(start):  # noqa: F811
    url = start("--host", "127.0.0.2").url
    assert url.startswith("http://127.0.0.2:")
    assert status(url, "127.0.0.2:8000") == status(url, "localhost") == 200
    assert status(url, "evil.example") == status(url, "127.0.0.3") == 400


def test_localhost_is_listened_on_by_both_of_its_addresses(start):  # noqa: F811
    with socket.create_server(("::1", 0), family=socket.AF_INET6):
        pass  # Else this machine has no IPv6, and the test says so.
    daemon = start()
    port = daemon.url.rpartition(":")[2]
    assert daemon.url == f"http://127.0.0.1:{port}"
    assert status(f"http://[::1]:{port}", f"[::1]:{port}") == status(daemon.url, "localhost") == 200


def test_a_container_calls_the_machine_by_its_own_name_and_others_hear_of_the_flag(start):  # noqa: F811
    url = start().url
    assert status(url, "host.docker.internal:8000") == status(url, "host.containers.internal") == 200
    refused = httpx.get(url + "/v1/models", headers={"host": "My-Mac.local:8000"}, trust_env=False)
    assert refused.status_code == 400 and "`--allowed-host my-mac.local`" in refused.text


def test_a_managers_socket_that_others_can_reach_is_called_by_any_name(tmp_path: Path):
    with socket.create_server(("0.0.0.0", 0), backlog=64) as kept:
        url = f"http://127.0.0.1:{kept.getsockname()[1]}"
        command, environ = serve_command(tmp_path)
        process = subprocess.Popen(
            [sys.executable, "-c", HAND_OVER, str(kept.fileno()), *command],
            env={**environ, "OMLXD_API_KEY": "s3cret"},
            pass_fds=[kept.fileno()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            key = {"x-api-key": "s3cret"}
            assert status(url, "192.168.1.5:8000", **key) == status(url, "my-mac.local", **key) == 200
            assert status(url, "my-mac.local") == 401
        finally:
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
