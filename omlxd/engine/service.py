"""The engine program: frames in from the front, frames out to it.

| thread   | does                                                          |
|----------|---------------------------------------------------------------|
| main     | reads frames and hands them on                                |
| engine   | loads the model, then runs the scheduler: the only MLX thread |
| request  | (two) render, tokenise and hash prompts                       |
| output   | detokenises, parses, sends events                             |
| pulse    | tells the front that work gets done, while it does            |
| kv-…     | read and write block files                                    |

When the front's end of the socket closes, whatever the reason, the engine flushes for a moment and
exits: no engine outlives its front. (On Linux, one whose front was killed is ended by the kernel before
it could flush.)
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from .. import wire
from ..chat import Event
from ..errors import OmlxdError
from . import mlx_adapter
from .host import EngineHost
from .hot_budget import memory
from .output_thread import OutputThread
from .sequence import Sequence
from .space import FrontSpace

log = logging.getLogger(__name__)

REQUEST_THREADS = 2
PULSE_S = 1.0
"""Between two looks at whether work gets done."""
ORPHAN_FLUSH_S = 1.0
"""How long an engine whose front is gone goes on storing."""
ORPHAN_EXIT_S = 5.0
"""How long after that end it is gone itself, at the latest."""


class EngineService:
    """One engine over one connected socket. `run` returns when the program should exit."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._send_lock = threading.Lock()
        self._connected = True
        self._space = FrontSpace(self._send)
        self._output = OutputThread(self._send_events)
        self._requests = ThreadPoolExecutor(REQUEST_THREADS, thread_name_prefix="request")
        self._lock = threading.Lock()
        self._sequences: dict[int, Sequence | None] = {}
        self._host: Future[EngineHost] = Future()
        self._engine: threading.Thread | None = None

    # ----------------------------------------------------------------- frames

    def _send(self, message: Any) -> None:
        frame = wire.encode(message)
        with self._send_lock:
            try:
                self._sock.sendall(frame)
            except OSError:
                self._connected = False

    def _send_events(self, events: tuple[tuple[int, Event], ...]) -> None:
        self._send(wire.Events(events=events))

    def run(self) -> None:
        total, available = memory()
        self._send(wire.Device(backend=mlx_adapter.backend(), total=total, available=available))
        decoder = wire.FrameDecoder(wire.ToEngine)
        deadline_s = ORPHAN_FLUSH_S
        while data := self._receive():
            messages = iter(decoder.feed(data))
            for message in messages:
                if isinstance(message, wire.Quit):
                    # What is written on the way out needs space, and the front's answer has to be read.
                    rest = list(messages)
                    threading.Thread(target=self._read_grants, args=(decoder, rest), daemon=True).start()
                    return self._close(message.deadline_s)
                self._handle(message)
        log.info("the front is gone")
        # Whatever hangs on the way out: nobody is left who would end this process.
        last = threading.Timer(ORPHAN_EXIT_S, os._exit, (1,))
        last.daemon = True
        last.start()
        self._close(deadline_s)

    def _read_grants(self, decoder: wire.FrameDecoder, messages: list[Any]) -> None:
        """`messages`: what came with the `Quit`, behind it."""
        while True:
            for message in messages:
                if isinstance(message, wire.Grant):
                    self._space.granted(message)
            if not (data := self._receive()):
                return
            messages = decoder.feed(data)

    def _receive(self) -> bytes:
        try:
            return self._sock.recv(1 << 18)
        except OSError:
            return b""

    def _handle(self, message: Any) -> None:
        match message:
            case wire.Generate():
                with self._lock:
                    self._sequences[message.id] = None
                self._requests.submit(self._generate, message)
            case wire.Cancel():
                self._cancel(message.id)
            case wire.Count():
                self._requests.submit(self._count, message)
            case wire.GetStats():
                self._requests.submit(self._stats, message)
            case wire.Explain():
                # May take seconds: no request waits behind it.
                threading.Thread(target=self._explain, args=(message,), name="explain", daemon=True).start()
            case wire.Grant():
                self._space.granted(message)
            case wire.Budget():
                if self._host.done():
                    self._host.result().set_budget(message)
            case wire.LogLevel():
                logging.getLogger("omlxd").setLevel(message.level.upper())
            case wire.Load():
                logging.getLogger("omlxd").setLevel(message.log_level.upper())
                self._engine = threading.Thread(
                    target=self._run_engine, args=(message,), name="engine", daemon=True
                )
                self._engine.start()
            case _:
                log.warning("unexpected frame %s", type(message).__name__)

    # ----------------------------------------------------------------- the engine thread

    def _run_engine(self, load: wire.Load) -> None:
        try:
            self._send(wire.LoadProgress(stage="loading"))
            host = EngineHost(load, self._output, self._space, self._send)
        except Exception as error:
            log.exception("load failed")
            # The front reads this before it sees the process end.
            self._send(wire.LoadFailed(message=_reason(error)))
            os._exit(3)
        # What was loaded lives as long as the process: 79,000 objects that a full collection would
        # visit for 45 ms, in the middle of somebody's answer. Most are frozen since they were imported.
        gc.collect()
        gc.freeze()
        self._host.set_result(host)  # First: a front that knows of it may ask, and send a budget.
        self._send(wire.Loaded(info=host.info))
        threading.Thread(target=self._pulse, name="pulse", daemon=True).start()
        try:
            host.scheduler.run()
        except BaseException:
            # Nothing is served without this thread; the front restarts what exits.
            log.exception("the engine thread died")
            os._exit(4)

    def _pulse(self) -> None:
        """Say that work gets done: a long tool call or a restore sends no events."""
        told = 0
        scheduler = self._host.result().scheduler
        while self._connected:
            time.sleep(PULSE_S)
            if (steps := scheduler.steps) != told:
                told = steps
                self._send(wire.Alive(steps=steps))

    # ----------------------------------------------------------------- request threads

    def _generate(self, message: wire.Generate) -> None:
        try:
            host = self._host.result()
            with self._lock:
                if message.id not in self._sequences:
                    return
            sequence = host.start(message.id, message.request, lambda: self._forget(message.id))
        except Exception as error:
            self._forget(message.id)
            self._fail(message.id, error)
            return
        with self._lock:
            wanted = message.id in self._sequences
            if wanted:
                self._sequences[message.id] = sequence
        if not wanted:  # cancelled meanwhile, or already over
            host.cancel(sequence)

    def _count(self, message: wire.Count) -> None:
        try:
            tokens = self._host.result().count(message.prompt, message.session)
            self._send(wire.Counted(id=message.id, tokens=tokens))
        except Exception as error:
            self._fail(message.id, error)

    def _explain(self, message: wire.Explain) -> None:
        try:
            explanation = self._host.result().explain(message.request, message.reached)
            self._send(wire.Explained(id=message.id, explanation=explanation))
        except Exception as error:
            self._fail(message.id, error)

    def _stats(self, message: wire.GetStats) -> None:
        values = self._host.result().stats() if self._host.done() else {}
        values["device_available_bytes"] = float(memory()[1])
        self._send(wire.Stats(id=message.id, values=values))

    def _fail(self, id: int, error: Exception) -> None:
        if not isinstance(error, OmlxdError):
            log.exception("request %d failed", id, exc_info=error)
            error = OmlxdError(f"{type(error).__name__}: {error}")
        self._send_events(((id, error.as_event()),))

    def _cancel(self, id: int) -> None:
        with self._lock:
            sequence = self._sequences.pop(id, None)
        if sequence is not None:
            self._host.result().cancel(sequence)

    def _forget(self, id: int) -> None:
        with self._lock:
            self._sequences.pop(id, None)

    # ----------------------------------------------------------------- the end

    def _close(self, deadline_s: float) -> None:
        self._requests.shutdown(wait=False, cancel_futures=True)
        if not self._host.done():
            return
        host = self._host.result()
        end = time.monotonic() + deadline_s
        host.scheduler.stop()
        if self._engine is not None:
            self._engine.join(deadline_s)
            if self._engine.is_alive():
                # In a long chunk: the store is still its own, and the deadline is over.
                log.warning("the engine is still computing: what it has not stored is lost")
                return
        self._output.close(1.0)
        host.close(max(0.0, end - time.monotonic()))
        self._space.release_all()


def _reason(error: Exception) -> str:
    if isinstance(error, OmlxdError):
        return error.message
    return f"{type(error).__name__}: {error}"
