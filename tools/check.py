"""Check in a minute what CI checks in full: format, lint, imports, types and tests of what you changed.

    python tools/check.py [--base REF] [--seconds 55]

Changed files are those that differ from REF (default: where this branch left main, else HEAD), and new
files that git does not ignore. A file of omlxd/ROOM/ runs the fast tests of tests/ROOM/, a changed test
file runs itself, and a helper in tests/support/ runs the test files that import it. Types are checked in
changed files only. Subjects of commits since REF are `room: what it does`. All steps run side by side; what
is still running at the limit is ended and reported.

Exit status: 0 if all passed, 1 if something failed, 3 if nothing failed and a step did not finish or start.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EVERYBODY = ("chat.py", "errors.py", "wire")
"""Files of omlxd/ that every room imports. Their tests: those of api/, which are the fastest to use them."""
READERS = ("tests/config/test_config.py", "tests/tools/test_documents.py")
"""Tests that read documents and example files."""
QUIET = re.compile(r" (PASSED|SKIPPED|XFAIL)\b|^tests/\S+ *$|^scheduling tests|^$")
"""Lines of pytest that say nothing is wrong."""
MOST_SUBJECT = 72
SUBJECT = re.compile(rf"(?=.{{1,{MOST_SUBJECT}}}$)[a-z_]+(/[a-z_]+)*: [^\sA-Z][^\n]*[^.\s]$")
"""Of a commit: its room, and what it does as an imperative."""
END_S = 5.0
"""pytest gets the last seconds of the limit to print its summary."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--base", default="", help="compare with this commit; default: where main was left")
    parser.add_argument("--seconds", type=float, default=55.0, help="time limit of all steps together")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    since = args.base or base()
    changed = changed_files(since)
    tests = tests_for(ROOT, changed)
    print(f"{len(changed)} files changed; tests: {' '.join(tests) or 'none'}", flush=True)
    steps = [Step(name, command) for name, command in commands(changed, tests).items()]
    bad = bad_subjects(git("log", "--format=%s", f"{since}..HEAD").splitlines())
    for subject in bad:
        print(
            f"failed      commit subject {subject!r}: `room: what it does`, {MOST_SUBJECT} characters at most"
        )
    status = 1 if bad else 0
    for step in steps:
        result = step.wait(deadline)
        print(f"{result:<11} {step.name} ({step.seconds:.1f} s)", flush=True)
        if result != "passed":
            print(step.output(), flush=True)
            status = 1 if result == "failed" or status == 1 else 3
    return status


# --------------------------------------------------------------------------- what changed


def git(*args: str) -> str:
    """Output of a git command in this checkout; "" if it fails."""
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def base() -> str:
    """The commit where this branch left main; HEAD without a main."""
    return next(
        (found for ref in ("main", "origin/main") if (found := git("merge-base", "HEAD", ref))), "HEAD"
    )


def changed_files(ref: str) -> list[str]:
    """Paths below the checkout that differ from `ref` and still exist."""
    names = git("diff", "--name-only", ref) + "\n" + git("ls-files", "--others", "--exclude-standard")
    return sorted({name for name in names.splitlines() if (ROOT / name).is_file()})


def tests_for(root: Path, changed: Sequence[str]) -> list[str]:
    """Test files that belong to the changed files: first those that changed, then those that name a module
    that did, so that the limit cuts the others.
    """
    own: set[str] = set()
    rooms: set[Path] = set()
    for name in changed:
        path = Path(name)
        if path.suffix != ".py":
            # READMEs and examples of settings.
            own |= {name for name in READERS if (root / name).is_file()}
        elif path.parts[0] == "tests" and path.name.startswith("test_"):
            own.add(name)
        elif path.parts[0] == "tests":
            own |= importers(root / "tests", path.stem, root)
        else:
            rooms.add(room_of(root, path))
    found = {str(file.relative_to(root)) for room in rooms for file in room.glob("test_*.py")}
    modules = re.compile("|".join(rf"(?:\b|_){re.escape(Path(name).stem)}\b" for name in changed))

    def is_far(name: str) -> bool:
        return modules.search(name + (root / name).read_text()) is None

    return sorted(own) + sorted(sorted(found - own), key=is_far)


def room_of(root: Path, path: Path) -> Path:
    """The folder of tests for a file of omlxd/ or tools/: the nearest one that exists."""
    if path.parts[0] == "tools":
        return root / "tests" / "tools"
    if path.parts[0] != "omlxd" or path.parts[1] in EVERYBODY:
        return root / "tests" / "api"
    room = root / "tests" / Path(*path.parts[1:-1])
    while not any(room.glob("test_*.py")) and room != root / "tests":
        room = room.parent
    return room


def importers(tests: Path, module: str, root: Path) -> set[str]:
    """Test files that import a helper module."""
    line = re.compile(rf"^\s*(?:from|import) {re.escape(module)}\b", re.MULTILINE)
    return {str(f.relative_to(root)) for f in tests.rglob("test_*.py") if line.search(f.read_text())}


def bad_subjects(subjects: Sequence[str]) -> list[str]:
    """Those that are too long or name no room; reverts are git's own words."""
    return [one for one in subjects if not SUBJECT.match(one) and not one.startswith('Revert "')]


# --------------------------------------------------------------------------- the steps


def commands(changed: Sequence[str], tests: Sequence[str]) -> dict[str, list[str]]:
    """Name → command of every step."""
    scripts = Path(sys.executable).parent
    typed = [name for name in changed if name.startswith("omlxd/") and name.endswith(".py")]
    steps = {
        "ruff format": [str(scripts / "ruff"), "format", "--check", "omlxd", "tests", "tools"],
        "ruff check": [str(scripts / "ruff"), "check", "omlxd", "tests", "tools"],
        "imports": [str(scripts / "lint-imports"), "--no-cache"],
    }
    if typed:
        steps["types"] = [str(scripts / "pyright"), "--pythonpath", sys.executable, *typed]
    if tests:
        steps["tests"] = [sys.executable, "-m", "pytest", "-vv", "--maxfail=5", *tests]
    return steps


class Step:
    """One command in a process group of its own, its output in a file."""

    def __init__(self, name: str, command: Sequence[str]):
        self.name = name
        self.seconds = 0.0
        self._began = time.monotonic()
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the step)
        self._process: subprocess.Popen[str] | None = None
        try:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            self._output.write(
                f"{command[0]}: {error.strerror}. Run `python3 tools/bootstrap.py test` once.\n"
            )

    def wait(self, deadline: float) -> str:
        """`passed`, `failed`, or `unfinished`: ended at the deadline, or could not start."""
        if self._process is None:
            return "unfinished"
        try:
            status = self._process.wait(max(0.0, deadline - END_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._end(self._process)
            return "failed" if re.search(r" (FAILED|ERROR) tests/", self.output()) else "unfinished"
        finally:
            self.seconds = time.monotonic() - self._began
        if self.name == "tests" and status == 5:  # pytest: all tests there are slow ones.
            return "passed"
        return "passed" if status == 0 else "failed"

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def output(self) -> str:
        """The last 60 lines, without tests that passed or only began."""
        self._output.seek(0)
        lines = [line for line in self._output.read().splitlines() if not QUIET.search(line)]
        return "\n".join(lines[-60:])


if __name__ == "__main__":
    sys.exit(main())
