"""The engine program: frames in from the front, frames out to it.

| thread   | does                                                          |
|----------|---------------------------------------------------------------|
| main     | reads frames and hands them on                                |
| engine   | loads the model, then runs the scheduler: the only MLX thread |
| request  | (two, and two for large ones) render, tokenise, hash prompts  |
| stats    | says what the engine holds                                    |
| output   | detokenises, parses, sends events                             |
| pulse    | reports to the front that work gets done            |
| kv-…     | read and write block files                                    |

When the front's end of the socket closes, whatever the reason, and at SIGTERM the engine flushes for a
moment, unwires its memory and exits: no engine outlives its front. (On Linux the kernel ends an engine whose
front was killed, most often before it has flushed.)
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
from msgspec.structs import replace

from ... import wire
from ...chat import Conversation, Event, RawPrompt, TextPart, ToolResultPart, media_of
from ...common.units import human, process_memory, total_ram
from ...errors import AdapterError, InvalidRequest, ModelError, NotNow, OmlxdError
from ...models.footprint import kind_of, read_config
from .. import mlx_adapter
from ..kvio.hot_budget import memory
from ..kvio.lease import FrontLease
from ..output.sink import OutputThread
from ..sequence.sequence import Sequence
from .embedding import EmbedderHost
from .host import EngineHost
from .ranks.lead import Lead, share_of_load

log = logging.getLogger(__name__)

REQUEST_THREADS = 2
LARGE_CHARS = 1 << 19
"""A prompt of so much text, or with an image or a document, has its turn beside other large ones: a small one
never waits for it."""
MEMORY_LOOK_S = 0.25
BEYOND_MLX_BYTES = 2 << 30
BEYOND_MLX_FRACTION = 0.1
"""Of the machine's memory. Blocks on their way to disk may be a twentieth (engine/kvio/open_store.py)."""
PULSE_S = 1.0
"""Between two looks at whether work gets done."""
ORPHAN_FLUSH_S = 1.0
"""How long an engine whose front is gone, or that got SIGTERM, goes on storing."""
ORPHAN_EXIT_S = 5.0
"""How long after that end it is gone itself, at the latest."""
LAST_PASS_S = 2.0
"""How long an engine that ends waits for a pass under way, where memory is wired for it."""
LAST_WORDS_S = 1.0
"""How long an engine that ends at once tries to say why."""


