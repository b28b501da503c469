"""A scripted engine behind the front's Engine protocol, and a daemon made of one.

A script is a list of steps: an Event is yielded, a number is slept (seconds), an exception is
raised. `FakeEngine.requests` keeps what was asked, `names` under which ids, `closed` counts answers closed
before their end.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace
from starlette.routing import Route

from omlxd import wire
from omlxd.chat import (
    Conversation,
    EmbedRequest,
    Event,
    Finished,
    GenerateRequest,
    RawPrompt,
    ReasoningDelta,
    Scored,
    TextDelta,
    TokenLogprob,
    ToolCall,
    Usage,
    Vectors,
)
from omlxd.errors import Unavailable
from omlxd.front.app import create_app
from omlxd.front.engines.ledger.cold_ledger import ColdLedger
from omlxd.front.engines.model import Card
from omlxd.front.engines.names.names import resolve_name
from omlxd.front.http.settings import HttpSettings
from omlxd.front.keep_awake import KeepAwake
from omlxd.front.owner.pull import Pulling
from omlxd.kv.ledger.evicted_log import EvictedLog, Removal
from omlxd.kv.ledger.ledger import LedgerStats
from omlxd.wire import ModelInfo
from omlxd.wire.explanation import Explanation

Step = Event | float | Exception

USAGE = Usage(
    prompt_tokens=100,
    cached_hot=48,
    cached_cold=16,
    completion_tokens=7,
    reasoning_tokens=3,
    ttft_s=0.25,
)

HELLO: tuple[Step, ...] = (TextDelta("Hello"), TextDelta(" there"), Finished("stop", USAGE))

EVERYTHING: tuple[Step, ...] = (
    ReasoningDelta("Let me "),
    ReasoningDelta("think."),
    TextDelta("I will "),
    TextDelta("look."),
    ToolCall("call_1", "read", '{"path":"/tmp/a","n":1}'),
    ToolCall("call_2", "read", "{}"),
    Finished("tool_calls", USAGE),
)

INFO = ModelInfo(
    model_id="org/tiny",
    model_type="qwen3",
    context_length=4096,
    vocab_size=512,
    weight_bytes=1,
    kv_bytes_per_token=1,
    kv_reuse="",
    namespace="ns",
    block_size=64,
    backend="cpu",
    note="a test",
    images=True,
)


async def silence(seconds: float) -> None:
    """A sleep of many short ones: where the machine stands still for a while, only one of them is over."""
    count = max(1, min(100, int(seconds / 0.01)))
    for _ in range(count):
        await asyncio.sleep(seconds / count)


class FakeEngine:
    def __init__(self, script: Sequence[Step] = HELLO, model_id: str = "org/tiny", tokens: int = 42):
        self.model_id, self.settings = model_id, SimpleNamespace(join=())
        self.info: ModelInfo | None = INFO
        self.state = "ready"
        self.starts = 1
        self.deaths = 0
        self.pid: int | None = None
        self.in_flight = 0
        self.by_priority: dict[int, int] = {}
        self.trouble = self.slowed = ""
        self.is_refused = False
        self.why_never = lambda: ""
        self.shares = ""
        self.explanation = Explanation(cause="none")
        self.values: dict[str, float] | None = {}
        self.last_stats: list[tuple[int, dict[str, float]]] = []
        self.script = tuple(script)
        self.tokens = tokens
        self.requests: list[GenerateRequest] = []
        self.names: list[str] = []
        self.clients: list[str] = []
        self.embedded: list[EmbedRequest] = []
        self.kind = "chat"
        self.counted: list[Conversation | RawPrompt] = []
        self.closed = asyncio.Event()
        self.orders: list[tuple[bool, bool]] = []
        self.finished = 0
        self.keep_alive: float | None = None

    @property
    def card(self) -> Card:
        return Card(
            id=self.model_id,
            state=self.state,
            context_length=self.context_length,
            images=bool(self.images),
            blind=self.blind,
            tools=True,
            thinking=True,
            family="qwen3",
            bits=4,
            nbytes=1000,
            changed=1.7e9,
            template="{{ tools }}{{ enable_thinking }}",
            info=self.info,
            kind=self.kind,
        )

    @property
    def context_length(self) -> int | None:
        return self.info.context_length if self.info else None

    @property
    def images(self) -> bool | None:
        return self.info.images if self.info else None

    @property
    def blind(self) -> str:
        return self.info.blind if self.info else ""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        # Whatever a protocol makes of a body must be fit for the frames that real engines get.
        (frame,) = wire.FrameDecoder(wire.ToEngine).feed(wire.encode(wire.Generate(1, request)))
        assert frame.request == request
        self.names.append(request.name)
        self.clients.append(request.client)
        # All else is the same, streamed or not.
        self.requests.append(replace(request, collected=False, name="", client="", asked=0.0))
        ended = False
        try:
            if count := len(request.labels):
                yield Scored(((-1.0,),) * count, (0.0,) * count, TokenLogprob("yes", -1.0))
            for step in self.script:
                if isinstance(step, Exception):
                    ended = True
                    raise step
                if isinstance(step, (int, float)):
                    await silence(step)
                    continue
                ended = isinstance(step, Finished)
                yield step
            ended = True
        finally:
            if ended:
                self.finished += 1
            else:
                self.closed.set()

    async def count_tokens(
        self, prompt: Conversation | RawPrompt, session: str = "", client: str = ""
    ) -> int:
        (frame,) = wire.FrameDecoder(wire.ToEngine).feed(wire.encode(wire.Count(1, prompt)))
        assert frame.prompt == prompt
        self.counted.append(prompt)
        return self.tokens

    async def embed(self, request: EmbedRequest) -> Vectors:
        (frame,) = wire.FrameDecoder(wire.ToEngine).feed(wire.encode(wire.Embed(1, request)))
        assert frame.request == request
        self.embedded.append(request)
        rows = [[float(len(text)), 0.5] for text in request.texts or request.tokens]
        width = 1 if request.query is not None else 2
        return Vectors(
            array("f", [value for row in rows for value in row[:width]]).tobytes(), width, len(rows)
        )

    async def explain(self, request: GenerateRequest, reached: int = -1, files: bool = False) -> Explanation:
        self.explained = (request, reached)
        return self.explanation

    def take_last_stats(self) -> Iterator[tuple[int, dict[str, float]]]:
        while self.last_stats:
            yield self.last_stats.pop(0)

    async def stats(self, trim: bool = False, reset_peak: bool = False) -> wire.Stats | None:
        if trim or reset_peak:
            self.orders.append((trim, reset_peak))
        return None if self.values is None else wire.Stats(id=1, values=self.values)


class FakeCold(ColdLedger):
    """`stats`: what its account says; None: there is no SSD cache."""

    def __init__(self, root: Path = Path(), stats: LedgerStats | None = None):
        super().__init__(root, 0)
        self.root, self.stats = root, stats
        self.evicted_log = EvictedLog()

    @property
    def folder(self) -> str:
        return str(self.root)

    def peek(self) -> LedgerStats | None:
        return self.stats

    async def _ask(self, function: Any, *args: object) -> Any:
        raise Unavailable("This daemon has no SSD cache.")

    async def pinned_files(self) -> dict[str, list[str]]:
        return {}

    def removal(self, path: str) -> Removal | None:
        return self.evicted_log.of(path)


class FakeEngines:
    """The first engine is the default one."""

    def __init__(self, *engines: FakeEngine):
        self.cold = FakeCold()
        self.awake = KeepAwake(False)
        self.catalog = SimpleNamespace(settings=SimpleNamespace(memory_limit_bytes=6 * 10**9))
        self._engines = {engine.model_id: engine for engine in engines}

    async def look_for_models(self, *, afresh: bool = False) -> None: ...

    async def find_engine(self, model_name: str) -> FakeEngine:
        known = list(self._engines)
        return self._engines[resolve_name(model_name, known, known[0] if known else None)]

    def models(self) -> list[FakeEngine]:
        return list(self._engines.values())

    async def load(self, model_name: str, keep_alive: float | None = None) -> FakeEngine:
        engine = await self.find_engine(model_name)
        engine.state, engine.keep_alive = "ready", keep_alive
        return engine

    async def unload(self, model_name: str) -> bool:
        (await self.find_engine(model_name)).state = "unloaded"
        return True

    def keep_alive(self, engine: FakeEngine, seconds: float) -> None:
        engine.keep_alive = seconds


def app_of(*engines: FakeEngine, **settings: Any):
    made: Any = FakeEngines(*engines)
    return create_app(made, HttpSettings(**settings), [ollama_pull(made)])


def ollama_pull(engines: Any) -> Route:
    return next(route for route in Pulling(engines).routes() if route.path == "/api/pull")


@contextlib.asynccontextmanager
async def served(app: Any, port: int = 0) -> AsyncIterator[str]:
    """The app on Hypercorn, at the base URL that is yielded; real sockets, loopback. `port` 0: a free one."""
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.accesslog = config.errorlog = None
    config.graceful_timeout = 0.2
    sockets = config.create_sockets()
    config.create_sockets = lambda: sockets  # type: ignore[method-assign]
    (listening,) = sockets.insecure_sockets
    listening.listen()  # Who comes before the server runs, waits.
    port = listening.getsockname()[1]
    stop = asyncio.Event()
    server = asyncio.create_task(serve(app, config, shutdown_trigger=stop.wait))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        stop.set()
        await asyncio.wait_for(server, 60)
