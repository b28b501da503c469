"""Running a client: nothing of the caller's environment, a home of its own, a time limit."""

from __future__ import annotations

import os
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


def run_client(command: list[str], env: dict[str, str], cwd: Path, limit_s: float = LIMIT_S) -> Ended:
    """Run `command` with `env` alone, plus a PATH that has its own folder and Node.js on it.

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
    try:
        output, errors = process.communicate(timeout=limit_s)
        return Ended(process.returncode, output, errors)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # It may have children; they are of its session.
        output, errors = process.communicate()
        return Ended(None, output, errors)


def _node_folder() -> list[str]:
    import shutil

    node = shutil.which("node")
    return [str(Path(node).parent)] if node else []
