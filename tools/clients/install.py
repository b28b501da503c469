"""Clients from npm and PyPI, each version in a folder of its own, kept for the next time."""

from __future__ import annotations

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
    folder = home / f"{package.replace('/', '-').lstrip('@')}-{version}"
    path = folder / "node_modules" / ".bin" / program
    if path.exists():
        return path
    npm = shutil.which("npm")
    if npm is None:
        raise InstallError("npm is needed (Node.js 20 or later)")
    folder.mkdir(parents=True, exist_ok=True)
    # A version, never a range: npm silently steps back to an older release whose `engines` fit.
    flags = ["--no-fund", "--no-audit", "--loglevel=error", "--prefix", str(folder)]
    _run([npm, "install", *flags, f"{package}@{version}"])
    if not path.exists():
        raise InstallError(f"{package}@{version} has no program {program}")
    return path


def python_with(home: Path, packages: dict[str, str]) -> Path:
    """A Python that imports `packages` (name → exact version): this one, or one made for it.

    Raises InstallError.
    """
    if all(_version(name) == version for name, version in packages.items()):
        return Path(sys.executable)
    folder = home / "-".join(["python", *(f"{name}{version}" for name, version in packages.items())])
    python = folder / "bin" / "python"
    done = folder / ".done"
    if not done.exists():
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        wanted = [f"{name}=={version}" for name, version in packages.items()]
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
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise InstallError(f"{' '.join(command[:4])} … failed: {last[0]}")
