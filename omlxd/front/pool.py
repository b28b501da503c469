"""Which engines there are, and which one a client's model name means.

One engine today: the model that `omlxd serve` was started with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..config import Settings
from ..kv.ledger import LedgerStats
from ..models.resolve import model_id, resolve_model
from ..wire import CacheSettings, Load
from .cold_ledger import ColdLedger
from .engine_link import ENGINE_COMMAND
from .engine_process import EngineProcess
from .engines import resolve_name

DRAIN_S = 10.0
"""How long answers under way may take to end once the daemon was told to stop."""
FLUSH_S = 5.0
"""How long an engine may then write blocks that are still in memory."""


class EnginePool:
    """The engines of one daemon. `command` is the engine program, replaced in tests."""

    def __init__(self, settings: Settings, command: Sequence[str] = ENGINE_COMMAND):
        self._settings = settings
        cap = 0 if settings.no_cache else settings.paged_ssd_cache_max_size
        self.cold = ColdLedger(
            settings.paged_ssd_cache_dir, cap, daily_writes=settings.ssd_cache_daily_write_budget
        )
        self._engine = EngineProcess(
            model_id(settings.model),
            self._prepare,
            max_concurrent=settings.max_concurrent_requests,
            cold=self.cold,
            command=command,
        )

    def resolve(self, model_name: str) -> EngineProcess:
        """The engine that serves `model_name`; a `claude-…` name is the loaded model's. Raises OmlxdError."""
        resolve_name(model_name, [self._engine.model_id], default=self._engine.model_id)
        return self._engine

    def models(self) -> list[EngineProcess]:
        """Every engine, loaded or not."""
        return [self._engine]

    @property
    def cold_dir(self) -> str:
        return str(self._settings.paged_ssd_cache_dir)

    def cold_stats(self) -> LedgerStats | None:
        return self.cold.peek()

    def start(self) -> None:
        """Begin to load. Returns at once; needs a running event loop."""
        self._engine.start()

    async def close(self, drain_s: float = DRAIN_S, flush_s: float = FLUSH_S) -> None:
        """Let answers end, then engines; the cache's lock goes last."""
        await self._engine.drain(drain_s)
        await self._engine.close(flush_s)
        await self.cold.close()

    def kill(self) -> None:
        """End every engine process now."""
        self._engine.kill()

    async def _prepare(self) -> Load:
        settings = self._settings
        # The cache dir is locked while the model is found or fetched; nobody waits for its walk.
        folder, cold_dir = await asyncio.gather(
            resolve_model(settings.model, settings.base_path), self.cold.open()
        )
        return Load(
            model_path=str(folder),
            model_id=self._engine.model_id,
            cache=CacheSettings(
                enabled=not settings.no_cache,
                block_size=settings.block_size,
                initial_blocks=settings.initial_cache_blocks,
                hot_max_bytes=0 if settings.no_cache else settings.hot_cache_max_size,
                cold_dir=cold_dir,
            ),
            max_concurrent=settings.max_concurrent_requests,
            log_level=settings.log_level,
        )
