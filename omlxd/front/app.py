"""The HTTP app: routes, and nothing else. `create_app` wires them to engines.

Layers, outermost first: `PacedApp` (clients that read slowly), CORS where it is opened, `Shell` (id, body
limit, errors, log line), `Guard` (host, origin, key), then a route. No route catches errors; they raise
OmlxdError and the shell answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .. import __version__
from ..api.anthropic import request as anthropic
from ..api.anthropic.answer import TokenCount
from ..api.body import ParsedRequest, keep_alive_of, mended, with_timeout
from ..api.ollama.answer import unloaded
from ..api.ollama.request import OllamaRequest
from ..api.responses.request import parse_compact
from ..chat import first_image
from .engines.link import in_background
from .engines.protocol import Engine, Engines, check_chats, check_images
from .http.discovery import Discovery
from .http.embeddings import Embeddings
from .http.generation import (
    CLASSIFY,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    OPENAI_CHAT,
    OPENAI_COMPLETIONS,
    SCORE,
    Dialect,
    GenerationResponse,
    InputTokens,
    Parse,
    messages_dialect,
    responses_dialect,
)
from .http.guard import Guard
from .http.recent_requests import RecentRequests
from .http.response_store import ResponseStore, StoredResponses
from .http.router_events import RouterEvents
from .http.settings import HttpSettings
from .http.shell import Shell, raise_route_error
from .http.slow_reader import PacedApp
from .http.streams import as_json as _json
from .http.thread_store import ThreadStore
from .http.trace import trace_of
from .owner import page
from .owner.cache_tree import CacheTree
from .owner.carry import Carrying
from .owner.engine_metrics import MetricsOf
from .owner.live import Live
from .owner.metrics import Metrics
from .owner.pins import Pinning
from .owner.status import Admin
from .owner.why_miss import Explaining

LARGE_BODY = 2 << 20
"""Bytes: 30 MB would hold the event loop for 0.15 s."""


class _ResponseId(StringConvertor):
    regex = "resp_[^/]+"


register_url_convertor("response", _ResponseId())


class _ModelState(msgspec.Struct):
    id: str
    state: str


class _Health(msgspec.Struct):
    """`status`: this process answers. `models`: the state of the engines."""

    version: str
    models: list[_ModelState]
    status: str = "ok"


def create_app(
    engines: Engines, settings: HttpSettings | None = None, more_routes: Sequence[Route] = ()
) -> Starlette:
    """The ASGI app over `engines`. `more_routes`: what is for the owner and no client's protocol."""
    routes = _Routes(engines, settings or HttpSettings())
    app = PacedApp(
        routes=[
            Route("/v1/chat/completions", partial(routes.generate, dialect=OPENAI_CHAT), methods=["POST"]),
            Route("/v1/completions", partial(routes.generate, dialect=OPENAI_COMPLETIONS), methods=["POST"]),
            Route("/v1/classify", partial(routes.generate, dialect=CLASSIFY), methods=["POST"]),
            Route("/v1/score", partial(routes.generate, dialect=SCORE), methods=["POST"]),
            Route(
                "/v1/responses", partial(routes.generate, dialect=routes.responses_dialect), methods=["POST"]
            ),
            Route(
                "/v1/responses/compact",
                partial(routes.generate, dialect=routes.compact_dialect),
                methods=["POST"],
            ),
            Route("/v1/responses/input_tokens", routes.input_tokens, methods=["POST"]),
            Route("/v1/responses/{id:response}", routes.stored.get),
            Route("/v1/responses/{id:response}", routes.stored.delete, methods=["DELETE"]),
            Route(
                "/v1/messages", partial(routes.generate, dialect=routes.messages_dialect), methods=["POST"]
            ),
            Route("/v1/messages/count_tokens", routes.count_tokens, methods=["POST"]),
            Route("/api/chat", partial(routes.generate, dialect=OLLAMA_CHAT), methods=["POST"]),
            Route("/api/generate", partial(routes.generate, dialect=OLLAMA_GENERATE), methods=["POST"]),
            *Discovery(engines).routes(),
            Route("/models/sse", routes.router_events.listen),
            *Embeddings(engines).routes(),
            Route("/health", routes.health),
            Route("/openapi.json", routes.openapi),
            Route("/ready", routes.ready),
            Route("/metrics", routes.metrics_page),
            Route("/omlxd/status", routes.status),
            Route("/omlxd/memory", routes.memory, methods=["POST"]),
            Route("/omlxd/events", routes.live.events),
            Route("/omlxd/requests", routes.requests),
            Route("/omlxd/cache/forget", routes.forget, methods=["POST"]),
            Route("/omlxd/cache/tree", routes.tree.tree),
            Route("/omlxd/cache/clear", routes.clear, methods=["POST"]),
            Route("/omlxd/cache/pin", routes.pin, methods=["POST"]),
            Route("/omlxd/cache/pins", routes.pins),
            Route("/omlxd/cache/files", routes.cached_files, methods=["POST"]),
            Route("/omlxd/cache/import", routes.take_archive, methods=["POST"]),
            Route("/omlxd/cache/prompt-cache/import", routes.take_prompt, methods=["POST"]),
            Route("/omlxd/cache/prompt-cache/export", routes.give_prompt, methods=["POST"]),
            Route("/omlxd/why-miss", routes.why_miss, methods=["POST"]),
            Route("/", page.root),
            Route("/web/{name}", page.file),
            *more_routes,
        ],
        middleware=_layers(routes.settings),
        exception_handlers={HTTPException: raise_route_error},
    )
    app.router.redirect_slashes = False
    app.send_pause_s = routes.settings.send_pause_s
    return app


