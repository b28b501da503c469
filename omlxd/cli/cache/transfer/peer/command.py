"""`omlxd peer code | pair | list | remove`: works beside a running daemon, which needs no restart."""

from __future__ import annotations

import argparse
import getpass
import sys
from collections.abc import Sequence

from .....common.ports import JOIN_PORT, peer_address
from .....config import add_flags, settings_of
from .....errors import ConfigError, OmlxdError
from .....kv.peer.client import pair
from .....kv.peer.identity import Identity, PeerError, plain_code
from ....watch.status import table

SHORT = 16
"""Digits of a fingerprint that are shown."""


def main(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    parser.epilog = (
        "On the machine that has the cache: `omlxd serve --peer-listen ADDRESS`, then `omlxd peer code`. "
        "On the other: `omlxd peer pair ADDRESS`."
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    verbs.add_parser("code", help="show a code for one pairing, for 5 minutes")
    paired = verbs.add_parser("pair", help="pair with a daemon whose machine shows a code")
    paired.add_argument(
        "host", metavar="HOST[:PORT]", help="its --peer-listen, or where its `omlxd join` waits"
    )
    paired.add_argument("--code", metavar="CODE", help="the code; without it you are asked")
    verbs.add_parser("list", help="those that are paired with this one")
    removed = verbs.add_parser("remove", help="undo a pairing on this side")
    removed.add_argument("name", metavar="NAME", help="of `omlxd peer list`, or its id's beginning")
    for verb in verbs.choices.values():
        add_flags(verb, "base_path")
    args = parser.parse_args(list(argv))
    # An address that needs a key is refused without one, and no verb here listens.
    settings = settings_of(args, "base_path", host="127.0.0.1")
    identity = Identity(settings.base_path)
    try:
        return _run(args, identity, settings.peer_listen)
    except PeerError as error:
        raise OmlxdError(f"{getattr(args, 'host', 'peer')}: {error}") from error
    except OSError as error:
        raise OmlxdError(f"{error.filename or identity.folder}: {error.strerror or error}") from error


def _run(args: argparse.Namespace, identity: Identity, listens: str) -> int:
    if args.verb == "code":
        if not identity.somebody_listens():
            raise OmlxdError(
                "no omlxd of this base path listens for a pairing: start `omlxd serve --peer-listen ADDRESS` "
                "or `omlxd join --listen ADDRESS` first."
            )
        print(identity.new_code())
        print(
            f"For one pairing, within 5 minutes: `omlxd peer pair {listens or 'ADDRESS'}` on the other, with "
            "the --peer-listen of the daemon that runs here, or the --listen of its `omlxd join`.",
            file=sys.stderr,
        )
    elif args.verb == "pair":
        try:
            address = peer_address(args.host)
        except ValueError:
            raise ConfigError(f"{args.host!r} is no address; write HOST or HOST:PORT.") from None
        code = args.code or _asked_code()
        try:
            name = pair(identity, address, code)
        except PeerError as error:
            if not error.passing or peer_address(args.host, 0)[1]:
                raise
            name = pair(identity, peer_address(args.host, JOIN_PORT), code)
        print(f"Paired with {name}.")
    elif args.verb == "remove":
        alike = [each for each in identity.paired() if each.name == args.name]
        if len(alike) > 1:
            ids = ", ".join(each.fingerprint[:SHORT] for each in alike)
            raise ConfigError(f"{len(alike)} machines are called {args.name!r}; name one by its id: {ids}.")
        if not identity.remove(args.name):
            raise ConfigError(f"nothing paired is called {args.name!r}; `omlxd peer list` shows what is.")
        print(f"{args.name} is removed; remove this machine there, too.")
    else:
        if paired := identity.paired():
            rows = ((each.fingerprint[:SHORT], each.name, each.address or "-", each.since) for each in paired)
            print("\n".join(table([("ID", "NAME", "ADDRESS", "PAIRED"), *rows])))
        else:
            print("Nothing is paired; `omlxd peer --help` says how.", file=sys.stderr)
    return 0


def _asked_code() -> str:
    typed = getpass.getpass("Code: ") if sys.stdin.isatty() else sys.stdin.readline()
    if not plain_code(typed.strip()):
        raise ConfigError("the code is missing; `omlxd peer code` on the other machine shows one.")
    return typed.strip()
