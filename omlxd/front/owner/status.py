"""What the daemon tells its owner: `GET /omlxd/status`, for `omlxd status`, and `GET /ready`.

Each model's engine values stand there as the engine names them, so that a new one needs no field here.
"""

from __future__ import annotations

import os
import time

import msgspec

from ... import __version__
from ...kv.ledger.ledger import LedgerStats
from ..engines.protocol import Engine, Engines
from .engine_figures import EngineFigures, FiguresOf

_CANNOT = frozenset({"loading", "restarting", "failed"})
"""States in which a request would wait, or be refused. In any other it is served, loading if need be."""
_SOON = frozenset({"loading", "restarting"})


class ModelStatus(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One model. Bytes, tokens and seconds; 0 where there is nothing to say.

    trouble   why it can't serve, a sentence
    resident  bytes of the engine process
    values    the engine's counters and gauges, counters over all its processes
    values_age_s  how old they are: the engine is too busy to answer at once; 0: they are of this moment
    """

    id: str
    state: str
    trouble: str = ""
    pid: int = 0
    starts: int = 0
    resident: int = 0
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    context_length: int = 0
    backend: str = ""
    kv_reuse: str = ""
    note: str = ""
    running: int = 0
    waiting: int = 0
    values: dict[str, float] = {}
    values_age_s: float = 0.0


class ColdStatus(msgspec.Struct, kw_only=True):
    """The SSD cache: its folder and its account."""

    dir: str
    bytes: int
    cap: int
    reserved: int
    files: int
    evicted_files: int
    evicted_bytes: int
    folder_away: bool = False


class DaemonStatus(msgspec.Struct, kw_only=True):
    """`cold` None: no SSD cache, or it can't be used. `resident`: bytes of the front process alone."""

    version: str
    pid: int
    started: float
    uptime_s: float
    resident: int
    models: list[ModelStatus]
    cold: ColdStatus | None


class Readiness(msgspec.Struct, kw_only=True):
    """`reasons`: a sentence for each model that can't serve now."""

    ready: bool
    reasons: list[str]


class Admin:
    """The daemon's own account of itself."""

    def __init__(self, engines: Engines, figures: FiguresOf):
        self._engines = engines
        self._figures = figures
        self._started, self._clock = time.time(), time.monotonic()

    async def status(self) -> DaemonStatus:
        known = {each.model_id: each for each in await self._figures.look()}
        ledger = self._engines.cold_stats()
        return DaemonStatus(
            version=__version__,
            pid=os.getpid(),
            started=self._started,
            uptime_s=time.monotonic() - self._clock,
            resident=_own_resident(),
            models=[_status(engine, known.get(engine.model_id)) for engine in self._engines.models()],
            cold=_cold(self._engines.cold_dir, ledger) if ledger is not None else None,
        )

    def readiness(self) -> Readiness:
        """Ready once one model is loaded, or could be loaded on demand and none is being loaded already."""
        models = self._engines.models()
        # Nothing restarts by itself: one that died waits for its next request, which loads it.
        here = [engine for engine in models if not _comes_on_demand(engine)]
        reasons = [reason for engine in here if (reason := _why_not(engine) or _refused(engine))]
        states = {engine.state for engine in here}
        ready = "ready" in states or (len(reasons) < len(models) and not states & _SOON)
        return Readiness(ready=ready, reasons=reasons or _nothing(models))


def _comes_on_demand(engine: Engine) -> bool:
    """It was loaded, died, and has not been asked for since."""
    dead = engine.state == "restarting" and engine.pid is None and not engine.in_flight
    return dead and engine.info is not None


def _nothing(models: object) -> list[str]:
    return [] if models else ["There is no model to serve."]


def _why_not(engine: Engine) -> str:
    if engine.state not in _CANNOT:
        return ""
    return engine.trouble or f"{engine.model_id} is {engine.state}."


def _refused(engine: Engine) -> str:
    """No trouble of the model's, as its owner wanted it so; but not one request is served."""
    if not engine.is_refused:
        return ""
    return f"{engine.model_id} is not loaded; load it with `omlxd models load {engine.model_id}`."


def _status(engine: Engine, figures: EngineFigures | None) -> ModelStatus:
    figures = figures or EngineFigures(engine.model_id)
    info = engine.info
    status = ModelStatus(
        id=engine.model_id,
        state=engine.state,
        trouble=_why_not(engine),
        pid=engine.pid or 0,
        starts=engine.starts,
        resident=figures.resident,
        running=figures.running,
        waiting=figures.waiting,
        values={**figures.totals, **figures.gauges},
        values_age_s=figures.age_s,
    )
    if info is not None:
        status.weight_bytes, status.kv_bytes_per_token = info.weight_bytes, info.kv_bytes_per_token
        status.context_length, status.backend = info.context_length, info.backend
        status.kv_reuse, status.note = info.kv_reuse, info.note
    return status


def _cold(folder: str, stats: LedgerStats) -> ColdStatus:
    return ColdStatus(
        dir=folder,
        bytes=stats.bytes_used,
        cap=stats.cap,
        reserved=stats.reserved,
        files=stats.files,
        evicted_files=stats.evicted_files,
        evicted_bytes=stats.evicted_bytes,
        folder_away=bool(stats.folder_away),
    )


def _own_resident() -> int:
    import psutil

    return psutil.Process().memory_info().rss
