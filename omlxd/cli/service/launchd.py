"""launchd: a LaunchAgent of the user, through `launchctl bootstrap, bootout, kickstart, print`.

- on demand (the default): `Sockets` and no `KeepAlive`: the first connection starts the daemon, also after a
  failure.
- at login: `KeepAlive: {SuccessfulExit: false}` as well: started at once, and again after a failure.

Exit statuses below are those that others met. None of this has run on a Mac: tests play launchctl's part.
"""

from __future__ import annotations

import os
import plistlib
import re
import shlex
import time
from pathlib import Path
from typing import Any
from xml.parsers.expat import ExpatError

from ...config.settings import BY_SERVICE
from .manager import (
    ServiceError,
    Status,
    addresses,
    check_free,
    check_installed,
    read_ours,
    replace_file,
    run,
    tail,
)
from .plan import EXIT_TIMEOUT_S, FILES, LAUNCHD_NAME, THROTTLE_S, Plan
from .protected import check_unprotected

LABEL, JOIN_LABEL = "dev.omlxd.serve", "dev.omlxd.join"

EIO, EXISTS, IN_PROGRESS, ALREADY = 5, 17, 36, 37
"""Statuses of bootstrap for a job that is loaded already (5, 17, 37) or still on its way out (36, 37)."""
NO_PROCESS, NOT_FOUND, NO_DOMAIN = 3, 113, 125
POLL_S = 0.2
LOGIN_ITEMS = "System Settings > General > Login Items (Allow in the Background)"
_LAST_END = re.compile(
    r"^\s*last (?:exit code = (?P<status>\d.*)|(?P<kind>terminating signal|exit reason) = (?P<what>.+))$",
    re.M,
)
"""How a job's last run ended. A signal, and a reason as `JETSAM_…`, stand in place of the exit code."""
ASKED_TO_END = "signal Terminated: 15"
_BROKEN = (plistlib.InvalidFileException, ExpatError, ValueError, LookupError, TypeError)
"""What reading a property list raises that somebody changed."""


class Launchd:
    """The LaunchAgent of the user whose home is `home`. Every method raises ServiceError."""

    name = "launchd"

    def __init__(self, home: Path, *, join: bool = False):
        self._home = home
        self._label = JOIN_LABEL if join else LABEL
        self._domain = f"gui/{os.getuid()}"
        self._service = f"{self._domain}/{self._label}"
        self.file = home / "Library" / "LaunchAgents" / f"{self._label}.plist"
        self._logs = home / "Library" / "Logs" / "omlxd"

    def log_file(self) -> Path | None:
        """Return the daemon's default log file; None: the manager keeps what it prints."""
        return self._logs / ("join.log" if self._label == JOIN_LABEL else "omlxd.log")

    def install(self, plan: Plan) -> bool:
        """Write the files and start listening; returns False if just that was installed already.

        Raises ConfigError for files that the service could not read.
        """
        check_unprotected(plan.paths, self._home)
        content = plistlib.dumps(agent(plan, self._logs / ("join-stdio.log" if plan.join else "stdio.log")))
        there, was_loaded = read_ours(self.file, BY_SERVICE), self._loaded()
        if there == content and was_loaded:
            return False
        same_port = _port(there) == str(plan.port)
        if not same_port:  # What is installed holds it otherwise, and goes on if the new one is refused.
            check_free(*plan.where)
        self._bootout()
        try:
            if same_port:
                check_free(*plan.where)
            self._make_logs()
            replace_file(self.file, content)
        except ServiceError:
            if was_loaded:
                self._bootstrap()
            raise
        self._bootstrap()
        return True

    def _make_logs(self) -> None:
        try:
            self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)  # launchd makes no folders.
        except OSError as error:
            raise ServiceError(f"{self._logs} can't be made: {error.strerror}.") from error

    def uninstall(self) -> bool:
        """Stop, and remove the files of `install`; returns False if there was nothing."""
        if read_ours(self.file, BY_SERVICE) is None:
            return False
        self._bootout()
        self.file.unlink(missing_ok=True)
        return True

    def start(self) -> None:
        self._check_startable()
        if not self._loaded():
            self._bootstrap()
        done = run("launchctl", "kickstart", self._service)
        if done.status not in (0, ALREADY):
            raise ServiceError(f"launchd would not start it: {done.said}.")

    def stop(self) -> None:
        """Stop the daemon and close its port, until `start` or the next login."""
        check_installed(self.file, BY_SERVICE)
        self._bootout()

    def restart(self) -> None:
        self._check_startable()
        # Not `kickstart -k`, which may kill without a chance to write the cache.
        self.stop()
        self.start()

    def _check_startable(self) -> None:
        check_installed(self.file, BY_SERVICE)
        if gone := _lost_python(self.file.read_bytes()):
            raise ServiceError(gone)

    def status(self) -> Status:
        if (content := read_ours(self.file, BY_SERVICE)) is None:
            return Status(state="not installed", file=self.file)
        gone = _lost_python(content)
        done = run("launchctl", "print", self._service)
        if done.status:
            off = self._is_disabled() or done.status == EIO
            hint = f"It may be switched off under {LOGIN_ITEMS}." if off else ""
            return Status(state="stopped", file=self.file, trouble=gone or hint)
        pid = re.search(r"^\s*pid = (\d+)", done.out, re.MULTILINE)
        last_exit = _last_end(done.out)
        failed = not pid and (gone or last_exit not in ("", "status 0", ASKED_TO_END))
        return Status(
            state="running" if pid else "failed" if failed else "waiting",
            file=self.file,
            pid=int(pid[1]) if pid else None,
            last_exit=last_exit,
            trouble=gone,
            is_open=True,
        )

    def logs(self, lines: int, follow: bool) -> list[str]:
        """Return the command that shows the logs."""
        check_installed(self.file, BY_SERVICE)
        agent = plistlib.loads(self.file.read_bytes())
        words = agent["ProgramArguments"]
        files = [Path(agent["StandardErrorPath"])]
        if "--log-file" in words:
            files.append(Path(words[words.index("--log-file") + 1]))
        if there := [file for file in files if file.exists()]:
            return tail(there, lines, follow)
        raise ServiceError("it has logged nothing yet; `omlxd service start` starts it.")

    # ----------------------------------------------------------------- launchctl

    def _loaded(self) -> bool:
        return run("launchctl", "print", self._service).status == 0

    def _is_disabled(self) -> bool:
        said = run("launchctl", "print-disabled", self._domain).out
        return re.search(rf'"{re.escape(self._label)}" => (disabled|true)', said) is not None

    def _bootstrap(self) -> None:
        # One that was disabled once stays so, and would be refused.
        run("launchctl", "enable", self._service)
        done = run("launchctl", "bootstrap", self._domain, str(self.file))
        if done.status == 0 or (done.status in (EIO, EXISTS, ALREADY) and self._loaded()):
            return
        if done.status == NO_DOMAIN:
            raise ServiceError("launchd has no session for this user; log in at the Mac's screen first.")
        if done.status == EIO:
            raise ServiceError(
                f"launchd would not take {self.file}: {done.said}. It may be switched off in {LOGIN_ITEMS}, "
                "or nobody is logged in at the Mac's screen: change that, then run `omlxd service start`."
            )
        raise ServiceError(f"launchd would not take {self.file}: {done.said}.")

    def _bootout(self) -> None:
        """Remove the job from launchd, which sends SIGTERM; returns once it is gone."""
        done = run("launchctl", "bootout", self._service)
        if done.status in (NO_PROCESS, NOT_FOUND):
            return
        if done.status not in (0, IN_PROGRESS, ALREADY):
            if not self._loaded():
                return
            raise ServiceError(f"launchd would not let go of it: {done.said}.")
        for _ in range(int((EXIT_TIMEOUT_S + 10) / POLL_S)):
            if not self._loaded():
                return
            time.sleep(POLL_S)
        raise ServiceError("launchd has not ended it in time; try again in a moment.")


