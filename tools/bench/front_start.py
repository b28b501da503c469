"""How fast the front takes connections, and how much memory it holds, with its engine still loading.

    python tools/bench/front_start.py [runs] [--activated]

Seconds count from the spawn of `python -m omlxd serve`. With --activated systemd-socket-activate holds
the port, and they count from the first connection, which starts the daemon. Goals: under 0.5 s, under
60 MB resident. The memory is the front process's alone (VmRSS on Linux, `ps -o rss` elsewhere), after
20 requests.
"""

from __future__ import annotations

import argparse
import http.client
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
ENGINE = f"{sys.executable} {REPO / 'tests' / 'support' / 'stub_engine.py'} --load-s 60"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=int, nargs="?", default=5)
    parser.add_argument("--activated", action="store_true")
    args = parser.parse_args()
    print("| run | accepts after s | answers /health after s | resident MB |")
    print("|---|---|---|---|")
    rows = [measure(args.activated) for _ in range(args.runs)]
    for number, (accepts, answers, resident) in enumerate(rows, 1):
        print(f"| {number} | {accepts:.3f} | {answers:.3f} | {resident / 1e6:.1f} |")
    worst = [max(column) for column in zip(*rows, strict=True)]
    ok = worst[1] < 0.5 and worst[2] < 60e6
    print(
        f"\nworst: answers after {worst[1]:.3f} s, {worst[2] / 1e6:.1f} MB: goals {'met' if ok else 'MISSED'}"
    )
    return 0 if ok else 1


def measure(activated: bool) -> tuple[float, float, float]:
    """(seconds to a connection, seconds to an answer, resident bytes) of one daemon."""
    port = free_port()
    with tempfile.TemporaryDirectory() as home:
        environ = dict(os.environ, OMLXD_ENGINE_COMMAND=ENGINE, PYTHONPATH=str(REPO))
        began = time.perf_counter()
        daemon = subprocess.Popen(
            [
                *(activator(port, environ) if activated else ()),
                *(sys.executable, "-m", "omlxd", "serve", "--port", str(port), "--base-path", home),
            ],
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if activated:
            time.sleep(0.5)  # Until it listens; it becomes the daemon, under the same process id.
            began = time.perf_counter()
        try:
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=5).close()
                    break
                except ConnectionRefusedError:
                    if daemon.poll() is not None or time.perf_counter() - began > 10:
                        raise
                    time.sleep(0.002)
            accepts = time.perf_counter() - began
            health(port)
            answers = time.perf_counter() - began
            for _ in range(20):
                health(port)
            return accepts, answers, resident_bytes(daemon.pid)
        finally:
            daemon.terminate()
            daemon.wait()


def activator(port: int, environ: dict[str, str]) -> list[str]:
    """systemd-socket-activate passes on only the variables that it is told of."""
    kept = [f"--setenv={name}" for name in environ if name.startswith(("OMLXD", "PYTHON", "HOME", "PATH"))]
    return ["systemd-socket-activate", f"--listen=127.0.0.1:{port}", *kept]


def health(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/health")
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 200, body
    connection.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def resident_bytes(pid: int) -> float:
    said = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return int(said.stdout) * 1024


if __name__ == "__main__":
    sys.exit(main())
