"""The `omlxd` command. Imports nothing heavy before it knows that the settings make sense."""

from __future__ import annotations

from ..common import early_stop  # noqa: F401  (before whatever takes time)

# isort: split
import argparse
import errno
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .. import __version__
from ..config import OPTIONS, add_grouped_flags, closest, load_settings, warnings_of, where_else
from ..errors import ConfigError, OmlxdError
from .daemon.agent import name_verb

USAGE_ERROR = 2
"""Exit status when a flag, a variable or a line of the file makes no sense."""
UNWRITTEN = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Why standard output took no more; `main` prints it."""

VERBS = {
    "bench": (
        "cli.bench",
        "measure a model: speed with the cache and without, quality of a quantised KV cache",
    ),
    "cache": (
        "cli.cache.command",
        "look at the SSD cache, verify it, clear it; works beside a running daemon",
    ),
    "chat": ("cli.chat.command", "talk to a model in the terminal; starts a daemon if none runs"),
    "key": ("cli.settings.key", "make, list and revoke API keys; a running daemon follows at once"),
    "config": ("cli.settings.config", "show each setting, and where its value comes from"),
    "doctor": (
        "cli.doctor.command",
        "find what in this machine or its settings keeps omlxd from working well",
    ),
    "engine": (
        "front.bridge.command",
        "speak JSON Lines on standard input and output, to be embedded in another program",
    ),
    "join": ("front.join.command", "compute a share of a model that another machine serves"),
    "peer": (
        "cli.cache.transfer.peer.command",
        "pair with another omlxd of yours, which then reads this SSD cache",
    ),
    "run": ("cli.chat.run", "talk to the model that is named first, as Ollama does; downloads it if need be"),
    "launch": ("cli.launch", "start Claude Code, Codex or another coding agent with this daemon's models"),
    "mcp": ("cli.mcp.command", "let an agent manage this daemon's models, by the Model Context Protocol"),
    "memory": ("cli.watch.memory", "what each loaded model holds in memory; give some of it back"),
    "models": (
        "cli.models.command",
        "list, show, pull, import, load, unload, pin and name the models of this machine",
    ),
    "service": ("cli.service.command", "have launchd or systemd run the daemon"),
    "status": ("cli.watch.status", "models, memory, tiers and requests of the running daemon"),
    "tune": ("cli.models.tune", "train a LoRA adapter of a model, which is then served as MODEL:NAME"),
    "top": ("cli.watch.top", "what `omlxd status` shows, live"),
}
"""Every verb but `serve`: its module, whose `main(argv, parser)` returns the exit status, and its help."""


SAME = {
    "list": ("models", "list"),
    "ls": ("models", "list"),
    "ps": ("models", "list", "--loaded"),
    "pull": ("models", "pull"),
    "show": ("models", "show"),
    "rm": ("models", "rm"),
    "stop": ("models", "unload"),
}
"""Ollama's verbs. `run` is one of `VERBS`, `serve` is our own."""


class _Parser(argparse.ArgumentParser):
    """argparse that ends in one sentence instead of a page of usage, and takes no shortened flags."""

    def __init__(self, **options: Any):
        super().__init__(**options, allow_abbrev=False)
        self.typed: dict[str, str] = {}
        """Verb that the user typed → its meaning."""

    def print_help(self, file: Any = None) -> None:
        """Print the help; argparse's own says nothing if a long page can't be written."""
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        kind, _, words = message.partition(": ")
        if kind == "the following arguments are required":
            verbs = next((action.choices for action in self._actions if action.metavar == "VERB"), None)
            message = f"{words} is missing" + (f": one of {', '.join(verbs)}" if verbs else "")
        elif kind == "unrecognized arguments":
            word = words.split()[0]
            message = f"{word} is not a flag of `{self.prog}`"
            if not word.startswith("-"):
                message = f"`{self.prog}` takes no further word, but {word} follows"
        elif choice := re.fullmatch(r"invalid choice: ('.*') \(choose from (.*)\)", words):
            there = choice[2].replace("'", "")
            message = (
                f"{choice[1]}{closest(choice[1].strip(chr(39)), there.split(', '))} is not one of {there}"
            )
        raise ConfigError(message[:1].upper() + message[1:] + f"; see `{self.prog} --help`.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 (could not serve), 2 (bad settings), 130 at ^C."""
    try:
        try:
            return _main(list(sys.argv[1:] if argv is None else argv))
        except OmlxdError as error:
            return report(error)
        except KeyboardInterrupt:
            print("omlxd: stopped.", file=sys.stderr)
            return 130
        finally:  # `--help` leaves by SystemExit. Standard output may be closed, and None.
            print(end="", flush=True)
    except OSError as error:
        if error.errno not in UNWRITTEN or error.filename:
            raise
        # Python would write what is left at its own exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0  # Whoever read our lines (`head`, say) has enough.
        print(f"omlxd: can't write: {error.strerror}.", file=sys.stderr)
        return 1


def report(error: OmlxdError) -> int:
    """Print `error` and return the exit status for it."""
    for line in error.message.splitlines():
        print(f"omlxd: {line.rstrip('.')}.", file=sys.stderr)
    return USAGE_ERROR if isinstance(error, ConfigError) else 1


def _main(argv: list[str]) -> int:
    typed = ""
    if argv and argv[0] in SAME:
        typed = argv[0]
        argv = [*SAME[typed], *argv[1:]]
    if argv and argv[0] in VERBS:
        module, description = VERBS[argv[0]]
        name_verb(argv[0])
        verb = importlib.import_module("omlxd." + module)
        made = _Parser(prog=f"omlxd {argv[0]}", description=description)
        if typed:
            made.typed = {f"omlxd models {SAME[typed][1]}": f"omlxd {typed}"}
        return verb.main(argv[1:], made)
    parser = _Parser(prog="omlxd", description="Serve local language models; keep their KV cache.")
    parser.epilog = (
        "`omlxd serve` alone serves a small model; `omlxd VERB --help` explains a verb. "
        "Ollama's list, ps, pull, show, rm and stop do what they do there."
    )
    parser.add_argument("--version", action="version", version=f"omlxd {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    serve = verbs.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP with OpenAI, Anthropic and Ollama APIs. Every flag can also be "
        "given as a variable (OMLXD_PORT for --port) or in a TOML file; flags win. A setting under "
        '`[models."x"]` of the file wins for that model, also over a flag.',
    )
    serve.usage = "omlxd serve [flags]"
    add_grouped_flags(serve)
    for name, (_, description) in VERBS.items():
        verbs.add_parser(name, help=description, add_help=False)
    if not argv:
        parser.print_help()
        return 0
    if not argv[0].startswith("-") and argv[0] not in (*verbs.choices, *SAME):
        near = closest(argv[0], [*verbs.choices, *SAME])
        raise ConfigError(f"There is no verb {argv[0]!r}{near}; `omlxd --help` lists them.")
    args, rest = parser.parse_known_args(argv)
    if rest:
        word = rest[0].partition("=")[0]
        hint = where_else(word, [option.flag for option in OPTIONS] + ["--config"])
        raise ConfigError(f"{word} is not a flag of `omlxd serve`{hint}; see `omlxd serve --help`.")
    flags = {name: value for name, value in vars(args).items() if name != "verb" and value is not None}
    environ = dict(os.environ)
    settings = load_settings(flags, environ)
    for sentence in warnings_of(settings, environ):
        print(f"omlxd: {sentence}", file=sys.stderr)

    from ..front.process.serve import serve as run

    return run(settings, lambda: load_settings(flags, environ))


if __name__ == "__main__":
    sys.exit(main())
