"""What lies in the folders of the cache dir. A folder or file that is not there is no error."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def subfolders(folder: Path, ours: Callable[[str], bool]) -> list[os.DirEntry[str]]:
    """Those of a name that is `ours`; links to folders are none. Raises OSError."""
    return [e for e in entries_of(str(folder)) if ours(e.name) and e.is_dir(follow_symlinks=False)]


def entries_of(folder: str) -> list[os.DirEntry[str]]:
    """Raises OSError where it can't be read."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def is_gone(path: Path) -> bool:
    """False for a file that can't be looked at: it may be there still."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def unlink(path: str | Path) -> OSError | None:
    """None when the file is gone, else why it isn't."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None
