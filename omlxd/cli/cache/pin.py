"""`omlxd cache pin`: KV that is evicted last from the SSD cache, by session or by a prompt in a file."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from ...common.units import human
from ...config import Settings
from ...errors import ConfigError
from ..daemon.client import find_daemon
from ..daemon.owner_api import PinBlocks, PinList
from ..watch.status import as_json, table
from .asked import NAMED, named_request
from .listing.stats import ago
from .why_miss import ANSWER_S


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        metavar="SESSION|FILE",
        help=f"{NAMED}; without one the pins are listed",
    )
    parser.add_argument("--name", default="", help="what the pin is called; default: SESSION or FILE")
    parser.add_argument("--model", metavar="NAME", help="whose KV, for a file; default: the request's own")
    parser.add_argument("--off", action="store_true", help="unpin what is called so")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace, settings: Settings, root: Path) -> int:
    daemon = find_daemon(args.url, settings)
    name = args.name or args.what
    if args.off and not name:
        raise ConfigError("--off: say what to unpin.")
    if not args.what and not args.off:
        pins = daemon.fetch("/omlxd/cache/pins", PinList)
    else:
        of = {} if args.off else msgspec.structs.asdict(named_request(args.what, args.model))
        asked = PinBlocks(**of, name=name, pinned=not args.off)
        pins = daemon.fetch("/omlxd/cache/pin", PinList, asked, ANSWER_S)
    if args.json:
        print(as_json(pins))
        return 0
    rows = [
        (
            pin.name if pin.name.isprintable() else repr(pin.name),
            pin.model,
            str(pin.files),
            human(pin.bytes),
            ago(pin.at),
        )
        for pin in pins.pins
    ]
    if rows:
        print(*table([("pin", "model", "files", "bytes", "pinned"), *rows]), sep="\n")
    print(f"{len(rows)} pinned, {human(pins.bytes)} of at most {human(pins.most_bytes)}")
    return 0
