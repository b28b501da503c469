"""Ends requests whose time is up, wherever they are: waiting, restoring, prefilling or decoding.

It is looked at between two steps of the engine, so a prefill ends with the chunk that it is in. What
was computed stays cached, block by block, as it is right; a turn that was cut off so is not remembered
(healing.py), nor where it stood in its session (sessions.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from .sequence import Sequence

log = logging.getLogger(__name__)


class Watchdog:
    """Engine thread. `cancel(sequence)` gives its slot and references back.

    expired  requests ended so far
    """

    def __init__(self, cancel: Callable[[Sequence], None], clock: Callable[[], float] = time.monotonic):
        self._cancel = cancel
        self._clock = clock
        self.expired = 0

    def check(self, sequences: Iterable[Sequence]) -> None:
        """End those of `sequences` that are past their deadline, with the reason `length`."""
        now = self._clock()
        for sequence in [s for s in sequences if s.deadline <= now and not s.cancelled]:
            self.expired += 1
            sequence.timed_out = True
            log.warning(
                "request %d: its time is up after %.0f s, %d of %d prompt tokens done, %d generated",
                sequence.id,
                now - sequence.received,
                min(sequence.kv_length, sequence.prompt_length),
                sequence.prompt_length,
                sequence.generated,
            )
            sequence.sink.finished(sequence, "length")
            self._cancel(sequence)