def _last_end(said: str) -> str:
    """Return how the last run ended, by `launchctl print`: `status 1`, `signal Killed: 9`; "": none has."""
    if not (last := _LAST_END.search(said)):
        return ""
    kind = (last["kind"] or "status").replace("terminating ", "").replace("exit ", "")
    return f"{kind} {(last['status'] or last['what']).strip()}"


def _lost_python(agent: bytes) -> str:
    """Say what to do if the Python of a property list as below is gone; "": it is there."""
    try:
        job = plistlib.loads(agent)
        python, *words = job["ProgramArguments"]
        join = "join" in words
        flags = words[words.index("join" if join else "serve") + 1 :]
    except _BROKEN:
        return ""
    if os.path.exists(python):
        return ""
    options = ["--at-login"] * ("KeepAlive" in job) + ["--join"] * join
    return (
        f"Its Python is gone: {python} (`brew upgrade` and others remove old ones). In a checkout, `python3 "
        "tools/bootstrap.py serve --help` makes .venv again. Or run, with an omlxd that starts: "
        f"`{shlex.join(['omlxd', 'service', 'install', *options, '--', *flags])}`."
    )


def _port(agent: bytes | None) -> str | None:
    """Return the port of a property list as below; None also for one that somebody broke."""
    try:
        listeners = plistlib.loads(agent or b"")["Sockets"][LAUNCHD_NAME]
        # Earlier versions wrote one dictionary.
        return (listeners if isinstance(listeners, dict) else listeners[0])["SockServiceName"]
    except _BROKEN:
        return None


def agent(plan: Plan, stdio: Path) -> dict[str, Any]:
    """Return the property list, of keys that launchd.plist(5) documents."""
    made: dict[str, Any] = {
        "Label": JOIN_LABEL if plan.join else LABEL,
        "ProgramArguments": list(plan.program),
        "EnvironmentVariables": dict(plan.environ),
        "WorkingDirectory": "/",
        "ThrottleInterval": THROTTLE_S,
        "ExitTimeOut": EXIT_TIMEOUT_S,
        # Unset, launchd throttles CPU and disk.
        "ProcessType": "Interactive",
        "SoftResourceLimits": {"NumberOfFiles": FILES},
        "Umask": 0o077,
        "StandardOutPath": str(stdio),
        "StandardErrorPath": str(stdio),
        "Sockets": {
            LAUNCHD_NAME: [
                {
                    "SockNodeName": address,
                    "SockServiceName": str(plan.port),
                    "SockFamily": "IPv6" if is_v6 else "IPv4",
                    "SockType": "stream",
                }
                for address, is_v6 in addresses(plan.host)
            ]
        },
    }
    if plan.at_login:
        made["KeepAlive"] = {"SuccessfulExit": False}
    return made
