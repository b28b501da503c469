"""Play chat, stream, tools and structured output with each client that people use, a line each.

    python tools/clients_matrix.py [--home DIR] [--only NAME …]

Each client is installed at a pinned version from PyPI or npm into a folder of its own under --home (about
3 GB in all), and runs with an environment and a home of its own, with no key, against 127.0.0.1 alone. The
daemon's model follows a script (clients/script.py), so that every answer is known; tokenizer, template, KV,
grammars and parsers are real. Libraries are in clients/library_players.py and .mjs; agents are started by
`omlxd launch`. Claude Code, Codex and opencode are played by check_clients.py.

`ok`: played as it had to. `-`: the client has no such thing. A client that can't be installed is `not run`,
with the reason. Exit status 1: something that was played failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from clients.install import InstallError, npm_folder, python_with
from clients.launched import LAUNCHED, LaunchedAgent, node
from clients.own_daemon import OwnDaemon, first_model
from clients.recorder import Recorder
from clients.run import Ended, start_client
from clients.script_model import build_script_model

PROGRAMS = Path(__file__).parent / "clients"
PARTS = ("chat", "stream", "tools", "structured")
_ANTHROPIC, _OLLAMA = {"anthropic": "2.12.0"}, {"ollama": "0.6.3"}
_LANGCHAIN = {"langchain-core": "1.7.2"}
_LITELLM = {"litellm": "1.106.2", "mcp": "2.3.0"}  # Without mcp its tools can't be imported.
_PYDANTIC_AI = {"pydantic-ai-slim[openai,anthropic]": "2.68.0"}
_AGENTS = {"openai-agents": "0.24.0"}
PYTHON = {
    "anthropic": _ANTHROPIC,
    "ollama": {**_OLLAMA, "pydantic": "2.13.3"},
    "langchain-openai": {"langchain-openai": "1.7.3", **_LANGCHAIN},
    "langchain-anthropic": {"langchain-anthropic": "1.7.7", **_LANGCHAIN},
    "langchain-ollama": {"langchain-ollama": "1.1.0", **_LANGCHAIN},
    "llama-index-openai-like": {"llama-index-llms-openai-like": "0.8.1"},
    "llama-index-ollama": {"llama-index-llms-ollama": "0.11.0"},
    "litellm-openai": _LITELLM,
    "litellm-anthropic": _LITELLM,
    "litellm-ollama": _LITELLM,
    "pydantic-ai-openai": _PYDANTIC_AI,
    "pydantic-ai-anthropic": _PYDANTIC_AI,
    "openai-agents-responses": _AGENTS,
    "openai-agents-chat": _AGENTS,
    "instructor": {"instructor": "1.17.0"},
    "llm": {"llm": "0.36"},
}
"""Library → packages on PyPI. The newest that install together."""
NPM = {
    "ollama": "0.6.4",
    "ai": "7.0.173",
    "@ai-sdk/openai-compatible": "3.0.92",
    "@ai-sdk/anthropic": "4.0.105",
    "ai-sdk-ollama": "4.3.0",
    "zod": "4.6.7",
}
JAVASCRIPT = ("ollama-js", "ai-sdk-openai-compatible", "ai-sdk-anthropic", "ai-sdk-ollama")
NAMES = [*PYTHON, *JAVASCRIPT, *LAUNCHED]


@dataclass
class Row:
    """problems: part → what was wrong, "" nothing; a part that is absent was not played."""

    client: str
    version: str = ""
    problems: dict[str, str] = field(default_factory=dict)
    not_run: str = ""
    refused: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--home", type=Path, default=Path.home() / ".cache" / "omlxd-clients")
    options = parser.parse_args()
    options.home.mkdir(parents=True, exist_ok=True)
    rows = []
    print(f"| client | version | {' | '.join(PARTS)} |\n|---|---|{'---|' * len(PARTS)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="omlxd-matrix-") as temporary:
        scratch = Path(temporary)
        with OwnDaemon(scratch / "daemon", build_script_model(scratch / "scripted")) as daemon:
            for name in options.only:
                rows.append(play(name, options.home, scratch / name, daemon.url))
                print(_line(rows[-1]), flush=True)
    for row in rows:
        for part, problem in row.problems.items():
            if problem:
                print(f"\n{row.client}, {part}: {problem}")
        for refused in dict.fromkeys(row.refused):
            print(f"\n{row.client} went on after: {refused}")
        if row.not_run:
            print(f"\n{row.client} was not run: {row.not_run}")
    return 1 if any(any(row.problems.values()) for row in rows) else 0


def _line(row: Row) -> str:
    words = {None: "-", "": "ok"}
    cells = [words.get(row.problems.get(part), "FAILED") for part in PARTS]
    if row.not_run:
        cells = ["not run"] * len(PARTS)
    return f"| {' | '.join([row.client, row.version or '?', *cells])} |"


def play(name: str, home: Path, scratch: Path, url: str) -> Row:
    """All parts of one client."""
    scratch.mkdir(parents=True, exist_ok=True)
    row = Row(name)
    streamed: list[bool] = []

    def note(path: str, body: bytes) -> tuple[str, bytes]:
        asked = b'"stream":true' in body.replace(b" ", b"")
        streamed.append(asked or ":streamGenerateContent" in path)
        return path, body

    try:
        with Recorder(url, note) as recorder:
            if name in LAUNCHED:
                row.version = LAUNCHED[name].version
                agent = LaunchedAgent(name, home, scratch, recorder.url)
                _play_agent(row, agent.ask, calls=LAUNCHED[name].calls)
                if any(streamed):
                    row.problems["stream"] = row.problems["chat"]
            else:
                play_library(row, _command(name, home, scratch), recorder.url, scratch)
            row.refused = [request.error for request in recorder.requests if request.status >= 400]
    except (InstallError, OSError) as error:
        row.not_run = str(error)
    return row


def _command(name: str, home: Path, scratch: Path) -> list[str]:
    if name in PYTHON:
        # -P: a library may be called as a module beside the program is.
        return [str(python_with(home, PYTHON[name])), "-P", str(PROGRAMS / "library_players.py"), name]
    # Node.js looks for packages beside the program that imports them.
    (scratch / "node_modules").symlink_to(npm_folder(home, NPM))
    program = Path(shutil.copy(PROGRAMS / "library_players.mjs", scratch))
    return [str(node(home) / "node"), str(program), name]


def play_library(row: Row, command: list[str], url: str, scratch: Path) -> None:
    """Fill in what a library player says of its parts; those it never came to have failed."""
    env = {"HOME": str(scratch), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    ended = start_client([*command, url, first_model(url)], env, scratch).wait()
    for line in ended.output.splitlines():
        if line.startswith("{"):
            told = json.loads(line)
            row.version = told.get("version", row.version)
            if "part" in told:
                row.problems[told["part"]] = told["problem"]
    for part in PARTS:
        row.problems.setdefault(part, f"it ended before: {_last(ended)}")


def _play_agent(row: Row, ask: Callable[[str], Ended], *, calls: bool) -> None:
    wanted = {"chat": ("hello", "I am the scripted model"), "tools": ("two-files", "beta of saucers")}
    for part, (scenario, said) in wanted.items():
        if part == "chat" or calls:
            ended = ask(scenario)
            well = ended.status == 0 and said in ended.output
            row.problems[part] = "" if well else f"status {ended.status}: {_last(ended)}"


def _last(ended: Ended) -> str:
    lines = (ended.errors.strip() or ended.output.strip()).splitlines() or ["it said nothing"]
    return lines[-1][:300]


if __name__ == "__main__":
    sys.exit(main())
