"""Values that engines report, kept so that a look is answered at once.

An engine is asked with a short timeout; one that is loading, dead or slow costs a look nothing but
that. Of a slow engine the last values stand; of one that doesn't run, its counters alone.

An engine's counters begin at nothing with its process. Here they go on: a counter never goes down.
One that ends in order says its counters once more; what one that dies counted since the last look is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..engines.model import ModelEngine
from ..engines.pool import EnginePool
from ..engines.watch import resident

ANSWER_S = 0.5
"""Seconds that a look waits for an engine; Prometheus gives up after ten by default."""
OF_RANK = re.compile(r"rank_(\d+)_(.+)")
"""Matches names of values of one of several ranks."""
COUNTER = "_total"
"""Ending of the names of counters; all other engine values are gauges."""


@dataclass(slots=True)
class EngineMetrics:
    """One model's values. Totals go on over restarts; `gauges` is empty unless the engine runs.

    engine    that `life` and `last` are of: a folder that went and came back has another one
    starts    engine processes started so far; deaths: those of them that died or hung
    before    (starts, deaths) of engines before this one
    resident  bytes of the engine process, and of its other ranks; 0 without one
    running, waiting  requests; those that wait for a load are among the waiting
    peer      why nothing comes from --peer; "": it may
    age_s     seconds since a ready engine said the values; 0: it has just done so
    """

    model_id: str
    engine: ModelEngine | None = None
    state: str = ""
    starts: int = 0
    deaths: int = 0
    before: tuple[int, int] = (0, 0)
    resident: int = 0
    running: int = 0
    waiting: int = 0
    peer: str = ""
    age_s: float = 0.0
    totals: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    life: int = 0
    """Process (its number among `starts`) whose values `last` has."""
    last: dict[str, float] = field(default_factory=dict)
    said_at: float = field(default_factory=time.monotonic)
    """When the engine last answered; before that, the time of the first look."""

    def total(self, name: str) -> float:
        return self.totals.get(name, 0.0)

    def ranks(self) -> dict[int, dict[str, int]]:
        """Return what each of several ranks says of itself, by name."""
        found: dict[int, dict[str, int]] = {}
        for name, value in self.gauges.items():
            if of_rank := OF_RANK.fullmatch(name):
                found.setdefault(int(of_rank[1]), {})[of_rank[2]] = int(value)
        return found

    def add_counters(self, values: dict[str, float], life: int) -> None:
        """Add what process `life` has counted since the last look."""
        if life != self.life:
            self.life, self.last = life, {}
        self.gauges = {}
        for name, value in values.items():
            if not name.endswith(COUNTER):
                self.gauges[name] = value
                continue
            grown = max(0.0, value - self.last.get(name, 0.0))
            self.totals[name] = self.totals.get(name, 0.0) + grown
            self.last[name] = value


class MetricsOf:
    """Metrics of all `engines`; models that are gone keep their totals."""

    def __init__(self, engines: EnginePool):
        self._engines = engines
        self._by_model: dict[str, EngineMetrics] = {}
        self._asking: asyncio.Task[None] | None = None

    async def read(self) -> Sequence[EngineMetrics]:
        """Ask every engine, for `ANSWER_S` at most. Looks at the same time share one question."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_all(), name="engine metrics")
        await asyncio.shield(self._asking)
        return list(self._by_model.values())

    async def _ask_all(self) -> None:
        engines = {engine.model_id: engine for engine in self._engines.models()}
        for gone in self._by_model.keys() - engines.keys():
            metrics = self._by_model[gone]
            metrics.state, metrics.resident, metrics.running, metrics.waiting = "", 0, 0, 0
            metrics.gauges = {}
        await asyncio.gather(*map(self._ask, engines.values()))

    async def _ask(self, engine: ModelEngine) -> None:
        metrics = self._by_model.setdefault(engine.model_id, EngineMetrics(engine.model_id))
        if metrics.engine is not engine:
            metrics.engine, metrics.before = engine, (metrics.starts, metrics.deaths)
            metrics.life, metrics.last = 0, {}
        for ended, values in engine.take_last_stats():
            if ended >= metrics.life:  # Else a later one has been asked already.
                metrics.add_counters(values, ended)
        life = engine.starts
        answer = None
        if engine.state == "ready":
            with contextlib.suppress(TimeoutError):
                answer = await asyncio.wait_for(engine.stats(), ANSWER_S)
        metrics.age_s = 0.0
        if answer is not None:
            metrics.add_counters(answer.values, life)
            metrics.peer = answer.peer
            metrics.said_at = time.monotonic()
        elif engine.state == "ready":
            metrics.age_s = max(0.001, time.monotonic() - metrics.said_at)
        starts, deaths = metrics.before
        metrics.starts, metrics.deaths = starts + engine.starts, deaths + engine.deaths
        metrics.state = engine.state
        if engine.state != "ready":
            metrics.gauges, metrics.peer = {}, ""
        if "ranks" in metrics.gauges and engine.info is not None:
            namespaces = engine.info.namespace, *engine.info.shares
            here = len(namespaces) - len(engine.settings.join or ())  # The others say it themselves.
            for number, namespace in enumerate(namespaces[:here]):
                metrics.gauges[f"rank_{number}_cold_bytes"] = self._engines.cold.bytes_in(namespace)
        others = (rank.get("resident_bytes", 0) for number, rank in metrics.ranks().items() if number)
        metrics.resident = (resident(engine.pid) or 0) + sum(others)
        metrics.running = int(metrics.gauges.get("num_requests_running", 0))
        queued = int(metrics.gauges.get("num_requests_waiting", 0))
        metrics.waiting = queued if engine.state == "ready" else engine.in_flight
