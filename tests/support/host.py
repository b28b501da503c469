"""An engine host in this process: requests in, chat events out; no sockets and no front."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omlxd import wire
from omlxd.chat import (
    Conversation,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    Message,
    RawPrompt,
    Sampling,
    TextDelta,
    TextPart,
)
from omlxd.engine.output.sink import OutputThread
from omlxd.engine.sequence.sequence import Sequence
from omlxd.engine.server.host import EngineHost


class Host:
    """`model`: a folder; `seed`: as Load has it; `cold_dir`: nothing may be written there.

    `ask` waits for a request's events, `send` doesn't.
    """

    def __init__(
        self, model: Path, slots: int = 8, seed: int | None = 0, draft: str = "", cold_dir: str = ""
    ):
        self._ids = itertools.count(1)
        self._events: dict[int, queue.SimpleQueue[Event]] = {}
        self._ready = threading.Event()
        load = wire.Load(
            model_path=str(model),
            model_id="tiny",
            cache=wire.CacheSettings(cold_dir=cold_dir),
            max_concurrent=slots,
            seed=seed,
            draft_path=draft,
        )

        def run() -> None:
            self.engine = EngineHost(load, OutputThread(self._take), None)  # type: ignore[arg-type]
            self._ready.set()
            self.engine.scheduler.run()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert self._ready.wait(120)

    def _take(self, events: tuple[tuple[int, Event], ...]) -> None:
        for id, event in events:
            self._events[id].put(event)

    def send(self, request: GenerateRequest) -> int:
        return self.start(request, lambda: None).id

    def start(self, request: GenerateRequest, end: Callable[[], None]) -> Sequence:
        """`end` is called once nothing more is sent of it."""
        id = next(self._ids)
        self._events[id] = queue.SimpleQueue()
        return self.engine.start(id, request, end)

    def events(self, id: int) -> list[Event]:
        out: list[Event] = []
        while not out or not isinstance(out[-1], Finished | Failed):
            out.append(self._events[id].get(timeout=300))
        return out

    def ask(self, request: GenerateRequest) -> list[Event]:
        return self.events(self.send(request))

    def close(self) -> None:
        self.engine.scheduler.stop()
        self._thread.join(120)
        self.engine.close(5)


def chat(text: str = "Hello", *, thinking: bool | None = False, **more: Any) -> GenerateRequest:
    """A request of one user message. `more`: fields of Conversation, of Sampling, or `format`."""
    of_sampling = {name: more.pop(name) for name in list(more) if name in Sampling.__struct_fields__}
    format = more.pop("format", None)
    prompt = Conversation((Message("user", (TextPart(text),)),), thinking=thinking, **more)
    return GenerateRequest(prompt, sampling=Sampling(**of_sampling), format=format)


def raw(text: str = "Hello", format: Any = None, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(RawPrompt(text), sampling=Sampling(**sampling), format=format)


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def finished(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished), events[-1]
    return events[-1]