class Lane:
    """`threads` threads. Clients take turns, and so do a client's sessions: work of one is done in order.

    Requests of one client with different priorities take turns as those of different clients do.
    """

    def __init__(self, name: str, threads: int):
        self._waiting: OrderedDict[tuple[str, int], OrderedDict[Hashable, deque[Callable[[], None]]]] = (
            OrderedDict()
        )
        self._changed = threading.Condition()
        self._open = True
        for number in range(threads):
            threading.Thread(target=self._work, name=f"{name}_{number}", daemon=True).start()

    def put_work(self, client: str, session: Hashable, work: Callable[[], None], priority: int = 0) -> None:
        with self._changed:
            self._waiting.setdefault((client, priority), OrderedDict()).setdefault(session, deque()).append(
                work
            )
            self._changed.notify()

    def close(self) -> None:
        """Begin nothing more."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def _work(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except BaseException:
                log.exception("a request failed")
            del work  # It holds the request, and the next may be long in coming.

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self._open)
            if not self._open:
                return None
            whose, sessions = self._waiting.popitem(last=False)
            session, works = sessions.popitem(last=False)
            work = works.popleft()
            if works:
                sessions[session] = works  # Behind all others.
            if sessions:
                self._waiting[whose] = sessions
            return work


class EngineService:
    """One engine over one connected socket. `run` returns when the program should exit.

    terminated  SIGTERM is why
    """

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._send_lock = threading.Lock()
        self._connected = True
        self._lease = FrontLease(self._send)
        self._output = OutputThread(self._send_events)
        self._small_lane = Lane("request", REQUEST_THREADS)
        self._large_lane = Lane("large", REQUEST_THREADS)
        self._stats_lane = Lane("stats", 1)
        self._lock = threading.Lock()
        self._sequences: dict[int, Sequence | None] = {}
        self._host: Future[EngineHost | EmbedderHost] = Future()
        self._engine: threading.Thread | None = None
        self.terminated = False
        self._leaving = threading.Lock()

    @staticmethod
    def _start(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, args=args, daemon=True)
        thread.start()
        return thread

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
        self._start("memory", self._watch_memory)
        mlx_adapter.watch_gpu_faults(mlx_adapter.attention_backend().gpu_faults, self._end_for_fault)
        total, available = memory()
        free_from = "engine" if mlx_adapter.attention_backend().own_memory else "host"
        self._send(wire.Device(mlx_adapter.backend(), total, available, free_from))
        decoder = wire.FrameDecoder(wire.ToEngine)
        while data := self._receive():
            messages = iter(decoder.feed(data))
            for message in messages:
                if isinstance(message, wire.Quit):
                    # What is written on the way out needs space, and the front's answer has to be read.
                    rest = list(messages)
                    self._start("grants", self._read_grants, decoder, rest)
                    return self._close(message.deadline_s)
                self._handle(message)
        if not self.terminated:
            log.info("the front is gone")
            mlx_adapter.attention_backend().stop_judging()
            self._end_soon()
        self._close(ORPHAN_FLUSH_S)

    def terminate(self) -> None:
        """Have `run` return as if the front had gone, or flush no longer. In a signal's handler."""
        self.terminated = True
        mlx_adapter.attention_backend().stop_judging()
        self._end_soon()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def _end_soon(self) -> None:
        """End this process whatever hangs on the way out: perhaps nobody is left who would."""

        def end() -> None:
            mlx_adapter.release_memory()
            os._exit(1)

        last = threading.Timer(ORPHAN_EXIT_S, end)
        last.daemon = True
        last.start()

    def _watch_memory(self) -> None:
        """End this process when it takes far more than MLX, tokenizer and blocks on their way should."""
        process = psutil.Process()
        most = BEYOND_MLX_BYTES + int(total_ram() * BEYOND_MLX_FRACTION)
        beyond = 0
        while beyond <= most:
            time.sleep(MEMORY_LOOK_S)
            beyond = process_memory(process) - mx.get_active_memory() - mx.get_cache_memory()
        what = f"it took {human(beyond)} beside its model and KV, and {human(most)} is the most"
        self._end_now(what)

    def _end_now(self, why: str, lasting: bool = False) -> None:
        """End this process. `lasting`: as `LoadFailed` has it. Any thread."""
        self._leave(why, wire.LoadFailed(message=why, lasting=lasting), 5)

    def _end_for_fault(self, fault: str) -> None:
        """End this process before anybody reads what the GPU has not computed. Any thread."""
        tokens = 0
        if self._host.done():
            host = self._host.result()
            tokens = host.scheduler.pass_tokens
            tokens = tokens if tokens > host.info.block_size else 0  # A smaller one would not go better.
        advice = mlx_adapter.attention_backend().fault_help(fault)
        self._leave(f"a GPU fault: {fault}", wire.GpuFault(fault, advice, tokens), wire.GPU_FAULT_STATUS)

    def _leave(self, why: str, message: Any, status: int) -> None:
        """Log `why`, send `message` and exit; another thread that is here stands still until then."""
        with self._leaving:
            log.error("this engine ends: %s", why)
            self._start("last words", self._send, message).join(LAST_WORDS_S)
            mlx_adapter.release_memory()
            os._exit(status)

    def _read_grants(self, decoder: wire.FrameDecoder, messages: list[Any]) -> None:
        """`messages`: what came with the `Quit`, behind it."""
        while True:
            for message in messages:
                if isinstance(message, wire.Grant):
                    self._lease.granted(message)
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
                request = message.request
                lane = self._lane(request.prompt)
                work = partial(self._try, message, self._generate)
                lane.put_work(request.client, request.session, work, request.priority)
            case wire.Cancel():
                self._cancel(message.id)
            case wire.Count():
                lane = self._lane(message.prompt)
                lane.put_work(message.client, message.session, lambda: self._try(message, self._count))
            case wire.Embed():
                with self._lock:
                    self._sequences[message.id] = None
                client = message.request.client
                self._large_lane.put_work(client, message.id, lambda: self._try(message, self._embed))
            case wire.GetStats():
                self._stats_lane.put_work("", "", lambda: self._stats(message))
            case wire.Explain():
                # May take seconds: no request waits behind it.
                self._start("explain", self._try, message, self._explain)
            case wire.LoadAdapter():
                if isinstance(host := self._host.result(), EngineHost):
                    host.adapters.expect(message)
                self._start("adapter", self._add, message)
            case wire.DropAdapter():
                dropped = wire.AdapterDropped(channel=message.channel)
                if isinstance(host := self._host.result(), EngineHost):
                    self._send_last_stats(host, message.channel)
                    host.adapters.drop(message.channel, lambda: self._send(dropped))
            case wire.Grant():
                self._lease.granted(message)
            case wire.Budget():
                if self._host.done():
                    self._host.result().set_budget(message)
            case wire.PassLimit():
                if self._host.done():
                    self._host.result().set_pass_limit(message.tokens)
            case wire.LogLevel():
                logging.getLogger("omlxd").setLevel(message.level.upper())
            case wire.Load():
                logging.getLogger("omlxd").setLevel(message.log_level.upper())
                self._engine = self._start("engine", self._run_engine, message)
            case _:
                log.warning("unexpected frame %s", type(message).__name__)

    # ----------------------------------------------------------------- the engine thread

    def _run_engine(self, load: wire.Load) -> None:
        try:
            self._send(wire.LoadProgress(stage="loading"))
            folder = Path(load.model_path)
            is_chat = kind_of(folder, read_config(folder)) == "chat"
            if load.ranks > 1 and not is_chat:
                what = f"{load.ranks} ranks can't serve a model that makes vectors or scores"
                raise ModelError(f"{what}; serve it with --ranks 1", param="--ranks")
            host = self._make_host(load) if is_chat else EmbedderHost(load, self._send, self._fail)
        except Exception as error:
            mlx_adapter.end_if_fault(error)
            if not isinstance(error, OmlxdError):  # Its sentence says it all.
                log.warning("what the load raised, whose end the front tells", exc_info=True)
            # The front reads this before it sees the process end.
            adapter, lasting = isinstance(error, AdapterError), _is_lasting(error)
            now = isinstance(error, NotNow)
            self._send(wire.LoadFailed(_reason(error), adapter=adapter, now=now, lasting=lasting))
            mlx_adapter.release_memory()
            os._exit(3)
        # What was loaded lives as long as the process: 79,000 objects that a full collection would
        # visit for 45 ms, in the middle of somebody's answer. Most are frozen since they were imported.
        gc.collect()
        gc.freeze()
        self._host.set_result(host)  # First: a front that knows of it may ask, and send a budget.
        self._send(wire.Loaded(info=host.info))
        self._start("pulse", self._pulse)
        try:
            host.scheduler.run()
        except BaseException:
            # Nothing is served without this thread; the front restarts what exits.
            log.exception("the engine thread died")
            mlx_adapter.release_memory()
            os._exit(4)
        mlx_adapter.release_memory(idle=True)

    def _make_host(self, load: wire.Load) -> EngineHost:
        """Start the other ranks, if the model has some, and load."""
        lead = None
        if load.ranks > 1:
            load = share_of_load(load)
            lead = Lead(load, self._lease, self._end_now)

        def want(wants: wire.Wants) -> None:
            self._send(replace(wants, nbytes=wants.nbytes * load.ranks_here))

        return EngineHost(load, self._output, self._lease, want, lead)

    def _pulse(self) -> None:
        """Say that work gets done: a long tool call or a restore sends no events. A PDF on its way has a
        deadline of its own, and counts.

        End this process once a file was written to whose pages are its weights, or the SSD cache's folder has
        stopped answering: the next one loads anew, and takes the requests that have had no answer yet.
        """
        sent, read, host = 0, 0, self._host.result()
        scheduler = host.scheduler
        while self._connected:
            time.sleep(PULSE_S)
            if isinstance(host, EngineHost):
                if file := host.loaded.mapped.changed():
                    self._end_now(f"{file} was written to under its mapping")
                if host.disk_hangs:
                    self._end_now("the SSD cache's folder does not answer")
                read += host.media.busy
            if (steps := scheduler.progress + read) != sent:
                sent = steps
                self._send(wire.Alive(steps=steps))

    # ----------------------------------------------------------------- request threads

    def _lane(self, prompt: Conversation | RawPrompt) -> Lane:
        return self._large_lane if _size(prompt) > LARGE_CHARS else self._small_lane

    def _try(self, message: Any, answer: Callable[[Any], None]) -> None:
        """Answer `message`; whatever goes wrong is told to its client."""
        try:
            answer(message)
        except BaseException as error:  # A library may panic.
            self._forget(message.id)
            self._fail(message.id, error, message.request.name if isinstance(message, wire.Generate) else "")

    def _is_wanted(self, id: int) -> bool:
        with self._lock:
            return id in self._sequences

    def _generate(self, message: wire.Generate) -> None:
        host = self._host.result()
        if not self._is_wanted(message.id):
            return
        sequence = host.start(message.id, message.request, lambda: self._forget(message.id))
        with self._lock:
            wanted = message.id in self._sequences
            if wanted:
                self._sequences[message.id] = sequence
        if not wanted:  # cancelled meanwhile, or already over
            host.cancel(sequence)

    def _embed(self, message: wire.Embed) -> None:
        host = self._host.result()
        if not isinstance(host, EmbedderHost):
            raise InvalidRequest("This model makes no vectors and no scores.", param="model")
        host.embed(message, lambda: self._is_wanted(message.id), lambda: self._forget(message.id))

    def _count(self, message: wire.Count) -> None:
        tokens = self._host.result().count(message.prompt, message.session, message.id)
        self._send(wire.Counted(id=message.id, result=tokens))

    def _explain(self, message: wire.Explain) -> None:
        host = self._host.result()
        if message.files:
            explanation = host.cached_files(message.id, message.request)
        else:
            explanation = host.explain(message.id, message.request, message.reached)
        self._send(wire.Explained(id=message.id, result=explanation))

    def _add(self, message: wire.LoadAdapter) -> None:
        try:
            host = self._host.result()
            if not isinstance(host, EngineHost):
                raise AdapterError("This model takes no adapters.", param="model")
            if host.loaded.split:
                raise AdapterError("Several ranks (--ranks) serve no adapters.", param="model")
            info = host.adapters.add(message).info
            self._send(wire.Loaded(info=info, channel=message.channel))
        except BaseException as error:  # A library may panic.
            mlx_adapter.end_if_fault(error)
            if not isinstance(error, OmlxdError):
                log.exception("%s failed to load", message.model_id)
            self._send(
                wire.LoadFailed(_reason(error), message.channel, adapter=True, now=isinstance(error, NotNow))
            )

    def _stats(self, message: wire.GetStats) -> None:
        host = self._host.result() if self._host.done() else None
        if host is not None and (message.trim or message.reset_peak):
            host.tidy_memory(message.trim, message.reset_peak)
        values = host.engine_stats(message.id) if host is not None else {}
        values["device_available_bytes"] = float(memory()[1])
        peer = host.peer_trouble(message.id) if isinstance(host, EngineHost) else ""
        self._send(wire.Stats(id=message.id, values=values, peer=peer))

    def _send_last_stats(self, host: EngineHost | EmbedderHost, channel: int) -> None:
        """Send the counters of `channel` once more, as it ends. Raises nothing."""
        id = channel * wire.CHANNEL
        try:
            self._send(wire.Stats(id=id, values=host.engine_stats(id)))
        except Exception:
            log.exception("its last counters are lost")

    def _fail(self, id: int, error: BaseException, name: str = "") -> None:
        if isinstance(error, RecursionError):
            error = InvalidRequest("the request holds a value that is nested too deeply")
        if not isinstance(error, OmlxdError):
            log.exception("%s failed", name or f"request {id}", exc_info=error)
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
        for lane in (self._small_lane, self._large_lane, self._stats_lane):
            lane.close()
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
        for channel in host.channels:
            self._send_last_stats(host, channel)
        host.close(max(0.0, end - time.monotonic()))
        self._lease.release_all()

    def release_memory(self) -> None:
        """Unwire MLX's memory, after the pass under way if it ends soon. The last call before the exit."""
        if self._engine is not None and mlx_adapter.limits.get("mlx_wired_limit_bytes"):
            self._engine.join(LAST_PASS_S)
        mlx_adapter.release_memory()


def _size(prompt: Conversation | RawPrompt) -> int:
    """Characters, and what takes as long as so many: 0.1 ms for a message, 0.1 ms for a tool."""
    if isinstance(prompt, RawPrompt):
        return len(prompt.text) + 4 * len(prompt.tokens or ())
    if any(True for _ in media_of(prompt.messages)):
        return LARGE_CHARS + 1
    parts = [part for message in prompt.messages for part in message.parts]
    texts = sum(len(part.text) for part in parts if isinstance(part, TextPart | ToolResultPart))
    return texts + 64 * (len(parts) + len(prompt.tools))


def _reason(error: BaseException) -> str:
    if isinstance(error, OmlxdError):
        return error.message
    return f"{type(error).__name__}: {error}"


def _is_lasting(error: BaseException) -> bool:
    """Whether a load that raised `error` would raise it again: not for want of memory or a failing disk."""
    if isinstance(error, OSError):
        return isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError | PermissionError)
    if isinstance(error, OmlxdError):
        return error.code == "model_unusable" or isinstance(error, InvalidRequest)
    return not isinstance(error, MemoryError) and not re.search(r"alloc|memory", str(error), re.IGNORECASE)
