"""Who goes first, by the numbers that requests carry (`GenerateRequest.priority`): the lowest.

A turn is a slot (queue.py) or a pass over a prompt (prefill.py). The lowest number that waits has `PATIENCE`
turns in a row at most; then one is for the number that has waited for the most turns. So the lowest loses one
turn in PATIENCE + 1, and a number that begins to wait beside n others has one of the next
(n + 1) * (PATIENCE + 1) turns, whatever comes after it. Requests of one number have the order that they have
without any.

Who has a slot and has begun nothing gives it back to a lower number that needs it, or its memory. It keeps a
slot that it had before a lower number that waits, and any once lower numbers had `PATIENCE` turns before it.
Beside n others it keeps one of the next (n + 2) * (PATIENCE + 1). A slot that is given back does not count.

Side requests of an agent (`is_side_request` of engine/prompt/sessions.py) go behind the others of their
session that wait with the same number: for a slot, behind `PATIENCE` at most that came later; for passes, by
the rule above.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from ...sequence.sequence import Sequence

PATIENCE = 16

Level = TypeVar("Level", int, tuple[int, bool])


class Levels(Generic[Level]):
    """Says which level has the next turn.

    passed  turns that went to others since it began to wait, or had one, of each level that waits
    row     turns in a row that went to the lowest while others waited
    """

    def __init__(self) -> None:
        self._passed: dict[Level, int] = {}
        self._row = 0

    def next_level(self, waiting: Iterable[Level]) -> Level:
        """Return one of `waiting`."""
        self._passed = {level: self._passed.get(level, 0) for level in waiting}
        if self._row < PATIENCE:
            return min(self._passed)
        return max(self._passed, key=self._passed.__getitem__)

    def take_turn(self, taken: Level) -> None:
        waited = len(self._passed) > 1 and taken == min(self._passed)
        self._row = self._row + 1 if waited else 0
        self._passed = {level: count + 1 for level, count in self._passed.items() if level != taken}


def session_of(sequence: Sequence) -> str:
    """Sub-agents' sessions are `session/agent`: one with their parent."""
    return sequence.prompt.session.partition("/")[0]


def later_ones(running: Iterable[Sequence], waiting: Iterable[Sequence]) -> list[Sequence]:
    """Return those of `running` that may give their slot back to one of `waiting`."""
    fresh = [each for each in running if each.has_begun_nothing and each.outranked < PATIENCE]
    first = min((each.prompt.priority for each in waiting), default=None) if fresh else None
    return [each for each in fresh if first is not None and each.prompt.priority > first]


def pass_levels(sequences: Iterable[Sequence]) -> dict[Sequence, tuple[int, bool]]:
    """Return the level of each of `sequences`, which wait for a pass: its number, and whether it goes behind
    another."""

    def whose(sequence: Sequence) -> tuple[int, str, str]:
        return sequence.prompt.priority, sequence.prompt.client, session_of(sequence)

    sequences = [*sequences]
    parents = {whose(sequence) for sequence in sequences if not sequence.prompt.side}
    return {
        sequence: (sequence.prompt.priority, sequence.prompt.side and whose(sequence) in parents)
        for sequence in sequences
    }
