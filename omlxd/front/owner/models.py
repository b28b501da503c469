"""The owner's side of the models, over HTTP: `omlxd models` speaks it. Behind the same key as all else.

| request                                               | does                                           |
|-------------------------------------------------------|------------------------------------------------|
| GET /omlxd/models                                     | every installed model, loaded or not           |
| GET /omlxd/models/{id}                                | one of them                                    |
| POST /omlxd/models/load {model, keep_alive}           | answers once it is loaded                      |
| POST /omlxd/models/unload {model}                     | answers once it is gone, or says that it waits |
| POST /omlxd/models/pin {model, pinned}                | never unloaded for others or for being idle    |
| POST /omlxd/models/pull {model}                       | downloads it, and says how far it is (pull.py) |
| POST /omlxd/models/alias {alias, model}               | another name for it; model null takes it away  |
| POST /omlxd/inspect {prompt or messages, query, …}    | writes a prompt's keys into a file             |
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...api.body import decode
from ...cli.owner_api import (
    InstalledStatus,
    InstalledStatuses,
    LoadModel,
    NameModel,
    PinModel,
    Unloaded,
    UnloadModel,
)
from ...common.units import duration
from ...errors import InvalidRequest
from ..engines.model import ModelEngine
from ..engines.pool import EnginePool
from ..http.streams import as_json as _json
from .inspect import inspect_prompt, parse_inspect
from .pull import Pulling


def model_status(pool: EnginePool, engine: ModelEngine) -> InstalledStatus:
    """The status of `engine`, without asking its process."""
    idle = engine.idle_s
    load_bytes, kv_bytes = pool.estimate(engine) or (None, None)
    if engine.host is not None and engine.info is not None:
        load_bytes = engine.info.weight_bytes
    return InstalledStatus(
        id=engine.model_id,
        state=engine.state,
        default=engine is pool.default(),
        source=engine.installed.source,
        folder=str(engine.folder) if engine.folder else None,
        aliases=pool.aliases_of(engine.model_id),
        pinned=engine.is_pinned,
        in_flight=engine.in_flight,
        leaving=engine.leaving,
        pid=engine.pid,
        disk_bytes=engine.disk_bytes,
        load_bytes=load_bytes,
        kv_bytes_per_token=engine.info.kv_bytes_per_token if engine.info else kv_bytes,
        memory_bytes=engine.memory_bytes,
        context_length=engine.context_length,
        images=engine.images,
        blind=engine.blind,
        idle_s=None if engine.is_pinned or idle == float("inf") else idle,
        expires_in_s=engine.expires_in_s,
        loads=engine.process.supervisor.loads,
        trouble=engine.process.supervisor.trouble,
        origin=engine.described.origin,
        tools=engine.described.tools,
        layers=engine.footprint.layers if engine.footprint else None,
        hidden_size=engine.footprint.hidden_size if engine.footprint else None,
        adapter=str(engine.adapter or ""),
        shares=engine.shares,
    )


def admin_routes(pool: EnginePool) -> list[Route]:
    """Routes over `pool`."""

    pulling = Pulling(pool)

    def status(engine: ModelEngine) -> Response:
        return _json(model_status(pool, engine))

    async def models(request: Request) -> Response:
        await pool.look_for_models(afresh=True)
        return _json(InstalledStatuses([model_status(pool, engine) for engine in pool.models()]))

    async def model(request: Request) -> Response:
        return status(await pool.find_engine(request.path_params["id"]))

    async def load(request: Request) -> Response:
        asked = decode(_LOAD, await request.body())
        try:
            keep_alive = None if asked.keep_alive is None else duration(asked.keep_alive)
        except ValueError:
            raise InvalidRequest('keep_alive: write "5m", seconds or -1', param="keep_alive") from None
        return status(await pool.load(asked.model, keep_alive))

    async def unload(request: Request) -> Response:
        engine = await pool.find_engine(decode(_UNLOAD, await request.body()).model)
        gone = await pool.unload(engine.model_id)
        return _json(Unloaded(engine.model_id, gone, engine.in_flight))

    async def pin(request: Request) -> Response:
        asked = decode(_PIN, await request.body())
        await pool.find_engine(asked.model)
        return status(pool.pin(asked.model, asked.pinned))

    async def alias(request: Request) -> Response:
        asked = decode(_ALIAS, await request.body())
        await pool.look_for_models(afresh=True)
        pool.alias(asked.alias, asked.model)
        return _json(InstalledStatuses([model_status(pool, engine) for engine in pool.models()]))

    async def inspect(request: Request) -> Response:
        parsed = parse_inspect(await request.body())
        return _json(await inspect_prompt(pool, await pool.find_engine(parsed.model), parsed))

    return [
        Route("/omlxd/inspect", inspect, methods=["POST"]),
        Route("/omlxd/models", models),
        Route("/omlxd/models/load", load, methods=["POST"]),
        Route("/omlxd/models/unload", unload, methods=["POST"]),
        Route("/omlxd/models/pin", pin, methods=["POST"]),
        Route("/omlxd/models/pull", pulling.pull, methods=["POST"]),
        Route("/api/pull", pulling.ollama, methods=["POST"]),
        Route("/omlxd/models/alias", alias, methods=["POST"]),
        Route("/omlxd/models/{id:path}", model),
    ]


_LOAD, _UNLOAD = msgspec.json.Decoder(LoadModel), msgspec.json.Decoder(UnloadModel)
_PIN, _ALIAS = msgspec.json.Decoder(PinModel), msgspec.json.Decoder(NameModel)
