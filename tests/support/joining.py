"""An `omlxd join` of a test: its own home, an address of loopback, and what it prints."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from daemon import PATIENCE_S, alive, wait_until

from omlxd.kv.peer.client import pair
from omlxd.kv.peer.identity import Identity


class JoinHost:
    """`home`: of that machine. `cap`: of its SSD cache. `wrapper`: a program to run it under."""

    def __init__(
        self,
        home: Path,
        *flags: str,
        host: str = "127.0.0.2",
        cap: int = 2_000_000,
        wrapper: tuple[str, ...] = (),
    ):
        self.home, self.flags, self.wrapper = home, flags, wrapper
        self.base, self.cap = home / "omlxd", cap
        home.mkdir(parents=True, exist_ok=True)
        self._log_path = home / "log.txt"
        self.port = 0
        self.host = host
        self.code = ""
        self.start()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def cache(self) -> Path:
        return self.base / "cache"

    def start(self) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("OMLXD_")}
        environ |= {"HOME": str(self.home), "OMLXD_CPU_BLAS": "off"}
        listen = ("--listen", self.address, "--base-path", str(self.base))
        flags = (*listen, "--paged-ssd-cache-max-size", str(self.cap), *self.flags)
        with self._log_path.open("a") as log:
            self.process = subprocess.Popen(
                [*self.wrapper, sys.executable, "-m", "omlxd", "join", *flags],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"waiting for a lead at \S+:(\d+)", line)
        assert found, f"{line}{self.logged()}"
        self.port = int(found[1])
        if not Identity(self.base).paired():
            shown = re.search(r"the code (\S+),", self.process.stdout.readline())
            self.code = shown[1] if shown else ""

    def pair(self, base: Path) -> None:
        """With the lead whose base path that is."""
        pair(Identity(base), (self.host, self.port), self.code)

    def followers(self) -> list[psutil.Process]:
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "--lead" in child.cmdline() and alive(child):
                        found.append(child)
        return found

    def follower(self) -> psutil.Process:
        wait_until(lambda: len(self.followers()) == 1, why=self.logged)
        return self.followers()[0]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        family = self.followers()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        deadline = time.monotonic() + 10.0
        while any(map(alive, family)) and time.monotonic() < deadline:
            time.sleep(0.02)
        for each in filter(alive, family):
            each.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> JoinHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def logged(self) -> str:
        return self._log_path.read_text()
