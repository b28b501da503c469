"""A small launchd for tests: what it does to a job, on a system that has none.

It reads a LaunchAgent's property list and keeps launchd's side of the contract: it opens the
`Sockets`, starts the program at the first connection (or at load, with `KeepAlive`), in `/`, with no
terminal, a handful of variables and few open files; it restarts a failure after `ThrottleInterval`;
`bootout` sends SIGTERM, and SIGKILL after `ExitTimeOut`. The job gets its sockets by
`launch_activate_socket`, which a preloaded library plays (test_activation.py).
"""

from __future__ import annotations

import contextlib
import os
import plistlib
import resource
import select
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEFAULT_FILES = 256


@dataclass
class Launchd:
    """plist    the job
    home     HOME of the user
    preload  the library with launchd's call
    held     the socket that the job gets, listening already where the plist says
    extra    variables of the test rig, on top of launchd's own
    hard_files  the hard limit of open files, which the job can't pass
    throttle_s  instead of the plist's, which is long for a test
    """

    plist: Path
    home: Path
    preload: Path
    held: socket.socket
    extra: dict[str, str] = field(default_factory=dict)
    hard_files: int = 4096
    throttle_s: float = 0.2

    def __post_init__(self) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if limit != resource.RLIM_INFINITY:
            self.hard_files = min(self.hard_files, limit)
        self.job: dict[str, Any] = plistlib.loads(self.plist.read_bytes())
        self.sockets: list[socket.socket] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.starts: list[float] = []
        self.exits: list[int] = []
        self.was_killed = False
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="launchd")

    # ----------------------------------------------------------------- launchctl's verbs

    def bootstrap(self) -> None:
        entry = self.job["Sockets"]["Listeners"][0]
        family = {"IPv4": socket.AF_INET, "IPv6": socket.AF_INET6}[entry["SockFamily"]]
        assert family == self.held.family
        assert (entry["SockNodeName"], int(entry["SockServiceName"])) == self.held.getsockname()
        self.sockets = [self.held]
        self._thread.start()

    def bootout(self) -> None:
        self._leaving.set()
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(self.job["ExitTimeOut"])
            except subprocess.TimeoutExpired:
                self.was_killed = True
                self.process.kill()
                self.process.wait()
        if self._thread.is_alive():
            self._thread.join()
        for one in self.sockets:
            one.close()

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    # ----------------------------------------------------------------- its own work

    def _run(self) -> None:
        wanted = "KeepAlive" in self.job  # It implies RunAtLoad.
        while not self._leaving.is_set():
            if not wanted:
                wanted = bool(select.select(self.sockets, [], [], 0.02)[0])
                continue
            if self.starts and (left := self.starts[-1] + self.throttle_s - time.monotonic()) > 0:
                self._leaving.wait(left)
                continue
            self._spawn()
            assert self.process is not None
            status = self.process.wait()
            self.exits.append(status)
            keep = self.job.get("KeepAlive", {})
            wanted = status != 0 and keep.get("SuccessfulExit") is False

    def _spawn(self) -> None:
        fds = [one.fileno() for one in self.sockets]
        environ = {
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(self.home),
            "USER": "me",
            "LOGNAME": "me",
            "SHELL": "/bin/zsh",
            "TMPDIR": "/tmp",
            "XPC_FLAGS": "0x0",
            "XPC_SERVICE_NAME": self.job["Label"],
            **self.job.get("EnvironmentVariables", {}),
            **self.extra,
            "LD_PRELOAD": str(self.preload),
            "FAKE_LAUNCHD": "Listeners=" + ",".join(map(str, fds)),
        }
        soft = self.job.get("SoftResourceLimits", {}).get("NumberOfFiles", DEFAULT_FILES)
        soft, hard = min(soft, self.hard_files), self.hard_files
        umask = self.job.get("Umask", 0o022)
        with open(self.job["StandardOutPath"], "ab") as said:
            # The shell becomes the program. Nothing of ours runs in a fork of a process with threads.
            limited = f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"'
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", limited, "sh", *self.job["ProgramArguments"]],
                env=environ,
                cwd=self.job.get("WorkingDirectory", "/"),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=fds,
                start_new_session=True,
                umask=umask,
            )
        self.starts.append(time.monotonic())

    def said(self) -> str:
        path = Path(self.job["StandardOutPath"])
        return path.read_text() if path.exists() else ""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
