"""The one model that is loaded: another one takes its place once its answers have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from msgspec.structs import replace

from ...config import Settings
from ...errors import InvalidRequest, ModelError, NotFound, NotNow, OmlxdError, Unavailable
from ...models.catalog import InstalledModel, default_model
from ...models.resolve import check_folder, is_local, local_path
from ..engines.model import ModelEngine
from ..engines.names.names import resolve_name
from ..engines.pool import EnginePool

Loading = asyncio.Task[ModelEngine]


class ModelSlot:
    """Holds the loaded model. `settings`: as they were when the program began.

    loading  the newest load, under way or over; None: there was none
    loaded   the model that requests go to
    """

    def __init__(self, settings: Settings, pool: EnginePool):
        self._settings = self._applied = settings
        self._pool = pool
        self._trouble = ""
        self.loading: Loading | None = None
        self.loaded: ModelEngine | None = None

    def load(self, name: str, before: Collection[asyncio.Task[Any]]) -> Loading:
        """Have `name` loaded ("": what `--model` says) once the tasks in `before` have ended.

        The task raises OmlxdError. What stood in the slot stays if there is no such model.
        """
        self.loading = asyncio.create_task(self._load(name, self.loading, before), name=f"load {name}")
        return self.loading

    async def engine(self, loading: Loading | None, name: str = "") -> ModelEngine:
        """Return the model that `loading` loaded. Raises OmlxdError if nothing is, or not `name`."""
        if loading is not None:
            await asyncio.wait({loading})
        if self.loaded is None:
            raise Unavailable(self._trouble or 'No model is loaded; send {"op": "load", "id": …} first.')
        if name:
            id = self.loaded.model_id
            try:
                resolve_name(name, [id], id, dict.fromkeys(self._pool.aliases_of(id), id))
            except NotFound as error:
                raise NotFound(
                    f"model: {name[:200]!r} is not loaded, {id} is; load it first, or leave the field out.",
                    param="model",
                ) from error
        return self.loaded

    async def _load(
        self, name: str, previous: Loading | None, before: Collection[asyncio.Task[Any]]
    ) -> ModelEngine:
        if waited := {*before, *([previous] if previous is not None else [])}:
            await asyncio.wait(waited)
        settings, wanted = await self._find(name)
        await self._make_room(wanted)
        await self._apply(settings)
        engine = self._pool.resolve(wanted.id)
        try:
            await self._pool.load(engine.model_id)
        except OmlxdError as error:
            self.loaded = None
            self._trouble = f"The last load failed: {error.message} Send `load` again."
            raise
        self.loaded = engine
        return engine

    async def _find(self, name: str) -> tuple[Settings, InstalledModel]:
        """Find the model that `name` means, and its settings, under which the pool knows it."""
        settings = self._settings
        if name:
            await self._apply(settings)
            try:
                return settings, (await self._pool.find_engine(name)).installed
            except NotFound:
                settings = replace(settings, model=name)
            if is_local(name):
                try:
                    await asyncio.to_thread(check_folder, local_path(name))
                except ModelError as error:
                    raise InvalidRequest(f"model: {error.message}", param="model") from error
        wanted = default_model(settings)
        if wanted is None:
            raise InvalidRequest("model: say which one, a folder or ORG/NAME", param="model")
        return settings, wanted

    async def _make_room(self, wanted: InstalledModel) -> None:
        old = self.loaded
        if old is None or old.installed.is_same(wanted):
            return
        self.loaded = None
        if not await self._pool.unload(old.model_id):
            self.loaded = old
            raise NotNow(f"{old.model_id} is still in use; send `load` again in a moment.", retry_after=1)

    async def _apply(self, settings: Settings) -> None:
        if settings != self._applied:
            self._applied = settings
            await self._pool.apply_settings(settings)
