"""`omlxd key add | list | revoke | off`: works beside a running daemon, which needs no restart."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ...chat import PRIORITIES
from ...common.units import counted
from ...config import add_flags, settings_of
from ...config.keys import add_key, keys_path, open_to_all, read_keys, revoke_key


def main(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    parser.epilog = (
        "A request carries a key as `Authorization: Bearer KEY` or `x-api-key: KEY`. From the first key on, "
        "every request but GET /health and GET /ready needs one; a running daemon follows changes at once."
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    add = verbs.add_parser("add", help="make a key and print it, once")
    add.add_argument("name", metavar="NAME", help="who or what will use it")
    add.add_argument(
        "--priority",
        choices=[*PRIORITIES],
        default="interactive",
        help="of its requests: background ones wait for all others (interactive). A request may say "
        "background or a higher number itself, and none that goes before its key's",
    )
    verbs.add_parser("list", help="names of the keys, and when they were made")
    revoke = verbs.add_parser("revoke", help="refuse a key from now on")
    revoke.add_argument("name", metavar="NAME")
    verbs.add_parser("off", help="revoke all keys, and ask for none where only this machine asks")
    for verb in verbs.choices.values():
        add_flags(verb, "base_path")
    args = parser.parse_args(list(argv))
    # An address that needs a key is refused without one, and this command makes the first.
    path = keys_path(settings_of(args, "base_path", host="127.0.0.1").base_path)
    if args.verb == "add":
        key = add_key(path, args.name, args.priority)
        print(key)
        print("This key is not shown again; only its digest is kept.", file=sys.stderr)
    elif args.verb == "revoke":
        left = revoke_key(path, args.name)
        rest = "1 key is" if left == 1 else f"{left or 'no'} keys are"
        print(f"{args.name} is revoked; {rest} left.")
        if not left:
            print(
                "A running daemon now refuses every request that needs a key, until there is one again or "
                "`omlxd key off` takes it back to open; one that is started from now on asks for none.",
                file=sys.stderr,
            )
    elif args.verb == "off":
        count = open_to_all(path)
        print(f"{counted(count, 'key')} revoked; no key is asked for.")
        print("A daemon that other machines reach, or that has --api-key, goes on asking.", file=sys.stderr)
    else:
        for key in (keys := read_keys(path)):
            print(f"{key.created}  {key.name}  {key.priority}")
        if not keys:
            print("There is no key; `omlxd key add NAME` makes one.", file=sys.stderr)
    return 0
