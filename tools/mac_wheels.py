"""What a Mac installs, asked from any machine: wheels for each Python, and MLX's names in the macOS wheel.

    python -m tools.mac_wheels

uv resolves pyproject.toml with all extras for macOS 14 on arm64, from wheels alone; then every `mx.` name
that omlxd uses must be in the stubs of MLX's wheel for it. uv and the wheel are fetched once, into
.venv/share/omlxd. Exit status 1: something is missing; 3: there is no network.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from tools.bootstrap import VISION

ROOT = Path(__file__).resolve().parents[1]
KEPT = Path(sys.prefix) / "share" / "omlxd"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACOS = "14.0"
UV = "uv==0.13.8"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
NOT_IN_STUBS = {"random.state"}
"""Made while MLX is imported."""
NO_NETWORK = re.compile(r"connection|connect\b|resolve host|dns error|could not fetch|timed out", re.I)


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser("tools.mac_wheels", description=__doc__, formatter_class=form).parse_args()
    packages: list[str] = []
    try:
        for python in PYTHONS:
            packages = resolved(python, "--all-extras", "pyproject.toml")
            packages += resolved(python, "--no-deps", "-", given=VISION)
            print(f"Python {python}: {len(packages)} packages, each a wheel for macOS {MACOS} on arm64")
        wheel = mlx_wheel(next(line for line in packages if line.startswith("mlx==")))
    except subprocess.CalledProcessError as error:
        print(f"{Path(error.cmd[0]).name}: {error.stderr}", file=sys.stderr)
        return 3 if NO_NETWORK.search(error.stderr) else 1
    used = names_used()
    absent = missing_names(used, stubs_of(wheel))
    print(f"{wheel.name}: {len(used) - len(absent)} of the {len(used)} names of mx that omlxd uses")
    for name in absent:
        print(f"it has no mx.{name}", file=sys.stderr)
    return int(bool(absent))


def resolved(python: str, *what: str, given: str = "") -> list[str]:
    """Return NAME==VERSION of all that `uv pip compile WHAT` finds wheels for. Raises CalledProcessError."""
    uv = KEPT / UV / "bin" / "uv"
    if not uv.exists():
        run(*PIP, "install", "--target", str(uv.parents[1]), UV)
    target = ["--python-platform", "aarch64-apple-darwin", "--python-version", python]
    printed = ["--quiet", "--no-header", "--no-annotate", "--only-binary", ":all:"]
    return run(str(uv), "pip", "compile", *target, *printed, *what, given=given).split()


def mlx_wheel(requirement: str) -> Path:
    """Fetch MLX's wheel for macOS. Raises CalledProcessError."""
    folder = KEPT / f"{requirement}-macos"
    if not list(folder.glob("*.whl")):
        platform = f"macosx_{MACOS.replace('.', '_')}_arm64"
        where = ["--platform", platform, "--python-version", PYTHONS[-1], "--only-binary", ":all:"]
        run(*PIP, "download", "--no-deps", *where, "--dest", str(folder), requirement)
    return next(folder.glob("*.whl"))


def run(*command: str, given: str = "") -> str:
    environ = os.environ | {"MACOSX_DEPLOYMENT_TARGET": MACOS}
    how = {"cwd": ROOT, "env": environ, "capture_output": True, "text": True, "check": True}
    return subprocess.run(command, input=given, **how).stdout


def names_used(folder: Path = ROOT / "omlxd") -> set[str]:
    """Return what stands behind `mx.` in `folder`, as `fast.rms_norm`; in programs that are strings, too."""
    texts = [file.read_text() for file in folder.rglob("*.py")]
    return {name for text in texts for name in re.findall(r"\bmx\.([a-zA-Z]\w*(?:\.[a-zA-Z]\w*)?)", text)}


def stubs_of(wheel: Path) -> dict[str, str]:
    """Return the texts of `mlx.core` (`__init__`) and of its modules, by their names."""
    with zipfile.ZipFile(wheel) as files:
        stubs = [name for name in files.namelist() if re.fullmatch(r"mlx/core/\w+\.pyi", name)]
        return {Path(name).stem: files.read(name).decode() for name in stubs}


def missing_names(used: set[str], stubs: Mapping[str, str]) -> list[str]:
    known = {module: _defined(text) for module, text in stubs.items()}

    def is_known(name: str) -> bool:
        first, _, second = name.partition(".")
        return not second or second in known[first] if first in known else first in known["__init__"]

    return sorted(name for name in used - NOT_IN_STUBS if not is_known(name))


def _defined(text: str) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(text).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                names.add(name)
            case ast.ImportFrom(names=aliases):
                names.update(alias.asname or alias.name for alias in aliases)
    return names


if __name__ == "__main__":
    sys.exit(main())
