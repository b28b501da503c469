"""Who may still wait when the queue is full."""

import asyncio

import pytest

from omlxd import wire
from omlxd.chat import GenerateRequest, RawPrompt
from omlxd.errors import Overloaded
from omlxd.front.engines.in_flight import OWN_FLOOR, InFlight


async def test_a_client_that_fills_the_queue_keeps_no_other_out():
    line = InFlight(1, lambda: None)

    def add(client: str) -> None:
        line.check_room(client)
        id = line.new_id()
        message = wire.Generate(id=id, request=GenerateRequest(RawPrompt("hi"), client=client))
        line.add_request(id, message, asyncio.get_running_loop().create_future(), client)

    with pytest.raises(Overloaded):
        while True:
            add("crowd")
    full = len(line)
    for _ in range(OWN_FLOOR):
        add("small")
    for client in ("small", "crowd", ""):
        with pytest.raises(Overloaded):
            add(client)
    with pytest.raises(Overloaded):
        for n in range(10 * full):
            add(f"client-{n}")
    assert len(line) == 2 * full


async def test_what_goes_later_leaves_room_for_what_goes_first():
    line = InFlight(1, lambda: None)

    def fill(priority: int) -> int:
        before = len(line)
        with pytest.raises(Overloaded):
            while True:
                line.check_room(priority=priority)
                request = GenerateRequest(RawPrompt("hi"), priority=priority)
                message = wire.Generate(id=line.new_id(), request=request)
                line.add_request(message.id, message, asyncio.get_running_loop().create_future())
        return len(line) - before

    full = fill(1)
    assert fill(0) == full and fill(-1) == 0, "there are twice as many at most"
    assert line.by_priority == {0: full, 1: full}
