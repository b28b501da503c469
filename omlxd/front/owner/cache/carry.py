"""`/omlxd/cache/import` and `/omlxd/cache/prompt-cache`: KV that the owner brings or takes away.

| request                               | body                                          | answer         |
|---------------------------------------|-----------------------------------------------|----------------|
| POST /omlxd/cache/import              | an archive of `omlxd cache export`            | Imported       |
| POST /omlxd/cache/prompt-cache/import | 8 bytes, little-endian: the length of a       | ImportedPrompt |
|                                       | WhyMissBody; that; then mlx-lm's file         |                |
| POST /omlxd/cache/prompt-cache/export | a WhyMissBody                                 | mlx-lm's file  |

Bodies are streamed: of an archive no more is held than a file, and a client names no path. mlx-lm's file may
take what its disk has room for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

import msgspec
import psutil
from starlette.requests import Request
from starlette.responses import StreamingResponse

from ....api.fields.body import decode
from ....chat import GenerateRequest, Sampling
from ....cli.cache.transfer.archive import Room, take_archive
from ....cli.daemon.owner_api import Imported, ImportedPrompt, WhyMissBody
from ....common.units import counted, disk_room
from ....errors import InvalidRequest, RequestTooLarge, Unavailable
from ....kv.files.fs import FileSystem, write_all
from ....wire import Released, Reserve, Stored
from ...engines.ledger.cold_ledger import ColdLedger
from ...engines.pool import EnginePool
from ...http.routes import Operation
from ..inspect import computed
from .why_miss import Explaining

_MOST_ASKED = 32 << 20
_PIECE = 1 << 20
_BAD_SHOWN = 3
"""Files that an error names."""
_FILE = "application/octet-stream"
_ASKED = msgspec.json.Decoder(WhyMissBody)


class Carrying:
    """Imports and exports KV. `spool`: a folder for files on their way, which are as large as a prompt's KV;
    None: there is none.
    """

    def __init__(self, engines: EnginePool, explaining: Explaining, spool: Path | None):
        self._engines = engines
        self._explaining = explaining
        self._spool = spool
        self._one = asyncio.Lock()

    def export_route(self) -> Operation:
        path, summary = "/omlxd/cache/prompt-cache/export", "A prompt's KV as mlx-lm's file"
        return Operation("POST", path, self.give_prompt, summary, body=WhyMissBody, media=_FILE)

    async def take_archive(self, request: Request) -> Imported:
        """Import an archive. Raises OmlxdError, ClientDisconnect."""
        cold = self._engines.cold
        cold.check()
        room = _LedgerRoom(cold, asyncio.get_running_loop())
        async with self._one:
            try:
                done = await _piped(
                    request.stream(), lambda body: take_archive(body, Path(cold.folder), room)
                )
            except OSError as error:
                raise Unavailable(f"The SSD cache can't be written: {error.strerror or error}.") from None
        _check_taken(done)
        return done

    async def take_prompt(self, request: Request) -> ImportedPrompt:
        """Import a prompt's KV. Raises OmlxdError, ClientDisconnect."""
        async with self._one:
            with self._file() as file:
                asked = await _received(request.stream(), file)
                engine, generate, _ = await self._explaining.request_of(asked)
                usage = await computed(engine, _bare(generate, import_file=str(file)))
        info = engine.info
        return ImportedPrompt(engine.model_id, usage.prompt_tokens, info.block_size if info else 0)

    async def give_prompt(self, request: Request) -> StreamingResponse:
        """Export a prompt's KV. Raises OmlxdError."""
        asked = decode(_ASKED, await request.body())
        engine, generate, _ = await self._explaining.request_of(asked)
        with self._file() as file:
            await computed(engine, _bare(generate, export_to=str(file)))
            opened = file.open("rb")  # And its name goes: whatever becomes of the client, nothing stays.
        size = os.fstat(opened.fileno()).st_size
        headers = {"content-length": str(size), "content-type": _FILE}
        return StreamingResponse(_pieces(opened), headers=headers)

    @contextlib.contextmanager
    def _file(self) -> Iterator[Path]:
        """Make a private temporary file; those of killed daemons go first."""
        if self._spool is None:
            raise Unavailable("This server keeps no files.")
        self._spool.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in self._spool.glob("*.safetensors"):
            owner = old.name.partition("-")[0]
            if not owner.isdigit() or not psutil.pid_exists(int(owner[:9])):
                old.unlink(missing_ok=True)
        file = self._spool / f"{os.getpid()}-{time.time_ns()}.safetensors"
        file.touch(mode=0o600)
        try:
            yield file
        finally:
            file.unlink(missing_ok=True)


