"""systemd: a unit and a socket unit of the user, through `systemctl --user` and `journalctl --user`.

The socket unit listens from login on (with `loginctl enable-linger`, from boot on) and starts the daemon at
the first connection. With `at_login` the service unit is enabled as well.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from .manager import (
    ServiceError,
    Status,
    addresses,
    check_free,
    check_installed,
    read_ours,
    replace_file,
    run,
)
from .plan import EXIT_TIMEOUT_S, FILES, THROTTLE_S, Plan

SERVICE, SOCKET = "omlxd.service", "omlxd.socket"
JOIN_UNITS = "omlxd-join.service", "omlxd-join.socket"
MARK = "# Written by `omlxd service install`, which writes it anew; `omlxd service uninstall` removes it."
WATCHDOG_S = 60
JOURNALS = ("/var/log/journal", "/run/log/journal")


class Systemd:
    """The units of the user whose home is `home`. Methods mean what those of `Launchd` do."""

    name = "systemd"

    def __init__(self, home: Path, *, join: bool = False):
        self._unit, self._port = JOIN_UNITS if join else (SERVICE, SOCKET)
        config = os.environ.get("XDG_CONFIG_HOME") or str(home / ".config")
        self._folder = Path(config) / "systemd" / "user"
        self.file = self._folder / self._unit

    def log_file(self) -> Path | None:
        return None  # The journal keeps and rotates.

    def install(self, plan: Plan) -> bool:
        wanted = {self._unit: service_unit(plan).encode(), self._port: socket_unit(plan).encode()}
        there = {name: read_ours(self._folder / name, MARK) for name in wanted}
        # Also what the last form of it enabled, and this one does not.
        other = self._show("UnitFileState", self._unit) == "enabled"
        was_active = self._show("ActiveState", self._port) == "active"
        if there == wanted and was_active and other == plan.at_login:
            return False
        same_port = _port(there[self._port]) == plan.port
        if not same_port:  # What is installed holds it otherwise, and goes on if the new one is refused.
            check_free(*plan.where)
        self._systemctl("daemon-reload")  # Before anything is written: is there a systemd of this user?
        was_enabled = self._show("UnitFileState", self._port) == "enabled"
        if there[self._unit] is not None:
            self._systemctl("disable", "--now", self._unit, self._port)
        if same_port:
            try:
                check_free(*plan.where)
            except ServiceError:
                if was_enabled or was_active:
                    now = ["--now"] if was_active else []
                    run(
                        "systemctl",
                        "--user",
                        "enable",
                        *now,
                        self._port,
                        *([self._unit] if other else []),
                    )
                raise
        for name, content in wanted.items():
            replace_file(self._folder / name, content)
        self._systemctl("daemon-reload")
        self._forget_failures()
        self._systemctl("enable", "--now", self._port)
        if plan.at_login:
            self._systemctl("enable", "--now", self._unit)
        return True

    def uninstall(self) -> bool:
        ours = [name for name in (self._unit, self._port) if read_ours(self._folder / name, MARK) is not None]
        if not ours:
            return False
        # Where there is no systemd of this user, nothing runs under it, and the files go all the same.
        run("systemctl", "--user", "disable", "--now", *ours)
        for name in ours:
            (self._folder / name).unlink(missing_ok=True)
        run("systemctl", "--user", "daemon-reload")
        self._forget_failures()
        return True

    def start(self) -> None:
        check_installed(self.file, MARK)
        self._forget_failures()
        self._systemctl("start", self._port, self._unit)

    def stop(self) -> None:
        check_installed(self.file, MARK)
        # Together: a socket that still listened would start it again.
        self._systemctl("stop", self._port, self._unit)

    def restart(self) -> None:
        check_installed(self.file, MARK)
        self._forget_failures()
        self._systemctl("restart", self._unit)

    def status(self) -> Status:
        if read_ours(self.file, MARK) is None:
            return Status(state="not installed", file=self.file)
        active, pid = self._show("ActiveState", self._unit), self._show("MainPID", self._unit)
        by_signal = self._show("Result", self._unit) in ("signal", "core-dump", "oom-kill")
        last = f"{'signal' if by_signal else 'status'} {self._show('ExecMainStatus', self._unit)}"
        if active in ("active", "reloading", "deactivating", "activating") and pid not in ("", "0"):
            return Status(state="running", file=self.file, pid=int(pid))
        waiting = self._show("ActiveState", self._port) == "active"
        if active == "failed":
            return Status(state="failed", file=self.file, last_exit=last, is_open=waiting)
        return Status(state="waiting" if waiting else "stopped", file=self.file, last_exit=last)

    def logs(self, lines: int, follow: bool) -> list[str]:
        check_installed(self.file, MARK)
        more = ["--follow"] if follow else ["--no-pager"]
        # Users have a journal of their own only on disk, and root has none. In the system's journal,
        # those see theirs who may read it; journalctl says so to the others.
        own = any(file for root in JOURNALS for file in Path(root).glob(f"*/user-{os.getuid()}*.journal"))
        unit = ["--user", "--unit", self._unit] if own else ["--user-unit", self._unit]
        return ["journalctl", *unit, "--lines", str(lines), "--output", "cat", *more]

    # ----------------------------------------------------------------- systemctl

    def _forget_failures(self) -> None:
        """Forget failed starts: systemd refuses a service for a while after several, mended or not."""
        run("systemctl", "--user", "reset-failed", self._unit, self._port)  # 1 when it knows of none.

    def _systemctl(self, *words: str) -> None:
        done = run("systemctl", "--user", *words)
        if done.status:
            said, _, where_to_look = done.said.partition(' See "systemctl')
            hint = "; `omlxd service logs` tells why" if where_to_look else ""
            if "connect to bus" in said or "No medium found" in said:
                hint = "; there is no session of this user: log in once, or run `loginctl enable-linger`"
            raise ServiceError(f"systemctl --user {' '.join(words)} failed: {said.rstrip('.')}{hint}.")

    def _show(self, property: str, unit: str) -> str:
        return run("systemctl", "--user", "show", "--property", property, "--value", unit).out.strip()


def service_unit(plan: Plan) -> str:
    variables = "".join(f"Environment={_quoted(f'{name}={value}')}\n" for name, value in plan.environ.items())
    socket = JOIN_UNITS[1] if plan.join else SOCKET
    return f"""{MARK}
