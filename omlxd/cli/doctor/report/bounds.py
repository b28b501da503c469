"""Bounds what the report takes: all of it, and each part."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
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
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([done], seconds).done:
        raise TimeoutError(f"no end within {seconds:.0f} s")
    return done.result()


@contextlib.contextmanager
def ended_by_signals() -> Generator[None]:
    """Have ^C, SIGTERM and SIGHUP clean up once; what is ignored (`nohup`) stays so."""

    def leave(number: int, frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {each: old for each in numbers if (old := signal.getsignal(each)) != signal.SIG_IGN}
    for each in before:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each, old in before.items():
            signal.signal(each, old)
