"""The bytes that may be written to the cold tier on one day, and those that were: flash wears by writing.

The budget's sum of the day is kept in a small file of the cache dir, so that it survives restarts and
crashes. The file always holds as much as was granted or more: it is written before a grant is given, `AHEAD`
bytes ahead, so that it is not written for every block; a crash makes the day's sum too large by that at most.
A file that can't be read counts as a day whose budget is used up; one that can't be written leaves the
sum in memory. A day is a calendar day of the machine's own time.

The same file keeps what was written, today and in all. These figures are never ahead: they are saved with the
budget's sum, once in `SAVE_S` while something is written (`Ledger.check_folder`, every 10 s at least), and at
the end. `kill -9` or a loss of power loses the tail since the last save, some seconds of writing; no other
event makes the sum of all days less.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from ...common.files import read_small
from ..files.fs import FileSystem, put_in_place, read_all, write_all
from ..files.paths import LOCK_NAME, TEMP_SUFFIX, WRITES_NAME

log = logging.getLogger(__name__)

AHEAD = 64 << 20
"""Bytes by which the file is ahead of the sum: as many as an engine is granted at a time."""
SAVE_S = 5.0
"""Seconds between two saves of what was written, at least."""
_NOTHING = 1 << 20
_MOST = 4096
"""Bytes that the file may have."""


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Day(msgspec.Struct, frozen=True):
    """`day` as 2026-01-31; `bytes` granted on it at most; `written` on it, and `ever` on all days."""

    day: str
    bytes: _Count
    written: _Count = 0
    ever: _Count = 0


def _today() -> str:
    return time.strftime("%Y-%m-%d")


def bytes_written(root: Path, today: Callable[[], str] = _today) -> tuple[int, int]:
    """Return the bytes written to the cache dir `root` today and in all, as last saved. Any process."""
    try:
        saved = msgspec.json.decode(read_small(root / WRITES_NAME), type=_Day)
    except (OSError, msgspec.MsgspecError, ValueError):
        return 0, 0
    return saved.written if saved.day == today() else 0, saved.ever


class WriteBudget:
    """Counts a day's writes. `root`: the cache dir; `limit`: bytes a day, 0 for no limit (they are counted
    all the same).

    outstanding  bytes granted and neither written nor given back: they count for the day that begins
    """

    def __init__(
        self,
        root: Path,
        limit: int = 0,
        fs: FileSystem | None = None,
        today: Callable[[], str] = _today,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.limit = limit
        self._path = str(root / WRITES_NAME)
        self._fs = fs or FileSystem(str(root / LOCK_NAME))
        self._today, self._clock = today, clock
        self._day = ""
        self._spent = 0
        self._saved = 0
        self._refused = False
        self._written = 0
        self.written_ever = 0
        """Bytes written on all days."""
        self._saved_ever = 0
        self._saved_at = float("-inf")
        self.outstanding: Callable[[], int] = lambda: 0

    def open(self) -> None:
        """Continue with the file's sums, or this object's own where they are more.

        Never raises OSError.
        """
        self.turn_the_page()
        with contextlib.suppress(OSError):
            self._fs.unlink(self._path + TEMP_SUFFIX)
        try:
            saved = self._load()
        except FileNotFoundError:
            saved = _Day("", 0)
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            saved = _Day(self._day, self.limit)
            if self.limit:
                log.warning(
                    "SSD cache: %s can't be read (%s); nothing is written until tomorrow", self._path, error
                )
                self._refused = True
        if saved.day == self._day:
            self._spent = max(self._spent, saved.bytes)
            self._written = max(self._written, saved.written)
        self._saved = self._spent
        self.written_ever, self._saved_ever = max(self.written_ever, saved.ever), saved.ever

    def close(self) -> None:
        """Write the exact sums."""
        self.turn_the_page()
        if self._saved != self._spent or self._saved_ever != self.written_ever:
            self._save(self._spent)

    def wrote(self, nbytes: int) -> None:
        """Count bytes that were written, each once."""
        self.turn_the_page()
        self._written += nbytes
        self.written_ever += nbytes

    def save_written(self) -> None:
        """Save what was written, unless it is saved or was a moment ago."""
        if self._saved_ever != self.written_ever and self._clock() - self._saved_at >= SAVE_S:
            self.turn_the_page()
            self._save(max(self._saved, self._spent))

    @property
    def written_today(self) -> int:
        """Bytes written today. Any thread."""
        return self._written if self._day == self._today() else 0

    @property
    def spent(self) -> int:
        """Bytes granted today and not given back. Any thread, so this turns no page."""
        return self._spent if self._day == self._today() else self.outstanding()

    @property
    def used_up(self) -> bool:
        """Whether something was refused today. Any thread."""
        return self._refused and self._day == self._today()

    def spend(self, nbytes: int) -> bool:
        """Grant `nbytes` more. False: today's budget has no room for them."""
        self.turn_the_page()
        if self.limit and self._spent + nbytes > self.limit:
            # An engine that is refused a large lease asks again for a single file.
            if nbytes < AHEAD or self.limit - self._spent < _NOTHING:
                self._tell()
            return False
        self._spent += nbytes
        if self._spent > self._saved:
            ahead = self._spent + AHEAD
            self._save(max(self._spent, min(ahead, self.limit) if self.limit else ahead))
        return True

    def give_back(self, nbytes: int) -> None:
        """Take back granted bytes that were not written."""
        self.turn_the_page()
        self._spent = max(0, self._spent - nbytes)

    def _tell(self) -> None:
        if not self._refused:
            self._refused = True
            log.warning(
                "SSD cache: today's write budget of %d MB is used up; new blocks stay in RAM until tomorrow",
                self.limit // 10**6,
            )

    def turn_the_page(self) -> None:
        """Begin a new day, if there is one, with what is `outstanding`: call it before that shrinks."""
        if (today := self._today()) != self._day:
            self._day, self._spent, self._saved, self._refused = today, self.outstanding(), 0, False
            self._written = 0

    def _load(self) -> _Day:
        buffer = bytearray(_MOST)
        fd = self._fs.open_read(self._path)
        try:
            size = read_all(self._fs, fd, [memoryview(buffer)])
        finally:
            with contextlib.suppress(OSError):
                self._fs.close(fd)
        return msgspec.json.decode(buffer[:size], type=_Day)

    def _save(self, nbytes: int) -> None:
        """Replace the file, and sync it: it is small and seldom written."""
        day = _Day(self._day, nbytes, self._written, self.written_ever)
        data = memoryview(msgspec.json.encode(day))
        self._saved_at = self._clock()  # Where it fails, too: a disk that fails is not asked for every block.

        def write(fd: int) -> None:
            write_all(self._fs, fd, [data])
            self._fs.sync(fd)

        try:
            put_in_place(self._fs, self._path, write, self._path + TEMP_SUFFIX)
        except OSError as error:
            log.debug("SSD cache: %s can't be written: %s", self._path, error)
            return
        self._saved, self._saved_ever = nbytes, day.ever
