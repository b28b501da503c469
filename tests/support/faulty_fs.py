"""A file system that fails or crashes at its N-th operation: the seam of omlxd/kv/files/fs.py, used in
earnest.

SQLite tests itself so: run a scenario with a fault at operation 1, then at 2, and so on until one
run ends without meeting its fault; after each, reopen and check.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from omlxd.kv.files.fs import Buffer, FileSystem

T = TypeVar("T")

Kind = Literal["error", "error forever", "short", "short then error", "crash", "crash after"]


class Crash(BaseException):
    """The process is gone: whoever catches this and goes on is no longer testing a crash."""


@dataclass(slots=True)
class Fault:
    """What happens at operation `at`, counted from 1.

    error             it raises OSError(errno) and does nothing
    error forever     and so does every later one: a dead or full disk
    short             a read or write does half of itself; the rest is tried again by the caller
    short then error  half of itself, and the next operation raises
    crash             it does nothing, nor does anything after it
    crash after       it is done (half of it, if it reads or writes), and then nothing more is
    """

    at: int
    kind: Kind
    errno: int = 0


class FaultyFileSystem(FileSystem):
    """`count`: operations so far. `hit`: the fault has been met. `crashed`: nothing works any more.

    `watch` is called after every operation: for what must hold at every instant.
    """

    def __init__(self, fault: Fault | None = None, watch: Callable[[], None] = lambda: None, lock: str = ""):
        super().__init__(lock)
        self.fault = fault
        self._watch = watch
        self.count = 0
        self.hit = False
        self.crashed = False
        self._open: set[int] = set()

    def _operation(self, run: Callable[[], T], half: Callable[[], T] | None = None) -> T:
        try:
            return self._faulty(run, half)
        finally:
            self._watch()

    def _faulty(self, run: Callable[[], T], half: Callable[[], T] | None) -> T:
        if self.crashed:
            raise Crash
        self.count += 1
        fault = self.fault
        if fault is None or self.count < fault.at:
            return run()
        if self.count > fault.at:
            if fault.kind == "error forever" or (
                fault.kind == "short then error" and self.count == fault.at + 1
            ):
                raise OSError(fault.errno, os.strerror(fault.errno))
            return run()
        self.hit = True
        match fault.kind:
            case "error" | "error forever":
                raise OSError(fault.errno, os.strerror(fault.errno))
            case "short" | "short then error":
                return (half or run)()
            case "crash after":
                with contextlib.suppress(OSError):
                    (half or run)()
                self._crash()
            case "crash":
                self._crash()
        raise Crash

    def _crash(self) -> None:
        self.crashed = True
        for fd in self._open:
            os.close(fd)
        self._open.clear()

    # ----------------------------------------------------------------- the operations

    def open_read(self, path: str) -> int:
        return self._operation(lambda: self._opened(FileSystem.open_read(self, path)))

    def open_new(self, path: str) -> int:
        return self._operation(lambda: self._opened(FileSystem.open_new(self, path)))

    def _opened(self, fd: int) -> int:
        self._open.add(fd)
        return fd

    def close(self, fd: int) -> None:
        # As Linux does: the descriptor is gone, whatever close says.
        if not self.crashed:
            self._open.discard(fd)
            os.close(fd)
        self._operation(lambda: None)

    def size(self, fd: int) -> int:
        return self._operation(lambda: FileSystem.size(self, fd))

    def readv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return self._operation(
            lambda: FileSystem.readv(self, fd, buffers, offset),
            lambda: FileSystem.readv(self, fd, _half(buffers), offset),
        )

    def writev(self, fd: int, buffers: Sequence[Buffer]) -> int:
        return self._operation(
            lambda: FileSystem.writev(self, fd, buffers),
            lambda: FileSystem.writev(self, fd, _half(buffers)),
        )

    def sync(self, fd: int) -> None:
        self._operation(lambda: FileSystem.sync(self, fd))

    def rename(self, source: str, target: str) -> None:
        self._operation(lambda: FileSystem.rename(self, source, target))

    def unlink(self, path: str) -> None:
        self._operation(lambda: FileSystem.unlink(self, path))

    def make_folder(self, path: str) -> None:
        self._operation(lambda: FileSystem.make_folder(self, path))

    def is_file(self, path: str) -> bool:
        # The seam promises that it raises nothing, so a fault here is "not there".
        try:
            return self._operation(lambda: FileSystem.is_file(self, path))
        except OSError:
            return False

    def touch(self, path: str, mtime_ns: int) -> None:
        self._operation(lambda: FileSystem.touch(self, path, mtime_ns))


def _half(buffers: Sequence[Buffer]) -> list[memoryview]:
    """The first half of the bytes, rounded up, so that a short transfer still gets on."""
    left = (sum(memoryview(b).nbytes for b in buffers) + 1) // 2
    kept: list[memoryview] = []
    for buffer in buffers:
        view = memoryview(buffer)
        kept.append(view[: min(left, view.nbytes)])
        left -= kept[-1].nbytes
        if left == 0:
            break
    return kept
