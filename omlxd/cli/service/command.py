"""The command line of `omlxd service`.

Exit status 0: done; for `status`: running or waiting. 1: the service manager refused. 2: an argument makes no
sense. `status` also ends with 3 (stopped or failed) and 4 (not installed).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ...config import add_flags, add_join_flags
from ...errors import ConfigError
from .launchd import Launchd
from .manager import Status
from .plan import ignored_variables, make_plan
from .systemd import Systemd

STATUS_EXIT = {"running": 0, "waiting": 0, "failed": 3, "stopped": 3, "not installed": 4}
_KILLED = re.compile(r"signal (Killed: )?9$|JETSAM")
"""`Status.last_exit` of a daemon that could not say why it ends."""


def main(
    argv: Sequence[str],
    parser: argparse.ArgumentParser,
    *,
    platform: str = sys.platform,
    home: Path | None = None,
) -> int:
    """Run `omlxd service`; tests replace `platform` and `home`. Raises ConfigError and ServiceError."""
    args = _parse(list(argv), parser)
    kind = Launchd if platform == "darwin" else Systemd
    manager = kind(home or Path.home(), join=args.join)
    return _run(args, manager)


def _parse(argv: list[str], parser: argparse.ArgumentParser) -> argparse.Namespace:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    install = verbs.add_parser(
        "install",
        help="have the service manager run the daemon; flags of `omlxd serve` follow after --",
        description="Have launchd or systemd run `omlxd serve` for this user. What follows -- are its "
        "flags; without any it goes by the TOML file. Installed again, it takes the new flags.",
    )
    install.add_argument(
        "--at-login",
        action="store_true",
        help="start at login and after a failure; default: the port is open from login on, and the "
        "first connection starts the daemon",
    )
    verbs.add_parser("uninstall", help="stop it, and remove what install wrote; cache, keys and logs stay")
    verbs.add_parser("start", help="open the port and start the daemon now")
    verbs.add_parser("stop", help="end the daemon in order and close its port, until start or the next login")
    verbs.add_parser("restart", help="end the daemon in order and start it again")
    verbs.add_parser("status", help="whether it runs; exit status 0, 3 (stopped) or 4 (not installed)")
    logs = verbs.add_parser("logs", help="what it logged last")
    logs.add_argument("-n", "--lines", type=int, default=50, metavar="N", help="so many lines (50)")
    logs.add_argument("-f", "--follow", action="store_true", help="and what follows")
    for verb in verbs.choices.values():
        verb.add_argument("--join", action="store_true", help="of `omlxd join`, in place of `omlxd serve`")
    rest: list[str] = []
    if "--" in argv:
        at = argv.index("--")
        argv, rest = argv[:at], argv[at + 1 :]
    args = parser.parse_args(argv)
    if rest and args.verb != "install":
        raise ConfigError(f"`omlxd service {args.verb}` takes no flags of the daemon.")
    kind = "join" if args.join else "serve"
    args.flags = _flags(rest, type(parser)(prog=f"omlxd {kind}", add_help=False), args.join)
    return args


def _flags(words: list[str], parser: argparse.ArgumentParser, join: bool) -> dict[str, str]:
    """Map option name → text, as `omlxd serve` reads `words`, or `omlxd join`."""
    (add_join_flags if join else add_flags)(parser)
    return {name: value for name, value in vars(parser.parse_args(words)).items() if value is not None}


def _run(args: argparse.Namespace, manager: Launchd | Systemd) -> int:
    verb = args.verb
    if verb == "install":
        plan = make_plan(args.flags, log_file=manager.log_file(), at_login=args.at_login, join=args.join)
        if ignored := ignored_variables(os.environ):
            print(f"omlxd: the service does not see {', '.join(ignored)} of this shell.", file=sys.stderr)
        new = manager.install(plan)
        done = "installed" if new else "installed already, just like this"
        how = "starts at login" if plan.at_login else "starts at the first connection"
        print(f"{done}: {manager.name} listens on {plan.host} port {plan.port}; the daemon {how}")
        return 0
    if verb == "uninstall":
        gone = manager.uninstall()
        print("uninstalled; cache, keys, settings and logs stay" if gone else "there was no service")
        return 0
    if verb == "status":
        return _show(manager.status(), manager.name)
    if verb == "logs":
        return subprocess.run(manager.logs(max(0, args.lines), args.follow)).returncode
    getattr(manager, verb)()
    print({"start": "started", "stop": "stopped", "restart": "started again"}[verb])
    return 0


def _show(status: Status, manager: str) -> int:
    how = f", with {status.last_exit}" if status.last_exit else ""
    why = "; `omlxd service logs` tells why"
    if _KILLED.search(status.last_exit):  # Nobody logs that.
        why = "; memory may have run out, or somebody killed it"
    said = {
        "running": f"running, process {status.pid}",
        "waiting": "waiting: the first connection starts it",
        "failed": f"failed{how}{'' if status.trouble else why}",
        "stopped": "stopped; `omlxd service start` starts it",
        "not installed": "not installed; `omlxd service install` does that",
    }[status.state]
    print(said)
    if status.trouble:
        print(status.trouble)
    elif status.state == "failed" and status.is_open:
        print("its port is open, and the next connection starts it again")
    if status.state != "not installed":
        print(f"{manager}: {status.file}")
    return STATUS_EXIT[status.state]
