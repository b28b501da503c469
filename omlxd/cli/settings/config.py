"""`omlxd config show`, or `omlxd config` alone: each setting, and the place of its value."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ...common.units import human, spoken
from ...config import (
    BY_NAME,
    OPTIONS,
    ModelSettings,
    Settings,
    add_flags,
    full_name,
    load_settings,
    warnings_of,
)
from ..watch.status import as_json, table

_BYTES = [option.name for option in OPTIONS if option.metavar == "SIZE"]
_TIMES = ["ttl", *(option.name for option in OPTIONS if option.metavar == "TIME")]


class Shown(msgspec.Struct):
    """One setting. `value`: as it is in force, sizes in bytes; a key is never shown.

    name    an option's, or `models."org/name".temperature`; source: `default`, a flag, a variable, or a line
    """

    name: str
    value: str | int | float | bool | list[str] | None
    source: str


def main(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the verb. Raises ConfigError, as `omlxd serve` would for the same settings."""
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv = ["show", *argv]
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    show = verbs.add_parser("show", help="each setting and where it comes from")
    show.add_argument("--json", action="store_true", help="a JSON list")
    add_flags(show)
    args = vars(parser.parse_args(argv))
    in_json = args.pop("json")
    flags = {name: value for name, value in args.items() if value is not None}
    settings = load_settings(flags)
    rows = shown(settings)
    for sentence in warnings_of(settings):
        print(f"omlxd: {sentence}", file=sys.stderr)
    print(as_json(rows) if in_json else as_text(rows))
    return 0


def shown(settings: Settings) -> list[Shown]:
    """List the file, each option in order, then the file's values for all models and for single ones."""
    named = [("config", settings.config), *((o.name, getattr(settings, o.field)) for o in OPTIONS)]
    rows = [Shown(name, _plain(name, value), settings.sources[name]) for name, value in named]
    tables = [(settings.defaults, ("defaults",))]
    tables += [(own, ("models", model)) for model, own in settings.models.items()]
    for own, path in tables:
        for field in ModelSettings.__struct_fields__:
            name = full_name(field, *path)
            if name in settings.sources:
                rows.append(Shown(name, _plain(field, getattr(own, field)), settings.sources[name]))
    return rows


def _plain(name: str, value: object) -> str | int | float | bool | list[str] | None:
    if "key" in name.split("_"):
        return "(set, not shown)" if value else ""
    if value == math.inf:
        return 0.0  # As it is written: a model that stays for good.
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (tuple, list, frozenset, set)):
        return [str(each) for each in value]
    if isinstance(value, Mapping):
        return [f"{key}={each}" for key, each in value.items()]
    return str(value)


def as_text(rows: Sequence[Shown]) -> str:
    lines = [("SETTING", "VALUE", "FROM")]
    lines += [(_called(row.name), _value(row), _place(row.source)) for row in rows]
    return "\n".join(table(lines))


def _called(name: str) -> str:
    return name if "." in name else "--" + name.replace("_", "-")


def _value(row: Shown) -> str:
    value, field = row.value, row.name.rsplit(".", 1)[-1].replace("-", "_")
    if value is None and row.name in BY_NAME and BY_NAME[row.name].none:
        return str(BY_NAME[row.name].none)
    if isinstance(value, bool):
        return "true" if value else "false"
    if row.name in _BYTES:
        if not value:
            return "off" if row.name == "memory_limit" else "0"
        return human(int(str(value)))
    if isinstance(value, list):
        return " ".join(value) or "-"
    if field in _TIMES:
        return spoken(float(value)) if isinstance(value, (int, float)) and value else "0"
    return "-" if value in (None, "") else str(value)


def _place(source: str) -> str:
    """Shorten a path under the home folder, as people write it."""
    home = str(Path.home()) + "/"
    return source.replace(home, "~/", 1) if source.startswith(home) else source
