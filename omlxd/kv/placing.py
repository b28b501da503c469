"""A file put in place whole or not at all, written beside its place and renamed; and its reading back."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from typing import TypeVar

from .fs import FileSystem
from .paths import TEMP_SUFFIX

T = TypeVar("T")

_numbers = itertools.count()
"""Of this process's temporary files: no two of them have one name."""


class TempLeft(OSError):
    """A store failed and its temporary file can't be removed either: it still takes its space."""


def put_in_place(fs: FileSystem, target: str, write: Callable[[int], None]) -> None:
    """Make the file `target`, and its folder, of what `write(fd)` writes; a file that is there is replaced.

    Atomic, but not synced. Raises OSError, leaving nothing behind, or else TempLeft.
    """
    temp = f"{target}.{os.getpid()}-{next(_numbers)}{TEMP_SUFFIX}"
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
    """What `read(fd)` makes of the file `path`. Raises FileNotFoundError, OSError, or `bad`.

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
