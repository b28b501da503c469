"""Sequences that wait for a slot, and the watchdog that ends those whose time is up.

The queue is in order of arrival, but no client takes all slots from the others. The next sequence is of
the client that holds the fewest slots; among equals, the first to arrive. A client is a session with all
its sub-agents; requests that name no session are one client together. A sequence that was overtaken
`PATIENCE` times goes next, whoever holds what. Until then the shortest prompt may go before one that
waits for memory.

Engine thread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..sequence import Sequence

PATIENCE = 16


@dataclass(slots=True)
class _Entry:
    sequence: Sequence
    overtaken: int = 0


class RequestQueue:
    """Iterates in order of arrival. Hundreds at most wait (the front's bound): scans are cheap."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([entry.sequence for entry in self._entries])

    def add_request(self, sequence: Sequence) -> None:
        self._entries.append(_Entry(sequence))

    def remove_request(self, sequence: Sequence) -> None:
        """Remove `sequence`, if it is there."""
        self._entries = [entry for entry in self._entries if entry.sequence is not sequence]

    def next_request(self, active: Iterable[Sequence], stuck: Sequence | None = None) -> Sequence | None:
        """The next sequence, which stays in the queue; None: there is none.

        active  sequences that hold slots
        stuck   the one that would be next, but waits for memory
        """
        others = [entry for entry in self._entries if entry.sequence is not stuck]
        late = next((entry.sequence for entry in self._entries if entry.overtaken >= PATIENCE), None)
        if late is not None or not others:
            return late if late is not stuck else None
        # `min` takes the first of equals.
        if stuck is not None:
            return min(others, key=lambda entry: entry.sequence.prompt_length).sequence
        held = Counter(client_of(sequence) for sequence in active)
        return min(others, key=lambda entry: held[client_of(entry.sequence)]).sequence

    def take_request(self, sequence: Sequence) -> None:
        """Remove `sequence`; it has overtaken all that came before it."""
        for entry in self._entries:
            if entry.sequence is sequence:
                break
            entry.overtaken += 1
        self.remove_request(sequence)


def client_of(sequence: Sequence) -> str:
    """Sub-agents' sessions are `session/agent`: one client with their parent."""
    return sequence.session.partition("/")[0]


log = logging.getLogger(__name__)


class Watchdog:
    """Ends requests that are past their deadline: waiting, restoring, prefilling or decoding.

    Blocks that were computed stay cached. The turn is not remembered (engine/prompt/turn_memory.py), nor
    its place in the session (engine/prompt/sessions.py).

    cancel(sequence)  gives its slot and references back
    expired           requests ended so far
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
