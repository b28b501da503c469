"""Leases of cold-tier space: what is asked, spent, given back, and what comes too late."""

from __future__ import annotations

import threading
import time

from omlxd import wire
from omlxd.engine.kvio import lease as module
from omlxd.engine.kvio.lease import LEASE_BYTES, FrontLease


class Front:
    """Answers `Reserve` from another thread, as the frame reader does, out of `room` bytes."""

    def __init__(self, room: int, silent: bool = False):
        self.room = room
        self.silent = silent
        self._lock = threading.Lock()
        self.sent: list[object] = []
        self.lease = FrontLease(self.receive)

    def receive(self, message: object) -> None:
        self.sent.append(message)
        if isinstance(message, wire.Reserve) and not self.silent:
            with self._lock:
                granted = message.nbytes if message.nbytes <= self.room else 0
                self.room -= granted
            answer = wire.Grant(ticket=message.ticket, nbytes=granted)
            threading.Thread(target=self.lease.granted, args=(answer,)).start()

    def of(self, kind: type) -> list:
        return [m for m in self.sent if isinstance(m, kind)]


def test_one_lease_serves_many_files():
    front = Front(10 * LEASE_BYTES)
    assert all(front.lease.take(1 << 20) for _ in range(64))
    assert len(front.of(wire.Reserve)) == 1
    assert front.lease.take(1 << 20)
    assert len(front.of(wire.Reserve)) == 2


def test_a_small_rest_is_asked_for_when_a_lease_is_refused():
    front = Front(3 << 20)
    assert front.lease.take(1 << 20)
    assert [(m.nbytes, m.least) for m in front.of(wire.Reserve)] == [
        (LEASE_BYTES, 1 << 20),
        (1 << 20, 1 << 20),
    ]
    assert front.lease.take(2 << 20)
    assert not front.lease.take(1)


def test_a_file_larger_than_a_lease_gets_its_own():
    front = Front(3 * LEASE_BYTES)
    assert front.lease.take(2 * LEASE_BYTES)
    assert not front.lease.take(2 * LEASE_BYTES)


def test_what_was_not_written_is_spent_again_and_the_rest_released():
    front = Front(LEASE_BYTES)
    assert front.lease.take(LEASE_BYTES)
    front.lease.give_back(LEASE_BYTES)
    assert front.lease.take(LEASE_BYTES - 5)
    front.lease.release_all()
    front.lease.release_all()
    assert [m.nbytes for m in front.of(wire.Released)] == [5]
    assert len(front.of(wire.Reserve)) == 1


def test_a_grant_that_comes_too_late_goes_back(monkeypatch):
    patience = module.ANSWER_S
    monkeypatch.setattr(module, "ANSWER_S", 0.05)
    front = Front(LEASE_BYTES, silent=True)
    assert not front.lease.take(1)
    for reserve in front.of(wire.Reserve):
        front.lease.granted(wire.Grant(ticket=reserve.ticket, nbytes=reserve.nbytes))
    assert sum(m.nbytes for m in front.of(wire.Released)) == LEASE_BYTES + 1
    front.silent = False
    monkeypatch.setattr(module, "ANSWER_S", patience)
    assert front.lease.take(1)


def test_writers_at_once_never_spend_more_than_was_granted():
    front = Front(40 << 20)
    taken: list[int] = []

    def write() -> None:
        for _ in range(30):
            if front.lease.take(1 << 20):
                taken.append(1 << 20)
                time.sleep(0.0005)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) <= 40 << 20
    assert sum(taken) == 40 << 20, "nothing of what there was is left unused"


def test_what_happens_to_files_is_told():
    front = Front(0)
    front.lease.stored("a/b", 7)
    front.lease.dropped("a/c")
    front.lease.touched(["x", "y"])
    assert front.sent == [
        wire.Stored(files=(("a/b", 7),)),
        wire.Dropped(files=("a/c",)),
        wire.Touched(files=("x", "y")),
    ]
