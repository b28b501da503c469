"""The SSD cache's prefixes, kept in memory so that every look at them is answered at once.

    cli/cache/listing/tree.py, at the lowest priority → lines of JSON → here → all readers

One read of the folder serves all readers. A look at a cache that has changed since waits `WAIT_S` for a new
read, and is then answered with the last one: the piece says that it is old. The program stays for a while,
because it reads the heads of new files alone.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator

import msgspec

from ....cli.cache.listing.tree import Trees
from ....errors import OmlxdError
from ...engines.ledger.cold_ledger import ColdLedger
from ...engines.link import in_background

COMMAND = ("nice", "-n", "19", sys.executable, "-m", "omlxd.cli.cache.listing.tree")
WAIT_S = 0.2
MOST_WAIT_S = 30.0
"""Seconds that a reader may wait for the new read."""
STAYS_S = 120.0
"""Seconds that the program stays without an order."""
OLD_S = 60.0
"""Seconds after which a read is old, whatever was written: blocks were used since."""
LINE_BYTES = 4 << 20


class TreePiece(msgspec.Struct):
    """A piece of the trees. Seconds since 1970; bytes.

    look    which read it is of: pieces of one read belong together; 0: none has ended yet
    at      when that read ended
    state   `new`; `old`: a newer read is under way; `reading`: the first one is
    pieces  how many there are; `piece`: which one this is, from 0
    files, bytes  of the whole cache, by its account
    trees   of this piece; one that goes on in the next is named there again
    """

    look: int
    at: float
    state: str
    piece: int
    pieces: int
    files: int
    bytes: int
    left_out: int
    trees: msgspec.Raw


class CacheIndex:
    """Keeps the cache's trees. Raises OmlxdError. `reads`: reads of the folder that were begun."""

    def __init__(self, cold: ColdLedger):
        self._cold = cold
        self._lines: list[bytes] = []
        self._look, self._at = 0, 0.0
        self._of: object = None
        self._reading: asyncio.Task[None] | None = None
        self._trouble: OmlxdError | None = None
        self._orders = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._ends: asyncio.TimerHandle | None = None
        self.reads = 0

    def begin(self) -> None:
        """Read the folder if that was never done, for later lookers."""
        if self._reading is None and not self._look and self._cold.peek() is not None:
            self._read()

    def forget(self) -> None:
        """Note that the folder has changed."""
        self._of = None

    async def piece(self, number: int, wait: float = WAIT_S) -> TreePiece:
        """Return piece `number` of the newest read. Waits `wait` seconds at most for one that is not old."""
        self._cold.check()
        if number == 0:
            if self._reading is None and self._is_old():
                self._read()
            if self._reading is not None:
                await asyncio.wait({self._reading}, timeout=min(wait, MOST_WAIT_S))
            if self._trouble is not None:
                raise self._trouble
        stats = self._cold.peek()
        assert stats is not None
        raw, left_out = msgspec.Raw(b"[]"), 0
        if number < len(self._lines):
            line = msgspec.json.decode(self._lines[number], type=_Line)
            raw, left_out = line.trees, line.left_out
        reading = self._reading is not None
        state = "new" if not reading else "old" if self._look else "reading"
        return TreePiece(
            *(self._look, self._at, state, number, len(self._lines)),
            *(stats.files, stats.bytes_used, left_out, raw),
        )

    async def files_below(self, namespace: str, id: str) -> list[str]:
        """Return the files of a node and of all below it, children first; `id` "": all of the namespace."""
        return [line.decode() async for line in self._asked(f"below {namespace} {id or '-'}")]

    def _is_old(self) -> bool:
        return self._of is None or self._of != self._state() or time.time() - self._at > OLD_S

    def _state(self) -> object:
        """Return what changes whenever a file comes or goes."""
        stats = self._cold.peek()
        return stats and (stats.files, stats.bytes_used, stats.evicted_files, stats.written_bytes_total)

    def _read(self) -> None:
        self.reads += 1
        self._reading = in_background(self._work())

    async def _work(self) -> None:
        state = self._state()
        self._trouble = None
        try:
            lines = [line async for line in self._asked("tree")]
            self._lines, self._of = lines, state
            self._look, self._at = self._look + 1, time.time()
        except OmlxdError as error:
            self._trouble = error
        finally:
            self._reading = None

    async def _asked(self, order: str) -> AsyncGenerator[bytes, None]:
        """Yield the lines of the program's answer."""
        async with self._orders:
            process = await self._running()
            assert process.stdin is not None and process.stdout is not None
            ended = False
            try:
                process.stdin.write(order.encode() + b"\n")
                await process.stdin.drain()
                while (line := await process.stdout.readline()).strip():
                    yield line.rstrip(b"\n")
                if not line:
                    raise OmlxdError("The cache's files can't be read; the log has the details.")
                ended = True
            except (ConnectionError, ValueError):  # It has ended; a line is too long.
                raise OmlxdError("The cache's files can't be read; the log has the details.") from None
            finally:
                if ended:
                    self._ends = asyncio.get_running_loop().call_later(STAYS_S, self._end)
                else:
                    self._end()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._ends is not None:
            self._ends.cancel()
        if self._process is None or self._process.returncode is not None:
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(
                *COMMAND, self._cold.folder, stdin=pipe, stdout=pipe, limit=LINE_BYTES
            )
        return self._process

    def _end(self) -> None:
        """End the program; a later order starts another."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            in_background(process.wait())


class _Line(msgspec.Struct):
    """A line of the program: `Trees`, whose trees stay as they are written."""

    trees: msgspec.Raw
    left_out: int = 0


assert _Line.__struct_fields__ == Trees.__struct_fields__
