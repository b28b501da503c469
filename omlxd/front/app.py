"""The HTTP app: its routes, and what they are wired to.

Layers, outermost first: `PacedApp` (clients that read slowly), CORS where it is opened, `Shell` (id, body
limit, errors, log line), `Guard` (host, origin, key), then a route. No route catches errors; they raise
OmlxdError and the shell answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..api.anthropic import request as anthropic
from ..api.anthropic.answer import TokenCount
from ..api.fields.body import ParsedRequest, keep_alive_of, mended, with_timeout
from ..api.fields.priority import priority_of
from ..api.gemini.answer import TokenCount as GeminiTokenCount
from ..api.gemini.body import CountTokensBody
from ..api.gemini.request import parse_count
from ..api.ollama.answer import unloaded
from ..api.ollama.request import OllamaRequest
from ..api.responses.request import parse_compact
from ..chat import Conversation, RawPrompt, first_image
from ..errors import OmlxdError, bad_field
from .engines.model import ModelEngine
from .engines.pool import EnginePool
from .http.embeddings import Embeddings
from .http.generation import (
    CLASSIFY,
    DECISIONS,
    GEMINI,
    GEMINI_STREAM,
    LLAMA_COMPLETION,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    OPENAI_CHAT,
    OPENAI_COMPLETIONS,
    SCORE,
    SYSTEM_ONE,
    AnyDialect,
    GenerationResponse,
    InputTokens,
    Parse,
    lmstudio_dialect,
    messages_dialect,
    responses_dialect,
)
from .http.guard import Guard
from .http.listing.discovery import Discovery
from .http.listing.router_events import RouterEvents
from .http.observe.recent_requests import RecentRequests
from .http.observe.request_metrics import Requests
from .http.observe.trace import RequestTrace, client_of, trace_of
from .http.routes import Operation, get, json_route, post
from .http.sending.slow_reader import PacedApp
from .http.sending.streams import SSE, as_json
from .http.settings import HttpSettings
from .http.shell import Shell, raise_route_error
from .http.stores.response_store import ResponseStore, StoredResponses
from .http.stores.thread_store import ThreadStore
from .owner.cache.carry import Carrying
from .owner.cache.index import TreePiece
from .owner.cache.miss_log import MissLog
from .owner.cache.pins import Pinning
from .owner.cache.tree import CacheTree
from .owner.cache.why_miss import Explaining
from .owner.engine_metrics import MetricsOf
from .owner.live import Live
from .owner.metrics import Metrics
from .owner.page import Page
from .owner.status import Admin

LARGE_BODY = 2 << 20
"""Bytes: 30 MB would hold the event loop for 0.15 s."""


def create_app(
    engines: EnginePool, settings: HttpSettings | None = None, more_routes: Sequence[Route] = ()
) -> Starlette:
    """Make the ASGI app over `engines`. `more_routes`: the owner's, of no client's protocol."""
    settings = settings or HttpSettings()
    stopping = settings.stopping or asyncio.Event()
    store, threads, recent = ResponseStore(), ThreadStore(), RecentRequests()
    messages, responses = messages_dialect(threads), responses_dialect(store)
    counted_messages = messages_dialect(threads, anthropic.parse)
    compact = responses_dialect(store, parse_compact, stream_type="")
    engine_metrics = MetricsOf(engines)
    metrics, admin = Metrics(engines, engine_metrics), Admin(engines, engine_metrics)
    stored, tree = StoredResponses(store), CacheTree(engines)
    miss_log = MissLog(settings.miss_log) if settings.miss_log else None
    explaining = Explaining(engines, recent, messages, responses, miss_log)
    pinning, carrying = Pinning(engines, explaining), Carrying(engines, explaining, settings.spool)
    live, events = Live(admin, metrics.requests.last_hour, stopping), RouterEvents(engines, stopping)
    prompted = _Prompted(engines, settings, metrics.requests, recent, explaining.note_end)
    asked, counted = prompted.answered, prompted.counted
    a_response = "/v1/responses/{id}"
    page = Page(tree.index.begin)
    app = PacedApp(
        routes=[
            asked("/v1/chat/completions", OPENAI_CHAT, "OpenAI: chat"),
            asked("/v1/completions", OPENAI_COMPLETIONS, "OpenAI: completion"),
            asked("/v1/classify", CLASSIFY, "vLLM: which label is the likeliest answer"),
            asked("/v1/score", SCORE, "vLLM: how likely a text is after another"),
            asked("/v1/systemone", SYSTEM_ONE, "TypeSafe: decisions about a state"),
            asked("/v1/decisions", DECISIONS, "OpenAI, mlx-vlm: decisions about an input or a state"),
            asked("/v1/responses", responses, "OpenAI: response"),
            asked("/v1/responses/compact", compact, "OpenAI: a summary of the input"),
            counted("/v1/responses/input_tokens", responses, "OpenAI: tokens of a prompt", InputTokens),
            Operation("GET", a_response, stored.get, "OpenAI: a stored response", answer=responses.answer),
            get(f"{a_response}/input_items", stored.items, "OpenAI: what a stored response was asked with"),
            json_route("DELETE", a_response, stored.delete, "OpenAI: forget a stored response"),
            asked("/chat/completions", OPENAI_CHAT, "OpenAI: chat, as llama.cpp has it"),
            asked("/completions", OPENAI_COMPLETIONS, "OpenAI: completion, as llama.cpp has it"),
            asked("/completion", LLAMA_COMPLETION, "llama.cpp: completion"),
            asked("/v1/messages", messages, "Anthropic: one message"),
            counted(
                "/v1/messages/count_tokens", counted_messages, "Anthropic: tokens of a prompt", TokenCount
            ),
            *_gemini_routes(prompted),
            asked("/api/chat", OLLAMA_CHAT, "Ollama: chat"),
            asked("/api/generate", OLLAMA_GENERATE, "Ollama: answer a prompt"),
            asked("/api/v1/chat", lmstudio_dialect(ResponseStore()), "LM Studio: chat"),
            events.route(),  # Before models by their names.
            *Discovery(engines).routes(),
            *Embeddings(engines).routes(),
            *_owner_routes(admin, metrics, live, explaining, tree, pinning, carrying),
            Operation("GET", "/", page.root, "Name and version; for a browser, the page", media="text/plain"),
            Operation("GET", "/web/{name}", page.file, "A file of the page", media="text/javascript"),
            *more_routes,
        ],
        middleware=_layers(settings),
        exception_handlers={HTTPException: raise_route_error},
    )
    app.router.redirect_slashes = False
    app.state.cache_index, app.send_pause_s = tree.index, settings.send_pause_s
    return app


def _owner_routes(
    admin: Admin,
    metrics: Metrics,
    live: Live,
    explaining: Explaining,
    tree: CacheTree,
    pinning: Pinning,
    carrying: Carrying,
) -> list[Route]:
    return [
        get("/health", admin.health, "Whether the daemon answers, and the state of its engines"),
        Operation("GET", "/openapi.json", _openapi, "This document"),
        admin.ready_route(),
        Operation("GET", "/metrics", metrics.page, "Figures for Prometheus", media="text/plain"),
        get("/omlxd/status", admin.daemon_status, "Models, memory, tiers and counters"),
        post("/omlxd/memory", admin.tidy_memory, "Give memory back, count peaks anew"),
        Operation("GET", "/omlxd/events", live.events, "The status every few seconds", media=SSE),
        get("/omlxd/requests", explaining.recent, "The last requests, without their prompts"),
        post("/omlxd/cache/forget", admin.forget_files, "Files of the SSD cache that shall go"),
        get("/omlxd/cache/tree", tree.tree, "The prefixes of the SSD cache, a piece", answer=TreePiece),
        post("/omlxd/cache/clear", tree.clear, "Remove some of them"),
        post("/omlxd/cache/pin", pinning.pin, "What is evicted last, or no more"),
        get("/omlxd/cache/pins", pinning.pins, "What is pinned"),
        post("/omlxd/cache/files", pinning.files, "Files that a prompt is restored from"),
        post("/omlxd/cache/import", carrying.take_archive, "Take in an archive of KV, the body"),
        post("/omlxd/cache/prompt-cache/import", carrying.take_prompt, "Take in mlx-lm's file"),
        carrying.export_route(),
        post("/omlxd/why-miss", explaining.why, "Why a prompt's cached prefix ends"),
    ]


def _gemini_routes(prompted: _Prompted) -> list[Operation]:
    counting = dataclasses.replace(GEMINI, body=CountTokensBody, parse=parse_count)
    return [
        route
        for model in ("/v1beta/models/{model:path}", "/v1/models/{model:path}")
        for route in (
            prompted.answered(f"{model}:generateContent", GEMINI, "Gemini: one answer"),
            prompted.answered(f"{model}:streamGenerateContent", GEMINI_STREAM, "Gemini: a streamed answer"),
            prompted.counted(
                f"{model}:countTokens",
                counting,
                "Gemini: tokens of a prompt",
                lambda tokens: GeminiTokenCount(total_tokens=tokens),
                GeminiTokenCount,
            ),
        )
    ]


async def _openapi(request: Request) -> Response:
    from .owner import openapi  # hardly anybody asks

    kept = request.app.state
    if not hasattr(kept, "document"):
        kept.document = openapi.document(request.app.routes)  # It takes 0.1 s.
    return Response(kept.document, media_type="application/json")


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


class _Prompted:
    """Routes whose requests have a prompt."""

    def __init__(
        self,
        engines: EnginePool,
        settings: HttpSettings,
        metrics: Requests,
        recent: RecentRequests,
        note_end: Callable[[RequestTrace], None],
    ):
        self._engines = engines
        self._settings = settings
        self._metrics = metrics
        self._recent = recent
        self._note_end = note_end
        self._large = asyncio.Semaphore(1)

    def answered(self, path: str, dialect: AnyDialect, summary: str) -> Operation:
        answer = partial(self._generate, dialect=dialect)
        described = {"body": dialect.body, "answer": dialect.answer, "stream": dialect.stream_type}
        return Operation("POST", path, answer, summary, queues=True, **described)

    def counted(
        self, path: str, dialect: AnyDialect, summary: str, answer: Callable[[int], Any], struct: Any = None
    ) -> Operation:
        """Make an operation that counts a prompt's tokens. `struct`: the struct, where `answer` is none."""

        async def count(request: Request) -> Response:
            _, parsed = await self._parsed(request, dialect.parse)
            trace = trace_of(request.scope)
            trace.model = parsed.model
            engine = await self._find_engine(parsed, trace)
            asked = parsed.generate
            tokens = await engine.count_tokens(asked.prompt, asked.session, asked.client)
            return as_json(answer(tokens))

        return Operation("POST", path, count, summary, body=dialect.body, answer=struct or answer)

    async def _generate(self, request: Request, dialect: AnyDialect) -> GenerationResponse | Response:
        trace = trace_of(request.scope)
        try:
            return await self._response(request, dialect, trace)
        except OmlxdError as error:
            self._metrics.refused(trace.model_id, error)
            raise

    async def _response(
        self, request: Request, dialect: AnyDialect, trace: RequestTrace
    ) -> GenerationResponse | Response:
        if dialect.without_sse is not None and request.query_params.get("alt") != "sse":
            dialect = dialect.without_sse
        size, parsed = await self._parsed(request, dialect.parse)
        parsed = with_timeout(parsed, request.headers)
        trace.model, trace.priority = parsed.model, parsed.generate.priority
        engine = await self._find_engine(parsed, trace)
        if not parsed.model:
            trace.model = engine.model_id
            parsed = msgspec.structs.replace(parsed, model=engine.model_id)
        if isinstance(parsed, OllamaRequest) and parsed.loads and parsed.keep_alive == 0:
            await self._engines.unload(engine.model_id)
            return Response(unloaded(parsed), media_type="application/json")
        if parsed.keep_alive is not None:
            self._engines.keep_alive(engine, parsed.keep_alive)
        if isinstance(parsed, OllamaRequest) and engine.state != "ready":
            parsed = msgspec.structs.replace(parsed, waits=True)
        self._recent.add_request(engine.model_id, parsed.generate, trace, size)
        return GenerationResponse(engine, parsed, dialect, self._settings, self._metrics, self._note_end)

    async def _find_engine(self, parsed: ParsedRequest, trace: RequestTrace) -> ModelEngine:
        engine = await self._engines.find_engine(parsed.model)
        trace.model_id = engine.model_id
        check_chats(engine)
        prompt = parsed.generate.prompt
        if engine.images is None and first_image(prompt) is not None:
            await self._engines.look_for_models()  # Its folder says whether it sees.
        check_images(engine, self._engines.models(), prompt)
        return engine

    async def _parsed(self, request: Request, parse: Parse[ParsedRequest]) -> tuple[int, ParsedRequest]:
        """Return the body's bytes, and its parsed form. A thread parses large bodies, one at a time."""
        pieces = [piece async for piece in request.stream()]
        size = sum(map(len, pieces))
        keys = self._settings.keys
        floor = keys.priority_of(trace_of(request.scope).key) if keys else None

        def read() -> ParsedRequest:
            body = mended(b"".join(pieces))
            pieces.clear()
            parsed = parse(body, request.headers)
            priority = priority_of(body, request.headers, floor)
            named = request.path_params.get("model", parsed.model)
            whose = msgspec.structs.replace(
                parsed.generate, client=client_of(request.scope), priority=priority
            )
            return msgspec.structs.replace(
                parsed, model=named, generate=whose, keep_alive=keep_alive_of(body)
            )

        if size < LARGE_BODY:
            return size, read()
        async with self._large:
            return size, await asyncio.to_thread(read)


def check_images(
    engine: ModelEngine, engines: Sequence[ModelEngine], prompt: Conversation | RawPrompt
) -> None:
    """Raise InvalidRequest, with the id of one of `engines` that can, for images that `engine` can't read."""
    if engine.images is not False or (image := first_image(prompt)) is None:
        return
    why = f" ({engine.blind})" if engine.blind else ""
    seeing = next((other.model_id for other in engines if other.images), None)
    others = f"{seeing} does: ask for that model" if seeing else "no installed model does"
    raise bad_field(image.param, f"{engine.model_id} reads no images{why}, and {others}")


def check_chats(engine: ModelEngine) -> None:
    """Raise InvalidRequest for a model that embeds or scores."""
    doors = {"embedding": "/v1/embeddings", "rerank": "/v1/rerank"}
    if door := doors.get(engine.card.kind):
        raise bad_field("model", f"{engine.model_id} answers no prompts; send texts to {door}")