def _layers(settings: HttpSettings) -> list[Middleware]:
    layers = [Middleware(Shell, settings=settings), Middleware(Guard, settings=settings)]
    if settings.cors_origins:
        layers.insert(
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "request-id", "retry-after"],
                # Browsers ask for this before a page of the web may reach an address of this machine.
                allow_private_network="*" not in settings.cors_origins,
            ),
        )
    return layers


class _Routes:
    def __init__(self, engines: Engines, settings: HttpSettings):
        self.settings = settings
        self._engines = engines
        store, threads = ResponseStore(), ThreadStore()
        self.messages_dialect = messages_dialect(threads)
        self._counted_messages = messages_dialect(threads, anthropic.parse)
        self.responses_dialect = responses_dialect(store)
        self.compact_dialect = responses_dialect(store, parse_compact)
        self.stored = StoredResponses(store)
        metrics = MetricsOf(engines)
        self._metrics = Metrics(engines, metrics)
        self._admin = Admin(engines, metrics)
        self._recent = RecentRequests()
        self.tree = CacheTree(engines)
        stopping = self.settings.stopping or asyncio.Event()
        self.live = Live(self._admin, self._metrics.requests.last_hour, stopping)
        self.router_events = RouterEvents(engines, stopping)
        self._large = asyncio.Semaphore(1)
        self._explaining = Explaining(engines, self._recent, self.messages_dialect, self.responses_dialect)
        self._pinning = Pinning(engines, self._explaining)
        self._carrying = Carrying(engines, self._explaining, self.settings.spool)

    async def generate(self, request: Request, dialect: Dialect) -> GenerationResponse | Response:
        size, parsed = await self._parsed(request, dialect.parse)
        parsed = with_timeout(parsed, request.headers)
        trace_of(request.scope).model = parsed.model
        engine = await self._find_engine(parsed)
        if not parsed.model:
            trace_of(request.scope).model = engine.model_id
            parsed = msgspec.structs.replace(parsed, model=engine.model_id)
        if isinstance(parsed, OllamaRequest) and parsed.loads and parsed.keep_alive == 0:
            await self._engines.unload(engine.model_id)
            return Response(unloaded(parsed), media_type="application/json")
        if parsed.keep_alive is not None:
            self._engines.keep_alive(engine, parsed.keep_alive)
        trace = trace_of(request.scope)
        if isinstance(parsed, OllamaRequest) and engine.state != "ready":
            parsed = msgspec.structs.replace(parsed, waiting_since=trace.started)
        self._recent.add_request(engine.model_id, parsed.generate, trace, size)
        return GenerationResponse(engine, parsed, dialect, self.settings, self._metrics.requests)

    async def _find_engine(self, parsed: ParsedRequest) -> Engine:
        engine = await self._engines.find_engine(parsed.model)
        check_chats(engine)
        prompt = parsed.generate.prompt
        if engine.images is None and first_image(prompt) is not None:
            await self._engines.look_for_models()  # Its folder says whether it sees.
        check_images(engine, self._engines.models(), prompt)
        return engine

    async def _parsed(self, request: Request, parse: Parse) -> tuple[int, ParsedRequest]:
        """Bytes of the body, and what `parse` makes of it. A thread parses large bodies, one at a time."""
        pieces = [piece async for piece in request.stream()]
        size = sum(map(len, pieces))

        def read() -> ParsedRequest:
            body = mended(b"".join(pieces))
            pieces.clear()
            return msgspec.structs.replace(parse(body, request.headers), keep_alive=keep_alive_of(body))

        if size < LARGE_BODY:
            return size, read()
        async with self._large:
            return size, await asyncio.to_thread(read)

    async def count_tokens(self, request: Request) -> Response:
        return _json(TokenCount(await self._count(request, self._counted_messages.parse)))

    async def input_tokens(self, request: Request) -> Response:
        return _json(InputTokens(await self._count(request, self.responses_dialect.parse)))

    async def _count(self, request: Request, parse: Parse) -> int:
        _, parsed = await self._parsed(request, parse)
        trace_of(request.scope).model = parsed.model
        engine = await self._find_engine(parsed)
        return await engine.count_tokens(parsed.generate.prompt, parsed.generate.session)

    async def health(self, request: Request) -> Response:
        in_background(self._engines.look_for_models())  # For whoever asks next: a probe is answered at once.
        models = [_ModelState(engine.model_id, engine.state) for engine in self._engines.models()]
        return _json(_Health(__version__, models))

    async def openapi(self, request: Request) -> Response:
        from .owner import openapi  # its structs are made at import, and hardly anybody asks

        return Response(openapi.document(), media_type="application/json")

    async def ready(self, request: Request) -> Response:
        readiness = self._admin.readiness()
        answer = _json(readiness)
        answer.status_code = 200 if readiness.ready else 503
        return answer

    async def metrics_page(self, request: Request) -> Response:
        body, content_type = await self._metrics.page(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def status(self, request: Request) -> Response:
        return _json(await self._admin.daemon_status())

    async def memory(self, request: Request) -> Response:
        return _json(await self._admin.tidy_memory(await request.body()))

    async def requests(self, request: Request) -> Response:
        return _json(self._explaining.recent())

    async def forget(self, request: Request) -> Response:
        return _json(await self._admin.forget_files(await request.body()))

    async def pin(self, request: Request) -> Response:
        return _json(await self._pinning.pin(await request.body()))

    async def pins(self, request: Request) -> Response:
        return _json(await self._pinning.pins())

    async def cached_files(self, request: Request) -> Response:
        return _json(await self._pinning.files(await request.body()))

    async def take_archive(self, request: Request) -> Response:
        return _json(await self._carrying.take_archive(request))

    async def take_prompt(self, request: Request) -> Response:
        return _json(await self._carrying.take_prompt(request))

    async def give_prompt(self, request: Request) -> Response:
        return await self._carrying.give_prompt(await request.body())

    async def clear(self, request: Request) -> Response:
        return _json(await self.tree.clear(await request.body()))

    async def why_miss(self, request: Request) -> Response:
        return _json(await self._explaining.why(await request.body()))
