"""Agents that are started by `omlxd launch`, as a user would start them, and play two scenarios."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .agents import write_files
from .install import InstallError, npm_folder, npm_program, python_with
from .run import Ended, start_client

REPO = Path(__file__).resolve().parents[2]
NODE = "22.23.3"
"""Node.js from npm: most agents want 22 or newer."""


@dataclass(slots=True, frozen=True)
class Launched:
    """An agent of `omlxd launch`.

    install  (home) → its program
    flags    of one question, which follows them
    quiet    variables that keep it from the network
    calls    it has tools
    """

    version: str
    install: Callable[[Path], Path]
    flags: tuple[str, ...]
    quiet: dict[str, str]
    calls: bool = True


def _npm(package: str, version: str, program: str) -> Callable[[Path], Path]:
    return lambda home: npm_program(home, package, version, program)


def _goose(home: Path) -> Path:
    found = sorted(npm_folder(home, {"@aaif/goose": "0.20.1"}).glob("@aaif/goose-binary-*/bin/goose"))
    if not found:
        raise InstallError("@aaif/goose has no binary for this machine")
    return found[0]


def _aider(home: Path) -> Path:
    return python_with(home, {"aider-chat": "0.86.2"}).with_name("aider")


LAUNCHED = {
    "pi": Launched("0.87.1", _npm("@earendil-works/pi-coding-agent", "0.87.1", "pi"), ("-p",), {}),
    "gemini": Launched(
        "0.61.0",
        _npm("@google/gemini-cli", "0.61.0", "gemini"),
        ("--approval-mode", "yolo", "-p"),
        {"GEMINI_CLI_TRUST_WORKSPACE": "true"},
    ),
    "qwen-code": Launched("0.24.4", _npm("@qwen-code/qwen-code", "0.24.4", "qwen"), ("-p",), {}),
    "continue": Launched("1.5.47", _npm("@continuedev/cli", "1.5.47", "cn"), ("--auto", "-p"), {}),
    "goose": Launched("0.20.1", _goose, ("run", "-t"), {}),
    "copilot": Launched(
        "1.0.102", _npm("@github/copilot", "1.0.102", "copilot"), ("--allow-all-tools", "-p"), {}
    ),
    "aider": Launched(
        "0.86.2",
        _aider,
        ("--no-git", "--yes-always", "--no-check-update", "--no-analytics", "--message"),
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        calls=False,
    ),
    "crush": Launched("0.96.1", _npm("@charmland/crush", "0.96.1", "crush"), ("run",), {}),
}


def node(home: Path) -> Path:
    """The folder of Node.js 22. Raises InstallError."""
    return npm_program(home, "node", NODE, "node").parent


class LaunchedAgent:
    """One agent, with a home and a folder of its own below `scratch`."""

    def __init__(self, name: str, home: Path, scratch: Path, url: str):
        self._name, self._agent, self._url = name, LAUNCHED[name], url
        program = self._agent.install(home)
        paths = [str(program.parent), str(node(home)), "/usr/local/bin", "/usr/bin", "/bin"]
        self._env = {"HOME": str(scratch / "home"), "PATH": os.pathsep.join(paths)}
        self._env |= {"PYTHONPATH": str(REPO), **self._agent.quiet}
        self._project = scratch / "project"
        for folder in (self._project, scratch / "home"):
            folder.mkdir(parents=True, exist_ok=True)
        write_files(self._project)

    def ask(self, scenario: str) -> Ended:
        """Run once, with one question."""
        question = f"Scenario {scenario} in {self._project}."
        launch = [sys.executable, "-m", "omlxd", "launch", self._name, "--save", "--url", self._url, "--"]
        return start_client([*launch, *self._agent.flags, question], self._env, self._project).wait(180)
