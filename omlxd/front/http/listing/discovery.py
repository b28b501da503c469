"""Routes that list, load and unload models, each in a client's dialect."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn, get_type_hints

import msgspec
from starlette.requests import Request

from ....errors import InvalidRequest, OmlxdError, bad_field
from ...engines.link import in_background
from ...engines.model import Card, ModelEngine
from ...engines.pool import EnginePool
from ..routes import Operation, get, post
from . import model_list as cards
from .codex_catalog import codex_catalog

log = logging.getLogger(__name__)

ANSWER_S = 0.5
"""Seconds that a list waits for an engine."""


class NamedModel(msgspec.Struct):
    model: str


class Success(msgspec.Struct):
    success: bool = True


class LMStudioLoadBody(msgspec.Struct):
    """A load. `context_length`: the least that the client needs; the model has its own."""

    model: str
    context_length: Annotated[int, msgspec.Meta(ge=1)] | None = None


class LMStudioLoaded(msgspec.Struct):
    instance_id: str
    load_time_seconds: float
    type: str = "llm"
    status: str = "loaded"


class LMStudioInstanceBody(msgspec.Struct):
    instance_id: str


class OllamaModelBody(msgspec.Struct):
    """A body. `name`: older clients' word for `model`."""

    model: str = ""
    name: str = ""
    stream: bool | None = None

    def named(self) -> str:
        """Return the model's name. Raises InvalidRequest."""
        if name := self.model or self.name:
            return name
        raise bad_field("model", "this field is required")


class OllamaStatus(msgspec.Struct):
    status: str


class OllamaVersion(msgspec.Struct):
    """Answers with the API's version, of which clients ask for the least that they need."""

    version: str = "0.34.2"


class Hello(msgspec.Struct):
    message: str = "hello"


class LMStudioGreeting(msgspec.Struct):
    """Greets LM Studio's SDK, which then opens a WebSocket (websockets.py)."""

    lmstudio: bool = True


