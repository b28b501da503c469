"""`GET /omlxd/cache/tree` and `POST /omlxd/cache/clear`: the SSD cache's prefixes, and an end of some.

A program of its own reads the files' heads (cli/cache/tree.py), one at a time, at the lowest priority.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.types import ASGIApp

from ...cli.owner_api import ClearCache, Forgotten
from ...errors import InvalidRequest, OmlxdError, Overloaded
from ...kv.files.paths import is_namespace_dir, is_stored_path
from ..engines.pool import EnginePool
from ..http.streams import Streamed

COMMAND = ("nice", "-n", "19", sys.executable, "-m", "omlxd.cli.cache.tree")
PIECE = 64 * 1024
AT_ONCE = 256
"""Files that are removed in one turn of the ledger's thread."""


class CacheTree:
    """Raises OmlxdError."""

    def __init__(self, engines: EnginePool):
        self._engines = engines
        self._busy = False

    async def tree(self, request: Request) -> ASGIApp:
        pieces = self._said()
        first = await anext(pieces, b"")  # So that a failure is an error and no broken answer.
        return Streamed(pieces, "application/json", first)

    async def clear(self, asked: ClearCache) -> Forgotten:
        if not is_namespace_dir(asked.namespace):
            raise InvalidRequest("namespace: it is no folder of the cache.", param="namespace")
        said = b"".join([piece async for piece in self._said(asked.namespace, asked.id)]).decode()
        pins = await self._engines.cold.pinned_files()
        found = [path for path in said.split("\n") if is_stored_path(path)]
        paths = [path for path in found if path not in pins]
        stays = sorted({name for path in found for name in pins.get(path, ())})
        total = Forgotten(pinned=len(found) - len(paths), pins=stays)
        for at in range(0, len(paths), AT_ONCE):
            done = await self._engines.cold.forget_files(paths[at : at + AT_ONCE], remove=True)
            total.files += done[0]
            total.bytes += done[1]
            total.troubles += done[2][: 20 - len(total.troubles)]
        return total

    async def _said(self, *arguments: str) -> AsyncGenerator[bytes, None]:
        """What the program prints."""
        self._engines.cold.check()
        if self._busy:
            raise Overloaded("The cache's files are being read already; retry in a moment.", retry_after=5)
        self._busy = True
        process = None
        try:
            process = await asyncio.create_subprocess_exec(
                *COMMAND, self._engines.cold.folder, *arguments, stdout=asyncio.subprocess.PIPE
            )
            assert process.stdout is not None
            while piece := await process.stdout.read(PIECE):
                yield piece
            if await process.wait():
                raise OmlxdError("The cache's files can't be read; the log has the details.")
        finally:
            self._busy = False
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
