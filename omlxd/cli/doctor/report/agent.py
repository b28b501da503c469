"""Runs `inside.py` where the service runs: as a job of launchd, of systemd, or else as a plain process."""

from __future__ import annotations

import contextlib
import os
import plistlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import psutil

import omlxd

from ...service import plan
from ...service.manager import ServiceError, run
from .inside import END, Inside
from .measure import Measured

LABEL = f"dev.omlxd.report.{os.getpid()}"
TOOL_S = 15.0
POLL_S = 0.1
CARRIED = (*plan.CARRIED, "LD_LIBRARY_PATH")
"""Variables of this shell that the job gets: the service's, and where a bare folder's libraries are."""
_FACTS = re.compile(r"^\s*((?:state|spawn type|runs|last [\w ]+) = .+?)\s*$", re.M)

FOLDER = "omlxd-report-"

Outcome = tuple[str, str, list[tuple[str, str]], list[Measured]]
"""How it ran, why it failed ("": it did not), lines about its manager, and its results."""


def remove_leftovers() -> None:
    """Remove folders and jobs of reports whose processes were killed. Raises OSError and ServiceError."""
    if sys.platform == "darwin":
        for label, pid in re.findall(
            r"(dev\.omlxd\.report\.(\d+))", run("launchctl", "list", timeout=TOOL_S).out
        ):
            if not psutil.pid_exists(int(pid)):
                run("launchctl", "bootout", f"gui/{os.getuid()}/{label}", timeout=TOOL_S)
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*-*"):
        pid = folder.name.removeprefix(FOLDER).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)) and folder.lstat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


def measure_inside(inside: Inside, folder: Path, seconds: float) -> Outcome:
    """Run it for at most `seconds`, and return what it said. `folder`: for files of the job."""
    file = folder / "inside.json"
    file.write_bytes(msgspec.json.encode(inside))
    program = [str(Path(sys.executable).absolute()), "-m", f"{__package__}.inside", str(file)]
    until = time.monotonic() + seconds
    how, failed, lines = "", "", []
    try:
        if sys.platform == "darwin":
            how = "a one-shot launchd agent, ProcessType Interactive"
            lines = _by_launchd(program, inside, until, folder)
        else:
            how = _by_systemd(program, inside, until)
    except ServiceError as error:
        failed = f"failed: {error.message}"
    results = _results(inside)
    if not failed and not _ended(results):
        failed = "failed: its process ended before its work"
    return how, failed, lines, results


def _ended(results: list[Measured]) -> bool:
    return any(result.part == END for result in results)


def _results(inside: Inside) -> list[Measured]:
    with contextlib.suppress(OSError):
        lines = Path(inside.out).read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Measured) for line in lines if line.endswith(b"}")]
    return []


def _variables() -> dict[str, str]:
    """Return what the job needs of this shell: a checkout that is not installed has its own import path."""
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = [Path(omlxd.__file__).parents[1], *map(Path, given)]
    own = {name: value for name in CARRIED if (value := os.environ.get(name))}
    return own | {"PYTHONPATH": os.pathsep.join(str(path.absolute()) for path in paths)}


def _wait(inside: Inside, until: float) -> None:
    """Wait until the job has ended its work. Raises ServiceError if it does not in time."""
    while not _ended(_results(inside)):
        if time.monotonic() > until:
            raise ServiceError("the job did not end in time")
        time.sleep(POLL_S)


# --------------------------------------------------------------------------- launchd


def _by_launchd(program: list[str], inside: Inside, until: float, folder: Path) -> list[tuple[str, str]]:
    """Raises ServiceError, and says what launchctl answered, which nobody has seen on a Mac yet."""
    domain, said = f"gui/{os.getuid()}", folder / "job.txt"
    service, plist = f"{domain}/{LABEL}", folder / "job.plist"
    job = {
        "Label": LABEL,
        "ProgramArguments": program,
        "EnvironmentVariables": _variables(),
        "WorkingDirectory": "/",
        "ProcessType": "Interactive",  # As the service has it.
        "RunAtLoad": True,
        "ExitTimeOut": 5,
        "SoftResourceLimits": {"NumberOfFiles": plan.FILES},
        "StandardOutPath": str(said),
        "StandardErrorPath": str(said),
    }
    plist.write_bytes(plistlib.dumps(job))
    statuses: list[str] = []

    def ctl(verb: str, *words: str) -> str:
        done = run("launchctl", verb, *words, timeout=TOOL_S)
        statuses.append(f"{verb} {done.status}")
        return done.out if verb == "print" else done.said if done.status else ""

    try:
        if refused := ctl("bootstrap", domain, str(plist)):
            raise ServiceError(f"launchd would not take the job ({statuses[0]}): {refused}")
        ctl("bootstrap", domain, str(plist))  # Again, as bootout below: its status then is not known yet.
        ctl("kickstart", service)
        running = _FACTS.findall(ctl("print", service))
        try:
            _wait(inside, until)
        except ServiceError as error:
            ended = ", ".join(_FACTS.findall(ctl("print", service)))
            last = said.read_text(errors="replace").strip().splitlines()[-1:] if said.exists() else []
            raise ServiceError(f"{error.message} ({', '.join([ended, *last])})") from None
    finally:
        ctl("bootout", service)
        ctl("bootout", service)
    return [("launchctl", f"{', '.join(statuses)}; while it ran: {', '.join(running)}")]


# --------------------------------------------------------------------------- Linux


def _by_systemd(program: list[str], inside: Inside, until: float) -> str:
    """Return how it ran. Raises ServiceError."""
    words = [f"--setenv={name}={value}" for name, value in _variables().items()]
    unit = f"omlxd-report-{os.getpid()}"
    command = ["systemd-run", "--user", "--quiet", "--collect", f"--unit={unit}", *words, *program]
    with contextlib.suppress(ServiceError):
        if run(*command, timeout=TOOL_S).status == 0:
            try:
                _wait(inside, until)
            finally:
                run("systemctl", "--user", "stop", unit, timeout=TOOL_S)
            return "a one-shot service of this user's systemd"
    process = subprocess.Popen(
        program,
        cwd="/",
        env={**os.environ, **_variables()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise ServiceError("the process did not end in time") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
    return "a plain process of its own session, as this user has no systemd here"
