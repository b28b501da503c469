"""Calls that other threads want the engine thread to make."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable

log = logging.getLogger(__name__)


class Inbox:
    """`post` and `len` from any thread; `drain` on the engine thread."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def __len__(self) -> int:
        return self._calls.qsize()

    def post(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def drain(self, patience_s: float) -> bool:
        """Make the calls that were posted; wait for the first up to `patience_s`. False: there was none.

        A call that raises is logged, and spoils no other.
        """
        made = False
        while True:
            wait = bool(patience_s) and not made
            try:
                call = self._calls.get(block=wait, timeout=patience_s if wait else None)
            except queue.Empty:
                return made
            made = True
            try:
                call()
            except Exception:
                log.exception("a posted call failed")
