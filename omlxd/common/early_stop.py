"""Ends `omlxd serve` and `omlxd engine` with status 0 at SIGTERM or ^C while they import themselves.

Importing this module installs the handlers, before anything that takes time; the event loop replaces them
(front/process/own_process.py). A start that is refused ends as Python ends, with the status that it has.
"""

import os
import signal
import sys

NUMBERS = (signal.SIGINT, signal.SIGTERM)


def _end(number: int, frame: object) -> None:
    os._exit(0)


def install() -> None:
    for number in NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    import atexit  # After the handlers, like all else.

    atexit.register(_ignore)


def _ignore() -> None:
    """Ignore signals at the end: Python gives handlers back to the system, but not what is ignored."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


if sys.argv[1:2] in (["serve"], ["engine"]):
    install()
