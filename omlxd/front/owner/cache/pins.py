"""`/omlxd/cache/pin`, `/pins` and `/files`: pinned files of the SSD cache, and a prompt's files.

A request is named as for `/omlxd/why-miss`: by its session, by its id, or by its path and body.
"""

from __future__ import annotations

import time

from ....cli.daemon.owner_api import CachedFiles, PinBlocks, PinList, WhyMissBody
from ....common.units import counted
from ....errors import InvalidRequest, NotFound
from ....wire.explanation import Explanation
from ...engines.ledger.pins import PinnedChain, in_order
from ...engines.pool import EnginePool
from .why_miss import Explaining

MOST_NAME = 200


class Pinning:
    """Answers requests about pins. Raises OmlxdError."""

    def __init__(self, engines: EnginePool, explaining: Explaining):
        self._engines = engines
        self._explaining = explaining

    async def pin(self, asked: PinBlocks) -> PinList:
        name, chain = asked.name, None
        if asked.pinned:
            engine, request, kept = await self._explaining.request_of(asked)
            found = await engine.explain(request, files=True)
            if not found.files:
                raise NotFound(_why_none(found))
            name = name or asked.session or (kept.trace.id if kept else f"{asked.path} {int(time.time())}")
            chain = PinnedChain(engine.model_id, in_order(found.files), time.time())
        if not name or len(name) > MOST_NAME:
            raise InvalidRequest(f"name: write 1 to {MOST_NAME} characters.", param="name")
        return await self._engines.cold.pin(name, chain)

    async def pins(self) -> PinList:
        return await self._engines.cold.pins()

    async def files(self, asked: WhyMissBody) -> CachedFiles:
        engine, request, _ = await self._explaining.request_of(asked)
        found = await engine.explain(request, files=True)
        return CachedFiles(engine.model_id, list(found.files), found.chain_tokens)


def _why_none(found: Explanation) -> str:
    """Say why a prompt has nothing to pin."""
    if found.prompt_tokens < found.block_size:
        tokens = counted(found.prompt_tokens, "token")
        return f"Nothing of it is cached: its {tokens} are less than one block of {found.block_size}."
    return "Nothing of it is cached; send it once, or `omlxd cache warm` it, then pin it."
