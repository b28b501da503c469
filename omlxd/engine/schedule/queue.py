"""Sequences that wait for a slot: in order of arrival, but no client takes all slots from the others.

The next one is of the client that holds the fewest slots; among equals, the first to arrive. A client
is a session with all its sub-agents; requests that name no session are one client together. One that
others overtook `PATIENCE` times goes next, whoever holds what: nobody waits for ever. Until then the
shortest prompt may go before one that waits for memory.

Not thread-safe: the engine thread's.

Ends requests whose time is up, wherever they are: waiting, restoring, prefilling or decoding.

It is looked at between two steps of the engine, so a prefill ends with the chunk that it is in. What
was computed stays cached, block by block, as it is right; a turn that was cut off so is not remembered
(engine/prompt/turn_memory.py), nor where it stood in its session (sessions.py).
"""
# MERGED: docstrings of waiting_line.py, watchdog.py (join by hand)

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..sequence import Sequence

PATIENCE = 16


@dataclass(slots=True)
class _Place:
    sequence: Sequence
    overtaken: int = 0


class RequestQueue:
    """Iterates in order of arrival. Hundreds at most wait (the front's bound): scans are cheap."""

    def __init__(self) -> None:
        self._places: list[_Place] = []

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([place.sequence for place in self._places])

    def join(self, sequence: Sequence) -> None:
        self._places.append(_Place(sequence))

    def leave(self, sequence: Sequence) -> None:
        """Does nothing if it isn't there."""
        self._places = [place for place in self._places if place.sequence is not sequence]

    def next(self, active: Iterable[Sequence], stuck: Sequence | None = None) -> Sequence | None:
        """Who is next, and stays in the line; `active` hold slots. None: nobody.

        stuck  who would be, but waits for memory
        """
        others = [place for place in self._places if place.sequence is not stuck]
        late = next((place.sequence for place in self._places if place.overtaken >= PATIENCE), None)
        if late is not None or not others:
            return late if late is not stuck else None
        # `min` takes the first of equals.
        if stuck is not None:
            return min(others, key=lambda place: place.sequence.prompt_length).sequence
        held = Counter(client_of(sequence) for sequence in active)
        return min(others, key=lambda place: held[client_of(place.sequence)]).sequence

    def take(self, sequence: Sequence) -> None:
        """`sequence` goes, past all that came before it."""
        for place in self._places:
            if place.sequence is sequence:
                break
            place.overtaken += 1
        self.leave(sequence)


def client_of(sequence: Sequence) -> str:
    """Sub-agents' sessions are `session/agent`: one client with their parent."""
    return sequence.session.partition("/")[0]


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
