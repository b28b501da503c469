"""Requests in, lines out. Each request is a task; they are answered side by side.

Order counts where it must: a `load` waits for the answers that were asked for before it, and what
comes after a `load` waits for it, `quit` as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from msgspec.structs import replace

from ... import __version__
from ...api.fields.body import ParsedRequest
from ...api.fields.unknown_fields import UnknownFields, noting
from ...api.openai import chat_request, completions, scores
from ...chat import Finished
from ...config import Settings
from ...errors import InvalidRequest, OmlxdError, Overloaded, RequestTooLarge
from ..engines.model import ModelEngine
from ..engines.pool import EnginePool
from ..http.choices import scores_of
from ..http.sending.event_pump import EventPump
from ..owner.engine_metrics import MetricsOf
from ..owner.inspect import inspect_prompt, parse_inspect
from ..owner.status import Admin
from .messages import (
    AnyRequest,
    Cancel,
    Chat,
    Classify,
    Generate,
    Id,
    Info,
    Inspect,
    Line,
    Lines,
    Load,
    Metrics,
    Quit,
    classified,
    decode_request,
    failure,
    id_of,
    line_out,
)
from .model_slot import Loading, ModelSlot
from .pipes import LineWriter

log = logging.getLogger(__name__)

LINE_BYTES = 32 << 20
"""Bytes of one line, as of an HTTP body."""
MOST = 256
"""Requests without an answer at most."""


class Bridge:
    """Answers each line given to `take_line`.

    quit     set once a `quit` came
    bye      the last line of all
    """

    def __init__(self, settings: Settings, pool: EnginePool, out: LineWriter):
        self._out = out
        self._pool = pool
        self._slot = ModelSlot(settings, pool)
        self._admin = Admin(pool, MetricsOf(pool))
        self._tasks: dict[Id, asyncio.Task[None]] = {}
        self._answers: dict[Id, asyncio.Task[None]] = {}
        self._cancelled: set[Id] = set()
        self._first: asyncio.Task[None] | None = None
        self.quit = asyncio.Event()
        self.bye = line_out(None, "bye")

    def load_first(self) -> None:
        """Begin to load the model of `--model`, before a request for it."""
        self._first = asyncio.create_task(self._report_first(self._slot.load("", ())))

    async def _report_first(self, loading: Loading) -> None:
        try:
            self._out.put_line(_loaded(None, await loading))
        except OmlxdError as error:
            self._out.put_line(failure(None, error))

    # ----------------------------------------------------------------- requests

    def take_line(self, line: bytes | None) -> None:
        """Take a line of input; None stands for one longer than `LINE_BYTES`. Returns at once."""
        if line is None:
            self._out.put_line(failure(None, RequestTooLarge(f"A line has at most {LINE_BYTES} bytes.")))
        elif line.strip():
            unknown = noting()
            try:
                self._begin_request(decode_request(line), line, unknown)
            except OmlxdError as error:
                id = id_of(line)
                self._out.put_line(failure(None if id in self._tasks else id, error))

    def _begin_request(self, request: AnyRequest, line: bytes, unknown: UnknownFields) -> None:
        if request.id in self._tasks:
            raise InvalidRequest(f"id: {request.id!r} is in use; give each request its own", param="id")
        if isinstance(request, Quit):
            self.bye = line_out(request.id, "bye", ignored=unknown.names)
            self.quit.set()
            return
        if len(self._tasks) >= MOST:
            raise Overloaded(f"{MOST} requests wait for an answer already; send it again in a moment.")
        if isinstance(request, Load):
            loading = self._slot.load(request.wanted, [*self._answers.values()])
        else:
            loading = self._slot.loading
        task = asyncio.create_task(self._answer(request, line, loading, unknown))
        self._tasks[request.id] = task
        if isinstance(request, (Generate, Chat, Classify, Inspect)):
            self._answers[request.id] = task

    async def _answer(
        self, request: AnyRequest, line: bytes, loading: Loading | None, unknown: UnknownFields
    ) -> None:
        """Answer one request, always with a last line."""
        try:
            last = await self._last_line(request, line, loading)
        except asyncio.CancelledError:
            if request.id not in self._cancelled:
                raise
            last = line_out(request.id, "done", reason="cancelled")
        except OmlxdError as error:
            last = failure(request.id, error)
        except Exception:
            log.exception("a request failed unexpectedly")
            last = failure(
                request.id, OmlxdError("Something went wrong inside omlxd; its log has the details.")
            )
        finally:
            self._cancelled.discard(request.id)
            self._answers.pop(request.id, None)
            del self._tasks[request.id]  # The id may be used again by whoever has read the last line.
        if ignored := unknown.names:
            last["ignored"] = ignored
        self._out.put_line(last)

    async def _last_line(self, request: AnyRequest, line: bytes, loading: Loading | None) -> Line:
        match request:
            case Load():
                assert loading is not None
                return _loaded(request.id, await asyncio.shield(loading))
            case Generate():
                return await self._stream(request.id, completions.parse(line), loading)
            case Chat():
                return await self._stream(request.id, chat_request.parse(line), loading)
            case Classify():
                if request.messages is not None:
                    parsed = chat_request.parse(scores.without_top(line))
                else:
                    parsed = completions.parse(line)
                _check_one(parsed)
                labelled = scores.labelled(parsed, request.labels, request.top_logprobs)
                return await self._classify(request, labelled, loading)
            case Inspect():
                return await self._inspect(request.id, parse_inspect(line), loading)
            case Info():
                return self._info(request.id)
            case Metrics():
                return await self._metrics(request.id)
            case Cancel():
                return line_out(request.id, "cancelled", found=self._cancel(request.target))
            case Quit():
                raise AssertionError("it has no task")

    async def _stream(self, id: Id, parsed: ParsedRequest, loading: Loading | None) -> Line:
        _check_one(parsed)
        asked = time.monotonic()
        engine = await self._slot.engine(loading, parsed.model)
        pump, lines = EventPump(engine.generate(replace(parsed.generate, asked=asked))), Lines(id)
        try:
            async for event in pump.events():
                if (line := lines.of(event)) is None:
                    continue
                if isinstance(event, Finished):
                    return line
                self._out.put_line(line)
                await self._out.room()
        finally:
            await pump.close()
        raise AssertionError("it ends with Finished, or raises")

    async def _classify(self, request: Classify, parsed: ParsedRequest, loading: Loading | None) -> Line:
        engine = await self._slot.engine(loading, parsed.model)
        pump, result = EventPump(scores_of(engine, parsed)), scores.Scores(parsed.labels)
        try:
            async for event in pump.events():
                result.event(event)
        finally:
            await pump.close()
        return classified(request, result)

    async def _inspect(self, id: Id, parsed: ParsedRequest, loading: Loading | None) -> Line:
        engine = await self._slot.engine(loading, parsed.model)
        found = await inspect_prompt(self._pool, engine, parsed)
        return line_out(id, "inspected", file=found.file, tokens=found.tokens, layers=found.layers)

    def _cancel(self, target: Id) -> bool:
        """Return whether there was an answer to end."""
        task = self._answers.get(target)
        if task is None:
            return False
        self._cancelled.add(target)
        task.cancel()
        return True

    def _info(self, id: Id) -> Line:
        model, loading = self._slot.loaded, self._slot.loading
        if model is None:
            state = "loading" if loading is not None and not loading.done() else "none"
            return line_out(id, "info", version=__version__, state=state)
        return line_out(id, "info", version=__version__, state=model.state, model=model.info)

    async def _metrics(self, id: Id) -> Line:
        status = await self._admin.daemon_status()
        model = self._slot.loaded
        own = [one for one in status.models if model is not None and one.id == model.model_id]
        return line_out(id, "metrics", model=own[0] if own else None, cold=status.cold)

    # ----------------------------------------------------------------- the end

    async def loaded(self) -> None:
        """Wait until the newest load is over: a client that loads before `quit` wants its line."""
        if self._slot.loading is not None:
            await asyncio.wait({self._slot.loading})

    async def finish_answers(self, seconds: float | None = None) -> None:
        """Wait until every request is answered, for `seconds` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while tasks := [task for task in self._tasks.values() if not task.done()]:
                    await asyncio.wait(tasks)

    def drop(self) -> None:
        """Drop all answers, since nobody reads them."""
        for task in self._tasks.values():
            task.cancel()


def _check_one(parsed: ParsedRequest) -> None:
    if parsed.answers != 1:
        param = "prompt" if parsed.more_prompts else "n"
        raise InvalidRequest(f"{param}: a line has one answer; send a line for each", param=param)


def _loaded(id: Id | None, engine: ModelEngine) -> Line:
    assert engine.info is not None
    return line_out(id, "loaded", model=engine.info)
