"""Sequences that wait for a slot: in order of arrival, but no client takes all slots from the others.

The next one is of the client that holds the fewest slots; among equals, the first to arrive. A client
is a session with all its sub-agents; requests that name no session are one client together. One that
others overtook `PATIENCE` times goes next, whoever holds what: nobody waits for ever.

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

    def put_back(self, sequence: Sequence) -> None:
        """`sequence`, which `take` gave, could not begin: it is the next one, whoever holds what."""
        self._places.insert(0, _Place(sequence, PATIENCE))

    def leave(self, sequence: Sequence) -> None:
        """Does nothing if it isn't there."""
        self._places = [place for place in self._places if place.sequence is not sequence]

    def take(self, active: Iterable[Sequence]) -> Sequence:
        """The next one, out of the line; `active` hold slots. Raises ValueError when nobody waits."""
        held = Counter(client_of(sequence) for sequence in active)
        index = self._next(held)
        for place in self._places[:index]:
            place.overtaken += 1
        return self._places.pop(index).sequence

    def _next(self, held: Counter[str]) -> int:
        for index, place in enumerate(self._places):
            if place.overtaken >= PATIENCE:
                return index
        # `min` takes the first of equals.
        return min(range(len(self._places)), key=lambda i: held[client_of(self._places[i].sequence)])


def client_of(sequence: Sequence) -> str:
    """Sub-agents' sessions are `session/agent`: one client with their parent."""
    return sequence.session.partition("/")[0]