[Unit]
Description=omlxd, local language models
Requires={socket}
After={socket}

[Service]
Type=notify
ExecStart={_command(plan.program)}
ExecReload=/bin/kill -HUP $MAINPID
{variables}WorkingDirectory=/
# A clean end stays ended; settings that make no sense (2) are not tried again.
Restart=on-failure
RestartSec={THROTTLE_S}
RestartPreventExitStatus=2
# Above our own deadlines for ending answers and writing the cache.
TimeoutStopSec={EXIT_TIMEOUT_S}
# SIGTERM goes to the daemon, which ends its engines in order.
KillMode=mixed
WatchdogSec={WATCHDOG_S}
LimitNOFILE={FILES}
UMask=0077
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""


def socket_unit(plan: Plan) -> str:
    listen = "\n".join(
        f"ListenStream={f'[{address}]' if is_v6 else address}:{plan.port}"
        for address, is_v6 in addresses(plan.host)
    )
    return f"""{MARK}
[Unit]
Description=omlxd's port

[Socket]
{listen}
Backlog=1024
NoDelay=yes

[Install]
WantedBy=sockets.target
"""


def _port(unit: bytes | None) -> int | None:
    """Return the port of a socket unit as above."""
    result = re.search(rb"^ListenStream=.*:(\d+)$", unit or b"", re.MULTILINE)
    return int(result[1]) if result else None


def _command(program: Sequence[str]) -> str:
    """Check a command: systemd expands no variable in its path, and refuses some characters there."""
    path, *words = program
    if set(path) & set("\"'\\"):
        raise ServiceError(f"systemd runs no program whose path has quotes or backslashes: {path}.")
    return " ".join([_quoted(path), *(_quoted(word, in_command=True) for word in words)])


def _quoted(word: str, *, in_command: bool = False) -> str:
    """Quote a word for systemd, to which % and, in a command, $ mean something."""
    if "\n" in word or "\0" in word:
        raise ServiceError(f"{word!r} can't stand in a unit file.")
    word = word.replace("%", "%%")
    if in_command:
        word = word.replace("$", "$$")
    if re.fullmatch(r"[\w@%+=:,./$-]+", word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
