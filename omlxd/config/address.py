"""Files with the address of a daemon, and of an `omlxd join`, under its base folder, for commands to find."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ..common.files import read_with_facts, write_atomic

FILE_NAME = "address"
"""Holds `PID HOST PORT`, also after a daemon was killed, so a reader checks that the process lives."""


JOIN_NAME = "join"
"""Holds the same of an `omlxd join`; the next line says of which model it has a share, and for whom."""


def record_address(base_path: Path, host: str, port: int) -> None:
    """Write this process's address. The newest daemon of a folder wins. Errors of the disk are ignored."""
    with contextlib.suppress(OSError):
        write_atomic(base_path / FILE_NAME, f"{os.getpid()} {host} {port}\n".encode())


def recorded_address(base_path: Path) -> tuple[int, str, int, float] | None:
    """Return (pid, host, port, time of writing in seconds since 1970); None: no daemon left any."""
    with contextlib.suppress(OSError, ValueError):
        data, facts = read_with_facts(base_path / FILE_NAME, most=1000)
        pid, host, port = data.decode().split()
        return int(pid), host, int(port), facts.st_mtime
    return None


def forget_address(base_path: Path) -> None:
    """Remove the file if this process wrote it."""
    recorded = recorded_address(base_path)
    if recorded is not None and recorded[0] == os.getpid():
        with contextlib.suppress(OSError):
            (base_path / FILE_NAME).unlink()


def record_join(base_path: Path, host: str, port: int, share: str = "") -> None:
    """Write where this process waits for leads, and what it has a share of; "": nothing."""
    with contextlib.suppress(OSError):
        write_atomic(base_path / JOIN_NAME, f"{os.getpid()} {host} {port}\n{share}".encode())


def recorded_join(base_path: Path) -> tuple[int, str, int, str, float] | None:
    """Return (pid, host, port, share, time of writing), as of `record_join`; None: nobody wrote any."""
    with contextlib.suppress(OSError, ValueError):
        data, facts = read_with_facts(base_path / JOIN_NAME, most=10_000)
        first, _, share = data.decode().partition("\n")
        pid, host, port = first.split()
        return int(pid), host, int(port), share, facts.st_mtime
    return None
