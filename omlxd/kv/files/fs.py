"""The cold tier's file system, as a seam: tests put one that fails or crashes at its N-th operation here.

`FileSystem` has what the cold tier uses, in POSIX's terms; a test overrides its methods.
`put_in_place` and `read_in_place` make a store atomic and a load checked. The rest lists the cache dir.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from .paths import TEMP_SUFFIX

Buffer = bytes | bytearray | memoryview

IOV_MAX = 1024
"""Buffers that one readv or writev takes, on Linux and macOS alike."""


def identity(path: str | int) -> tuple[int, int] | None:
    """Return device and inode of a file, by path or descriptor; None if it can't be looked at."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def is_held(lock: str) -> bool:
    """Return whether a process has locked the file `lock`. A ledger locks it anew if it is back as another
    file.
    """
    with contextlib.suppress(OSError), open(lock, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class FileSystem:
    """The operating system's file system. Every method but `is_file` raises OSError as `os` does.

    lock  the cache dir's lock file: no folder is made while it is missing, or another file that is not locked
    """

    _lock = ""
    _identity: tuple[int, int] | None = None

    def __init__(self, lock: str = ""):
        self._lock = lock
        self._identity = identity(lock) if lock else None

    def open_read(self, path: str) -> int:
        # O_NONBLOCK means nothing to a file, but a pipe in its place must not hold the reader for ever.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)

    def open_new(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def readv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def writev(self, fd: int, buffers: Sequence[Buffer]) -> int:
        return os.writev(fd, buffers)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def make_folder(self, path: str) -> None:
        """Make a folder and at most its parent: a cache dir that is away is not made anew."""
        if self._lock:
            now = identity(self._lock)
            if now is None or (now != (self._identity or now) and not is_held(self._lock)):
                raise OSError(errno.ENODEV, "the cache folder is away", self._lock)  # No fault of one path.
            self._identity = now
        for folder in (os.path.dirname(path), path):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)

    def is_file(self, path: str) -> bool:
        """Return whether `path` is an ordinary file, and no link. Raises nothing."""
        try:
            return stat.S_ISREG(os.lstat(path).st_mode)
        except OSError:
            return False

    def touch(self, path: str, mtime_ns: int) -> None:
        os.utime(path, ns=(mtime_ns, mtime_ns))


def read_all(fs: FileSystem, fd: int, buffers: Sequence[memoryview], offset: int = 0) -> int:
    """Fill `buffers`, byte views, from `offset` on, whatever the kernel returns at a time.

    Returns bytes read. Fewer bytes than the buffers hold means that the file ended.
    """
    return _all(lambda part, done: fs.readv(fd, part, offset + done), buffers)


def write_all(fs: FileSystem, fd: int, buffers: Sequence[memoryview]) -> int:
    """Write every byte of `buffers`; returns how many. Raises OSError, also where a write writes nothing."""
    done = _all(lambda part, done: fs.writev(fd, part), buffers)
    if done != sum(map(len, buffers)):
        raise OSError("short write")
    return done


def touch_in_order(fs: FileSystem, paths: Sequence[str]) -> None:
    """Make files the most recently used, the last one the most. Raises nothing."""
    now = time.time_ns() - len(paths) * 1000
    for index, path in enumerate(paths):
        # A microsecond apart, so that the order survives file systems of coarser clocks than ns.
        with contextlib.suppress(OSError):
            fs.touch(path, now + index * 1000)


def _all(transfer: Callable[[Sequence[memoryview], int], int], buffers: Sequence[memoryview]) -> int:
    left = list(buffers)
    at = done = 0
    while at < len(left):
        part = left[at : at + IOV_MAX]
        count = transfer(part, done)
        if count <= 0:
            break
        done += count
        if count == sum(map(len, part)):  # Nearly always; stepping over each buffer costs more than the call.
            at += len(part)
            continue
        while count >= len(left[at]):
            count -= len(left[at])
            at += 1
        left[at] = left[at][count:]
    return done


def subfolders(folder: Path, ours: Callable[[str], bool]) -> list[os.DirEntry[str]]:
    """Return the subfolders whose names are `ours`, without links. Raises OSError."""
    return [e for e in entries_of(str(folder)) if ours(e.name) and e.is_dir(follow_symlinks=False)]


def entries_of(folder: str) -> list[os.DirEntry[str]]:
    """Return a folder's entries; none if it is missing. Raises OSError."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def is_gone(path: Path) -> bool:
    """Return whether a file is gone; False if it can't be looked at."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def unlink(path: str | Path, fs: FileSystem | None = None) -> OSError | None:
    """Remove a file; returns None once it is gone, else why it isn't."""
    try:
        (fs or os).unlink(str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None


T = TypeVar("T")

_owner, _numbers = 0, itertools.count()
"""Whose temporary files this process's are, 0: its own; their numbers, so that no two share a name."""


def write_for(process: int, number: int) -> None:
    """Name temporary files by the id of another process, with which this one ends: who removes what that one
    left finds them by its id. `number`: of this process among those that write for it, from 1 on.
    """
    global _owner, _numbers
    _owner, _numbers = process, itertools.count(number << 32)


class TempLeft(OSError):
    """A store failed and its temporary file can't be removed either, so it still takes its space."""


def put_in_place(fs: FileSystem, target: str, write: Callable[[int], object], temp: str = "") -> None:
    """Make the file `target`, and its folder, of what `write(fd)` writes: all of it or nothing.

    An old file is replaced. Nothing is synced. Raises OSError, leaving nothing behind, or else TempLeft.
    `temp`: another name than the usual for the unfinished file.
    """
    temp = temp or f"{target}.{_owner or os.getpid()}-{next(_numbers)}{TEMP_SUFFIX}"
    try:
        fd = fs.open_new(temp)
    except FileNotFoundError:
        fs.make_folder(os.path.dirname(target))
        fd = fs.open_new(temp)
    try:
        try:
            write(fd)
        finally:
            fs.close(fd)
        fs.rename(temp, target)
    except BaseException as cause:
        try:
            fs.unlink(temp)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise TempLeft(error.errno, f"{cause}; {temp} stays", temp) from cause
        raise


def read_in_place(fs: FileSystem, path: str, read: Callable[[int], T], bad: type[Exception]) -> T:
    """Return what `read(fd)` makes of the file `path`. Raises FileNotFoundError, OSError, or `bad`.

    A file that fails its check, by raising `bad`, is removed first.
    """
    fd = fs.open_read(path)
    try:
        return read(fd)
    except bad:
        with contextlib.suppress(OSError):
            fs.unlink(path)
        raise
    finally:
        # Closing what was only read can't lose anything, and must not hide why a file was removed:
        # the account would keep it.
        with contextlib.suppress(OSError):
            fs.close(fd)
