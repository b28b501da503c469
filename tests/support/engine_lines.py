"""A real `omlxd engine`, and what it says, for tests that speak JSON Lines."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from daemon import PATIENCE_S, REPO

STUB = Path(__file__).with_name("stub_engine.py")
LAST = {"loaded", "done", "classified", "inspected", "info", "metrics", "cancelled", "bye", "error"}

Line = dict[str, Any]


class EngineLines:
    """A running `omlxd engine`; a context manager that leaves no process behind.

    home   its base path, and that of the stub's notes
    stub   arguments of the stub engine that it runs; None: a real one
    read   False: `stdout` is the test's own to read
    heard  every line so far, in order
    """

    def __init__(
        self,
        home: Path,
        *flags: str,
        stub: str | None = "",
        program: tuple[str, ...] = (),
        read: bool = True,
    ):
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("OMLXD_")}
        environ |= {"PYTHONPATH": str(REPO), "HOME": str(home), "OMLXD_SEED": "0"}
        if stub is not None:
            engine = shlex.join([sys.executable, str(STUB), "--notes", str(home)])
            environ["OMLXD_ENGINE_COMMAND"] = f"{engine} {stub}"
        self._log_path = home / f"log-{time.monotonic_ns()}.txt"
        self._log = self._log_path.open("w")
        program = program or (sys.executable, "-m", "omlxd")
        self.process = subprocess.Popen(
            [*program, "engine", "--base-path", str(home / "omlxd"), *flags],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.heard: list[Line] = []
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._ids = iter(range(1, 1 << 30))
        self._reader = threading.Thread(target=self._read, daemon=True) if read else None
        if self._reader is not None:
            self._reader.start()

    def __enter__(self) -> EngineLines:
        return self

    def __exit__(self, *_: object) -> None:
        family = self._family()
        self.process.kill()
        self.process.wait()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        if self._reader is not None:
            self._reader.join(PATIENCE_S)
        self.stdout.close()
        self._log.close()

    def _read(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in self.stdout:
                self._queue.put(line)
        self._queue.put(None)

    def _family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    # ----------------------------------------------------------------- saying

    def write(self, data: bytes) -> None:
        self.stdin.write(data)
        self.stdin.flush()

    def send(self, op: str, id: Any = None, **fields: Any) -> Any:
        """A request; its id, a new one if none is given."""
        id = f"r{next(self._ids)}" if id is None else id
        self.write(json.dumps({"op": op, "id": id, **fields}).encode() + b"\n")
        return id

    def ask(self, op: str, **fields: Any) -> Line:
        """The last line of a request."""
        return self.last(self.send(op, **fields))

    # ----------------------------------------------------------------- hearing

    def until(self, found: Callable[[Line], bool], since: int = 0) -> Line:
        """The first line that is `found`, of those heard already too, but for the first `since`."""
        for line in self.heard[since:]:
            if found(line):
                return line
        while True:
            try:
                raw = self._queue.get(timeout=2 * PATIENCE_S)
            except queue.Empty:
                raise AssertionError(f"not heard; heard: {self.heard}\n{self.logged()}") from None
            assert raw is not None, f"its output has ended; heard: {self.heard}\n{self.logged()}"
            assert raw.endswith(b"\n")
            line = json.loads(raw)
            self.heard.append(line)
            if found(line):
                return line

    def last(self, id: Any) -> Line:
        return self.until(lambda line: line["id"] == id and line["type"] in LAST)

    def gate(self, open: bool) -> None:
        """Whether requests that wait at the stub engine's `gate` may go on."""
        if open:
            (self.home / "gate").touch()
        else:
            (self.home / "gate").unlink(missing_ok=True)

    def text(self, id: Any) -> str:
        return "".join(line.get("text", "") for line in self.heard if line["id"] == id)

    def ended(self) -> int:
        """Its exit status; all of its lines are in `heard` then."""
        status = self.process.wait(2 * PATIENCE_S)
        while (raw := self._queue.get(timeout=PATIENCE_S)) is not None:
            self.heard.append(json.loads(raw))
        return status

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.ended()

    # ----------------------------------------------------------------- looking

    def logged(self) -> str:
        return self._log_path.read_text()

    def notes(self) -> str:
        """What the stub engine saw."""
        path = self.home / "notes.txt"
        return path.read_text() if path.exists() else ""
