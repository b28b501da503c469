"""SIGTERM and ^C while `omlxd serve` or `omlxd engine` imports itself: status 0 at once, no traceback.

Nothing is started then and nothing can be lost. Importing this module installs the handlers, if the
command is one of them; it comes before all else that takes time. They stay until the event loop puts its
own in their place (front/process/own_process.py), before the first thing that needs an end in order. A start
that is refused ends as Python ends, with the status that it has by then.
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
    """Python gives handlers back to the system on its last steps, but not what is ignored."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


if sys.argv[1:2] in (["serve"], ["engine"]):
    install()
