"""The cold tier's ledger, worked by one thread so that disk walks never block the event loop.

One thread means one order: what an engine said is settled in the order in which it said it, and
its death is settled last. If the folder can't be used, one log line says why, every request for
space is refused, and the daemon serves without a cold tier. A folder on a full or read-only disk is used:
engines read it, and try their writes again (kv/cold/health.py).

A folder that stops answering later is found by `_look`, and before each load: engines that load then get no
folder, those that wait for it end (kv/files/watched_fs.py), and what an owner asks of it is refused. Models
that load once it answers again have it again.

Reads need no account, so the folder is an engine's as soon as it is locked; the walk that takes stock
of it comes first in the thread's queue, and requests for space wait behind it. Until one does, the
walk rests most of its time, and leaves the processor to the model's load (tools/bench/cold_start.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from ....cli.cache.pinned import names_by_file
from ....cli.daemon.owner_api import PinList, PinnedBlocks
from ....common.files import leave_out_of_backups
from ....common.units import human
from ....config import Settings
from ....errors import InvalidRequest, OmlxdError, Unavailable
from ....kv.cold.health import FULL
from ....kv.files.fs import entries_of, subfolders
from ....kv.files.paths import LOCK_NAME, is_fan_dir, is_namespace_dir, is_stored_path
from ....kv.ledger.evicted_log import Removal
from ....kv.ledger.ledger import Ledger, LedgerBusy, LedgerStats
from ....kv.ledger.write_budget import WriteBudget
from ....wire import Dropped, Grant, Released, Reserve, Stored, Touched
from ..link import in_background
from .pins import SHARE, PinnedChain, Pins

if TYPE_CHECKING:
    from ....kv.peer.server import Given


log = logging.getLogger(__name__)
T = TypeVar("T")

LedgerMessage = Reserve | Stored | Released | Dropped | Touched
WALK_S, PAUSE_S = 0.01, 0.03
"""Seconds of a slow walk, and of each pause. With 100,000 files and 2 busy virtual
CPUs, one without rests made the first hit 0.2 to 1.0 s later.
"""
_PROBE_BYTES = 1 << 20
"""Bytes of a trial file: a folder that can't take them can't take a block either."""


PATIENCE_S = 2.0
"""Seconds that another process may hold the folder: a daemon that was killed, or `omlxd cache clear`."""
RETRY_S = 0.05
ANSWER_S, CLOSE_S = 4.0, 2.0
"""Seconds that the folder's file system may take to be locked and tried out, each, and to be released. A
mount whose server is gone, or a FIFO, never answers: the thread that asked it stays behind.
"""


LOOK_S = 10.0
"""Seconds between two looks at the folder."""
EXPIRY_S = 3600.0
"""Seconds at most between two looks for expired files; else a tenth of the time to live."""
EXPIRED_AT_ONCE = 256
"""Files removed in one turn of the ledger's thread."""

LEASE_SHARE = 64
"""Largest lease as one part in so many of the cache's capacity: a lease evicts others before it is used;
larger grants are a file each.

With 64 MiB leased at once, a cap of 100 MB kept 57 of 91 MB, and 33 after a restart and one prompt.
"""


class _Closing(Exception):
    """The daemon ends."""


