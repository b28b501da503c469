"""Cold-tier space as an engine sees it: leased from the front in advance, spent a file at a time.

The front grants nothing that would pass the cap, and a lease of many files keeps a writer from
waiting for a round trip a block.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ... import wire

LEASE_BYTES = 64 << 20
"""A lease is this or one file, whichever is more; under a small cap one file."""

ANSWER_S = 30.0

TOLD_S = 60.0
"""Seconds for which the front's last word on the disk's room counts."""


class FrontLease:
    """`kv.cold.writer.Lease` over the wire. `send(message)` may be called from any thread."""

    def __init__(self, send: Callable[[Any], None]):
        self._send = send
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._answered = threading.Condition(self._lock)
        self._balance = 0
        self._ticket = 0
        self._answers: dict[int, int] = {}
        self._capacity, self._told_at = 0, 0.0

    @property
    def capacity(self) -> int:
        """As the last answer had it; 0 a minute later, when the disk may have more room."""
        return self._capacity if time.monotonic() - self._told_at < TOLD_S else 0

    def granted(self, grant: wire.Grant) -> None:
        """The front's answer; on the thread that reads frames."""
        self._capacity, self._told_at = grant.capacity, time.monotonic()
        with self._answered:
            if grant.ticket == self._ticket:
                self._answers[grant.ticket] = grant.nbytes
                self._answered.notify_all()
                return
        # Too late: whoever asked has given up.
        if grant.nbytes:
            self._send(wire.Released(nbytes=grant.nbytes))

    def take(self, nbytes: int) -> bool:
        if self._spend(nbytes):
            return True
        with self._asking:  # one ticket at a time; whoever waited may find enough left over
            if self._spend(nbytes):
                return True
            for want in (max(LEASE_BYTES, nbytes), nbytes):
                self._ask(want, nbytes)
                if self._spend(nbytes):
                    return True
        return False

    def _spend(self, nbytes: int) -> bool:
        with self._lock:
            if self._balance < nbytes:
                return False
            self._balance -= nbytes
            return True

    def _ask(self, nbytes: int, least: int) -> None:
        with self._answered:
            self._ticket += 1
            ticket = self._ticket
        self._send(wire.Reserve(ticket=ticket, nbytes=nbytes, least=least))
        with self._answered:
            self._answered.wait_for(lambda: ticket in self._answers, timeout=ANSWER_S)
            self._balance += self._answers.pop(ticket, 0)
            self._ticket += 1  # an answer from now on is too late

    def stored(self, path: str, nbytes: int) -> None:
        self._send(wire.Stored(files=((path, nbytes),)))

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self._balance += nbytes

    def dropped(self, path: str) -> None:
        self._send(wire.Dropped(files=(path,)))

    def touched(self, paths: Sequence[str]) -> None:
        self._send(wire.Touched(files=tuple(paths)))

    def release_all(self) -> None:
        """Give the unspent lease back."""
        with self._lock:
            nbytes, self._balance = self._balance, 0
        if nbytes:
            self._send(wire.Released(nbytes=nbytes))
