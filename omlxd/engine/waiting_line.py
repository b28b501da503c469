"""Sequences that wait for a slot: in order of arrival, but no client takes all slots from the others.

The next one is of the client that holds the fewest slots; among equals, the first to arrive. A client
is a session with all its sub-agents; requests that name no session are one client together. One that
others overtook `PATIENCE` times goes next, whoever holds what: nobody waits for ever. Until then the
shortest prompt may go before one that waits for memory.

Not thread-safe: the engine thread's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .sequence import Sequence

PATIENCE = 16


@dataclass(slots=True)
class _Place:
    sequence: Sequence
    overtaken: int = 0


class WaitingLine:
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
