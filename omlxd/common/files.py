"""Files that anybody may have put there, atomic writes, the header of safetensors files, and backups."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

SMALL = 16 << 20
"""Bytes; the index of a model of 1,000 B parameters has 10 MB."""

MAX_HEADER = 100 * 2**20
"""Bytes: the limit of the safetensors format."""


def read_small(path: Path, most: int = SMALL) -> bytes:
    """Read a regular file of at most `most` bytes. Raises OSError for anything else: no device, no FIFO."""
    return read_with_facts(path, most)[0]


def read_with_facts(path: Path, most: int = SMALL) -> tuple[bytes, os.stat_result]:
    """Return (bytes, fstat) of a file. Raises as `read_small`."""
    # Opening a FIFO without O_NONBLOCK waits for a writer.
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


def write_atomic(path: Path, data: bytes, mode: int = 0o600, *, sync: bool = False) -> None:
    """Replace `path` by a file of `data`; readers see the old file or the new one. Raises OSError.

    The folder must exist. sync: the data are on disk before the name is.
    """
    temp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temp.unlink(missing_ok=True)  # A process of the same id may have been killed here.
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(data)
            file.flush()
            if sync:
                os.fsync(fd)
        temp.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temp.unlink()
        raise


@contextlib.contextmanager
def new_file(path: Path) -> Generator[IO[bytes]]:
    """Open a new file that gets its name once complete. Raises FileExistsError, OSError."""
    temp = path.with_name(f"{path.name}.{os.getpid()}.part")
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    if not path.parent.exists():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder; create it first", str(path.parent))
    if not path.parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is no folder", str(path.parent))
    temp.unlink(missing_ok=True)
    try:
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as target:
            yield target
        temp.rename(path)
    finally:
        temp.unlink(missing_ok=True)


def safetensors_header(file: IO[bytes], size: int, most: int = MAX_HEADER) -> bytes | None:
    """Read the JSON header of a safetensors file of `size` bytes; None without one. Raises OSError."""
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(most, size - 8):
        return None
    header = file.read(length)
    return header if len(header) == length else None


TMUTIL = "/usr/bin/tmutil"
TMUTIL_S = 60.0


def leave_out_of_backups(folder: Path) -> None:
    """On macOS, have Time Machine skip `folder` from now on; nothing elsewhere. It has not run on a Mac.

    tmutil(8) does it without root and remembers it with the folder, which may be moved.
    """
    if sys.platform != "darwin":
        return
    try:
        subprocess.run(
            [TMUTIL, "addexclusion", folder],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=TMUTIL_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        why = said.decode(errors="replace").strip() or error
        log.warning("Time Machine may back %s up, leave it out in its settings: %s", folder, why)
