"""The command line of `omlxd cache`.

Exit status 0: all is well; after a scrub, now. 1: something is bad, a daemon was in the way, or files could
not be read or removed. 2: an argument makes no sense.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ...common.units import counted, human
from ...config import Settings, add_flags, settings_of
from ...errors import ConfigError, OmlxdError
from ..daemon.client import DaemonError
from ..main import UNWRITTEN
from ..watch.status import as_json
from . import holder, inventory, pin, warm, why_miss
from .asked import NAMED
from .checks.check import check, summary
from .clear import named, notes_of, plan, remove, scrub
from .holder import DaemonRuns, exclusive
from .listing import stats
from .pinned import names_by_file, read_pins
from .transfer import carry

Verb = Callable[[argparse.Namespace, Settings, Path], int]
"""A verb: (arguments, settings, the cache dir) → exit status. Raises OmlxdError, OSError."""
AddVerb = Callable[[str, Verb, str], argparse.ArgumentParser]
_FOLDER_OPTIONS = ("base_path", "paged_ssd_cache_dir", "paged_ssd_cache_max_size")
_AGE = re.compile(r"(\d{1,6}(?:\.\d+)?)([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def main(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run `omlxd cache` with `argv`, the words after it. Raises OmlxdError."""
    _add_verbs(parser)
    args = parser.parse_args(argv)
    settings = settings_of(args, *_FOLDER_OPTIONS)
    root = settings.paged_ssd_cache_dir
    try:
        asks = args.run in (why_miss.run, warm.run, pin.run)
        if not args.url:
            root = holder.folder_at(settings)
        elif not asks and not (args.paged_ssd_cache_dir or args.base_path):
            root = holder.folder_of(args.url)
        return args.run(args, settings, root)
    except FileNotFoundError as error:
        raise OmlxdError(
            text_of_error(error) if root.is_dir() else f"there is no SSD cache at {root}"
        ) from error
    except OSError as error:
        if error.errno in UNWRITTEN and not error.filename:
            raise
        raise OmlxdError(text_of_error(error)) from error


