"""`omlxd config show`: each setting, and where its value stands."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ..config import OPTIONS, Settings, add_flags, load_settings
from ..durations import spoken
from ..sizes import human
from .status import table

_BYTES = (
    *("paged_ssd_cache_max_size", "hot_cache_max_size", "memory_limit"),
    *("ssd_cache_daily_write_budget", "log_file_size"),
)
_TIMES = ("model_ttl", "stall_timeout", "request_timeout")


class Shown(msgspec.Struct):
    """One setting. `value`: as it is in force, sizes in bytes; a key is never shown.

    source  `default`, a flag, a variable, or a line of the file
    """

    name: str
    value: str | int | float | bool | list[str] | None
    source: str


def main(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Raises ConfigError, as `omlxd serve` would for the same settings."""
    parser.allow_abbrev = False
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    show = verbs.add_parser("show", help="each setting and where it comes from", allow_abbrev=False)
    show.add_argument("--json", action="store_true", help="a JSON list")
    add_flags(show)
    known = vars(parser.parse_args(argv))
    as_json = known.pop("json")
    flags = {name: value for name, value in known.items() if value is not None}
    rows = shown(load_settings(flags))
    print(msgspec.json.format(msgspec.json.encode(rows)).decode() if as_json else as_text(rows))
    return 0


def shown(settings: Settings) -> list[Shown]:
    """In the order of the table of options."""
    return [
        Shown(option.name, _plain(option.name, getattr(settings, option.name)), settings.sources[option.name])
        for option in OPTIONS
    ]


def _plain(name: str, value: object) -> str | int | float | bool | list[str] | None:
    if "key" in name.split("_"):
        return "(set, not shown)" if value else ""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (tuple, list, frozenset, set)):
        return [str(each) for each in value]
    if isinstance(value, Mapping):
        return [f"{key}={each}" for key, each in value.items()]
    return str(value)


def as_text(rows: Sequence[Shown]) -> str:
    lines = [("SETTING", "VALUE", "FROM")]
    lines += [("--" + row.name.replace("_", "-"), _told(row), _place(row.source)) for row in rows]
    return "\n".join(table(lines))


def _told(row: Shown) -> str:
    value = row.value
    if isinstance(value, bool):
        return "true" if value else "false"
    if row.name in _BYTES:
        if not value:
            return "auto" if value is None else "off" if row.name == "memory_limit" else "0"
        return human(int(str(value)))
    if isinstance(value, list):
        return " ".join(value) or "-"
    if row.name in _TIMES:
        return spoken(float(value)) if isinstance(value, (int, float)) and value else "0"
    return "-" if value in (None, "") else str(value)


def _place(source: str) -> str:
    """A path under the home folder, as people write it."""
    home = str(Path.home()) + "/"
    return source.replace(home, "~/", 1) if source.startswith(home) else source