class ColdLedger:
    """Runs the ledger in its thread. `root`: the cache dir; `cold_cache_bytes`: its limit, None: by its disk,
    0: no cold tier.

    daily_writes  bytes that may be written to it on one day; 0: no limit
    ttl_s         seconds without use after which a file goes; infinite: only for others
    """

    def __init__(
        self, root: Path, cold_cache_bytes: int | None, daily_writes: int = 0, ttl_s: float = math.inf
    ):
        self._root = root
        self._ttl_s = ttl_s
        self._ledger = (
            Ledger(root, cold_cache_bytes, WriteBudget(root, daily_writes)) if cold_cache_bytes != 0 else None
        )
        self._pins = Pins(root)
        self.given: Given | None = None
        """What paired machines have read; None: they can't (--peer-listen)."""
        self._claim: asyncio.Future[LedgerBusy | OSError | None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cold-ledger")
        self._looker = ThreadPoolExecutor(1, thread_name_prefix="cold-look")
        self._look_under_way: asyncio.Future[None] | None = None
        self._hangs = False
        self._opening: asyncio.Future[str] | None = None
        self._awaited = threading.Event()
        self._closing = False
        self._looking: asyncio.Task[None] | None = None
        self._hosts: dict[int, Account] = {}

    @classmethod
    def of(cls, settings: Settings) -> ColdLedger:
        """Return the one that `settings` say."""
        return cls(
            settings.paged_ssd_cache_dir,
            0 if settings.no_cache else settings.cold_cache_bytes,
            daily_writes=settings.ssd_cache_daily_write_budget,
            ttl_s=settings.ssd_cache_ttl,
        )

    async def claim(self) -> LedgerBusy | OSError | None:
        """Lock the folder; returns None, or why that fails. A second call gives the same answer."""
        if self._claim is None:
            self._claim = asyncio.ensure_future(self._lock())
        return await asyncio.shield(self._claim)

    async def _lock(self) -> LedgerBusy | OSError | None:
        if self._ledger is None:
            return None
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                await self._try(self._ledger.lock)
                self._ledger.on_return = partial(self._load_pins, self._ledger)
                await self._try(self._ledger.on_return)
                return None
            except LedgerBusy as error:
                if time.monotonic() > deadline or self._closing:
                    return error
            except OSError as error:
                return error
            await asyncio.sleep(RETRY_S)

    @property
    def folder(self) -> str:
        """The cache dir; "" if there is to be none, or it can't be used."""
        return str(self._root) if self._ledger is not None else ""

    async def open(self) -> str:
        """Return the cache dir, locked and written to; "" if it is unusable or does not answer now.

        Called again, it does not open twice.
        """
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        elif self._opening.done() and self._opening.result() and not await self._answers():
            return ""
        return await asyncio.shield(self._opening)

    async def _answers(self) -> bool:
        """Return whether the folder's file system answers in `ANSWER_S`. While one look hangs there is no
        other.
        """
        if self._look_under_way is None or self._look_under_way.done():
            self._look_under_way = asyncio.get_running_loop().run_in_executor(self._looker, self._look_into)
        elif self._hangs:
            return False
        hung = not (await asyncio.wait({self._look_under_way}, timeout=ANSWER_S))[0]
        if hung and not self._hangs:
            log.warning("serving without the SSD cache: %s does not answer", self._root)
        elif self._hangs and not hung:
            log.warning("SSD cache %s answers again: models that load from now on use it", self._root)
        self._hangs = hung
        return not hung

    def _look_into(self) -> None:
        with contextlib.suppress(OSError), open(self._root / LOCK_NAME, "rb"):  # `stat` may ask no server.
            pass

    async def _open(self) -> str:
        error = await self.claim()
        if self._ledger is None or self._closing:
            return ""
        try:
            if error is not None:
                raise error
            await self._try(self._try_out, self._ledger)
        except LedgerBusy as busy:
            reason = (
                f"another omlxd is using it (process {busy.pid})" if busy.pid else "another omlxd is using it"
            )
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            if self._closing:
                return ""
            # Before anything that an engine will say, as none has the folder yet.
            self._thread.submit(self._take_stock_here, self._ledger)
            self._looking = asyncio.create_task(self._look(), name="cold-ledger-look")
            in_background(asyncio.to_thread(leave_out_of_backups, self._root))
            return str(self._root)
        log.warning("serving without the SSD cache: %s can't be used: %s", self._root, reason)
        self._ledger = None
        return ""

    async def _look(self) -> None:
        expired_at = -math.inf
        while True:
            await asyncio.sleep(LOOK_S)
            if not await self._answers():
                continue
            await self.submit(Ledger.check_folder)
            if time.monotonic() - expired_at >= min(self._ttl_s / 10, EXPIRY_S):
                expired_at = time.monotonic()
                try:
                    await self.remove_unused()
                except (OSError, OmlxdError) as error:
                    log.warning("SSD cache: unused files can't be removed now: %s", error)

    async def remove_unused(self) -> int:
        """Remove the files that nobody has used for `ttl_s`; returns their number. Engines take them for
        misses.
        """
        old = await asyncio.to_thread(self._unused) if math.isfinite(self._ttl_s) else []
        for at in range(0, len(old), EXPIRED_AT_ONCE):
            await self.forget_files(old[at : at + EXPIRED_AT_ONCE], remove=True)
        return len(old)

    def _unused(self) -> list[str]:
        """Return the paths of expired files, the longest unused first."""
        before = time.time() - self._ttl_s
        used: list[tuple[float, str]] = []
        for namespace in subfolders(self._root, is_namespace_dir):
            for fan in subfolders(Path(namespace.path), is_fan_dir):
                for entry in entries_of(fan.path):
                    with contextlib.suppress(FileNotFoundError):
                        path = f"{namespace.name}/{fan.name}/{entry.name}"
                        used.append((entry.stat(follow_symlinks=False).st_mtime, path))
                time.sleep(WALK_S)
        pinned = self._pins.files()
        return [
            path for at, path in sorted(used) if at < before and is_stored_path(path) and path not in pinned
        ]

    def _try_out(self, ledger: Ledger) -> None:
        try:
            try:
                self._probe()
            except OSError as error:
                # A crash's leftovers may be what fills the disk, or files above a cap that is lower now.
                if error.errno not in FULL or not ledger.take_stock():
                    raise
                self._probe()
        except OSError as error:
            if error.errno not in FULL | {errno.EROFS}:
                ledger.close()
                raise
            log.warning(
                "SSD cache %s: only read until its disk takes writes again: %s", self._root, error.strerror
            )
        except BaseException:
            ledger.close()
            raise

    def _take_stock_here(self, ledger: Ledger) -> None:
        began = time.perf_counter()
        try:
            ledger.take_stock(self._pause_now_and_then())
        except _Closing:
            return
        except Exception as error:
            log.warning("SSD cache %s: only read until it can be counted: %s", self._root, error)
            return
        self._drop_pins(ledger, self._pins.files())  # Of files that went without a daemon.
        stats = ledger.stats()
        log.debug(
            "SSD cache %s: %s of %s in %d files (counted in %.2f s)",
            self._root,
            human(stats.bytes_used),
            human(stats.cold_cache_bytes),
            stats.files,
            time.perf_counter() - began,
        )
        pinned, most = ledger.bytes_of(self._pins.files()), int(ledger.capacity() * SHARE)
        if pinned > most:
            log.warning(
                "SSD cache %s: %s are pinned, more than half of its limit (%s), and go last: unpin some, "
                "or raise --paged-ssd-cache-max-size",
                self._root,
                human(pinned),
                human(most),
            )

    def _pause_now_and_then(self) -> Callable[[], None]:
        """Pause the walk now and then; raises _Closing once nobody needs its result."""
        began = time.perf_counter()

        def rest() -> None:
            nonlocal began
            if self._closing:
                raise _Closing
            if time.perf_counter() - began > WALK_S and not self._awaited.is_set():
                self._awaited.wait(PAUSE_S)
                began = time.perf_counter()

        return rest

    def _probe(self) -> None:
        """Write and remove a file, so that a read-only or full disk shows before it matters."""
        probe = self._root / ".probe"
        try:
            with probe.open("wb") as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)

    def hurry(self) -> None:
        """Speed up the walk, since somebody waits for it."""
        self._awaited.set()

    def account(self, reply: Callable[[Grant], None], pid: int) -> Account:
        """Make an account of engine process `pid`; each after its first is an adapter's.

        `reply` is called on the event loop.
        """
        account = Account(self, reply, pid, self._hosts.get(pid))
        self._hosts.setdefault(pid, account)
        return account

    def end_account(self, account: Account, pid: int) -> None:
        """End an account: the process `pid`, or one of its adapters, has ended."""
        if self._hosts.get(pid) is account:
            del self._hosts[pid]

    def capacity(self) -> int:
        """Return `Ledger.capacity`; 0: no cold tier. Any thread: a torn read costs nothing."""
        return 0 if self._ledger is None else self._ledger.capacity()

    async def ledger_stats(self) -> LedgerStats | None:
        """Return the ledger's figures; None without a cold tier."""
        return await self._ask(Ledger.stats) if self._ledger is not None else None

    async def forget_files(self, paths: list[str], remove: bool) -> tuple[int, int, list[str]]:
        """Run `Ledger.forget`, and unpin the files that are gone. Raises Unavailable."""

        def settle(ledger: Ledger) -> tuple[int, int, list[str]]:
            done = ledger.forget(paths, remove)
            self._drop_pins(ledger, paths)
            return done

        return await self._ask(settle)

    async def settle_own(self, message: Reserve | Stored | Released) -> int:
        """Account for files that this process writes, without evicting; returns bytes granted: all or 0."""

        def settle(ledger: Ledger) -> int:
            if isinstance(message, Reserve) and ledger.check_folder() and message.nbytes > ledger.room():
                return 0
            return _settle(ledger, message)

        self.hurry()
        return await self.submit(settle)

    def _load_pins(self, ledger: Ledger) -> None:
        self._pins.load()
        ledger.pin(self._pins.files())

    def _drop_pins(self, ledger: Ledger, paths: Iterable[str]) -> None:
        """Unpin those of `paths` that are gone."""
        self._pins.drop({path for path in paths if not ledger.bytes_of([path])})
        ledger.pin(self._pins.files())

    async def pins(self) -> PinList:
        """Return the pins, newest last. Raises Unavailable."""
        return await self._ask(self._pinned)

    async def pinned_files(self) -> dict[str, list[str]]:
        """Return each pinned file's pins. Raises Unavailable."""
        return await self._ask(lambda _: names_by_file(self._pins.by_name))

    def _pinned(self, ledger: Ledger) -> PinList:
        pins = [
            PinnedBlocks(name, pin.model, len(pin.files), ledger.bytes_of(pin.files), pin.at)
            for name, pin in self._pins.by_name.items()
        ]
        return PinList(pins, ledger.bytes_of(self._pins.files()), int(ledger.capacity() * SHARE))

    async def pin(self, name: str, chain: PinnedChain | None) -> PinList:
        """Evict these files last, and what other ranks hold of the same; None: as all others. Returns all
        pins.

        Raises InvalidRequest where they take too large a share, NotFound for a name that is not pinned, and
        Unavailable.
        """

        def settle(ledger: Ledger) -> PinList:
            if chain is None:
                self._pins.remove(name)
            else:
                files = [each for path in chain.files for each in (path, *ledger.of_other_ranks(path))]
                held = ledger.bytes_of({*self._pins.files(), *files})
                most = int(ledger.capacity() * SHARE)
                if held > most:
                    raise InvalidRequest(
                        f"With it {human(held)} would be pinned, and at most half of what the SSD cache can "
                        f"take, {human(most)}, can be; unpin something, or raise --paged-ssd-cache-max-size."
                    )
                self._pins.put(name, replace(chain, files=files))
            ledger.pin(self._pins.files())
            return self._pinned(ledger)

        return await self._ask(settle)

    def removal(self, path: str) -> Removal | None:
        """Return what became of a file that is gone; None: unknown."""
        return None if self._ledger is None else self._ledger.evicted_log.of(path)

    def peek(self) -> LedgerStats | None:
        """Return the account at once, without hurrying the walk; until it ends, what it has counted so far.

        None without a cold tier. A torn read of counters costs whoever looks nothing.
        """
        return None if self._ledger is None else self._ledger.stats()

    def bytes_in(self, namespace: str) -> int:
        """Return the bytes of a namespace's files, as `peek` does all."""
        return 0 if self._ledger is None else self._ledger.bytes_in(namespace)

    def check(self) -> None:
        """Raise Unavailable without a cold tier, or while its folder does not answer."""
        if self.peek() is None:
            raise Unavailable("This daemon has no SSD cache.")
        if self._hangs:
            raise Unavailable("The SSD cache's folder does not answer.")

    async def close(self) -> None:
        """Settle what is queued, then release the lock."""
        self._closing = True
        self.hurry()
        if self._looking is not None:
            self._looking.cancel()
        if self._ledger is not None:
            with contextlib.suppress(TimeoutError):
                await self._try(self._ledger.close, seconds=CLOSE_S)
        self._thread.shutdown(wait=False)
        self._looker.shutdown(wait=False)

    async def _ask(self, function: Callable[..., T], *args: object) -> T:
        """Run `function(ledger, …)` in the ledger's thread, once the walk is over. Raises Unavailable."""
        self.hurry()
        self.check()
        return await self._call(function, self._ledger, *args)

    async def _try(self, function: Callable[..., T], *args: object, seconds: float | None = None) -> T:
        """Run a function in the ledger's thread; abandon a hanging thread. Raises TimeoutError."""
        asked = asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())  # It may end unheard.
        if not (await asyncio.wait({asked}, timeout=seconds or ANSWER_S))[0]:
            self._thread.shutdown(wait=False)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="cold-ledger")
            raise TimeoutError(errno.ETIMEDOUT, "its file system does not answer")
        return asked.result()

    async def _call(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def submit(self, function: Callable[[Ledger], int]) -> asyncio.Future[int]:
        """Run `function(ledger)` in the ledger's thread; returns 0 without a ledger or if it raises."""

        def work() -> int:
            try:
                return 0 if self._ledger is None else function(self._ledger)
            except Exception:
                log.exception("the SSD cache's ledger failed")
                return 0

        return asyncio.get_running_loop().run_in_executor(self._thread, work)


class Account:
    """Bytes that one engine process was granted and has not settled yet.

    host  of an adapter: the process's own account, under whose grants it writes
    """

    def __init__(self, owner: ColdLedger, reply: Callable[[Grant], None], pid: int, host: Account | None):
        self._owner = owner
        self._host = host or self
        self._adapters: set[str] = set()
        self._reply = reply
        self._pid = pid
        self._namespace = ""
        self._outstanding = 0  # Only the ledger's thread reads or writes it.

    def handle(self, message: LedgerMessage) -> None:
        """Settle `message` in its turn, and answer each `Reserve` with a `Grant`."""
        if isinstance(message, Reserve):
            self._owner.hurry()

        def settle(ledger: Ledger) -> int:
            change = _settle(ledger, message)
            self._outstanding += change
            return change

        done = self._owner.submit(settle)
        if isinstance(message, Reserve):
            ticket = message.ticket
            done.add_done_callback(
                lambda granted: self._reply(Grant(ticket, granted.result(), self._owner.capacity()))
            )

    def model_loaded(self, namespace: str, model_path: str, shares: Sequence[str] = ()) -> None:
        """Note that the engine has loaded the model, or adapter, in folder `model_path`.

        namespace  "": it has no blocks to keep
        shares     namespaces of the engine's other ranks, which write under its grants
        """

        def settle(ledger: Ledger) -> int:
            self._namespace = namespace
            if self._host is not self:
                self._host._adapters.add(namespace)
            self._adapters.update(shares)
            ledger.engine_loaded(namespace, model_path, shares)
            return 0

        if namespace:
            self._owner.submit(settle)

    def process_ended(self) -> None:
        """Take back what an engine process that ended was granted."""

        def settle(ledger: Ledger) -> int:
            ledger.engine_gone(self._outstanding, self._pid, self._namespace, self._adapters)
            return 0

        self._owner.end_account(self, self._pid)
        self._owner.submit(settle)


def _settle(ledger: Ledger, message: LedgerMessage) -> int:
    """Return the bytes by which grants grow; below 0: shrink."""
    match message:
        case Reserve():
            large = message.nbytes > ledger.capacity() // LEASE_SHARE
            return ledger.reserve(message.least if large and message.least else message.nbytes)
        case Stored():
            ledger.stored(message.files)
            return -sum(nbytes for _, nbytes in message.files)
        case Released():
            ledger.released(message.nbytes)
            return -message.nbytes
        case Dropped():
            ledger.dropped(message.files)
        case Touched():
            ledger.touched(message.files)
    return 0
