"""Clients from npm and PyPI, each version in a folder of its own, kept for the next time."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

NPM_S = 600.0


class InstallError(Exception):
    """A client could not be installed; the message says why."""


def npm_program(home: Path, package: str, version: str, program: str) -> Path:
    """The path of `program` of an npm package at exactly `version`. Raises InstallError."""
    path = npm_folder(home, {package: version}) / ".bin" / program
    if not path.exists():
        raise InstallError(f"{package}@{version} has no program {program}")
    return path


def npm_folder(home: Path, packages: dict[str, str]) -> Path:
    """The `node_modules` that holds `packages` (name → exact version). Raises InstallError."""
    names = [f"{name.replace('/', '-').lstrip('@')}-{version}" for name, version in packages.items()]
    folder = home / ("-and-".join(names[:2]) + (f"-and-{len(names) - 2}-more" if names[2:] else ""))
    modules = folder / "node_modules"
    wanted = [f"{name}@{version}" for name, version in packages.items()]
    done = folder / ".done"
    if done.exists() and done.read_text().split() == wanted:
        return modules
    npm = shutil.which("npm")
    if npm is None:
        raise InstallError("npm is needed (Node.js 20 or later)")
    folder.mkdir(parents=True, exist_ok=True)
    # A version, never a range: npm silently steps back to an older release whose `engines` fit.
    flags = ["--no-fund", "--no-audit", "--loglevel=error", "--prefix", str(folder)]
    _run([npm, "install", *flags, *wanted])
    done.write_text("\n".join(wanted))
    return modules


def python_with(home: Path, packages: dict[str, str]) -> Path:
    """A Python that imports `packages` (name → exact version): this one, or one made for it.

    Raises InstallError.
    """
    if all(_version(name) == version for name, version in packages.items()):
        return Path(sys.executable)
    names = [re.sub(r"\W+", "-", name) + version for name, version in packages.items()]
    folder = home / "-".join(["python", *names])
    python = folder / "bin" / "python"
    done = folder / ".done"
    if not done.exists():
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        wanted = [f"{name}=={version}" for name, version in packages.items()]
        _run(
            [str(python), "-m", "pip", "install", "--quiet", "--upgrade", "pip"]
        )  # An old one searches long.
        _run([str(python), "-m", "pip", "install", "--quiet", *wanted])
        done.touch()
    return python


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NPM_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{command[0]}: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        # The last line names a log or a version; the reason stands somewhere above.
        why = [line for line in said if re.search(r"Error: |ERROR: |notarget No ", line)] or said or ["?"]
        raise InstallError(f"{' '.join(command[:4])} … failed: {why[-1][:300]}")
