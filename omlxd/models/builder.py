"""The common part of programs that fetch or make a model folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Generator
from pathlib import Path

from ..errors import ModelError

PART = ".importing"
"""Suffix of folders under construction."""


def run_builder(make: Callable[[], Path]) -> int:
    """Print the folder that `make` makes, or why it can't; returns the exit status."""
    try:
        print(make())
    except ModelError as error:
        print(error.message)
        return 1
    return 0


def end_with_parent() -> None:
    """End when standard input closes: whoever wanted the model is gone."""
    if not sys.stdin.isatty():
        threading.Thread(target=_wait_for_end, daemon=True).start()


def _wait_for_end() -> None:
    # Not through sys.stdin: its lock, held here, would abort the interpreter's own exit.
    while os.read(0, 1024):
        pass
    os._exit(1)


@contextlib.contextmanager
def part_folder(folder: Path) -> Generator[Path]:
    """Make a folder beside `folder`, to be filled and renamed, for the block. Raises OSError.

    Its lock says that somebody fills it. What killed processes left goes first.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(folder.parent):
        _remove_leftovers(folder.parent)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", suffix=PART, dir=folder.parent))
        fd = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)
        os.close(fd)


def make_private(part: Path) -> None:
    """Give the content of `part` to its owner alone. Raises OSError."""
    for path in (part, *part.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)


def remove_leftovers(models: Path) -> None:
    """Remove leftovers of killed processes' `part_folder` in folder `models`."""
    with contextlib.suppress(OSError), _locked(models):
        _remove_leftovers(models)


def _remove_leftovers(models: Path) -> None:
    for part in models.glob(f".*{PART}"):
        with contextlib.suppress(OSError), _locked(part, fcntl.LOCK_NB):
            shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path, how: int = 0) -> Generator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | how)
        yield
    finally:
        os.close(fd)
