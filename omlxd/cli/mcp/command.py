"""`omlxd mcp`: serves the Model Context Protocol on standard input and output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..daemon.client import add_url, find_daemon
from .protocol import Server
from .tools import INSTRUCTIONS, kind_of, tools_of


def main(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the verb until standard input ends."""
    parser.epilog = "Claude Code takes it with `claude mcp add omlxd -- omlxd mcp`."
    add_url(parser)
    args = parser.parse_args(argv)
    written = sys.stdout.buffer
    sys.stdout = sys.stderr  # Lines of the protocol alone may stand there.
    tools = tools_of(lambda: find_daemon(args.url))
    Server(sys.stdin.buffer, written, tools, INSTRUCTIONS, kind_of).run()
    return 0
