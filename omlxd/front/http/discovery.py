"""Routes by which clients learn what models there are, and load and unload them, each in its own dialect."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...api.body import decode
from ...errors import InvalidRequest, OmlxdError, bad_field
from ..engines.link import in_background
from ..engines.protocol import Card, Engine, Engines
from . import model_list as cards
from .streams import as_json

log = logging.getLogger(__name__)


class NamedModel(msgspec.Struct):
    model: str


class Success(msgspec.Struct):
    success: bool = True


class LMStudioLoadBody(msgspec.Struct):
    """`context_length`: the least that the client needs; the model has its own."""

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
    """`name`: what older clients call it."""

    model: str = ""
    name: str = ""
    stream: bool | None = None


class OllamaStatus(msgspec.Struct):
    status: str


class OllamaVersion(msgspec.Struct):
    """Clients ask for the least version that has what they need: the one whose API is spoken here."""

    version: str = "0.34.2"


_named = msgspec.json.Decoder(NamedModel)
_lmstudio_load = msgspec.json.Decoder(LMStudioLoadBody)
_lmstudio_instance = msgspec.json.Decoder(LMStudioInstanceBody)
_ollama = msgspec.json.Decoder(OllamaModelBody)


class Discovery:
    def __init__(self, engines: Engines):
        self._engines = engines

    def routes(self) -> list[Route]:
        listed = self._listed
        return [
            Route("/v1/models", partial(listed, write=cards.model_list)),
            Route("/v1/models/{id:path}", self._one),
            Route("/models", partial(listed, write=cards.model_list)),
            Route("/models/load", self._load, methods=["POST"]),
            Route("/models/unload", self._unload, methods=["POST"]),
            Route("/props", self._props),
            Route("/api/version", self._version),
            Route("/api/tags", partial(listed, write=cards.ollama_tags)),
            Route("/api/ps", partial(listed, write=cards.ollama_processes)),
            Route("/api/show", self._show, methods=["POST"]),
            Route("/api/delete", self._delete, methods=["DELETE"]),
            *(
                Route(path, self._refused, methods=["POST"])
                for path in ("/api/copy", "/api/push", "/api/create")
            ),
            Route("/api/v1/models", partial(listed, write=cards.lmstudio_models)),
            Route("/api/v1/models/load", self._lmstudio_load, methods=["POST"]),
            Route("/api/v1/models/unload", self._lmstudio_unload, methods=["POST"]),
            Route("/api/v0/models", partial(listed, write=cards.lmstudio_v0_models)),
        ]

    async def _listed(self, request: Request, write: Callable[[Sequence[Card]], Any]) -> Response:
        await self._engines.look_for_models()
        return as_json(write([engine.card for engine in self._engines.models()]))

    async def _one(self, request: Request) -> Response:
        if not (name := request.path_params["id"]):
            return await self._listed(request, cards.model_list)
        return as_json(cards.model_entry((await self._engines.find_engine(name)).card))

    async def _props(self, request: Request) -> Response:
        engine = await self._engines.find_engine(request.query_params.get("model", ""))
        return as_json(cards.props(engine.card, not any(e.is_refused for e in self._engines.models())))

    async def _load(self, request: Request) -> Response:
        """Answer at once: llama.cpp's clients then watch the model's status."""
        engine = await self._engine_of(request)
        in_background(self._loaded(engine.model_id))
        return as_json(Success())

    async def _loaded(self, model_id: str) -> None:
        try:
            await self._engines.load(model_id)
        except OmlxdError as error:
            log.warning("%s can't be loaded: %s", model_id, error.message)

    async def _unload(self, request: Request) -> Response:
        await self._engines.unload((await self._engine_of(request)).model_id)
        return as_json(Success())

    async def _lmstudio_load(self, request: Request) -> Response:
        """Answer once it is loaded, as LM Studio does."""
        asked = decode(_lmstudio_load, await request.body())
        engine = await self._engines.find_engine(asked.model)
        context = engine.card.context_length
        if context and asked.context_length and asked.context_length > context:
            raise bad_field("context_length", f"{engine.model_id} has {context} tokens; ask for no more")
        began = time.monotonic()
        card = (await self._engines.load(engine.model_id)).card
        return as_json(LMStudioLoaded(card.id, time.monotonic() - began, cards.lmstudio_type(card)))

    async def _lmstudio_unload(self, request: Request) -> Response:
        asked = decode(_lmstudio_instance, await request.body())
        engine = await self._engines.find_engine(asked.instance_id)
        await self._engines.unload(engine.model_id)
        return as_json(LMStudioInstanceBody(engine.model_id))

    async def _version(self, request: Request) -> Response:
        return as_json(OllamaVersion())

    async def _show(self, request: Request) -> Response:
        engine = await self._engines.find_engine(_name(decode(_ollama, await request.body())))
        return as_json(cards.ollama_show(engine.card))

    async def _delete(self, request: Request) -> Response:
        raise InvalidRequest("No client deletes a model here: remove its folder yourself.")

    async def _refused(self, request: Request) -> Response:
        raise InvalidRequest(
            "No client makes, copies or sends a model here: `omlxd models pull` gets one, "
            "`omlxd models alias` gives it another name."
        )

    async def _engine_of(self, request: Request) -> Engine:
        return await self._engines.find_engine(decode(_named, await request.body()).model)


def _name(asked: OllamaModelBody) -> str:
    if name := asked.model or asked.name:
        return name
    raise bad_field("model", "this field is required")
