"""Run the real clients against a daemon whose model follows a script, and say what was computed twice.

    python tools/check_clients.py [--home DIR] [--only CLIENT …] [--turns] [--template FILE] [--vision]

Clients: claude-code (two versions), codex, opencode, gemini, continue, openai, anthropic, ollama. They are
installed from npm and PyPI at pinned versions under --home (about 2 GB), and run with an environment and a
home of their own, with no key, against 127.0.0.1 alone. Only the model's logits follow the script
(clients/script.py): tokenizer, template, KV and parsers are real.

Each client plays a tool loop with file reads, a second turn, an interrupted turn and what follows it, a PDF,
a turn after the daemon was killed (-9), and a new session; Claude Code also a sub-agent, it and Codex a
compaction.
With --vision the model sees, and each agent reads a picture too.

A row tells, in tokens of the model: prompts, cached, recomputed, the ideal (what a prompt shares with
anything that the daemon had computed before), and the most that one request lost of it. A request that
loses more than a block of 64 fails. Exit status 0: every turn passed.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from clients.agents import (
    CLAUDE_CODE,
    CODEX,
    CONTEXT_TOKENS,
    OPENCODE,
    Agent,
    ClaudeCode,
    Codex,
    OpenCode,
    write_files,
)
from clients.install import InstallError, python_with
from clients.launched import LAUNCHED, Continue, GeminiCli, LaunchedSession
from clients.own_daemon import OwnDaemon, first_model
from clients.recorder import Recorder
from clients.run import start_client
from clients.script_model import build_script_model
from clients.turns import Row, Session, agent_turns

SDKS = {"openai": "3.52.0", "anthropic": "2.11.0", "ollama": "0.6.3"}


@dataclass(slots=True, frozen=True)
class Entry:
    """A client at a version; `kind` None: a Python SDK."""

    name: str
    version: str
    kind: type[ClaudeCode | Codex | OpenCode | LaunchedSession] | None = None


CLIENTS = [
    *(Entry("claude-code", version, ClaudeCode) for version in CLAUDE_CODE),
    Entry("codex", CODEX, Codex),
    Entry("opencode", OPENCODE, OpenCode),
    *(Entry(kind.name, LAUNCHED[kind.name].version, kind) for kind in (GeminiCli, Continue)),
    *(Entry(name, version) for name, version in SDKS.items()),
]
HEAD = (
    "| client | turn | requests | errors | prompt tokens | cached | recomputed | ideal | worst loss |"
    " result |\n|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> int:
    names = sorted({entry.name for entry in CLIENTS})
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CLIENT")
    parser.add_argument("--home", type=Path, default=Path.home() / ".cache" / "omlxd-clients")
    parser.add_argument("--turns", action="store_true", help="also a row for each turn that passed")
    parser.add_argument("--keep", type=Path, help="folder that keeps logs and homes of the clients")
    parser.add_argument("--template", type=Path, help="a chat template (Jinja) instead of the demo's")
    parser.add_argument("--vision", action="store_true", help="a model that sees")
    options = parser.parse_args()
    template = options.template.read_text() if options.template else ""
    options.home.mkdir(parents=True, exist_ok=True)
    print(HEAD, flush=True)
    passed = True
    with tempfile.TemporaryDirectory(prefix="omlxd-clients-") as temporary:
        scratch = options.keep or Path(temporary)
        if options.vision:
            model = _seeing_model(scratch / "scripted")
        else:
            model = build_script_model(scratch / "scripted", template=template)
        for entry in CLIENTS:
            if entry.name not in options.only:
                continue
            total = Row(f"{entry.name} {entry.version}", "all")
            # A daemon each: none finds in the cache what another left there.
            for row in _rows(
                entry, options.home, scratch / f"{entry.name}-{entry.version}", model, options.vision
            ):
                if entry.kind and (options.turns or row.problem):
                    _print(row)
                total.add(row)
            _print(total)
            passed = passed and not total.problem
    return 0 if passed else 1


def _seeing_model(folder: Path) -> Path:
    """A Qwen2.5-VL as narrow as build_script_model's, with a context that an agent's prompt fits into."""
    from vision_families import VISION_FAMILIES, build_vision_family

    config = VISION_FAMILIES["qwen2_5_vl"].config
    config |= {"max_position_embeddings": CONTEXT_TOKENS, "num_hidden_layers": 1, "hidden_size": 32}
    config |= {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config["vision_config"] = {**config["vision_config"], "out_hidden_size": 32}
    return build_vision_family("qwen2_5_vl", folder)


def _print(row: Row) -> None:
    print("| " + " | ".join(map(str, row.cells())) + " |", flush=True)


def _rows(entry: Entry, home: Path, scratch: Path, model: Path, sees: bool) -> Iterator[Row]:
    name = f"{entry.name} {entry.version}"
    try:
        with contextlib.ExitStack() as stack:
            daemon = stack.enter_context(OwnDaemon(scratch / "daemon", model))
            recorder = stack.enter_context(Recorder(daemon.url))
            served = first_model(daemon.url)
            if entry.kind is not None:
                agent: Agent = entry.kind(
                    entry.kind.install(home, entry.version), scratch, recorder.url, served, sees
                )
                agent.prepare()
                yield from agent_turns(name, agent, recorder, daemon)
            else:
                yield _sdk_row(entry, home, scratch, recorder, daemon, served)
    except (InstallError, RuntimeError, OSError) as error:
        yield Row(name, "start", problem=f"{type(error).__name__}: {error}")


def _sdk_row(
    entry: Entry, home: Path, scratch: Path, recorder: Recorder, daemon: OwnDaemon, model: str
) -> Row:
    python = python_with(home, SDKS)
    program = Path(__file__).parent / "clients" / f"sdk_{entry.name}.py"
    write_files(scratch)
    command = [str(python), str(program), recorder.url, model, str(scratch)]
    session = Session(f"{entry.name} {entry.version}", recorder, daemon)
    return session.turn("session", lambda: start_client(command, {"HOME": str(scratch)}, scratch))


if __name__ == "__main__":
    sys.exit(main())
