"""`omlxd serve` of this checkout as a process, for programs that start one of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]


class NotStarted(RuntimeError):
    """The daemon ended before it listened."""


def start_daemon(log: Path, *flags: str, **variables: str) -> tuple[subprocess.Popen[str], str]:
    """A daemon that listens, and its URL. Raises NotStarted, leaving no process behind.

    log        file that its log is added to
    variables  over the environment's, of which none of the daemon's own is left
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMLXD_")}
    with log.open("a") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "omlxd", "serve", *flags],
            env=environ | {"PYTHONPATH": str(REPO)} | variables,
            stdin=subprocess.DEVNULL,  # A terminal would make SIGHUP its end.
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
    try:
        assert process.stdout is not None
        found = re.search(r"listening on (http://\S+)", process.stdout.readline())
        if not found:
            raise NotStarted(f"the daemon did not start: {log.read_text()[-2000:]}")
    except BaseException:
        end_daemon(process)
        raise
    return process, found[1]


def end_daemon(process: subprocess.Popen[str]) -> None:
    """Kill it if it still runs, and let go of it."""
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
