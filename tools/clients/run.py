"""Running a client: nothing of the caller's environment, a home of its own, a time limit."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 300.0
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(slots=True, frozen=True)
class Ended:
    """How a client ended: its exit status (None: stopped at the limit) and what it printed."""

    status: int | None
    output: str
    errors: str


class Running:
    """A client at work, with children of its own session."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def wait(self, limit_s: float = LIMIT_S) -> Ended:
        """Until it ends; past the limit it is killed."""
        try:
            output, errors = self._process.communicate(timeout=limit_s)
            return Ended(self._process.returncode, output, errors)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            output, errors = self._process.communicate()
            return Ended(None, output, errors)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None


def start_client(command: list[str], env: dict[str, str], cwd: Path) -> Running:
    """Start `command` with `env` alone, plus a PATH that has its own folder and Node.js on it.

    Keys and settings of whoever runs this must not reach a client, nor a client their files.
    """
    paths = [str(Path(command[0]).parent), *_node_folder(), _SYSTEM_PATH]
    whole = {"PATH": os.pathsep.join(paths), "LANG": "C.UTF-8", "TERM": "dumb", **env}
    process = subprocess.Popen(
        command,
        env=whole,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    return Running(process)


def _node_folder() -> list[str]:
    node = shutil.which("node")
    return [str(Path(node).parent)] if node else []
