"""Bounds what the report takes: all of it, and each part."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Budget:
    """Seconds that are left of `seconds`, by `clock`."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._seconds, self._clock, self._began = seconds, clock, clock()

    @property
    def spent(self) -> float:
        return self._clock() - self._began

    def part(self, seconds: float) -> float:
        """Return the seconds for a part that wants so many. Raises TimeoutError if none is left."""
        if (left := self._seconds - self.spent) <= 0:
            raise TimeoutError(f"left out: {self._seconds:.0f} s are over")
        return min(seconds, left)


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return what `call` returns. Raises what it raises, and TimeoutError once `seconds` are over.

    It runs on a thread that is left alone then: a call of the system may never end.
    """
    done: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()

    def run() -> None:
        try:
            result = call()
            done.put(lambda: result)
        except Exception as error:
            done.put(lambda error=error: _raise(error))

    threading.Thread(target=run, daemon=True).start()
    try:
        return done.get(timeout=seconds)()
    except queue.Empty:
        raise TimeoutError(f"no end within {seconds:.0f} s") from None


def _raise(error: Exception) -> T:  # type: ignore[type-var]
    raise error
