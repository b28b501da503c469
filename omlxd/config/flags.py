"""The options as flags of a command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from .options import OPTIONS, Option


def add_flags(parser: argparse.ArgumentParser, options: Iterable[Option] = OPTIONS) -> None:
    """Every value stays text here: reading.py reads flags, variables and the file with one parser."""
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file of settings; default: omlxd.toml under --base-path"
    )
    for option in options:
        if option.is_switch:
            parser.add_argument(
                option.flag, dest=option.name, action="store_const", const="true", help=option.help
            )
            continue
        shown = f" (default: {option.default})" if option.default else ""
        parser.add_argument(option.flag, dest=option.name, metavar=option.metavar, help=option.help + shown)
