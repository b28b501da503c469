"""`python -m omlxd.cli.doctor.report.inside FILE`: what the service's agent sees, for the report.

FILE is the JSON of an `Inside`. Each result is a line of JSON in its `out`, the last one of part `END`.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from . import folders, system
from .bounds import Budget
from .measure import Measured, measure

PARTS = ("eval", "bandwidth", "pass")
"""Measured in the shell too, and compared."""
END = "end"


class Inside(msgspec.Struct):
    """`places`: as `folders.places` has them. `job`: the measurement's file. `seconds`: for all of it."""

    places: dict[str, str]
    job: str
    out: str
    seconds: float


def surroundings() -> str:
    """Say what a process gets from whoever started it."""
    names = {
        name: "set" if os.environ.get(name) else "unset" for name in ("XPC_SERVICE_NAME", "LANG", "HOME")
    }
    paths = [path for path in os.environ.get("PATH", "").split(os.pathsep) if path]
    said = subprocess.run(["ps", "-o", "pri=,nice=", "-p", str(os.getpid())], capture_output=True, text=True)
    priority, nice = [*said.stdout.split(), "?", "?"][:2]
    variables = ", ".join(f"{name} {state}" for name, state in names.items())
    files = dict(system.limits())["open files"]
    encoding = sys.getfilesystemencoding()
    return (
        f"{variables}, PATH of {len(paths)} folders, {encoding}, priority {priority}, nice {nice}, "
        f"{files} open files, flock of a folder {_locks_folder()}"
    )


def _locks_folder() -> str:
    """Try it on a folder of this program: no other is sure to be there."""
    fd = os.open(Path(__file__).parent, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return f"fails: {error.strerror}"
    finally:
        os.close(fd)
    return "works"


def main(file: str) -> None:
    job = msgspec.json.decode(Path(file).read_bytes(), type=Inside)
    budget = Budget(job.seconds)
    with open(job.out, "ab", buffering=0) as out:

        def take(measured: Measured) -> None:
            out.write(msgspec.json.encode(measured) + b"\n")

        for name, call in (("surroundings", surroundings), ("folders", lambda: folders.describe(job.places))):
            try:
                take(Measured(name, [(name, call())]))
            except Exception as error:
                take(Measured(name, error=f"failed: {type(error).__name__}: {error}"))
        measure(Path(job.job), PARTS, budget, take)
        take(Measured(END))


if __name__ == "__main__":
    main(sys.argv[1])
