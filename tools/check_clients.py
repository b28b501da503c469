"""Run the real clients against a daemon, and print a line a run: requests, errors, tokens, exit status.

    python tools/check_clients.py [--home DIR] [--url URL] [CLIENT …]

Clients: claude-code, codex, opencode, openai, anthropic; all of them by default. They are installed from
npm and PyPI at pinned versions under --home (about 1.2 GB), and run with an environment and a home
of their own. Without --url, a daemon of this checkout serves the demo model, and is killed (-9) and
started again before the last run of each agent.

An agent runs four times, each in a new process: a prompt, the same prompt again, the conversation
continued, and that continued once more after the kill. Every run after the first must find its
prefix in the cache: all of what was sent before, less a block, or, for the same prompt again, all
but a tenth. Exit status 0: every run passed.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from clients.agents import CLAUDE_CODE, CODEX, OPENCODE, Agent, ClaudeCode, Codex, OpenCode
from clients.install import InstallError, python_with
from clients.own_daemon import OwnDaemon, first_model
from clients.recorder import Recorder, Request
from clients.run import Ended, run_client

BLOCK = 64
"""Tokens; the daemon's default."""
SDKS = {"openai": "3.52.0", "anthropic": "2.11.0"}
AGENTS: dict[str, tuple[type[ClaudeCode] | type[Codex] | type[OpenCode], str]] = {
    "claude-code": (ClaudeCode, CLAUDE_CODE),
    "codex": (Codex, CODEX),
    "opencode": (OpenCode, OPENCODE),
}


@dataclass(slots=True)
class Row:
    """One run. `problem` "": it passed. `least`: tokens that its main request had to find cached."""

    client: str
    requests: list[Request]
    status: int | None
    least: int = 0
    problem: str = ""

    def line(self) -> str:
        asked = [request for request in self.requests if request.generates]
        prompt, cached = (sum(getattr(r, name) for r in asked) for name in ("prompt", "cached"))
        errors = sum(bool(request.error) for request in self.requests)
        shown = "-" if self.status is None else self.status
        cells = (self.client, len(self.requests), errors, prompt, cached, prompt - cached, self.least, shown)
        return "| " + " | ".join(map(str, (*cells, self.problem or "pass"))) + " |"


HEAD = (
    "| client | requests | errors | prompt tokens | cached | recomputed | must be cached | exit | result |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join([*AGENTS, *SDKS]))
    parser.add_argument("--home", type=Path, default=Path.home() / ".cache" / "omlxd-clients")
    parser.add_argument("--url", help="a daemon that runs already; default: one of this checkout")
    options = parser.parse_args()
    wanted = options.clients or [*AGENTS, *SDKS]
    if unknown := sorted(set(wanted) - {*AGENTS, *SDKS}):
        parser.error(f"no such client: {', '.join(unknown)}")
    options.home.mkdir(parents=True, exist_ok=True)
    print(HEAD, flush=True)
    passed = True
    with tempfile.TemporaryDirectory(prefix="omlxd-clients-") as scratch:
        for name in wanted:
            # A daemon each: none finds in the cache what another left there.
            for row in _rows(name, options.home, Path(scratch) / name, options.url):
                print(row.line(), flush=True)
                passed = passed and not row.problem
    return 0 if passed else 1


def _rows(name: str, home: Path, scratch: Path, url: str | None) -> Iterator[Row]:
    scratch.mkdir(parents=True)
    try:
        with contextlib.ExitStack() as stack:
            daemon = None if url else stack.enter_context(OwnDaemon(scratch / "daemon"))
            target = daemon.url if daemon else url or ""
            recorder = stack.enter_context(Recorder(target))
            model = first_model(target)
            if name in AGENTS:
                kind, version = AGENTS[name]
                agent = kind(kind.install(home), scratch, recorder.url, model)
                yield from _agent_rows(f"{name} {version}", agent, recorder, daemon)
            else:
                yield _sdk_row(name, home, scratch, recorder, model)
    except (InstallError, RuntimeError, OSError) as error:
        yield Row(name, [], None, problem=str(error))


def _agent_rows(name: str, agent: Agent, recorder: Recorder, daemon: OwnDaemon | None) -> Iterator[Row]:
    agent.prepare()
    first = _run(f"{name}, first", recorder, lambda: agent.ask("Say hello."))
    yield _judged(first)
    again = _run(f"{name}, same prompt", recorder, lambda: agent.ask("Say hello."))
    again.least = _main(again).prompt * 9 // 10
    yield _judged(again)
    before = again
    for what in ("continued", *(["continued after kill -9"] if daemon else [])):
        if daemon and "kill" in what:
            daemon.kill_and_restart()
        row = _run(f"{name}, {what}", recorder, lambda: agent.ask("And once more.", go_on=True))
        row.least = max(0, _main(before).prompt - BLOCK)
        yield _judged(row)
        before = row


def _sdk_row(name: str, home: Path, scratch: Path, recorder: Recorder, model: str) -> Row:
    python = python_with(home, SDKS)
    program = Path(__file__).parent / "clients" / f"sdk_{name}.py"
    command = [str(python), str(program), recorder.url, model]
    row = _run(f"{name} {SDKS[name]}", recorder, lambda: run_client(command, {"HOME": str(scratch)}, scratch))
    asked = [request for request in row.requests if request.generates]
    # The second request, a stream, is the first one again.
    row.least = max(0, asked[1].prompt - BLOCK) if len(asked) > 1 else 0
    return _judged(row, 1)


def _run(name: str, recorder: Recorder, run: Callable[[], Ended]) -> Row:
    begin = len(recorder.requests)
    ended = run()
    row = Row(name, recorder.requests[begin:], ended.status)
    if ended.status is None:
        row.problem = "it did not end"
    elif ended.status:
        said = (ended.errors.strip() or ended.output.strip()).splitlines()[-1:] or ["nothing"]
        row.problem = f"it said: {said[0][:200]}"
    return row


def _main(row: Row) -> Request:
    """The first request of the conversation itself: agents ask small things beside it (titles)."""
    asked = [request for request in row.requests if request.generates]
    longest = max((request.prompt for request in asked), default=0)
    return next((r for r in asked if r.prompt * 2 >= longest), Request("POST", ""))


def _judged(row: Row, index: int | None = None) -> Row:
    """`row` with its problem, if it has one. `index`: which request must find `least` tokens cached."""
    asked = [request for request in row.requests if request.generates]
    errors = [request.error for request in row.requests if request.error]
    found = _main(row).cached if index is None else asked[index].cached if index < len(asked) else 0
    if row.problem:
        return row
    if errors:
        row.problem = errors[0].replace("|", "/")
    elif not asked:
        row.problem = "it asked nothing"
    elif found < row.least:
        row.problem = f"only {found} tokens were cached"
    return row


if __name__ == "__main__":
    sys.exit(main())
