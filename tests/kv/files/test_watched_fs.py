"""Who waits for a disk in vain is known; who reads slowly is not taken for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from omlxd.kv.files.fs import FileSystem
from omlxd.kv.files.watched_fs import HANG_S, SLOWEST, WatchedFileSystem

CALLS: dict[str, Callable[[WatchedFileSystem, str, int], object]] = {
    "is_file": lambda fs, path, fd: fs.is_file(path),
    "open_read": lambda fs, path, fd: os.close(fs.open_read(path)),
    "size": lambda fs, path, fd: fs.size(fd),
    "readv": lambda fs, path, fd: fs.readv(fd, [bytearray(SLOWEST)], 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_does_not_come_back_is_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    path, now, back, inside = tmp_path / "block", [0.0], threading.Event(), threading.Event()
    path.write_bytes(b"x" * 100)
    call = getattr(FileSystem, name)

    def hangs(*args: object) -> object:
        inside.set()
        back.wait(60)
        return call(*args)

    fs = WatchedFileSystem(clock=lambda: now[0])
    with path.open("rb") as file:
        CALLS[name](fs, str(path), file.fileno())
        monkeypatch.setattr(FileSystem, name, hangs)
        waiter = threading.Thread(target=CALLS[name], args=(fs, str(path), file.fileno()))
        waiter.start()
        try:
            assert inside.wait(60)
            allowed = HANG_S + (name == "readv")  # A large read has a second more for what it reads.
            for now[0], hung in ((0.0, False), (allowed, False), (allowed + 0.1, True)):
                assert fs.hangs == hung
        finally:
            back.set()
            waiter.join(60)
    assert not fs.hangs


def test_a_call_that_fails_is_over(tmp_path: Path):
    now = [0.0]
    fs = WatchedFileSystem(clock=lambda: now[0])
    with pytest.raises(FileNotFoundError):
        fs.open_read(str(tmp_path / "none"))
    now[0] = 2 * HANG_S
    assert not fs.hangs
