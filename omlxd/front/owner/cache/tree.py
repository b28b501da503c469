"""`GET /omlxd/cache/tree` and `POST /omlxd/cache/clear`: list the SSD cache's prefixes, and remove some.

/omlxd/cache/tree            the first piece, at once: of the last read, while a new one is under way
/omlxd/cache/tree?piece=3    the fourth; they belong together while their `look` is the same
/omlxd/cache/tree?wait=20    waits so many seconds for a read that is not old
"""

from __future__ import annotations

from starlette.requests import Request

from ....cli.daemon.owner_api import ClearCache, Forgotten
from ....errors import InvalidRequest
from ....kv.files.paths import is_namespace_dir, is_stored_path
from ...engines.pool import EnginePool
from .index import WAIT_S, CacheIndex, TreePiece

AT_ONCE = 256
"""Files that are removed in one turn of the ledger's thread."""
MOST_PIECE = 10_000


class CacheTree:
    """Answers requests for trees. Raises OmlxdError."""

    def __init__(self, engines: EnginePool):
        self._engines = engines
        self.index = CacheIndex(engines.cold)

    async def tree(self, request: Request) -> TreePiece:
        piece = _number(request, "piece", 0, MOST_PIECE)
        return await self.index.piece(int(piece), _number(request, "wait", WAIT_S, 3600))

    async def clear(self, asked: ClearCache) -> Forgotten:
        if not is_namespace_dir(asked.namespace):
            raise InvalidRequest("namespace: it is no folder of the cache.", param="namespace")
        self._engines.cold.check()
        said = await self.index.files_below(asked.namespace, asked.id)
        pins = await self._engines.cold.pinned_files()
        found = [path for path in said if is_stored_path(path)]
        paths = [path for path in found if path not in pins]
        stays = sorted({name for path in found for name in pins.get(path, ())})
        total = Forgotten(pinned=len(found) - len(paths), pins=stays)
        for at in range(0, len(paths), AT_ONCE):
            done = await self._engines.cold.forget_files(paths[at : at + AT_ONCE], remove=True)
            total.files += done[0]
            total.bytes += done[1]
            total.troubles += done[2][: 20 - len(total.troubles)]
        self.index.forget()
        return total


def _number(request: Request, name: str, default: float, most: float) -> float:
    text = request.query_params.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise InvalidRequest(f"{name}: write a number from 0 to {most:g}.", param=name)
    return value
