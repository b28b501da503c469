"""The daemon's own account: `GET /omlxd/status`, `GET /ready` and `POST /omlxd/cache/forget`.

Each model's engine values stand there as the engine names them, so that a new one needs no field here.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ... import __version__
from ...cli.daemon.owner_api import (
    AwakeStatus,
    ColdStatus,
    DaemonStatus,
    Forget,
    Forgotten,
    ModelStatus,
    RankStatus,
    Readiness,
    TidyMemory,
)
from ...common.heap import give_memory_back
from ...errors import InvalidRequest
from ...kv.files.paths import is_stored_path
from ...kv.ledger.ledger import LedgerStats
from ..engines.link import in_background
from ..engines.model import ModelEngine
from ..engines.pool import EnginePool
from ..engines.watch import resident
from ..http.routes import Operation
from ..http.sending.streams import as_json
from .engine_metrics import OF_RANK, EngineMetrics, MetricsOf

_CANNOT = frozenset({"loading", "restarting", "failed"})
"""States in which a request waits or is refused. In any other it is served, loading if need be, or if the
model can't fit, refused.
"""
_SOON = frozenset({"loading", "restarting"})


class ModelState(msgspec.Struct):
    id: str
    state: str


class Health(msgspec.Struct):
    """The answer of a health check. `status`: this process answers. `models`: the state of the engines."""

    version: str
    models: list[ModelState]
    status: str = "ok"


class Admin:
    """Makes the answers from figures of the engines and the ledger."""

    def __init__(self, engines: EnginePool, metrics: MetricsOf):
        self._engines = engines
        self._engine_metrics = metrics
        self._started, self._clock = time.time(), time.monotonic()

    async def daemon_status(self) -> DaemonStatus:
        by_model = {each.model_id: each for each in await self._engine_metrics.read()}
        cold = self._engines.cold
        ledger, awake = cold.peek(), self._engines.awake
        return DaemonStatus(
            version=__version__,
            pid=os.getpid(),
            started=self._started,
            uptime_s=time.monotonic() - self._clock,
            resident=resident(os.getpid()) or 0,
            models=[_status(engine, by_model.get(engine.model_id)) for engine in self._engines.models()],
            cold=_cold(cold.folder, ledger) if ledger is not None else None,
            given=(cold.given.files, cold.given.nbytes) if cold.given is not None else None,
            awake=AwakeStatus(on=awake.on, held=awake.held, was_held=awake.was_held, trouble=awake.trouble),
            memory_limit=self._engines.catalog.settings.memory_limit_bytes,
        )

    async def forget_files(self, asked: Forget) -> Forgotten:
        """Take files out of the SSD cache that the owner has removed or wants gone. Raises OmlxdError."""
        for path in asked.paths:
            if not is_stored_path(path):
                raise InvalidRequest(
                    f"paths: {path[:200]!r} is no block or record in the cache dir.", param="paths"
                )
        return Forgotten(*await self._engines.cold.forget_files(asked.paths, asked.remove))

    async def tidy_memory(self, asked: TidyMemory) -> DaemonStatus:
        """Have engines and this process free memory, and report theirs. Loads none. Raises OmlxdError."""
        engines = [await self._engines.find_engine(asked.model)] if asked.model else self._engines.models()
        await asyncio.gather(*(engine.stats(asked.trim, asked.reset_peak) for engine in engines))
        if asked.trim:
            await asyncio.to_thread(give_memory_back)
        return await self.daemon_status()

    async def health(self) -> Health:
        in_background(self._engines.look_for_models())  # For whoever asks next: a probe is answered at once.
        models = [ModelState(engine.model_id, engine.state) for engine in self._engines.models()]
        return Health(__version__, models)

    def ready_route(self) -> Operation:
        summary = "Whether some model could serve a request now; `reasons`: which ones can't, and why"
        return Operation("GET", "/ready", self._ready, summary, answer=Readiness, unready=Readiness)

    async def _ready(self, request: Request) -> Response:
        in_background(self._engines.look_for_models())  # It may measure a model.
        answer = as_json(readiness := self.readiness())
        answer.status_code = 200 if readiness.ready else 503
        return answer

    def readiness(self) -> Readiness:
        """Say whether one model is loaded, or could be loaded on demand while none is being loaded.

        The default model may be one that can't be loaded, while others are served: `reasons` names it.
        """
        models = self._engines.models()
        # Nothing restarts by itself: one that died waits for its next request, which loads it.
        here = [engine for engine in models if not _comes_on_demand(engine)]
        reasons = [reason for engine in here if (reason := _why_not(engine) or _refused(engine))]
        states = {engine.state for engine in here}
        ready = "ready" in states or (len(reasons) < len(models) and not states & _SOON)
        return Readiness(ready=ready, reasons=reasons or _nothing(models))


def _comes_on_demand(engine: ModelEngine) -> bool:
    """Return whether the model was loaded, died, and has not been asked for since."""
    dead = engine.state == "restarting" and engine.pid is None and not engine.in_flight
    return dead and engine.info is not None


def _nothing(models: object) -> list[str]:
    return [] if models else ["There is no model to serve."]


def _why_not(engine: ModelEngine) -> str:
    if engine.state not in _CANNOT:
        return engine.why_never() if engine.state == "unloaded" else ""
    return engine.trouble or f"{engine.model_id} is {engine.state}."


def _refused(engine: ModelEngine) -> str:
    """Say why the owner's settings refuse every request for a model, which is no trouble of the model's."""
    if not engine.is_refused:
        return ""
    return f"{engine.model_id} is not loaded; load it with `omlxd models load {engine.model_id}`."


def _status(engine: ModelEngine, metrics: EngineMetrics | None) -> ModelStatus:
    metrics = metrics or EngineMetrics(engine.model_id)
    info = engine.info
    status = ModelStatus(
        id=engine.model_id,
        state=engine.state,
        trouble=_why_not(engine),
        slowed=engine.slowed,
        peer=metrics.peer,
        pid=engine.pid or 0,
        shares=engine.shares,
        starts=engine.starts,
        resident=metrics.resident,
        running=metrics.running,
        waiting=metrics.waiting,
        by_priority=engine.by_priority,
        ranks=_ranks(metrics.ranks(), engine.settings.join or ()),
        values={
            **metrics.totals,
            **{name: value for name, value in metrics.gauges.items() if not OF_RANK.fullmatch(name)},
        },
        values_age_s=metrics.age_s,
    )
    if info is not None:
        status.weight_bytes, status.kv_bytes_per_token = info.weight_bytes, info.kv_bytes_per_token
        status.context_length = engine.context_length or 0
        status.backend, status.speed = info.backend, info.speed
        status.kv_reuse, status.note, status.kernels = info.kv_reuse, info.note, info.kernels
    return status


def _ranks(found: dict[int, dict[str, int]], join: Sequence[str]) -> tuple[RankStatus, ...]:
    """`join`: hosts of the last ones."""
    hosts = [*[""] * (len(found) - len(join)), *join]
    return tuple(
        _rank(number, found[number], host) for number, host in zip(sorted(found), hosts, strict=False)
    )


def _rank(number: int, values: dict[str, int], host: str) -> RankStatus:
    works, full = values.get("kv_cold_tier_on", 1), values.get("kv_cold_disk_full", 0)
    return RankStatus(
        rank=number,
        host=host,
        pid=values.get("pid", 0),
        resident=values.get("resident_bytes", 0),
        mlx=values.get("mlx_active_bytes", 0),
        hot=values.get("kv_hot_bytes", 0),
        cold=values.get("cold_bytes"),
        disk="" if works else "full" if full else "off",
    )


def _cold(folder: str, stats: LedgerStats) -> ColdStatus:
    return ColdStatus(
        dir=folder,
        bytes=stats.bytes_used,
        cap=stats.cold_cache_bytes,
        reserved=stats.reserved,
        files=stats.files,
        evicted_files=stats.evicted_files,
        evicted_bytes=stats.evicted_bytes,
        folder_away=bool(stats.folder_away),
        capacity=stats.capacity,
        written_today=stats.written_today_bytes,
        written_ever=stats.written_ever_bytes,
        daily_write_budget=stats.daily_write_budget_bytes,
        write_budget_used_up=bool(stats.write_budget_used_up),
    )
