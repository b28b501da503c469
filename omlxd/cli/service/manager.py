"""The common part of launchd and systemd: state, calls of their tools, files and addresses."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from ...common import ports
from ...common.files import write_atomic
from ...errors import OmlxdError

State = Literal["running", "waiting", "failed", "stopped", "not installed"]


class ServiceError(OmlxdError):
    """The service manager did not do what it was asked. One sentence for the user."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """state     `waiting`: its port is open, and the first connection starts it
    pid       of the daemon while it runs
    last_exit how its last run ended, where the manager tells: `status 1`, `signal Killed: 9`
    file      the file that was installed
    trouble   what is wrong or may be, and what to do
    is_open   whether its port is open; told where the last run failed
    """

    state: State
    file: Path
    pid: int | None = None
    last_exit: str = ""
    trouble: str = ""
    is_open: bool = False


class Ran(msgspec.Struct, frozen=True):
    status: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """The tool's complaint, in one line."""
        return " ".join((self.err or self.out).split()) or f"exit status {self.status}"


def run(*command: str, timeout: float = 90.0) -> Ran:
    """Run a tool of the system, in the C locale. Raises ServiceError when there is none, or it hangs."""
    environ = {**os.environ, "LC_ALL": "C", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}
    try:
        done = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
        )
    except FileNotFoundError as error:
        raise ServiceError(f"there is no {command[0]} here; start `omlxd serve` by hand instead.") from error
    except subprocess.TimeoutExpired as error:
        raise ServiceError(f"{' '.join(command[:3])} did not answer within {timeout:.0f} s.") from error
    return Ran(done.returncode, done.stdout, done.stderr)


def replace_file(path: Path, content: bytes) -> None:
    """Replace `path`, so that nobody reads half of it. Raises ServiceError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content, 0o644)
    except OSError as error:
        raise ServiceError(f"{path} can't be written: {error.strerror}.") from error


def read_ours(path: Path, mark: str) -> bytes | None:
    """Read `path`; None if it isn't there. Raises ServiceError for a file that we did not write."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ServiceError(f"{path} can't be read: {error.strerror}.") from error
    if mark.encode() not in content:
        raise ServiceError(f"{path} was not written by `omlxd service install`; move it away first.")
    return content


def check_installed(path: Path, mark: str) -> None:
    """Raise ServiceError unless `path` is a file of ours."""
    if read_ours(path, mark) is None:
        raise ServiceError("the service is not installed; `omlxd service install` does that.")


def addresses(host: str) -> list[tuple[str, bool]]:
    """Return (address, is IPv6) of each address that the manager listens on for `host`.

    127.0.0.1 has ::1 beside it where there is IPv6: `localhost` means that to some clients.
    """
    try:
        result = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # A label of none or of too many letters.
        raise ServiceError(f"{host} is no address of this machine.") from error
    family, *_, (address, *_) = min(result, key=lambda one: one[0] != socket.AF_INET)
    beside = [("::1", True)] if address == "127.0.0.1" and _has_ipv6() else []
    return [(str(address), family == socket.AF_INET6), *beside]


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def check_free(host: str, port: int, flag: str = "--port") -> None:
    """Raise ServiceError when something listens there already: managers say nothing of that."""
    for address, is_v6 in addresses(host):
        try:
            ports.bind(socket.AF_INET6 if is_v6 else socket.AF_INET, (address, port)).close()
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            why = "is in use; stop the program that holds it" if in_use else "can't be had"
            raise ServiceError(f"port {port} on {address} {why}, or give another {flag}.") from error


def tail(files: Sequence[Path], lines: int, follow: bool) -> list[str]:
    return ["tail", "-n", str(lines), *(["-F"] if follow else []), *map(str, files)]
