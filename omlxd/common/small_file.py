"""Files that are read whole, and that somebody else may have put there: never a device, never without end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

SMALL = 16 << 20
"""Bytes; the index of a model of 1,000 B parameters has 10 MB."""


def read_small(path: Path, most: int = SMALL) -> bytes:
    """The bytes of a regular file of at most `most` bytes. Raises OSError for any other."""
    return read_with_facts(path, most)[0]


def read_with_facts(path: Path, most: int = SMALL) -> tuple[bytes, os.stat_result]:
    """(bytes, what the system says of the file that was read). Raises as `read_small`."""
    # A FIFO would keep who opens it until somebody writes.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        facts = os.fstat(fd)
        check_small(facts, path, most)
        data = file.read(most + 1)
    if len(data) > most:  # It grows.
        raise _too_large(path, most)
    return data, facts


def check_small(facts: os.stat_result, path: Path, most: int = SMALL) -> None:
    """Raise OSError unless `facts` are those of a regular file of at most `most` bytes."""
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if facts.st_size > most:
        raise _too_large(path, most)


def _too_large(path: Path, most: int) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))
