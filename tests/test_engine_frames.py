"""The engine program's frames, without a model."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from daemon import wait_until

from omlxd import wire
from omlxd.engine.service import EngineService
from omlxd.engine.space import LEASE_BYTES


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, engines = socket.socketpair()
    yield ours, engines
    ours.close()
    engines.close()


def test_a_grant_that_arrives_with_the_quit_is_not_lost(ends: tuple[socket.socket, socket.socket]):
    """Somebody writes while the engine is told to end: the blocks that wait for space are still written."""
    ours, engines = ends
    service = EngineService(engines)
    taken: list[bool] = []
    asks = threading.Thread(target=lambda: taken.append(service._space.take(4096)), daemon=True)
    asks.start()
    wait_until(lambda: service._space._ticket == 1, 30)
    ours.sendall(
        wire.encode(wire.Quit(deadline_s=1.0)) + wire.encode(wire.Grant(ticket=1, nbytes=LEASE_BYTES))
    )
    service.run()
    asks.join(10)
    assert taken == [True]
