"""Runs the parts of `omlxd.engine.server.measure` in a process of its own, which may crash or hang."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec

from ....wire import SAMPLE_KERNELS
from .bounds import Budget

COMMAND = (sys.executable, "-m", "omlxd.engine.server.measure")
START_S = 40.0
"""Seconds for Python and MLX to start; the first start after an installation compiles everything."""
PART_S = {"model": 45.0, "pass": 40.0, "hits": 25.0, "sdpa 16,384": 15.0} | dict.fromkeys(
    SAMPLE_KERNELS, 15.0
)
USUAL_S = 10.0
END_S = 3.0
START = "start"
"""The part that a process names once it has started."""


class Measured(msgspec.Struct):
    """What a part said. `values`: numbers to compare. `error`: why it failed; "": it did not."""

    part: str
    lines: list[tuple[str, str]] = []
    values: dict[str, float] = {}
    error: str = ""


Take = Callable[[Measured], None]


def measure(
    job: Path, parts: Sequence[str], budget: Budget, take: Take, command: Sequence[str] = COMMAND
) -> None:
    """Measure `parts` in order, each within its time; `take` gets each result, also of those that failed.

    A part that crashes or hangs costs the process, and the next one has a new one.
    """
    waiting = list(parts)
    while waiting:
        try:
            budget.part(USUAL_S)  # Else no process is started.
            _run(job, waiting, budget, take, command)
        except TimeoutError as error:
            take(Measured(waiting.pop(0), error=str(error)))


def _run(job: Path, waiting: list[str], budget: Budget, take: Take, command: Sequence[str]) -> None:
    """Run one process, which takes parts off `waiting`. Raises TimeoutError: the first took too long."""
    folder = str(job.absolute().parent)  # MLX's compiled functions go there, too, and leave with it.
    with tempfile.TemporaryFile("w+", errors="replace", dir=folder) as log:
        process = subprocess.Popen(
            [*command, str(job), *waiting],
            env={**os.environ, "TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        assert process.stdout is not None
        lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        seconds = START_S
        try:
            while waiting:
                seconds = budget.part(seconds)
                try:
                    line = lines.get(timeout=seconds)
                except queue.Empty:
                    raise TimeoutError(f"no end within {seconds:.0f} s") from None
                try:
                    result = msgspec.json.decode(line, type=Measured)
                except msgspec.MsgspecError:
                    take(Measured(waiting.pop(0), error=_end_of(process, log)))
                    return
                if result.part != START:
                    del waiting[0]
                    take(result)
                seconds = PART_S.get(waiting[0], USUAL_S) if waiting else 0.0
        finally:
            _end(process)


def _read(pipe: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Put each line, and b"" at the end."""
    with contextlib.suppress(OSError, ValueError):
        for line in pipe:
            lines.put(line)
    lines.put(b"")


def _end_of(process: subprocess.Popen[bytes], log: IO[str]) -> str:
    """Say how a process ended that owed a line."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    status = process.poll()
    how = f"status {status}"
    if status is not None and status < 0:
        with contextlib.suppress(ValueError):
            how = signal.Signals(-status).name
    log.seek(0)
    last = next((line.strip() for line in reversed(log.readlines()) if line.strip()), "")
    return f"failed: its process ended with {how}" + (f": {last}" if last else "")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process, at first so that it can give back what it has wired."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
