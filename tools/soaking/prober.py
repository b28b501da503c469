"""Asks a daemon for /health again and again from a process of its own, and looks at its front.

    python3 prober.py HOST PORT PID FILE

It adds a line to FILE for each answer: when it came (monotonic), seconds that it took, seconds in which the
front's event loop ran and waited for a processor meanwhile, bytes of the front. An attacker that asked by
itself would measure its own event loop, too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

PAUSE_S = 0.1
ANSWER_S = 60.0
ASKED = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True)
class Probe:
    """`took_s` is infinite where no 200 came. `ran_s`, `waited_s`: of the front's main thread; 0 on macOS."""

    at: float
    took_s: float
    ran_s: float
    waited_s: float
    rss: int


class Prober:
    """The process, at the priority of its parent's start."""

    def __init__(self, host: str, port: int, pid: int, file: Path):
        self._file = file
        command = [sys.executable, __file__, host, str(port), str(pid), str(file)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def since(self, began: float) -> list[Probe]:
        """Return what ended after the monotonic time `began`."""
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        probes = (Probe(*map(float, line.split()[:4]), int(line.split()[4])) for line in lines)
        return [probe for probe in probes if probe.at >= began]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _took_s(host: str, port: int) -> float:
    began = time.monotonic()
    try:
        with socket.create_connection((host, port), timeout=ANSWER_S) as connection:
            connection.sendall(ASKED)
            answer = b""
            while piece := connection.recv(1 << 16):
                answer += piece
    except OSError:
        return float("inf")
    return time.monotonic() - began if answer.startswith(b"HTTP/1.1 200") else float("inf")


def _processor_s(pid: int) -> tuple[float, float]:
    """Seconds that the main thread ran and waited to run (Linux's schedstat)."""
    with contextlib.suppress(OSError, ValueError):
        ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
        return int(ran) / 1e9, int(waited) / 1e9
    return 0.0, 0.0


def main(host: str, port: str, pid: str, file: str) -> None:
    front, parent = psutil.Process(int(pid)), os.getppid()
    with open(file, "a", buffering=1) as lines:
        while front.is_running() and os.getppid() == parent:
            ran, waited = _processor_s(front.pid)
            took_s = _took_s(host, int(port))
            ran_after, waited_after = _processor_s(front.pid)
            with contextlib.suppress(psutil.Error):
                rss = front.memory_info().rss
                spent = f"{ran_after - ran:.3f} {waited_after - waited:.3f}"
                lines.write(f"{time.monotonic():.3f} {took_s:.3f} {spent} {rss}\n")
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
