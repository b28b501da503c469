"""Runs code that may loop, crash or take all memory in processes whose loss costs one request."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from .units import process_memory

LOOK_S = 0.05
STALL = 6
"""Times its processor time that a call may last: on a busy machine a child waits for its turn, and a fresh
one imports what it needs first."""
KEEP = 2
"""Children that wait for work."""
MOST_LOST = 2
"""Fresh children that one call may end: the first may have been killed for another reason."""
MOST_REPLY_BYTES = 256 << 20

T = TypeVar("T")


class ChildLost(Exception):
    """A child did not answer in time, or took too much memory, and its process is gone."""


class _Child:
    def __init__(self, arguments: list[str], memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("child_loop.py")), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # A terminal's ^C is for the front.
        )
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def ask(self, frame: bytes, seconds: float) -> bytes:
        """Send a call and return the answer. Raises ChildLost, OSError and EOFError.

        seconds  of the child's processor time
        """
        late = self._deadline(seconds)
        try:
            # The child reads a whole frame before it answers, so that neither waits for the other.
            for part in (len(frame).to_bytes(4, "little"), frame):
                self._write(part, late)
            length = int.from_bytes(self._read(4, late), "little")
            if length > MOST_REPLY_BYTES:
                raise EOFError
            return self._read(length, late)
        except TimeoutError:
            raise ChildLost(f"it did not end within {seconds:.0f} s") from None

    def _write(self, data: bytes, late: Callable[[], bool]) -> None:
        writer = self.process.stdin
        assert writer is not None
        view = memoryview(data)
        with selectors.DefaultSelector() as ready:
            ready.register(writer, selectors.EVENT_WRITE)
            while view:
                self._wait(ready, late)
                view = view[writer.write(view) or 0 :]

    def _read(self, length: int, late: Callable[[], bool]) -> bytes:
        reader = self.process.stdout
        assert reader is not None
        data = bytearray()
        with selectors.DefaultSelector() as ready:
            ready.register(reader, selectors.EVENT_READ)
            while len(data) < length:
                self._wait(ready, late)
                if not (part := reader.read(min(length - len(data), 1 << 20))):
                    raise EOFError
                data += part
        return bytes(data)

    def _wait(self, ready: selectors.BaseSelector, late: Callable[[], bool]) -> None:
        while not ready.select(LOOK_S):
            if late():
                raise TimeoutError
            self._check_memory()

    def _deadline(self, seconds: float) -> Callable[[], bool]:
        """Return what tells whether a call that begins now has had its time."""
        began, used = time.monotonic(), self._cpu_s()

        def late() -> bool:
            lasts = time.monotonic() - began
            return lasts > STALL * seconds or (lasts > seconds and self._cpu_s() - used > seconds)

        return late

    def _cpu_s(self) -> float:
        """Return the child's processor time; 0.0: it is gone."""
        with contextlib.suppress(psutil.Error):
            return sum(psutil.Process(self.process.pid).cpu_times()[:2])
        return 0.0

    def _check_memory(self) -> None:
        """Raise ChildLost if the child takes too much memory, where the system sets no limit."""
        with contextlib.suppress(psutil.Error):
            if process_memory(psutil.Process(self.process.pid)) > self._memory_bytes:
                raise ChildLost("it takes more memory than it may have")


class ChildProcesses:
    """Calls `answer` of a script in children (child_loop.py). Thread-safe: each call has a child to itself.

    script        path of a Python file that imports nothing of omlxd
    memory_bytes  address space of a child. macOS does not enforce it: there the parent watches
    cpu_s         processor time of one call
    """

    def __init__(self, script: Path, memory_bytes: int, cpu_s: int):
        self._arguments = [str(script), str(memory_bytes), str(cpu_s)]
        self._bounds = f"{memory_bytes >> 20} MiB and {cpu_s} s of processor time"
        self._memory_bytes = memory_bytes
        self._idle: list[_Child] = []
        self._lock = threading.Lock()
        self.under_way = 0
        """Calls under way."""

    def call(self, arguments: tuple[Any, ...], result: type[T], seconds: float) -> T:
        """Return `answer(*arguments)` of the script as `result`.

        Raises ChildLost after `seconds` of the child's processor time, or `STALL` times as long.
        """
        with self._lock:
            self.under_way += 1
        try:
            return self._call(arguments, result, seconds)
        finally:
            with self._lock:
                self.under_way -= 1

    def _call(self, arguments: tuple[Any, ...], result: type[T], seconds: float) -> T:
        frame = msgspec.msgpack.encode(arguments)
        lost, until = 0, time.monotonic() + seconds
        while True:
            with self._lock:
                kept = self._idle.pop() if self._idle else None
            child = kept or _Child(self._arguments, self._memory_bytes)
            try:
                value = msgspec.msgpack.decode(
                    child.ask(frame, max(0.0, until - time.monotonic())), type=result
                )
            except (OSError, EOFError, msgspec.DecodeError):
                child.kill()
                lost += kept is None
                # A kept one may have ended while nobody looked. All tries together have `seconds`.
                if lost < MOST_LOST and time.monotonic() < until - seconds / 2:
                    continue
                raise ChildLost(f"its process was ended; it may take {self._bounds}") from None
            except BaseException:
                child.kill()
                raise
            self._keep(child)
            return value

    def close(self) -> None:
        """End the children that wait for work."""
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.kill()

    def _keep(self, child: _Child) -> None:
        with self._lock:
            if len(self._idle) < KEEP:
                self._idle.append(child)
                return
        child.kill()
