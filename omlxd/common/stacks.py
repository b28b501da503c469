"""SIGURG has a process write the stack of each of its threads to standard error: what a request waits for.

A process that does not know the signal ignores it. Stacks are files, lines and functions: no texts.
"""

from __future__ import annotations

import faulthandler
import signal
import sys

SIGNAL = signal.SIGURG


def show_threads_on_signal(*, chain: bool = False) -> None:
    """Write all stacks at SIGURG, even where a thread holds Python's lock. `chain`: older handlers, too."""
    if sys.__stderr__ is not None:
        faulthandler.register(SIGNAL, sys.__stderr__, all_threads=True, chain=chain)
