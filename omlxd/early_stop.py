"""SIGTERM and ^C while `omlxd serve` still imports itself: exit status 0 at once, and no traceback.

Nothing is started then and nothing can be lost. Importing this module installs the handlers, if the
command is `serve`; it comes before all else that takes time. They stay until the event loop puts its
own in their place (front/serve.py), before the first thing that needs an end in order.
"""

import os
import signal
import sys


def _end(number: int, frame: object) -> None:
    os._exit(0)


def install() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


if sys.argv[1:2] == ["serve"]:
    install()
