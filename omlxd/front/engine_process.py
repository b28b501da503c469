"""An engine as the front sees it: always there, whatever becomes of the process behind it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from .. import wire
from ..chat import Conversation, GenerateRequest, RawPrompt
from .engine_stream import EngineStream
from .engine_supervisor import EngineSupervisor

STATS_TIMEOUT_S = 5.0


class EngineProcess(EngineSupervisor):
    """What can be asked of it. What becomes of a request in which state: engine_supervisor.py."""

    def generate(self, request: GenerateRequest) -> EngineStream:
        """Send `request`; raises Overloaded, Unavailable or InvalidRequest before any event."""
        self._admit()
        stream = EngineStream(self._requests.new_id(), self.forget)
        self._submit(stream.id, wire.Generate(id=stream.id, request=request), stream)
        return stream

    async def count_tokens(self, prompt: Conversation | RawPrompt, session: str = "") -> int:
        """Tokens of `prompt` as `generate` would render it. Raises OmlxdError."""
        self._admit()
        id, answer = self._requests.new_id(), asyncio.get_running_loop().create_future()
        self._submit(id, wire.Count(id=id, prompt=prompt, session=session), answer)
        try:
            return await answer
        finally:
            self.forget(id)

    async def explain(self, request: GenerateRequest, reached: int) -> wire.Explanation:
        """Why `request` misses, or missed after `reached` tokens. Raises OmlxdError."""
        self._admit()
        id, answer = self._requests.new_id(), asyncio.get_running_loop().create_future()
        self._submit(id, wire.Explain(id=id, request=request, reached=reached), answer)
        try:
            return await answer
        finally:
            self.forget(id)

    async def stats(self) -> wire.Stats | None:
        """The engine's own counters; None unless it is ready and answers soon."""
        if self.state != "ready":
            return None
        return await self._ask_stats()

    async def device_available(self) -> int | None:
        """Bytes free where arrays live, as the engine finds them, loaded or not; None: it does not say."""
        stats = await self._ask_stats() if self._link is not None else None
        value = stats.values.get("device_available_bytes") if stats else None
        return None if value is None else int(value)

    async def _ask_stats(self) -> wire.Stats | None:
        # Not a request: it neither keeps a model loaded nor waits for one.
        if self._link is None:
            return None
        link, id = self._link, self._requests.new_id()
        return await self._requests.question(id, lambda: link.send(wire.GetStats(id=id)), STATS_TIMEOUT_S)

    def forget(self, id: int) -> None:
        """Nobody wants the answer to `id` any more; the engine is told if it is still at work."""
        if self._requests.forget(id):
            self.send(wire.Cancel(id=id))

    def _submit(self, id: int, message: Any, answer: EngineStream | asyncio.Future[Any]) -> None:
        waiting = self._requests.add(id, message, answer)
        self.used_at = time.monotonic()
        if self.state == "ready":
            self._send(waiting)
        else:
            self._want()