def _check_taken(done: Imported) -> None:
    """Raise for an archive that brought nothing: its status alone would pass for an import."""
    if done.taken or done.there:
        return
    if done.full:
        raise RequestTooLarge(f"The SSD cache has no room for any of its {counted(done.full, 'file')}.")
    if done.bad:
        more = f"; and {len(done.bad) - _BAD_SHOWN} more" if len(done.bad) > _BAD_SHOWN else ""
        raise InvalidRequest(f"Nothing of it is imported: {'; '.join(done.bad[:_BAD_SHOWN])}{more}.")
    raise InvalidRequest("Nothing of it is imported: it has no block and no record.")


def _bare(request: GenerateRequest, *, import_file: str = "", export_to: str = "") -> GenerateRequest:
    """Return the request's prompt alone, without an answer."""
    return GenerateRequest(
        request.prompt,
        Sampling(max_tokens=0),
        session=request.session,
        parent_agent=request.parent_agent,
        cache_salt=request.cache_salt,
        collected=not import_file,  # A file that ends an engine does so once.
        import_file=import_file,
        export_to=export_to,
    )


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while piece := file.read(_PIECE):
            yield piece


async def _received(body: AsyncIterator[bytes], file: Path) -> WhyMissBody:
    """Write what follows the request in `body` to `file`; returns the request."""
    head = bytearray()
    asked: WhyMissBody | None = None
    left = disk_room(file.parent)
    with file.open("wb") as target:
        async for piece in body:
            if asked is None:
                head += piece
                length = 8 + int.from_bytes(head[:8], "little")
                if len(head) >= 8 and length > _MOST_ASKED:
                    raise RequestTooLarge(f"The request before the file is larger than {_MOST_ASKED} bytes.")
                if len(head) < max(8, length):
                    continue
                asked, piece = decode(_ASKED, bytes(head[8:length])), bytes(head[length:])
            left -= len(piece)
            if left < 0 and (left := disk_room(file.parent) - len(piece)) < 0:
                raise Unavailable(f"The disk of {file.parent} has no room for the file.")
            try:
                await _to_its_end(lambda piece=piece: target.write(piece))
            except OSError as error:
                raise Unavailable(f"The file can't be kept: {error.strerror or error}.") from None
    if asked is None:
        raise InvalidRequest("The body ends before its request does.")
    return asked


T = TypeVar("T")


async def _to_its_end(write: Callable[[], object]) -> None:
    """Run `write` on a thread; a cancelled task waits until `write` is done with its open file."""
    writing = asyncio.ensure_future(asyncio.to_thread(write))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        while not writing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([writing])
        raise


async def _piped(body: AsyncIterator[bytes], work: Callable[[IO[bytes]], T]) -> T:
    """Return what `work` makes of the body, which it reads on a thread as it comes."""
    read_end, write_end = os.pipe()

    def read() -> T:
        with open(read_end, "rb") as source:
            return work(source)

    working = asyncio.create_task(asyncio.to_thread(read))
    try:
        with open(write_end, "wb", buffering=0) as target:
            async for piece in body:
                view = memoryview(piece)
                with contextlib.suppress(BrokenPipeError):  # It has enough; a client sends all of a body.
                    await _to_its_end(lambda view=view: write_all(FileSystem(), target.fileno(), [view]))
    except BaseException:
        with contextlib.suppress(Exception):
            await working  # It has read the end of the pipe, and puts nothing in place that is not whole.
        raise
    return await working


class _LedgerRoom(Room):
    """The ledger's room, for a thread that is not its own."""

    def __init__(self, cold: ColdLedger, loop: asyncio.AbstractEventLoop):
        self._cold, self._loop = cold, loop

    def _settle(self, message: Reserve | Stored | Released) -> int:
        return asyncio.run_coroutine_threadsafe(self._cold.settle_own(message), self._loop).result()

    def reserve(self, nbytes: int) -> bool:
        return self._settle(Reserve(0, nbytes)) > 0

    def stored(self, path: str, nbytes: int) -> None:
        self._settle(Stored(((path, nbytes),)))

    def released(self, nbytes: int) -> None:
        self._settle(Released(nbytes))
