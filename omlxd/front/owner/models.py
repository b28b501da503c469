"""The owner's side of the models over HTTP, for `omlxd models`, behind the same key as all else."""

from __future__ import annotations

import asyncio
import math

import msgspec
from starlette.requests import Request

from ...cli.daemon.owner_api import (
    Inspected,
    InstalledStatus,
    InstalledStatuses,
    LoadModel,
    ModelSetting,
    NameModel,
    PinModel,
    Removed,
    RemoveModel,
    Unloaded,
    UnloadModel,
)
from ...common.units import duration, total_ram
from ...config import ModelSettings, Settings, full_name
from ...config.reading import FILE_NAME
from ...errors import ConfigError, InvalidRequest
from ...models.local_stores import LocalModel, check_models, local_models
from ...models.remove import removable
from ..engines.model import ModelEngine
from ..engines.names.names import basename
from ..engines.pool import EnginePool
from ..http.routes import Operation, get, post
from .inspect import inspect_prompt, parse_inspect
from .pull import Pulling


def model_status(pool: EnginePool, engine: ModelEngine) -> InstalledStatus:
    """Return the status of `engine`, without asking its process."""
    idle = engine.idle_s
    load_bytes, kv_bytes = pool.estimate(engine) or (None, None)
    settings = pool.catalog.settings
    names = (engine.model_id, basename(engine.model_id))
    table = next((name for name in names if name in settings.models), "")
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
        leaving=engine.stay.leaving,
        pid=engine.pid,
        disk_bytes=engine.disk_bytes,
        load_bytes=load_bytes,
        kv_bytes_per_token=engine.info.kv_bytes_per_token if engine.info else kv_bytes,
        memory_bytes=engine.memory_bytes,
        context_length=engine.context_length,
        images=engine.images,
        blind=engine.blind,
        kv_reuse=engine.info.kv_reuse if engine.info else None,
        idle_s=None if engine.is_pinned or idle == float("inf") else idle,
        expires_in_s=engine.expires_in_s,
        loads=engine.process.supervisor.loads,
        trouble=engine.process.supervisor.trouble,
        never=pool.why_never(engine),
        origin=engine.measured.description.origin,
        tools=engine.measured.description.tools,
        layers=engine.footprint.layers if engine.footprint else None,
        hidden_size=engine.footprint.hidden_size if engine.footprint else None,
        adapter=str(engine.adapter or ""),
        shares=engine.shares,
        config=str(settings.config or settings.base_path / FILE_NAME),
        settings=_said(settings, table),
        table=table,
    )


def _said(settings: Settings, table: str) -> list[ModelSetting]:
    """Return the file's settings of the model with the table `table`, before its settings of all."""
    said: dict[str, ModelSetting] = {}
    for path, values in ((("models", table), settings.models.get(table)), (("defaults",), settings.defaults)):
        for field in ModelSettings.__struct_fields__:
            if values is not None and (source := settings.sources.get(full_name(field, *path))):
                value = getattr(values, field)
                text = "0" if value == math.inf else msgspec.json.encode(value, enc_hook=str).decode()
                said.setdefault(field, ModelSetting(field.replace("_", "-"), text, source))
    return [*said.values()]


class FoundModels(msgspec.Struct):
    """Models of other programs. `room_bytes`: what all models together may take, or the machine's memory
    where that is not known.
    """

    models: list[LocalModel]
    room_bytes: int


def _models_elsewhere() -> list[LocalModel]:
    models = local_models()
    check_models(models)
    return models


def _keep_alive(asked: LoadModel) -> float | None:
    try:
        return None if asked.keep_alive is None else duration(asked.keep_alive)
    except ValueError:
        raise InvalidRequest('keep_alive: write "5m", seconds or -1', param="keep_alive") from None


async def _remove(pool: EnginePool, engine: ModelEngine) -> Removed:
    try:
        folder = removable(model_status(pool, engine), pool.catalog.settings.base_path)
    except ConfigError as error:
        raise InvalidRequest(str(error), param="model") from None
    await pool.remove(engine, folder)
    return Removed(engine.model_id, str(folder), engine.disk_bytes or 0)


def admin_routes(pool: EnginePool) -> list[Operation]:
    """Return routes over `pool`."""

    pulling = Pulling(pool)

    def listed() -> InstalledStatuses:
        return InstalledStatuses([model_status(pool, engine) for engine in pool.models()])

    async def models() -> InstalledStatuses:
        await pool.look_for_models(afresh=True)
        return listed()

    async def model(request: Request) -> InstalledStatus:
        return model_status(pool, await pool.find_engine(request.path_params["id"]))

    async def load(asked: LoadModel) -> InstalledStatus:
        return model_status(pool, await pool.load(asked.model, _keep_alive(asked)))

    async def unload(asked: UnloadModel) -> Unloaded:
        engine = await pool.find_engine(asked.model)
        gone = await pool.unload(engine.model_id)
        return Unloaded(engine.model_id, gone, engine.in_flight)

    async def pin(asked: PinModel) -> InstalledStatus:
        await pool.find_engine(asked.model)
        return model_status(pool, pool.pin(asked.model, asked.pinned))

    async def alias(asked: NameModel) -> InstalledStatuses:
        await pool.look_for_models(afresh=True)
        pool.alias(asked.alias, asked.model)
        return listed()

    async def remove(asked: RemoveModel) -> Removed:
        return await _remove(pool, await pool.find_engine(asked.model))

    async def found() -> FoundModels:
        models = await asyncio.to_thread(_models_elsewhere)
        return FoundModels(models, pool.room() or total_ram())

    async def inspect(request: Request) -> Inspected:
        parsed = parse_inspect(await request.body())
        return await inspect_prompt(pool, await pool.find_engine(parsed.model), parsed)

    return [
        post("/omlxd/inspect", inspect, "Write a prompt's keys into a file"),
        get("/omlxd/models", models, "Every installed model, loaded or not"),
        post("/omlxd/models/load", load, "Answers once it is loaded"),
        post("/omlxd/models/unload", unload, "Answers once it is gone, or says that it waits"),
        post("/omlxd/models/pin", pin, "Never unloaded for others or for being idle"),
        post("/omlxd/models/remove", remove, "Unload it, and delete its files"),
        get("/omlxd/models/found", found, "Models of other programs on this machine"),
        post("/omlxd/models/alias", alias, "Another name for it; model null takes it away"),
        *pulling.routes(),
        get("/omlxd/models/{id:path}", model, "One installed model"),
    ]
