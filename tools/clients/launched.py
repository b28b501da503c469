"""Agents that are started by `omlxd launch`, as a user would start them, and play two scenarios."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .agents import Agent, write_files
from .install import InstallError, npm_folder, npm_program, python_with
from .run import Ended, Running, start_client

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
        self._env = environment(name, self._agent.install(home), node(home), scratch / "home")
        self._project = scratch / "project"
        for folder in (self._project, scratch / "home"):
            folder.mkdir(parents=True, exist_ok=True)
        write_files(self._project)

    def ask(self, scenario: str) -> Ended:
        """Run once, with one question."""
        question = f"Scenario {scenario} in {self._project}."
        command = [*launch(self._name, self._url), *self._agent.flags, question]
        return start_client(command, self._env, self._project).wait(180)


def launch(name: str, url: str) -> list[str]:
    """What starts an agent at a daemon, without its own flags."""
    return [sys.executable, "-m", "omlxd", "launch", name, "--save", "--url", url, "--"]


def environment(name: str, program: Path, node: Path, home: Path) -> dict[str, str]:
    paths = [str(program.parent), str(node), "/usr/local/bin", "/usr/bin", "/bin"]
    own = {"HOME": str(home), "PATH": os.pathsep.join(paths), "PYTHONPATH": str(REPO)}
    return {**own, **LAUNCHED[name].quiet}


class LaunchedSession(Agent):
    """An agent of `omlxd launch` that goes on with its conversations."""

    name: str
    goes_on: tuple[str, ...]

    @classmethod
    def install(cls, home: Path, version: str) -> Path:
        node(home)
        return LAUNCHED[cls.name].install(home)

    def ask(self, prompt: str, *, go_on: bool = False) -> Running:
        env = environment(self.name, self.program, node(self.program.parents[3]), self.home)
        flags = [*(self.goes_on if go_on else ()), *LAUNCHED[self.name].flags]
        return start_client([*launch(self.name, self.url), *flags, prompt], env, self.project)


class GeminiCli(LaunchedSession):
    """`gemini -p`, over /v1beta/models."""

    name, goes_on = "gemini", ("--resume", "latest")


class Continue(LaunchedSession):
    """`cn -p`, over /v1/chat/completions."""

    name, goes_on = "continue", ("--resume",)
    reads_pdf = False
