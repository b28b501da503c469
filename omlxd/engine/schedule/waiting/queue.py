"""What waits for the engine thread: calls of other threads, and sequences without a slot; and the watchdog,
which ends requests whose time is up.

Lower numbers of priority go first (priority.py). Of one number the queue is in order of arrival, but no
client takes all slots from the others, however many sessions it names. The next sequence is of the client
that holds the fewest slots, and of its session that does; among equals, the first to arrive. A client is a
key, or an address where keys say nothing; a session has all its sub-agents, and requests that name none are
one session together. Of a client or a session that saw `PATIENCE` turns go to others it is the next, whoever
holds what. The shortest prompt of the same number, or of a lower one, may go before one that waits for
memory, until that was overtaken as often.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from ...sequence.sequence import Sequence
from .priority import PATIENCE, Levels, session_of

log = logging.getLogger(__name__)


class Inbox:
    """Calls that other threads want the engine thread to make. `post` and `len` from any thread."""

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


class Turns:
    """Says whose turn it is among groups that wait: by default of the one that holds the fewest slots; of one
    that saw `PATIENCE` turns go to others, whoever holds what. With n groups none waits for more than
    PATIENCE + n turns."""

    def __init__(self) -> None:
        self._passed: dict[str, int] = {}

    def next_group(self, waiting: Iterable[str], held: Mapping[str, int]) -> str:
        """One of `waiting`, in order of arrival; the first among equals."""
        self._passed = {group: self._passed.get(group, 0) for group in waiting}
        longest = max(self._passed, key=self._passed.__getitem__)  # `max` and `min` take the first of equals.
        if self._passed[longest] >= PATIENCE:
            return longest
        return min(self._passed, key=lambda group: held.get(group, 0))

    def take_turn(self, taken: str) -> None:
        self._passed = {group: count + 1 for group, count in self._passed.items() if group != taken}


class FairTurns:
    """Says whose turn it is among requests of one priority: of clients first, then of its sessions."""

    def __init__(self) -> None:
        self._clients = Turns()
        self._sessions: dict[str, Turns] = {}

    def next_ones(self, waiting: list[Sequence], running: list[Sequence]) -> list[Sequence]:
        """Return those of `waiting` that are of the client and session whose turn it is."""
        client = self._clients.next_group(
            (sequence.prompt.client for sequence in waiting),
            Counter(sequence.prompt.client for sequence in running),
        )
        self._sessions = {
            one.prompt.client: self._sessions.get(one.prompt.client) or Turns() for one in waiting
        }
        own = [sequence for sequence in waiting if sequence.prompt.client == client]
        session = self._sessions[client].next_group(
            (session_of(sequence) for sequence in own),
            Counter(session_of(sequence) for sequence in running if sequence.prompt.client == client),
        )
        return [sequence for sequence in own if session_of(sequence) == session]

    def take_turn(self, sequence: Sequence) -> None:
        self._clients.take_turn(sequence.prompt.client)
        if sessions := self._sessions.get(sequence.prompt.client):
            sessions.take_turn(session_of(sequence))


class RequestQueue:
    """Iterates in order of arrival. Hundreds at most wait (the front's bound): scans are cheap."""

    def __init__(self) -> None:
        self._overtaken: dict[Sequence, int] = {}
        self._levels = Levels[int]()
        self._turns: dict[int, FairTurns] = {}

    def __len__(self) -> int:
        return len(self._overtaken)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([*self._overtaken])

    def add_request(self, sequence: Sequence) -> None:
        self._overtaken[sequence] = 0

    def put_back(self, sequence: Sequence) -> None:
        """Add one that had a slot, before all others: nobody overtakes it again."""
        self._overtaken = {sequence: PATIENCE, **self._overtaken}

    def remove_request(self, sequence: Sequence) -> None:
        """Remove `sequence`, if it is there."""
        self._overtaken.pop(sequence, None)

    def next_request(self, running: Iterable[Sequence], stuck: Sequence | None = None) -> Sequence | None:
        """The next sequence, which stays in the queue; None: there is none.

        running  sequences that hold slots
        stuck    the one that would be next, but waits for memory
        """
        if stuck is not None:
            if self._overtaken[stuck] >= PATIENCE:
                return None
            shorter = (
                sequence
                for sequence in self
                if sequence is not stuck and sequence.prompt.priority <= stuck.prompt.priority
            )
            return min(shorter, key=lambda each: (each.prompt.priority, each.prompt.length), default=None)
        if not self._overtaken:
            return None
        level = self._levels.next_level(sequence.prompt.priority for sequence in self)
        waiting = [sequence for sequence in self if sequence.prompt.priority == level]
        self._turns = {
            one.prompt.priority: self._turns.get(one.prompt.priority) or FairTurns() for one in self
        }
        those = self._turns[level].next_ones(waiting, [*running])
        return next((one for one in those if not self._stands_back(one)), those[0])

    def _stands_back(self, sequence: Sequence) -> bool:
        """Whether it goes behind others of its session."""
        return sequence.prompt.side and self._overtaken[sequence] < PATIENCE

    def take_request(self, sequence: Sequence) -> None:
        """Remove `sequence`; it has overtaken all that came before it, and keeps its slot if lower numbers
        wait (priority.py)."""
        for waiting in self._overtaken:
            if waiting.prompt.priority > sequence.prompt.priority:
                waiting.outranked += 1
            elif waiting.prompt.priority < sequence.prompt.priority:
                sequence.outranked = PATIENCE
        for waiting in self._overtaken:
            if waiting is sequence:
                break
            self._overtaken[waiting] += 1
        self._levels.take_turn(sequence.prompt.priority)
        if turns := self._turns.get(sequence.prompt.priority):
            turns.take_turn(sequence)
        self.remove_request(sequence)


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
        for sequence in list(sequences):
            if sequence.deadline > now or sequence.cancelled:
                continue
            self.expired += 1
            sequence.timed_out = True
            log.warning(
                "%s: its time is up after %.0f s, %d of %d prompt tokens done, %d generated",
                sequence.name,
                now - sequence.stats.received,
                min(sequence.kv.length, sequence.prompt.length),
                sequence.prompt.length,
                sequence.generated,
            )
            sequence.sink.finished(sequence, "length")
            self._cancel(sequence)
