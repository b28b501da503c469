"""The engine program's frames, without a model."""

from __future__ import annotations

import gc
import logging
import queue
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from daemon import wait_until

from omlxd import wire
from omlxd.chat import RawPrompt
from omlxd.engine.kvio.lease import LEASE_BYTES
from omlxd.engine.server import service as service_module
from omlxd.engine.server.service import EngineService


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
    asks = threading.Thread(target=lambda: taken.append(service._lease.take(4096)), daemon=True)
    asks.start()
    wait_until(lambda: service._lease._ticket == 1, 30)
    ours.sendall(
        wire.encode(wire.Quit(deadline_s=1.0)) + wire.encode(wire.Grant(ticket=1, nbytes=LEASE_BYTES))
    )
    service.run()
    asks.join(60)
    assert taken == [True]


def test_the_logs_level_changes_at_once(ends: tuple[socket.socket, socket.socket]):
    ours, engines = ends
    own = logging.getLogger("omlxd")
    before = own.level
    ours.sendall(wire.encode(wire.LogLevel(level="error")) + wire.encode(wire.Quit(deadline_s=1.0)))
    try:
        EngineService(engines).run()
        assert own.level == logging.ERROR
    finally:
        own.setLevel(before)


class Idle:
    """A host whose scheduler does as it is told."""

    channels = ()

    def __init__(self, *_: Any) -> None:
        self.info = wire.ModelInfo("m", "", 0, 0, 0, 0, "", "", 64, "cpu")
        self.scheduler = self
        self.progress = 0
        self.loaded = SimpleNamespace(mapped=SimpleNamespace(changed=str))
        self.disk_hangs = False
        self.media = SimpleNamespace(busy=False)
        self.stopped = threading.Event()

    def run(self) -> None:
        self.stopped.wait(60)

    def stop(self) -> None:
        self.stopped.set()

    def close(self, deadline_s: float) -> None:
        pass


def test_work_that_sends_no_events_is_told_of(ends: tuple[socket.socket, socket.socket], monkeypatch):
    """A long tool call, a restore: an engine that seems to do nothing is ended by the front."""
    ours, engines = ends
    monkeypatch.setattr(service_module, "EngineHost", Idle)
    monkeypatch.setattr(service_module, "PULSE_S", 0.01)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    service = EngineService(engines)
    serving = threading.Thread(target=service.run, daemon=True)
    serving.start()
    ours.sendall(wire.encode(wire.Load(model_path="", model_id="m", cache=wire.CacheSettings())))
    decoder = wire.FrameDecoder(wire.ToFront)
    ours.settimeout(60)

    def next_of(kind: type) -> Any:
        while True:
            for message in decoder.feed(ours.recv(1 << 16)):
                if isinstance(message, kind):
                    return message

    next_of(wire.Loaded)
    host = cast(Idle, service._host.result(30))
    for steps in (3, 7):
        host.progress = steps
        assert next_of(wire.Alive).steps == steps
    host.media.busy = True  # A PDF is read.
    steps = [next_of(wire.Alive).steps for _ in range(3)]
    assert 7 < steps[0] < steps[1] < steps[2]  # On a busy machine one may be left out for the next.
    host.media.busy = False
    ours.sendall(wire.encode(wire.Quit(deadline_s=60.0)))
    serving.join(60)
    assert not serving.is_alive()  # One that finds its socket closed ends the process, which is this one.


def test_an_engine_that_waits_for_a_disk_in_vain_ends(ends: tuple[socket.socket, socket.socket], monkeypatch):
    """No thread that waits in the kernel can be called back; the front sends the requests to the next one."""
    ours, engines = ends
    monkeypatch.setattr(service_module, "EngineHost", Idle)
    monkeypatch.setattr(service_module, "PULSE_S", 0.01)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    service, why = EngineService(engines), queue.SimpleQueue[str]()
    monkeypatch.setattr(service, "_end_now", why.put)
    serving = threading.Thread(target=service.run, daemon=True)
    serving.start()
    ours.sendall(wire.encode(wire.Load(model_path="", model_id="m", cache=wire.CacheSettings())))
    host = cast(Idle, service._host.result(30))
    assert why.empty()
    host.disk_hangs = True
    assert "does not answer" in why.get(timeout=60)
    host.disk_hangs = False  # Or it would end this process.
    ours.sendall(wire.encode(wire.Quit(deadline_s=60.0)))
    serving.join(60)
    assert not serving.is_alive()


def test_when_it_says_that_it_has_loaded_it_answers_for_the_model(
    ends: tuple[socket.socket, socket.socket], monkeypatch
):
    """What the front asks or tells it right after that, must not meet an engine without one."""
    ours, engines = ends
    monkeypatch.setattr(service_module, "EngineHost", Idle)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    service = EngineService(engines)
    had_model: list[bool] = []
    send = service._send

    def tell(message: Any) -> None:
        if isinstance(message, wire.Loaded):
            had_model.append(service._host.done())
        send(message)

    monkeypatch.setattr(service, "_send", tell)
    serving = threading.Thread(target=service.run, daemon=True)
    serving.start()
    ours.sendall(wire.encode(wire.Load(model_path="", model_id="m", cache=wire.CacheSettings())))
    wait_until(lambda: bool(had_model))
    assert had_model == [True]
    ours.sendall(wire.encode(wire.Quit(deadline_s=60.0)))
    serving.join(60)
    assert not serving.is_alive()


class Busy(Idle):
    """Counts a long text once it may."""

    may = threading.Event()

    def count(self, prompt: RawPrompt, session: str, id: int) -> int:
        if len(prompt.text) > service_module.LARGE_CHARS:
            self.may.wait(60)
        return len(prompt.text)

    def engine_stats(self, id: int) -> dict[str, float]:
        return {"steps": 1.0}

    def peer_trouble(self, id: int) -> str:
        return ""


def test_short_prompts_and_figures_wait_for_no_long_prompt(
    ends: tuple[socket.socket, socket.socket], monkeypatch
):
    ours, engines = ends
    monkeypatch.setattr(service_module, "EngineHost", Busy)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    service = EngineService(engines)
    serving = threading.Thread(target=service.run, daemon=True)
    serving.start()
    ours.sendall(wire.encode(wire.Load(model_path="", model_id="m", cache=wire.CacheSettings())))
    decoder = wire.FrameDecoder(wire.ToFront)
    ours.settimeout(60)
    heard: dict[int, Any] = {}

    def hear(*ids: int) -> None:
        while not heard.keys() >= set(ids):
            for message in decoder.feed(ours.recv(1 << 16)):
                if isinstance(message, (wire.Loaded, wire.Counted, wire.Stats)):
                    heard[getattr(message, "id", 0)] = message

    hear(0)
    long = RawPrompt(text="x" * (service_module.LARGE_CHARS + 1))
    for number in range(1, 5):
        ours.sendall(wire.encode(wire.Count(id=number, prompt=long, session=str(number))))
    ours.sendall(wire.encode(wire.Count(id=5, prompt=RawPrompt(text="short"))))
    ours.sendall(wire.encode(wire.GetStats(id=6)))
    hear(5, 6)
    assert heard[5].result == 5 and heard[6].values["steps"] == 1 and heard.keys() == {0, 5, 6}
    Busy.may.set()
    hear(1, 2, 3, 4)
    ours.sendall(wire.encode(wire.Quit(deadline_s=60.0)))
    serving.join(60)
    assert not serving.is_alive()
