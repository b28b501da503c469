"""Lets the flusher write what has become due: a thread with a clock, as the engine's has none at rest."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..kv.cold.flusher import Flusher

TICK_S = 2.0


class FlushClock:
    """`post(f)` runs `f` on the engine thread. It is woken only while there is something to do."""

    def __init__(self, flusher: Flusher, post: Callable[[Callable[[], None]], None]):
        self._flusher = flusher
        self._post = post
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="kv-clock", daemon=True).start()

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            if self._flusher.has_work:
                self._post(self._flusher.tick)

    def stop(self) -> None:
        self._stop.set()
