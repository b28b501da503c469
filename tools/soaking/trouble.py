"""What happens to a daemon on a bad day."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
from collections.abc import Callable, Iterator

import httpx
import psutil

from .own_daemon import MODELS, Daemon
from .report import Report


class Trouble:
    """What is done to the daemon while it works. Each method is one kind of it."""

    def __init__(self, daemon: Daemon, chance: random.Random, report: Report):
        self._daemon = daemon
        self._chance = chance
        self._report = report
        self._full: Callable[[], None] | None = None

    def one(self) -> None:
        what = self._chance.choice((self.kill, self.kill, self.freeze, self.unload, self.load, self.reload))
        with contextlib.suppress(psutil.Error, httpx.HTTPError, IndexError):  # None runs now.
            what()
            self._report.events[what.__name__] += 1

    def kill(self) -> None:
        number = self._chance.choice((signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM))
        self._chance.choice(self._daemon.engines()).send_signal(number)

    def freeze(self) -> None:
        self._chance.choice(self._daemon.engines()).suspend()

    def unload(self) -> None:
        self._daemon.post("/omlxd/models/unload", {"model": self._chance.choice(MODELS)})

    def load(self) -> None:
        self._daemon.post("/omlxd/models/load", {"model": self._chance.choice(MODELS), "keep_alive": "5s"})

    def reload(self) -> None:
        self._daemon.process.send_signal(signal.SIGHUP)

    @contextlib.contextmanager
    def full_disk(self) -> Iterator[None]:
        """Nothing can be written to the cache: a small file system is filled, else folders become files."""
        self._report.events["full disk"] += 1
        if os.path.ismount(self._daemon.cache):
            ballast = self._daemon.cache / "ballast"
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
            try:
                yield
            finally:
                ballast.unlink(missing_ok=True)
            return
        blocked = [
            entry for entry in self._daemon.cache.iterdir() if re.fullmatch(r"[0-9a-f]{32}", entry.name)
        ]
        for folder in blocked:
            folder.rename(folder.with_name("aside-" + folder.name))
            folder.write_bytes(b"")
        try:
            yield
        finally:
            for folder in blocked:
                folder.unlink(missing_ok=True)
                folder.with_name("aside-" + folder.name).rename(folder)
