"""The ledger is the cold tier's account: it alone grants space, over all models and engines.

    used + reserved <= cold_cache_bytes     at every instant

`reserve` evicts first and grants after, so what is on disk and what may still be written never pass the
limit; temporary files are written under a grant too. A file is *used* once its engine says that it is in
place; a walk counts what an engine that died had written and not said.

The account passes the limit in one case: a walk of the whole folder finds files that can't be removed. They
are left from a higher limit, or their engine has not reported them yet: then they count beside their grant
until it does. Nothing is granted meanwhile.

Counted are block files, records (record_file.py) and temporary files, each in whole pages of 4 KiB.
Not counted is what goes with them: the folders (257 of them a namespace at most, a page each on most
file systems: about 1 MiB), and a few files of a page: the lock, each namespace's description, the
fingerprints of weights, the day's writes. An orphan's folder goes with its last file.

The disk's last `LEFT_FREE` bytes are left to other programs. A grant that would use some of them evicts files
first, of as many bytes as are missing, and of twice the granted bytes at most. So where other programs fill
the disk, the cache shrinks step by step.

A limit that nobody set is what the disk has room for when the files are counted (`default_cap`). While the
daemon runs it grows with that, and never shrinks: files are evicted for it by the next daemon alone.

What may be written on one day has a limit of its own, if one is set (write_budget.py).

Blocks that no installed model has go first (kv/files/namespace.py), then the least recently used over all
models (kv/ledger/eviction_order.py). Where several ranks share a model, each has a share of a block in a
namespace of its own: they go together, since a block is a hit where all ranks have it. Requests touch their
chain from leaf to root, so that a parent is never older than its child and leaves go first; the touch is also
written to the file's mtime, by whoever read it, so the order survives a restart without an index.

Not thread-safe: one thread owns a ledger (front/engines/ledger/cold_ledger.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from pathlib import Path

from ...common.units import MOST_CACHE, default_cap, disk_room
from ..files.fs import entries_of, identity, is_gone, subfolders, unlink
from ..files.namespace import FILE_NAME, Installed, read_namespace
from ..files.paths import LOCK_NAME, disk_bytes, file_kind, is_fan_dir, is_namespace_dir, temp_owner
from ..files.record_file import MOST_AGE_S
from .evicted_log import EvictedLog
from .eviction_order import FileOrder
from .write_budget import WriteBudget

log = logging.getLogger(__name__)

UNDELETABLE_LIMIT = 32
"""Files that one eviction tries in vain before it gives up: more than any accident, less than a stall."""

TELL_S = 600.0
"""Seconds between two log lines about a nearly full disk, at least."""

JUDGE_S = 60.0
"""Seconds at most until the files of a model whose folder goes while the daemon runs count as orphans."""


class LedgerBusy(Exception):
    """Another daemon holds this cache dir. `pid`: its process id, 0 if unknown."""

    def __init__(self, root: Path, pid: int):
        super().__init__(f"{root} is in use by another omlxd" + (f" (process {pid})" if pid else ""))
        self.pid = pid


@dataclass(slots=True, frozen=True)
class LedgerStats:
    """Bytes, but for `files`, `evicted_files` and these.

    orphans_evicted_total  files of namespaces that no installed model has
    capacity               the most that the files can come to: the limit, or less where the disk has less
    written_bytes_total    since the start; `written_ever_bytes`: in all starts, as writes.json keeps it
    write_budget_used_up   1: something was refused today, 0: nothing was
    folder_away            1: the cache dir is not where its lock was taken, 0: it is
    """

    bytes_used: int
    reserved: int
    files: int
    cold_cache_bytes: int
    evicted_files: int
    evicted_bytes: int
    orphans_evicted_total: int = 0
    written_bytes_total: int = 0
    written_today_bytes: int = 0
    written_ever_bytes: int = 0
    daily_write_budget_bytes: int = 0
    write_budget_used_up: int = 0
    folder_away: int = 0
    capacity: int = 0


@dataclass(slots=True, eq=False)
class _Gone:
    """An engine that ended with `outstanding` granted bytes. `tried_at`: monotonic seconds."""

    outstanding: int
    pid: int
    namespaces: Set[str]
    tried_at: float = float("-inf")


@dataclass(slots=True)
class _Evicted:
    """Counts since the start; `orphans`: files of namespaces that no installed model has."""

    files: int = 0
    nbytes: int = 0
    orphans: int = 0


class Ledger:
    """The account of one cache dir. `root`: the cache dir. `cold_cache_bytes`: limit of files and grants,
    None: by the disk; `writes`: a day's limit.
    """

    def __init__(self, root: Path, cold_cache_bytes: int | None, writes: WriteBudget | None = None):
        self.root = root
        self.cold_cache_bytes = MOST_CACHE if cold_cache_bytes is None else cold_cache_bytes
        self._follows_disk = cold_cache_bytes is None
        self._writes = writes or WriteBudget(root)
        self._writes.outstanding = lambda: self._reserved
        self._written = 0
        self._files = FileOrder()
        self._installed = Installed(root)
        self._judged_at = -JUDGE_S
        self._reserved = 0
        self._disk_room = 0
        self._is_full = False
        self._full_logged_at = float("-inf")
        self.evicted_log = EvictedLog()
        self._evicted = _Evicted()
        self._lock_fd = -1
        self._has_stock = False
        self._away = False
        self.on_return: Callable[[], None] = lambda: None
        """Called once the folder, or another in its place, is back and counted."""
        self._leftovers_removed = 0
        self._gone: list[_Gone] = []
        """Engines that have ended and whose folders could not be read since."""

    def open(self) -> None:
        """Lock the folder and take stock. Raises LedgerBusy or OSError, with the lock given up."""
        self.lock()
        try:
            self.take_stock()
        except BaseException:
            self.close()
            raise

    def lock(self) -> None:
        """Make the folder this ledger's. Files may be read from now on; nothing is granted yet.

        Raises LedgerBusy, or OSError when the folder can't be made or opened. One on a read-only disk can be,
        where a daemon has used it before.
        """
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._take_lock(os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno != errno.EROFS or not (self.root / LOCK_NAME).exists():
                raise
            self._take_lock(os.O_RDONLY)
        self._disk_room = disk_room(self.root)

    def _take_lock(self, flags: int = os.O_RDWR) -> None:
        text = b""
        fd = os.open(self.root / LOCK_NAME, flags | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The number is for people. A full disk has no room for it, and must still be opened,
            # because that is how room is made.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
                os.write(fd, f"{os.getpid()}\n".encode())
        except BlockingIOError:
            with contextlib.suppress(OSError):
                text = os.pread(fd, 16, 0).strip()
            os.close(fd)
            raise LedgerBusy(self.root, int(text) if text.isdigit() else 0) from None
        except BaseException:
            os.close(fd)
            raise
        self._lock_fd = fd

    def _is_here(self) -> bool:
        """Return whether the folder is the locked one; its files are counted anew when it is back.

        It may come back as another file system (a disk unplugged and plugged in), and is locked anew then.
        Nothing is made in its place. One that is back and can't be read is away still.
        """
        held, there = identity(self._lock_fd), identity(str(self.root / LOCK_NAME))
        if there is not None and there != held:
            old = self._lock_fd
            try:
                self._take_lock()
            except (OSError, LedgerBusy):
                there = None
            else:
                os.close(old)
                self._away = True  # What was counted is another folder's.
        if there is None:
            if not self._away:
                log.warning(
                    "SSD cache off: the folder %s is not the one that was opened; it is used again once that "
                    "is back, and nothing is made in its place",
                    self.root,
                )
            self._away = True
        elif self._away:
            try:
                self.take_stock()
            except OSError as error:
                log.debug("SSD cache: the folder %s is back and can't be read: %s", self.root, error)
                return False
            self._away = False
            self.on_return()
            log.warning("SSD cache on: the folder %s is back", self.root)
        return not self._away

    def check_folder(self) -> bool:
        """Notice that the folder is away or back, and count what dead engines left. False: not usable."""
        usable = (self._has_stock or self._away) and self._is_here()
        if usable:
            self._settle_gone()
            self._disk_room = disk_room(self.root)
            if self._follows_disk and self._has_stock:
                self.cold_cache_bytes = max(self.cold_cache_bytes, self._default_cap())
            self._writes.save_written()
        return usable

    def close(self) -> None:
        """Give up the lock."""
        if self._lock_fd >= 0:
            if self._has_stock and identity(self._lock_fd) == identity(str(self.root / LOCK_NAME)):
                self._writes.close()
            os.close(self._lock_fd)
            self._lock_fd = -1

    def take_stock(self, between: Callable[[], None] = lambda: None) -> int:
        """Walk the folder: remove leftovers of a crash, count the rest, evict down to the cap.

        Returns the number of files removed. `between()` is called after each of the folders.

        Engines may read, touch and drop files meanwhile, but not write: nothing is granted before
        the walk has ended. Raises OSError when a folder can't be read: the cache dir is away then, and
        counted once it can be read.
        """
        self._has_stock = False
        removed = self._leftovers_removed + self._evicted.files
        self._files = FileOrder(self._files.pins)
        try:
            for _, path, size in sorted(self._walk(between)):
                self._files.add(path, size)
        except OSError:
            self._away = True
            raise
        # What engines that are gone wrote is counted now.
        unsaid = sum(gone.outstanding for gone in self._gone)
        self._writes.wrote(unsaid)  # At most: the budget counts it, too.
        self._reserved -= unsaid
        self._gone.clear()
        self._judge()
        if self._follows_disk:
            self._disk_room = disk_room(self.root)
            self.cold_cache_bytes = self._default_cap()
        self._evict(self._committed - self.cold_cache_bytes)
        self._writes.open()
        self._has_stock = True
        return self._leftovers_removed + self._evicted.files - removed

    def _walk(
        self,
        between: Callable[[], None] = lambda: None,
        only: Callable[[str], bool] = is_namespace_dir,
        dead: int | None = None,
    ) -> Iterable[tuple[int, str, int]]:
        """Yield (mtime in ns, relative path, bytes on disk) of every block file and record.

        Removes temporary files, and in a walk of all records that nobody has used for `MOST_AGE_S`.

        only  namespaces to look into
        dead  the process whose temporary files go; None: everybody's

        Symlinks are not followed, and what has no name of ours is left alone: somebody may point
        --paged-ssd-cache-dir at a folder of models, whose weights are safetensors files too. A
        temporary file that can't be removed counts as the oldest block file: every eviction tries it again.
        """
        for namespace in subfolders(self.root, only):
            for fan in subfolders(Path(namespace.path), is_fan_dir):
                for entry in entries_of(fan.path):
                    kind = file_kind(entry.name)
                    if not kind or not entry.is_file(follow_symlinks=False):
                        continue
                    is_temp = kind == "temp"
                    if is_temp and dead is not None and temp_owner(entry.name) != dead:
                        continue  # Some living engine is writing it, under its own grant.
                    if is_temp and unlink(entry.path) is None:
                        self._leftovers_removed += 1
                        continue
                    try:
                        stat = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # A living engine has removed it since it was listed.
                    too_old = dead is None and kind == "record" and stat.st_mtime < time.time() - MOST_AGE_S
                    if too_old and unlink(entry.path) is None:
                        continue
                    path = f"{namespace.name}/{fan.name}/{entry.name}"
                    yield 0 if is_temp else stat.st_mtime_ns, path, disk_bytes(stat.st_size)
                between()

    def reserve(self, nbytes: int) -> int:
        """Evict until `nbytes` more fit, then grant them. Returns the bytes granted: all, or 0."""
        if nbytes <= 0 or not self.check_folder():
            return 0
        if self._reserved + nbytes > self.cold_cache_bytes:
            return 0  # What others were granted can't be evicted.
        lacking = self._reserved + nbytes - self._disk_room
        least = min(lacking, nbytes)  # Bytes that must go, or the disk would have less free than before.
        if least > self._files.nbytes:
            self._log_full()
            return 0
        if not self._writes.spend(nbytes):  # Before anything is evicted for it.
            return 0
        before = self._files.nbytes
        self._evict(max(self._committed + nbytes - self.cold_cache_bytes, min(lacking, 2 * nbytes)))
        if self._committed + nbytes > self.cold_cache_bytes or before - self._files.nbytes < least:
            self._writes.give_back(nbytes)
            return 0
        if lacking <= 0 and self._is_full:
            self._is_full = False
            log.warning("SSD cache: the disk of %s has room again", self.root)
        self._reserved += nbytes
        return nbytes

    def _log_full(self) -> None:
        """Log that the disk is nearly full, and again after `TELL_S` if it had room in between."""
        now = time.monotonic()
        if not self._is_full and now - self._full_logged_at > TELL_S:
            self._is_full, self._full_logged_at = True, now
            log.warning("SSD cache: the disk of %s is nearly full: nothing new is stored", self.root)

    def capacity(self) -> int:
        """Return the most that the files may take: the limit, or what their disk has for them."""
        return min(self.cold_cache_bytes, self._files.nbytes + max(0, self._disk_room))

    def _default_cap(self) -> int:
        return default_cap(self._disk_room, self._files.nbytes)

    def room(self) -> int:
        """Return the bytes that can be granted without evicting; below 0: something must go."""
        return min(self.cold_cache_bytes - self._committed, self._disk_room - self._reserved)

    @property
    def _committed(self) -> int:
        return self._files.nbytes + self._reserved

    def stored(self, files: Iterable[tuple[str, int]]) -> None:
        """Count granted bytes as files, which are the most recently used.

        Two engines of one model may write the same record, and be heard in any order: then the file counts.
        """
        self._writes.turn_the_page()
        for path, nbytes in files:
            self._reserved = max(0, self._reserved - nbytes)
            self._count_written(nbytes)
            if self._files.nbytes_of(path) not in (None, nbytes):
                with contextlib.suppress(OSError):
                    nbytes = disk_bytes((self.root / path).stat().st_size)
            if not is_gone(self.root / path):  # Who cleared it was faster than its engine's word.
                self._files.add(path, nbytes)

    def _count_written(self, nbytes: int) -> None:
        self._written += nbytes
        self._writes.wrote(nbytes)

    def released(self, nbytes: int) -> None:
        """Release granted bytes that will not be written."""
        self._writes.give_back(nbytes)
        self._reserved = max(0, self._reserved - nbytes)

    def dropped(self, paths: Iterable[str]) -> None:
        """Account for files that an engine removed or tried to: a file that is still there counts."""
        is_here = self._is_here()
        for path in paths:
            self.evicted_log.note(path, "damaged")
            if is_here and is_gone(self.root / path):
                self._files.remove(path)

    def forget(self, paths: Iterable[str], remove: bool) -> tuple[int, int, list[str]]:
        """Remove these files, or (`remove` is false) forget bad files that the owner has removed already.

        An engine that counts on one takes it for a miss. `paths`: of block files and records, relative to the
        cache dir; orphans' folders go with their last ones. Returns (files, bytes, what went wrong).
        """
        files = nbytes = 0
        troubles: list[str] = []
        is_here = self._is_here()
        for path in paths:
            if remove and (error := unlink(self.root / path)) is not None:
                troubles.append(f"{path}: {error.strerror}")
            elif self._files.nbytes_of(path) is not None and is_here and is_gone(self.root / path):
                nbytes += self._files.remove(path)
                files += 1
                self.evicted_log.note(path, "cleared" if remove else "damaged")
        empty = {name for path in paths if not self._files.holds_any(name := path.partition("/")[0])}
        for namespace in self._installed.orphans(empty) if is_here else ():
            self._remove_folder(namespace)
        return files, nbytes, troubles

    def pin(self, paths: Set[str]) -> None:
        """Have these files and no others evicted last, in this order; some may come later."""
        self._files.pin(paths)

    def bytes_of(self, paths: Iterable[str]) -> int:
        return sum(self._files.nbytes_of(path) or 0 for path in paths)

    def touched(self, paths: Iterable[str]) -> None:
        """Make the files that a request used recent, leaf first."""
        for path in paths:
            self._files.touch(path)

    def engine_loaded(self, namespace: str, model_path: str, shares: Iterable[str] = ()) -> None:
        """Note that an engine runs the model in folder `model_path`, and will use the folder `namespace`, its
        other ranks `shares`.
        """
        self._installed.loaded(namespace, model_path, shares)
        self._judge()

    def engine_gone(
        self, outstanding: int, pid: int, namespace: str = "", adapters: Set[str] = frozenset()
    ) -> None:
        """Count what an engine that ended with `outstanding` granted bytes wrote, and free the rest.

        Its temporary files go, and no others'. Where they can't be read the grant stays, and is tried again.

        namespace  what it was loaded as, and wrote to; "": it was not loaded, and all are looked at
        adapters   namespaces of its adapters, to which it wrote under the same grant
        """
        if namespace:
            self._installed.left(namespace)
            self._judge()
        if outstanding > 0:  # Or else it has said whatever it wrote.
            self._gone.append(_Gone(outstanding, pid, {namespace, *adapters} if namespace else set()))
            self._settle_gone()

    def _settle_gone(self) -> None:
        """Try to settle each engine that is gone, but for those that were tried a moment ago."""
        if not self._gone or not self._is_here():
            return
        now = time.monotonic()
        for gone in [gone for gone in self._gone if now - gone.tried_at >= JUDGE_S]:
            gone.tried_at = now
            try:
                self._adopt(gone)
            except OSError as error:
                log.warning("SSD cache: what engine %d wrote can't be counted yet: %s", gone.pid, error)
            else:
                self._gone.remove(gone)

    def _adopt(self, gone: _Gone) -> None:
        def written_to(name: str) -> bool:
            return name in gone.namespaces if gone.namespaces else is_namespace_dir(name)

        self._writes.turn_the_page()
        unwritten = gone.outstanding
        for _, path, size in sorted(self._walk(only=written_to, dead=gone.pid)):
            if self._files.nbytes_of(path) != size:  # New, or a record that was replaced.
                self._files.add(path, size)
                self._count_written(size)
                unwritten -= size
        # No more than its own grant, even where another engine's file was counted before that said so.
        self._reserved -= gone.outstanding
        self._writes.give_back(max(0, unwritten))
        self._evict(self._committed - self.cold_cache_bytes)

    def _judge(self) -> None:
        self._judged_at = time.monotonic()
        self._files.set_orphans(self._installed.orphans(self._files.namespaces))

    def _evict(self, excess: int) -> None:
        """Remove files, in their order, until `excess` bytes are gone or too many can't be removed."""
        if excess > 0 and time.monotonic() - self._judged_at >= JUDGE_S:
            self._judge()
        stuck = 0
        limit = min(UNDELETABLE_LIMIT, len(self._files))
        while excess > 0 and stuck < limit and (oldest := self._files.pop_oldest()) is not None:
            for path, size in (oldest, *self._pop_of_other_ranks(oldest[0])):
                if (error := unlink(self.root / path)) is None:
                    excess -= size
                    self._note_evicted(path, size)
                    continue
                # It still takes its space, so it stays on the account.
                self._files.add_stuck(path, size)
                if stuck == 0:
                    log.warning("cold tier: can't remove %s: %s", path, error)
                stuck += 1

    def _pop_of_other_ranks(self, path: str) -> list[tuple[str, int]]:
        """Forget what other ranks hold of a block; returns files with their bytes."""
        found = [(other, self._files.remove(other)) for other in self.of_other_ranks(path)]
        return [(other, size) for other, size in found if size]

    def of_other_ranks(self, path: str) -> list[str]:
        """Return the files in which other ranks hold their shares of a block, those on the account."""
        namespace, _, rest = path.partition("/")
        others = [f"{other}/{rest}" for other in self._installed.of_other_ranks(namespace)]
        return [other for other in others if self._files.nbytes_of(other) is not None]

    def _note_evicted(self, path: str, size: int) -> None:
        self._evicted.files += 1
        self.evicted_log.note(path, "evicted")
        self._evicted.nbytes += size
        namespace = path.partition("/")[0]
        if self._files.is_orphan(namespace):
            self._evicted.orphans += 1
            if not self._files.holds_any(namespace):
                self._remove_folder(namespace)

    def _remove_folder(self, namespace: str) -> None:
        """Remove the folder of an orphan without files, unless something that is not ours is in it.

        So does a description of a model that is here: its engine may be loading, and has written it already.
        """
        info, folder = read_namespace(self.root, namespace), self.root / namespace
        if info is not None and any(copy.is_here() for copy in info.copies):
            return
        with contextlib.suppress(OSError):
            for fan in subfolders(folder, is_fan_dir):
                with contextlib.suppress(OSError):
                    os.rmdir(fan.path)
            if [entry.name for entry in entries_of(str(folder))] in ([], [FILE_NAME]):
                unlink(folder / FILE_NAME)
                os.rmdir(folder)

    def bytes_in(self, namespace: str) -> int:
        return self._files.by_namespace[namespace]

    def stats(self) -> LedgerStats:
        return LedgerStats(
            bytes_used=self._files.nbytes,
            reserved=self._reserved,
            files=len(self._files),
            cold_cache_bytes=self.cold_cache_bytes,
            evicted_files=self._evicted.files,
            evicted_bytes=self._evicted.nbytes,
            orphans_evicted_total=self._evicted.orphans,
            written_bytes_total=self._written,
            written_today_bytes=self._writes.written_today,
            written_ever_bytes=self._writes.written_ever,
            daily_write_budget_bytes=self._writes.limit,
            write_budget_used_up=int(self._writes.used_up),
            folder_away=int(self._away),
            capacity=self.capacity(),
        )
