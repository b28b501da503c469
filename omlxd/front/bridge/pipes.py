"""Lines from one file descriptor and to another, by threads of their own.

Not by asyncio's pipes: they take no plain file, and set a descriptor that others share to non-blocking.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import queue
import select
import threading
from collections.abc import Iterator

import msgspec

from .messages import Line

CHUNK = 1 << 18
AHEAD = 4
"""Lines read ahead of the one in work."""
HIGH = 1 << 20
"""Bytes that may wait to be written before writers wait."""


def lines_of(source: io.BufferedReader, limit: int) -> Iterator[bytes | None]:
    """Yield each line without its end; None for one longer than `limit` bytes."""
    while line := source.readline(limit + 1):
        if line.endswith(b"\n") or len(line) <= limit:
            yield line.removesuffix(b"\n")
            continue
        while line and not line.endswith(b"\n"):
            line = source.readline(limit + 1)
        yield None


class _Input(io.RawIOBase):
    """Reads `fd` to its end or first error, and waits where somebody made it non-blocking."""

    def __init__(self, fd: int):
        self._fd = fd

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        while True:
            try:
                return os.readv(self._fd, [buffer])
            except BlockingIOError:
                select.select([self._fd], [], [])
            except OSError:
                return 0


class LineReader:
    """Iterate over it: each line of `fd` (None: too long) until it ends. Needs a running event loop."""

    def __init__(self, fd: int, limit: int):
        self._fd, self._limit = fd, limit
        self._loop = asyncio.get_running_loop()
        self._lines: asyncio.Queue[list[bytes | None]] = asyncio.Queue()
        self._room = threading.Semaphore(AHEAD)
        threading.Thread(target=self._read_lines, name="stdin", daemon=True).start()

    def __aiter__(self) -> LineReader:
        return self

    async def __anext__(self) -> bytes | None:
        lines = await self._lines.get()
        self._room.release()
        if not lines:
            raise StopAsyncIteration
        return lines[0]

    def _read_lines(self) -> None:
        with contextlib.suppress(RuntimeError):  # The loop has been closed: nobody reads any more.
            for line in lines_of(io.BufferedReader(_Input(self._fd), CHUNK), self._limit):
                self._give([line])
            self._give([])

    def _give(self, lines: list[bytes | None]) -> None:
        self._room.acquire()
        self._loop.call_soon_threadsafe(self._lines.put_nowait, lines)


class LineWriter:
    """`put_line` never waits; `room` waits until what was put is written, but for `HIGH` bytes.

    broken   set once nobody reads any more; what is put then goes nowhere
    trouble  why
    """

    def __init__(self, fd: int):
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.json.Encoder()
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._waiting = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._ended = asyncio.Event()
        self.broken = asyncio.Event()
        self.trouble: OSError | None = None
        threading.Thread(target=self._write_lines, name="stdout", daemon=True).start()

    def put_line(self, line: Line) -> None:
        data = self._encoder.encode(line) + b"\n"
        self._waiting += len(data)
        if self._waiting > HIGH and not self.broken.is_set():
            self._has_room.clear()
        self._queue.put(data)

    async def room(self) -> None:
        await self._has_room.wait()

    async def close(self, seconds: float) -> None:
        """Write the queued lines, for `seconds` at most."""
        self._queue.put(None)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)

    def _write_lines(self) -> None:
        with contextlib.suppress(RuntimeError):
            try:
                while (data := self._queue.get()) is not None:
                    self._write(data)
                    self._loop.call_soon_threadsafe(self._written, len(data))
            except OSError as error:
                self.trouble = error
                self._loop.call_soon_threadsafe(self._break)
            self._loop.call_soon_threadsafe(self._ended.set)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:
                select.select([], [self._fd], [])

    def _written(self, size: int) -> None:
        self._waiting -= size
        if self._waiting <= HIGH:
            self._has_room.set()

    def _break(self) -> None:
        self.broken.set()
        self._has_room.set()
