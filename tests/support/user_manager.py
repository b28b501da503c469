"""A real systemd of a user who exists for a test alone: a login and its journal, in namespaces of their own.

systemd, journald and all that they start see mounts, processes and cgroups of their own, so nothing of
this machine's services can be met, and the end of one process ends all of it. The network is shared.
Needs root, and a kernel and a container that let it mount; `UserManager.missing` says what is not there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from daemon import REPO, wait_until

UID = 50123
LIFE_S = 3000
"""However a test hangs, its systemd is gone by then."""
SETUP = Path(__file__).with_name("user_manager.sh")
SYSTEMD = next(
    (found for found in ("/lib/systemd/systemd", "/usr/lib/systemd/systemd") if Path(found).exists()), ""
)


class UserManager:
    """A machine with one user, not logged in yet. `home`: the user's, removed at the end.

    Raises OSError where this machine can't have one.
    """

    def __init__(self) -> None:
        self._cgroup = _own_cgroup()
        self.home = Path(tempfile.mkdtemp(prefix="omlxd-user-", dir="/tmp"))
        self.home.chmod(0o755)
        os.chown(self.home, UID, UID)
        self._logged_in: subprocess.Popen[bytes] | None = None
        enter = f'echo 0 > "{self._cgroup}/cgroup.procs" && exec "$@"'
        spaces = ["--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "--mount-proc"]
        closed = [str(part) for wanted in _wanted() for part in _closed(wanted)]
        self._outer = subprocess.Popen(
            [
                *("sh", "-c", enter, "sh", "timeout", "--signal=KILL", str(LIFE_S)),
                *("unshare", "--cgroup", *spaces, "sh", str(SETUP), str(self.home), str(UID), *closed),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._outer.stdout is not None
        said: list[str] = []
        while (line := self._outer.stdout.readline()) != "ready\n":
            said.append(line)
            if not line:
                self.close()
                raise OSError("".join(said).strip() or "its namespaces can't be made")
        (unshare,) = psutil.Process(self._outer.pid).children()
        (first,) = unshare.children()
        self._init = first.pid

    @staticmethod
    def missing() -> str:
        """Why there can be none here, as far as that can be told without trying; "" if it may work."""
        if sys.platform != "linux" or not SYSTEMD:
            return "no systemd here"
        if os.geteuid() != 0:
            return "a systemd of its own, in namespaces, needs root"
        tools = ("unshare", "nsenter", "setpriv", "timeout", "systemctl", "journalctl", "mountpoint")
        gone = [tool for tool in tools if shutil.which(tool) is None]
        return f"{', '.join(gone)} not here" if gone else ""

    # ----------------------------------------------------------------- coming and going

    def login(self) -> None:
        """Start the user's systemd, as logind does; return once it has started what is enabled."""
        session = f"/sys/fs/cgroup/user.slice/user-{UID}.slice/user@{UID}.service"
        move = f"echo 0 > {session}/cgroup.procs && exec {self._as_user()} {SYSTEMD} --user"
        with (self.home / "systemd.txt").open("ab") as said:
            self._logged_in = subprocess.Popen(
                [*self._inside(), "sh", "-c", move], stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
        wait_until(lambda: self._is_up(), 60, lambda: (self.home / "systemd.txt").read_text())

    def _is_up(self) -> bool:
        state = self.run("systemctl", "--user", "is-system-running").stdout.strip()
        return state in ("running", "degraded")

    def logout(self) -> None:
        """SIGTERM to the user's systemd, which ends its units in order; return once it is gone."""
        assert self._logged_in is not None
        self.root("pkill", "-TERM", "-U", str(UID), "--full", f"^{SYSTEMD} --user")
        self._logged_in.wait(100)
        self._logged_in = None

    def close(self) -> None:
        """End all of it, and leave nothing."""
        with contextlib.suppress(psutil.Error):
            for unshare in psutil.Process(self._outer.pid).children():
                unshare.kill()  # And with it the first process of the namespace, and with that all.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._outer.wait(10)
        self._outer.kill()
        self._outer.wait()
        if self._logged_in is not None:
            self._logged_in.wait()
        assert self._outer.stdout is not None
        self._outer.stdout.close()
        deadline = time.monotonic() + 10
        while self._cgroup.exists() and time.monotonic() < deadline:
            for folder, _, _ in os.walk(self._cgroup, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            time.sleep(0.05)
        shutil.rmtree(self.home, ignore_errors=True)

    # ----------------------------------------------------------------- running things in it

    def _inside(self) -> list[str]:
        return ["nsenter", f"--target={self._init}", "--mount", "--pid", "--cgroup", "--"]

    def _as_user(self) -> str:
        environ = f"PATH=/usr/bin:/bin HOME={self.home} XDG_RUNTIME_DIR=/run/user/{UID}"
        return f"setpriv --reuid={UID} --regid={UID} --clear-groups env --chdir=/ -i {environ}"

    def run(self, *command: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
        """`command` as the user, with what a login gives; its output, both kinds together."""
        return _run([*self._inside(), *self._as_user().split(), *command], timeout)

    def root(self, *command: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
        return _run([*self._inside(), *command], timeout)

    def omlxd(self, *words: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
        """`omlxd words` in the user's shell, from this checkout."""
        return self.run("env", f"PYTHONPATH={REPO}", sys.executable, "-m", "omlxd", *words, timeout=timeout)

    def show(self, property: str, unit: str) -> str:
        """What systemd says of a unit."""
        return self.run("systemctl", "--user", "show", "--value", "--property", property, unit).stdout.strip()

    def processes(self) -> list[str]:
        """Command lines of the user's processes, but for systemd's own."""
        said = self.root("ps", "-o", "args=", "-U", str(UID)).stdout.splitlines()
        return [line for line in said if "systemd" not in line.split()[0] and "(sd-pam)" not in line]


def _run(command: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


def _own_cgroup() -> Path:
    """A new cgroup below ours, in the hierarchy that systemd uses. Raises OSError."""
    ours = next(
        (line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")),
        "",
    )
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2" and ours:
            made = Path(place) / ours.lstrip("/") / f"omlxd-test-{os.getpid()}"
            made.mkdir()
            return made
    raise OSError("there is no cgroup2 here")


def _wanted() -> list[Path]:
    """What the user must be able to read: Python, its environment, this checkout."""
    return [Path(part).resolve() for part in dict.fromkeys((sys.base_prefix, sys.prefix, str(REPO)))]


def _closed(wanted: Path) -> tuple[Path, Path] | tuple[()]:
    """(the first folder above `wanted` that others can't enter, `wanted`); () when there is none."""
    for folder in reversed(wanted.parents):
        if not folder.stat().st_mode & 0o001:
            return folder, wanted
    return ()