def text_of_error(error: OSError) -> str:
    """Format an error without Python's number of it."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)


# --------------------------------------------------------------------------- arguments


def _add_verbs(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, run: Verb, text: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text)
        made.set_defaults(run=run)
        return made

    _add_files_verbs(verb)
    warm.add_arguments(verb("warm", warm.run, "have the daemon compute prompts while it is idle"))
    pin.add_arguments(verb("pin", pin.run, "have the daemon evict a prompt's KV last"))
    _add_carrying_verbs(verb)
    why_miss.add_arguments(verb("why-miss", why_miss.run, "why a prompt's cached prefix ends"))
    for made in verbs.choices.values():
        add_flags(made, *_FOLDER_OPTIONS)
        made.add_argument("--url", help="address of the daemon that holds the folder, if one does")


def _add_files_verbs(verb: AddVerb) -> None:
    shown = verb("stats", _stats, "what each model takes")
    shown.add_argument("--json", action="store_true", help="one JSON object")
    checked = verb("check", _check, "verify files; exit 1 if any is bad")
    extent = checked.add_mutually_exclusive_group()
    extent.add_argument("--all", action="store_true", help="every file (the default)")
    extent.add_argument("--sample", metavar="N/M", type=_fraction, help="N of every M files, by chance")
    checked.add_argument("--delete-bad", action="store_true", help="remove bad files; a daemon may run")
    scrubbed = verb("scrub", _scrub, "check everything, remove bad files and leftovers; exit 1 if any stays")
    scrubbed.add_argument(
        "--orphans",
        action="store_true",
        help="and the KV of models whose folders are gone; without it they are listed",
    )
    cleared = verb("clear", _clear, "remove KV, by model or by age")
    cleared.add_argument("--model", metavar="NAME", help="of this model (or the start of its namespace)")
    cleared.add_argument("--older-than", metavar="AGE", type=_age, help="not used for that long, as 30d, 12h")
    cleared.add_argument("--pinned", action="store_true", help="also what is pinned, which stays otherwise")
    cleared.add_argument("--yes", action="store_true", help="don't ask")


def _add_carrying_verbs(verb: AddVerb) -> None:
    exported = verb(
        "export",
        carry.export_files,
        "write a model's blocks and records into a tar file, or a prompt's KV for mlx-lm",
    )
    exported.add_argument("named", nargs="?", metavar="MODEL", help="all of this model, as --model")
    exported.add_argument("archive", type=Path, metavar="FILE", help="a file that is not there yet")
    exported.add_argument(
        "--format",
        choices=("tar", "mlx-lm"),
        default="tar",
        help="mlx-lm: what `mlx_lm.generate --prompt-cache-file` reads, of the session's last prompt alone",
    )
    whose = exported.add_mutually_exclusive_group()
    whose.add_argument("--model", metavar="NAME", help="all of this model")
    whose.add_argument(
        "--session", metavar="SESSION|FILE", help=f"what the daemon restores this request from: {NAMED}"
    )
    newer, text = functools.partial(_age, flag="--newer-than"), "used within that time, as 30d, 12h"
    exported.add_argument("--newer-than", metavar="AGE", type=newer, help=text)
    imported = verb(
        "import", carry.import_files, "take an exported file in, or mlx-lm's, once it is verified"
    )
    imported.add_argument(
        "archive", type=Path, metavar="FILE", help="of `omlxd cache export`, or of `mlx_lm.cache_prompt`"
    )
    imported.add_argument(
        "--prompt",
        metavar="FILE",
        help="the prompt that mlx-lm's file was made of: its text (-: stdin), or in a .json file its token "
        "ids or a request that begins with it",
    )
    imported.add_argument("--model", metavar="NAME", help="whose KV mlx-lm's file holds")


def _fraction(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if not match or not 0 < int(match[1]) <= int(match[2]):
        raise ConfigError(f"--sample: {text!r} is no part; write 1/100 for one file in a hundred.")
    return int(match[1]), int(match[2])


def _age(text: str, flag: str = "--older-than") -> float:
    match = _AGE.fullmatch(text)
    if not match:
        raise ConfigError(f"{flag}: {text!r} is no age; write 30d, 12h, 90m or 2w.")
    return float(match[1]) * _SECONDS[match[2]]


# --------------------------------------------------------------------------- verbs


def _stats(args: argparse.Namespace, settings: Settings, root: Path) -> int:
    result = stats.collect(root, settings)
    with contextlib.suppress(DaemonRuns):
        if daemon := holder.find(root, settings, args.url):
            result.live = daemon.at_first
            result.cap_bytes, result.cap_source = daemon.cap, "the daemon's"
    print(as_json(result) if args.json else stats.as_text(result))
    return 0


def _check(args: argparse.Namespace, settings: Settings, root: Path) -> int:
    outcome = check(root, sample=args.sample or (1, 1), delete_bad=args.delete_bad)
    print(summary(outcome))
    try:
        # What was removed under a daemon leaves its account.
        if (gone := outcome.removed_paths()) and (daemon := holder.find(root, settings, args.url)):
            daemon.forget(gone, remove=False)
    except (DaemonRuns, DaemonError):
        print("the running daemon counts the removed files until it restarts or evicts them")
    return 1 if outcome.bad else 0


def _scrub(args: argparse.Namespace, settings: Settings, root: Path) -> int:
    try:
        daemon = holder.find(root, settings, args.url)
    except DaemonRuns:
        daemon = None  # Said where it stands in the way.
    good = scrub(root, orphans=args.orphans, daemon=daemon)
    return 0 if good else 1


def _pins(root: Path) -> dict[str, list[str]]:
    """Return each pinned file's pins. Raises OmlxdError."""
    try:
        return names_by_file(read_pins(root))
    except (OSError, ValueError) as error:
        raise OmlxdError(
            f"what is pinned in {root} can't be read: {error}; --pinned clears all the same"
        ) from error


def _clear(args: argparse.Namespace, settings: Settings, root: Path) -> int:
    infos = inventory.namespaces(root)
    chosen = named(infos, args.model) if args.model else infos
    if not chosen and args.model:
        names = sorted({", ".join(info.names) if info else folder[:8] for folder, info in infos.items()})
        raise ConfigError(f"--model: nothing of {args.model!r} is cached; cached: {', '.join(names) or '-'}.")
    daemon = holder.find(root, settings, args.url)
    # A daemon that does not answer is told now, and not after the question.
    with exclusive(root) if daemon is None else contextlib.nullcontext():
        planned = plan(root, chosen, args.older_than, daemon, {} if args.pinned else _pins(root))
        if daemon is None and not args.model and args.older_than is None:
            planned.files += notes_of(root)
    print(root, *planned.as_text(), sep="\n")
    if not planned.files:
        print("nothing to remove")
        return 0
    what = f"{counted(len(planned.files), 'file')}, {human(planned.bytes)}, from {root}"
    if not args.yes:
        if not sys.stdin.isatty():
            raise ConfigError("`omlxd cache clear` asks before it removes; give --yes where nobody answers.")
        if input(f"remove {what}? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing removed")
            return 1
    files, nbytes, troubles = remove(root, planned, daemon)
    for trouble in troubles:
        print(f"can't remove {trouble}", file=sys.stderr)
    print(f"removed {counted(files, 'file')}, {human(nbytes)}")
    return 1 if troubles else 0
