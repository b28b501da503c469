"""`omlxd run MODEL [QUESTION]`: Ollama's verb for `omlxd chat`. A model of the hub is downloaded first."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from urllib.parse import quote

from ...config import load_settings
from ...models.resolve import DEFAULT_ID, fetch_default_model, fetch_from_hub, is_local
from ..daemon.client import DaemonError, NoDaemon, find_daemon
from ..daemon.owner_api import InstalledStatus
from ..models.command import installed
from .command import talk


def main(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run `omlxd chat`, after a download if needed. Raises OmlxdError."""
    parser.usage = "omlxd run MODEL [QUESTION …] [flags of `omlxd chat`]"
    parser.add_argument("model", help="a name of `omlxd list`, or ORG/NAME of the hub")
    parser.add_argument(
        "question", nargs="*", default=[], help="print the answer to it and end; also taken from a pipe"
    )
    return talk(argv, parser, before=_pull_if_needed)


def _pull_if_needed(args: argparse.Namespace) -> None:
    """Download the model if it is missing and its name says where from."""
    if args.url or not (args.model == DEFAULT_ID or not is_local(args.model)):
        return
    settings = load_settings({"host": "127.0.0.1"})
    try:
        find_daemon(None, settings).fetch("/omlxd/models/" + quote(args.model), InstalledStatus)
        return
    except NoDaemon:
        if any(args.model == model.id for model in installed(settings)):
            return
    except DaemonError:
        pass
    print(f"omlxd: {args.model} is not here; downloading it", file=sys.stderr)
    if args.model == DEFAULT_ID:
        asyncio.run(fetch_default_model(settings.base_path))
    else:
        asyncio.run(fetch_from_hub(args.model))
