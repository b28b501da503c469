"""What waits for the engine thread: calls of other threads, and sequences without a slot; and the watchdog,
which ends requests whose time is up.

The queue is in order of arrival, but no client takes all slots from the others. The next sequence is of
the client that holds the fewest slots; among equals, the first to arrive. A client is a session with all
its sub-agents; requests that name no session are one client together. A sequence that was overtaken
`PATIENCE` times goes next, whoever holds what. Until then the shortest prompt may go before one that
waits for memory.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from ..sequence import Sequence

log = logging.getLogger(__name__)

PATIENCE = 16


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


class RequestQueue:
    """Iterates in order of arrival. Hundreds at most wait (the front's bound): scans are cheap."""

    def __init__(self) -> None:
        self._overtaken: dict[Sequence, int] = {}

    def __len__(self) -> int:
        return len(self._overtaken)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([*self._overtaken])

    def add_request(self, sequence: Sequence) -> None:
        self._overtaken[sequence] = 0

    def remove_request(self, sequence: Sequence) -> None:
        """Remove `sequence`, if it is there."""
        self._overtaken.pop(sequence, None)

    def next_request(self, running: Iterable[Sequence], stuck: Sequence | None = None) -> Sequence | None:
        """The next sequence, which stays in the queue; None: there is none.

        running  sequences that hold slots
        stuck    the one that would be next, but waits for memory
        """
        late = next((sequence for sequence, count in self._overtaken.items() if count >= PATIENCE), None)
        if late is not None:
            return late if late is not stuck else None
        # `min` takes the first of equals.
        if stuck is not None:
            shorter = (sequence for sequence in self if sequence is not stuck)
            return min(shorter, key=lambda sequence: sequence.prompt_length, default=None)
        held = Counter(client_of(sequence) for sequence in running)
        return min(self, key=lambda sequence: held[client_of(sequence)], default=None)

    def take_request(self, sequence: Sequence) -> None:
        """Remove `sequence`; it has overtaken all that came before it."""
        for waiting in self._overtaken:
            if waiting is sequence:
                break
            self._overtaken[waiting] += 1
        self.remove_request(sequence)


def client_of(sequence: Sequence) -> str:
    """Sub-agents' sessions are `session/agent`: one client with their parent."""
    return sequence.session.partition("/")[0]


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
                now - sequence.received,
                min(sequence.kv_length, sequence.prompt_length),
                sequence.prompt_length,
                sequence.generated,
            )
            sequence.sink.finished(sequence, "length")
            self._cancel(sequence)