class Discovery:
    def __init__(self, engines: EnginePool):
        self._engines = engines

    def routes(self) -> list[Operation]:
        lists = (
            ("/models", cards.model_list, "llama.cpp's router: the models"),
            ("/v1/codex/models", codex_catalog, "Codex: its model catalog"),
            ("/v1beta/models", cards.gemini_models, "Gemini: the models"),
            ("/api/tags", cards.ollama_tags, "Ollama: the models"),
            ("/api/v1/models", cards.lmstudio_models, "LM Studio: the models"),
            ("/api/v0/models", cards.lmstudio_v0_models, "LM Studio: the models"),
        )
        refused = "No client makes, copies or sends a model here: `omlxd models pull` gets one, "
        refused += "`omlxd models alias` gives it another name."
        kept = "No client deletes a model here: remove its folder yourself."
        return [
            get("/v1/models", self._all, "The models", answer=cards.ModelList),
            *(self._list(path, write, summary) for path, write, summary in lists),
            get("/api/ps", self._running, "Ollama: the models that are loaded"),
            get(
                "/v1/models/{id:path}",
                self._one,
                "One model; its id may hold slashes",
                answer=cards.ModelEntry,
            ),
            get("/v1beta/models/{id:path}", self._one_of_gemini, "Gemini: one model"),
            get("/models/{id:path}", self._one, "The same without a version", answer=cards.ModelEntry),
            post("/models/load", self._load, "llama.cpp's router: load a model"),
            post("/models/unload", self._unload, "llama.cpp's router: unload a model"),
            get("/props", self._props, "llama.cpp: what a model can do"),
            get("/api/hello", self._hello, "Anthropic: whether there is somebody"),
            get("/api/version", self._version, "Ollama: the version whose API this is"),
            post("/api/show", self._show, "Ollama: one model"),
            _refusing("DELETE", "/api/delete", kept),
            *(_refusing("POST", f"/api/{verb}", refused) for verb in ("copy", "push", "create")),
            get("/lmstudio-greeting", self._greeting, "LM Studio: whether there is somebody"),
            post("/api/v1/models/load", self._lmstudio_load, "LM Studio: load a model"),
            post("/api/v1/models/unload", self._lmstudio_unload, "LM Studio: unload"),
        ]

    def _list(self, path: str, write: Callable[[Sequence[Card]], Any], summary: str) -> Operation:
        async def listed() -> Any:
            return await self._listed(write)

        return get(path, listed, summary, answer=get_type_hints(write)["return"])

    async def _all(self, request: Request) -> Any:
        return await self._listed(cards.gemini_models if _asks_gemini(request) else cards.model_list)

    async def _listed(self, write: Callable[[Sequence[Card]], Any]) -> Any:
        await self._engines.look_for_models()
        return write([engine.card for engine in self._engines.models()])

    async def _running(self) -> cards.OllamaProcesses:
        await self._engines.look_for_models()
        loaded = [engine for engine in self._engines.models() if engine.state == "ready"]
        held = await asyncio.gather(*map(_held, loaded))
        return cards.ollama_processes([*zip((engine.card for engine in loaded), held, strict=True)])

    async def _one(self, request: Request) -> Any:
        if not (name := request.path_params["id"]):
            return await self._all(request)
        card = (await self._engines.find_engine(name)).card
        return cards.gemini_model(card) if _asks_gemini(request) else cards.model_entry(card)

    async def _one_of_gemini(self, request: Request) -> cards.GeminiModel:
        return cards.gemini_model((await self._engines.find_engine(request.path_params["id"])).card)

    async def _props(self, request: Request) -> cards.Props:
        engine = await self._engines.find_engine(request.query_params.get("model", ""))
        return cards.props(engine.card, not any(e.is_refused for e in self._engines.models()))

    async def _load(self, asked: NamedModel) -> Success:
        """Answer at once: llama.cpp's clients then poll the model's status."""
        engine = await self._engines.find_engine(asked.model)
        in_background(self._loaded(engine.model_id))
        return Success()

    async def _loaded(self, model_id: str) -> None:
        try:
            await self._engines.load(model_id)
        except OmlxdError as error:
            log.warning("%s can't be loaded: %s", model_id, error.message)

    async def _unload(self, asked: NamedModel) -> Success:
        await self._engines.unload((await self._engines.find_engine(asked.model)).model_id)
        return Success()

    async def _lmstudio_load(self, asked: LMStudioLoadBody) -> LMStudioLoaded:
        """Answer once the model is loaded, as LM Studio does."""
        engine = await self._engines.find_engine(asked.model)
        context = engine.card.context_length
        if context and asked.context_length and asked.context_length > context:
            raise bad_field("context_length", f"{engine.model_id} has {context} tokens; ask for no more")
        began = time.monotonic()
        card = (await self._engines.load(engine.model_id)).card
        return LMStudioLoaded(card.id, time.monotonic() - began, cards.lmstudio_type(card))

    async def _lmstudio_unload(self, asked: LMStudioInstanceBody) -> LMStudioInstanceBody:
        engine = await self._engines.find_engine(asked.instance_id)
        await self._engines.unload(engine.model_id)
        return LMStudioInstanceBody(engine.model_id)

    async def _version(self) -> OllamaVersion:
        return OllamaVersion()

    async def _hello(self) -> Hello:
        return Hello()

    async def _greeting(self) -> LMStudioGreeting:
        return LMStudioGreeting()

    async def _show(self, asked: OllamaModelBody) -> cards.OllamaShow:
        return cards.ollama_show((await self._engines.find_engine(asked.named())).card)


def _asks_gemini(request: Request) -> bool:
    """Return whether the client is a Google SDK, of which newer ones ask below /v1."""
    return "x-goog-api-client" in request.headers


async def _held(engine: ModelEngine) -> int:
    """Return the bytes of the engine's arrays, as `omlxd status`; 0: in another's engine, or slow."""
    with contextlib.suppress(TimeoutError):
        stats = None if engine.shares else await asyncio.wait_for(engine.stats(), ANSWER_S)
        return int(stats.values.get("mlx_active_bytes", 0)) if stats else 0
    return 0


def _refusing(method: str, path: str, why: str) -> Operation:
    async def refuse(request: Request) -> NoReturn:
        raise InvalidRequest(why)

    return Operation(method, path, refuse, "Ollama: refused")
