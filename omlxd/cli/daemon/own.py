"""An `omlxd serve` that a command starts for itself, on a free port, and ends."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO

from ...config.settings import WITH_STDIN
from .client import KEY_VARIABLE, Daemon, DaemonError, NoDaemon

END_S = 20.0
"""Seconds for the daemon to write its blocks to SSD."""


@contextmanager
def own_daemon(*flags: str) -> Generator[Daemon]:
    """Start a new daemon, which ends with the block. Raises DaemonError if it can't serve.

    It accepts a key that only this process knows, beside those of `omlxd key`. Other clients need theirs.
    SIGTERM and SIGHUP end the block. The daemon ends with this process, killed or not.
    """
    key = secrets.token_urlsafe(32)
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "omlxd", "serve", "--port", "0", *flags],
                stdin=subprocess.PIPE,  # Open as long as we are there.
                env={**os.environ, WITH_STDIN: "1", KEY_VARIABLE: key},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # ^C stops an answer, not the daemon.
            )
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                address = re.search(r"listening on (http://\S+)", line)
                if address is None:
                    process.wait()
                    raise _gave_up(log)
                try:
                    yield Daemon(address[1], key)
                except NoDaemon as error:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(END_S)
                    if process.returncode is None:
                        raise
                    raise _gave_up(log) from error
            finally:
                _end(process)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _gave_up(log: IO[str]) -> DaemonError:
    log.seek(0)
    lines = [text.strip() for text in log if text.strip()]
    why = lines[-1].removeprefix("omlxd: ") if lines else "The daemon ended and gives no reason."
    return DaemonError(why.removeprefix("--model: "))


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.terminate()  # The second one ends its engines at once.
        process.wait()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
