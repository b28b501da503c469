"""The ledger's promises after every step: the cap, the account, whose turn it is to go, the day's writes.

Several engines write files of several sizes and replace some (records), and each one's messages come late.
Engines die at any moment, files can't be removed, folders can't be read, models are removed, days pass, the
daemon is killed, and the cache dir goes and comes back. Two oracles: bytes of real files with the grants that
the engines themselves count, and `Account`, which does in plain lists what the ledger is to do.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kv_fakes import files_in, ram_folder, temps_in
from kv_machines import LONG, QUICK
from ledger_files import PAGE

import omlxd.kv.ledger.ledger as ledger_module
from omlxd.kv.files.fs import FileSystem, touch_in_order
from omlxd.kv.files.namespace import FILE_NAME, NamespaceInfo, describe_namespace
from omlxd.kv.files.paths import LOCK_NAME, RECORD_SUFFIX, SUFFIX, file_kind, is_stored_path, temp_owner
from omlxd.kv.files.record_file import MOST_AGE_S
from omlxd.kv.ledger import write_budget
from omlxd.kv.ledger.ledger import Ledger, LedgerBusy
from omlxd.kv.ledger.write_budget import WriteBudget

ENGINES = st.integers(0, 9)
NUMBER = st.integers(0, 99)
FILE = st.integers(0, 3)
COPIES = st.sampled_from(["", "-2", "-3"])
LETTERS = st.lists(st.sampled_from("abc"), min_size=2, max_size=4)
"""Namespaces of engines. Nobody describes `c`'s, and somebody else's file lies in its folder."""
RECORD = 3
AHEAD = 2 * PAGE


def path_of(letter: str, file: int) -> str:
    digest = sha256(f"{letter}{file}".encode()).hexdigest()
    return f"{letter * 32}/{digest[:2]}/{digest}{RECORD_SUFFIX if file == RECORD else SUFFIX}"


@dataclass(eq=False)
class Engine:
    """balance      bytes that it may still write
    outstanding  bytes that the front has granted it, less what it has said of them
    messages     what it has said and the ledger has not heard yet, and the bytes of a file that it is about
    writing      its temporary file, the file's name, and bytes
    """

    pid: int
    letter: str
    balance: int = 0
    outstanding: int = 0
    messages: deque[tuple[Callable[[], None], int]] = field(default_factory=deque)
    writing: tuple[Path, str, int] | None = None


@dataclass
class Day:
    """What the write budget is to know. `on_file`: day and bytes that the next life will read."""

    limit: int
    day: int = 1
    spent: int = 0
    saved: int = 0
    on_file: tuple[int, int] = (0, 0)

    def turn(self, today: int, reserved: int) -> None:
        if today != self.day:
            self.day, self.spent, self.saved = today, reserved, 0

    def spend(self, nbytes: int) -> bool:
        if self.limit and self.spent + nbytes > self.limit:
            return False
        self.spent += nbytes
        if self.spent > self.saved:
            ahead = self.spent + AHEAD
            self.save(min(ahead, self.limit) if self.limit else ahead)
        return True

    def save(self, nbytes: int) -> None:
        if not LedgerMachine.unwritable:
            self.saved, self.on_file = nbytes, (self.day, nbytes)

    def open(self, today: int, reserved: int) -> None:
        """A sum that could not be written is in memory alone."""
        self.turn(today, reserved)
        if self.on_file[0] == today:
            self.spent = max(self.spent, self.on_file[1])
        self.saved = self.spent


@dataclass
class Account:
    """What the ledger is to know. `files`: path → bytes, the next to go first; `stuck` can't be removed.

    gone   engines that ended and could not be counted: (outstanding, of that said to nobody, pid, letter)
    what   became of files: path → word
    """

    cap: int
    day: Day
    files: dict[str, int] = field(default_factory=dict)
    stuck: set[str] = field(default_factory=set)
    reserved: int = 0
    written: int = 0
    evicted: list[str] = field(default_factory=list)
    gone: list[tuple[int, int, int, str]] = field(default_factory=list)
    away: bool = False
    has_stock: bool = True
    what: dict[str, str] = field(default_factory=dict)

    def add(self, path: str, nbytes: int) -> None:
        self.files.pop(path, None)
        self.stuck.discard(path)
        self.files[path] = nbytes

    def use(self, path: str) -> None:
        if path in self.files:
            self.files[path] = self.files.pop(path)

    def excess(self, nbytes: int = 0) -> int:
        return sum(self.files.values()) + self.reserved + nbytes - self.cap

    def evict(self, excess: int, orphans: set[str]) -> None:
        """Orphans' files first, then the least recently used; what can't be removed goes to the back."""
        tries = len(self.files)
        while excess > 0 and tries and self.files:
            path = min(self.files, key=lambda p: p in self.stuck or p.partition("/")[0] not in orphans)
            nbytes = self.files.pop(path)
            self.stuck.discard(path)
            if path in LedgerMachine.undeletable:
                self.files[path] = nbytes
                self.stuck.add(path)
                tries -= 1
            else:
                excess -= nbytes
                self.evicted.append(path)
                self.what[path] = "evicted"


class LedgerMachine(RuleBasedStateMachine):
    """One ledger, engines of three models, and one folder. A rule tells `account` first."""

    unreadable = False
    unwritable = False
    undeletable: ClassVar[set[str]] = set()
    disk = 0
    """Bytes that the disk has for the cache beside what others wrote to it, and what it leaves to them."""

    @initialize(
        pages=st.integers(2, 12),
        daily=st.sampled_from([0, 0, 8, 20]),
        letters=LETTERS,
    )
    def start(self, pages: int, daily: int, letters: list[str]) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="omlxd-ledger-", dir=ram_folder()))
        self.root = self.home / "cache"
        self.used: dict[str, dict[Path, str]] = {letter: {} for letter in "abc"}
        """Folders that a namespace was loaded from, and what lay there then."""
        self.strangers = [Path("c" * 32) / "notes.txt", Path("d" * 40) / "00" / "x.safetensors"]
        self.strangers.append(Path(path_of("a", 99)))
        for stranger in self.strangers:
            (self.root / stranger).parent.mkdir(parents=True, exist_ok=True)
        for stranger in self.strangers[:2]:
            (self.root / stranger).touch()
        (self.root / self.strangers[2]).symlink_to(self.home)
        self.cap, self.daily, self.today = pages * PAGE, daily * PAGE, 1
        self.pids = self.written_today = self.unseen = self.written_ever = 0
        self.counted_twice = 0
        """Bytes over the cap on the account: files that can't be removed, beside grants they lie under."""
        self.missing: set[str] = set()
        """Files that were removed, perhaps before the ledger hears that they were written."""
        LedgerMachine.disk = 99 * PAGE
        self.open(Day(self.daily))
        for letter in letters:
            self.begins(letter)

    def open(self, day: Day) -> None:
        self.engines: list[Engine] = []
        self.aside: Path | None = None
        self.unlocked = False
        LedgerMachine.unreadable = LedgerMachine.unwritable = False
        LedgerMachine.undeletable.clear()
        self.account = Account(self.cap, day)
        self.counts_anew()
        writes = WriteBudget(self.root, self.daily, BudgetFiles(), lambda: f"2026-01-{self.today}")
        self.ledger = Ledger(self.root, self.cap, writes)
        self.ledger.open()
        assert temps_in(self.root) == []

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.come_back()
            self.ledger.close()
            shutil.rmtree(self.home)

    def some_path(self, number: int) -> str:
        paths = sorted(self.account.files) or [path_of("a", 0)]
        return paths[number % len(paths)]

    def pick(self, number: int) -> Engine:
        return self.engines[number % len(self.engines)]

    # ----------------------------------------------------------------- what the ledger is to do

    def evicts(self, excess: int) -> None:
        in_use = {engine.letter for engine in self.engines}
        orphans = {
            letter * 32
            for letter, used in self.used.items()
            if letter not in in_use
            and not (any(map(self.is_here, used.items())) and self.is_described(letter))
        }
        before = len(self.account.evicted)
        self.account.evict(excess, orphans)
        self.missing.update(self.account.evicted[before:])

    def is_described(self, letter: str) -> bool:
        return (self.root / (letter * 32) / FILE_NAME).exists()

    def is_here(self, used: tuple[Path, str]) -> bool:
        """A copy of a model is in its place, or has another name."""
        return used[0].exists() or used[1] in [
            path.read_text() for path in self.home.glob("model*/config.json")
        ]

    def on_disk(self, letters: str = "abc") -> list[tuple[int, str, int]]:
        """(mtime, path, bytes) of those that count, the oldest first."""
        folders = tuple(letter * 32 for letter in letters)
        paths = [str(path.relative_to(self.root)) for path in files_in(self.root)]
        stats = [(path, (self.root / path).stat()) for path in paths if is_stored_path(path)]
        return sorted((s.st_mtime_ns, path, s.st_size) for path, s in stats if path.startswith(folders))

    def counts_anew(self) -> None:
        """A walk of all: temporary files go, and records that nobody has used for long."""
        account = self.account
        for engine in self.engines:
            if engine.writing is not None:
                engine.balance += engine.writing[2]
                engine.writing = None
        oldest = (time.time() - MOST_AGE_S) * 1e9
        account.files = {
            path: nbytes
            for at, path, nbytes in self.on_disk()
            if not is_record(path) or at >= oldest or path in LedgerMachine.undeletable
        }
        account.stuck = set()
        account.reserved -= sum(outstanding for outstanding, *_ in account.gone)
        account.gone = []
        account.away, account.has_stock = False, True
        self.evicts(account.excess())
        self.counted_twice = max(0, account.excess())
        untold = sum(nbytes for engine in self.engines for _, nbytes in engine.messages)
        assert self.counted_twice <= (untold if LedgerMachine.undeletable else 0)
        account.day.open(self.today, account.reserved)

    def looks_there(self) -> bool:
        """The folder is looked at. False: it is not usable."""
        account = self.account
        if self.unlocked and self.aside is None:
            account.away, self.unlocked = True, False
        if self.aside is not None:
            account.away = True
        elif account.away and LedgerMachine.unreadable:
            account.has_stock, account.files = False, {}
        elif account.away:
            self.counts_anew()
        return not account.away

    def settles_gone(self) -> None:
        account = self.account
        if LedgerMachine.unreadable:
            return
        gone, account.gone = account.gone, []
        for outstanding, unsaid, _, letter in gone:
            account.day.turn(self.today, account.reserved)
            unwritten = outstanding
            for _, path, nbytes in self.on_disk(letter):
                if account.files.get(path) != nbytes:
                    account.add(path, nbytes)
                    account.written += nbytes
                    unwritten -= nbytes
            # A record replaced by one of its size looks as before, and what was removed since is gone.
            self.unseen += max(0, unsaid - (outstanding - unwritten))
            account.reserved -= outstanding
            account.day.spent = max(0, account.day.spent - max(0, unwritten))
            self.evicts(account.excess())

    # ----------------------------------------------------------------- engines

    @precondition(lambda self: len(self.engines) < 4)
    @rule(letter=st.sampled_from("abc"), copy=COPIES)
    def begins(self, letter: str, copy: str = "") -> None:
        self.pids += 1
        folder = self.home / f"model-{letter}{copy}"
        if not folder.exists():
            folder.mkdir()
            (folder / "config.json").write_text(f"{self.pids}")
        if self.aside is None:
            used = self.used[letter] if self.is_described(letter) else {}
            self.used[letter] = used | {folder: (folder / "config.json").read_text()}
        if letter != "c":
            info = NamespaceInfo(
                model_id=letter,
                model_path=str(folder),
                model_type="tiny",
                block_size=4,
                block_bytes=PAGE,
                facts_digest=letter * 64,
            )
            describe_namespace(self.root, info, FileSystem(str(self.root / LOCK_NAME)))
        self.ledger.engine_loaded(letter * 32, str(folder))
        self.engines.append(Engine(self.pids, letter))

    @rule(letter=st.sampled_from("abc"), copy=COPIES)
    def model_is_removed(self, letter: str, copy: str) -> None:
        shutil.rmtree(self.home / f"model-{letter}{copy}", ignore_errors=True)

    @rule(letter=st.sampled_from("abc"), copy=COPIES, to=COPIES)
    def model_is_renamed(self, letter: str, copy: str, to: str) -> None:
        folder, other = self.home / f"model-{letter}{copy}", self.home / f"model-{letter}{to}"
        if folder.exists() and not other.exists():
            folder.rename(other)

    @precondition(lambda self: self.engines)
    @rule(number=ENGINES, pages=st.integers(1, 4))
    def reserves(self, number: int, pages: int) -> None:
        engine, account, nbytes = self.pick(number), self.account, pages * PAGE
        self.hears(number, len(engine.messages))
        self.looks()  # What that removes makes room on the disk.
        expected = 0
        possible, evicted = self.possible(), len(account.evicted)
        there = {path: size for path, size in account.files.items() if not (self.root / path).exists()}
        if not account.away:
            lacking = account.reserved + nbytes - room_on_disk(self.root)
            fits = account.reserved + nbytes <= self.cap
            if fits and min(lacking, nbytes) <= sum(account.files.values()):
                account.day.turn(self.today, account.reserved)
                if account.day.spend(nbytes):
                    before = sum(account.files.values())
                    self.evicts(max(account.excess(nbytes), min(lacking, 2 * nbytes)))
                    freed = before - sum(account.files.values())
                    if account.excess(nbytes) <= 0 and freed >= min(lacking, nbytes):
                        expected = nbytes
                    account.day.spent -= nbytes - expected
        assert self.ledger.reserve(nbytes) == expected
        if expected:
            lost = sum(there.get(path, 0) for path in account.evicted[evicted:])
            assert self.possible() + nbytes <= max(LedgerMachine.disk, possible + lost), "others' room"
        account.reserved += expected
        engine.balance += expected
        engine.outstanding += expected

    @precondition(lambda self: self.engines)
    @rule(number=ENGINES, file=FILE, pages=st.integers(1, 3))
    def begins_to_write(self, number: int, file: int, pages: int) -> None:
        engine = self.pick(number)
        nbytes = min(pages * PAGE, engine.balance)
        if engine.writing is not None or not nbytes or self.aside is not None:
            return
        path = path_of(engine.letter, file)
        temp = self.root / f"{path}.{engine.pid}-1.tmp"
        temp.parent.mkdir(parents=True, exist_ok=True)
        temp.write_bytes(bytes(nbytes))
        engine.balance -= nbytes
        engine.writing = temp, path, nbytes

    @precondition(lambda self: self.engines)
    @rule(number=ENGINES)
    def ends_to_write(self, number: int) -> None:
        engine = self.pick(number)
        if engine.writing is None or self.aside is not None:
            return
        (temp, path, nbytes), engine.writing = engine.writing, None
        temp.rename(self.root / path)
        self.missing.discard(path)
        self.written_today += nbytes

        def said() -> None:
            self.account.day.turn(self.today, self.account.reserved)
            known, there = self.account.files.get(path, nbytes), self.root / path
            if there.exists():  # Or the owner has cleared it already.
                self.account.add(path, nbytes if known == nbytes else there.stat().st_size)
            self.account.written += nbytes
            self.account.reserved -= nbytes
            engine.outstanding -= nbytes
            self.ledger.stored([(path, nbytes)])

        engine.messages.append((said, nbytes))

    @precondition(lambda self: self.engines)
    @rule(
        number=ENGINES,
        files=st.lists(st.tuples(FILE, st.integers(1, 3)), min_size=1, max_size=5),
        says=st.booleans(),
    )
    def writes(self, number: int, files: list[tuple[int, int]], says: bool) -> None:
        """All of it, one by one; `says`: the ledger hears of each at once, else later."""
        for file, pages in files:
            if self.pick(number).balance < pages * PAGE:
                self.reserves(number, pages)
            self.begins_to_write(number, file, pages)
            self.ends_to_write(number)
            self.hears(number, 9 * says)

    @precondition(lambda self: self.engines)
    @rule(number=ENGINES)
    def gives_back(self, number: int) -> None:
        engine, account = self.pick(number), self.account
        nbytes, engine.balance = engine.balance, 0

        def said() -> None:
            account.day.turn(self.today, account.reserved)
            account.day.spent = max(0, account.day.spent - nbytes)
            account.reserved -= nbytes
            engine.outstanding -= nbytes
            self.ledger.released(nbytes)

        engine.messages.append((said, 0))

    @precondition(lambda self: self.engines)
    @rule(number=ENGINES, file=NUMBER, removed=st.booleans())
    def finds_damage(self, number: int, file: int, removed: bool) -> None:
        """`removed`: and could remove it."""
        path, account = self.some_path(file), self.account
        if removed and self.aside is None:
            (self.root / path).unlink(missing_ok=True)
            self.missing.add(path)

        def said() -> None:
            account.what[path] = "damaged"
            if self.looks_there() and not (self.root / path).exists():
                account.files.pop(path, None)
            self.ledger.dropped([path])

        self.pick(number).messages.append((said, 0))

    @precondition(lambda self: self.engines)
    @rule(number=ENGINES, files=st.lists(FILE, min_size=1, max_size=4, unique=True))
    def uses(self, number: int, files: list[int]) -> None:
        """Leaf first."""
        engine = self.pick(number)
        paths = [path_of(engine.letter, file) for file in files]
        touch_in_order(FileSystem(), [str(self.root / path) for path in paths])

        def said() -> None:
            for path in paths:
                self.account.use(path)
            self.ledger.touched(paths)

        engine.messages.append((said, 0))

    @precondition(lambda self: self.engines)
    @rule(number=ENGINES, count=st.integers(1, 3), midnight=st.sampled_from([False, False, False, True]))
    def hears(self, number: int, count: int, midnight: bool = False) -> None:
        messages = self.pick(number).messages
        if midnight and messages:
            self.next_day()
        for _ in range(min(count, len(messages))):
            messages.popleft()[0]()

    @precondition(lambda self: self.engines)
    @rule(
        number=ENGINES,
        unsaid=st.integers(0, 2),
        grants=st.lists(st.tuples(FILE, st.integers(1, 3)), max_size=3),
        amid=st.booleans(),
    )
    def dies(self, number: int, unsaid: int, grants: list[tuple[int, int]], amid: bool) -> None:
        """Killed with grants that it has used, all but one; its last words may not have been sent."""
        for place, (file, pages) in enumerate(grants):
            self.reserves(number, pages)
            if place or amid:
                self.begins_to_write(number, file, pages)
            if place:
                self.ends_to_write(number)
        if amid:
            for other in range(len(self.engines)):
                self.reserves(other, 1)
                self.begins_to_write(other, RECORD, 1)
        engine, account = self.pick(number), self.account
        self.hears(number, max(0, len(engine.messages) - unsaid))
        self.engines.remove(engine)
        if engine.outstanding:
            unsaid = sum(nbytes for _, nbytes in engine.messages)
            account.gone.append((engine.outstanding, unsaid, engine.pid, engine.letter))
            if self.looks_there():
                self.settles_gone()
        self.ledger.engine_gone(engine.outstanding, engine.pid, engine.letter * 32)
        pids = [pid for _, _, pid, _ in account.gone]
        if engine.outstanding and engine.pid not in pids and self.aside is None:
            assert not [temp for temp in temps_in(self.root) if temp_owner(temp.name) == engine.pid]

    # ----------------------------------------------------------------- the owner

    @rule(files=st.lists(NUMBER, min_size=1, max_size=4), remove=st.booleans())
    def owner_forgets(self, files: list[int], remove: bool) -> None:
        account, count, nbytes, troubles = self.account, 0, 0, 0
        paths = list(dict.fromkeys(self.some_path(file) for file in files))
        here = self.looks_there()
        for path in paths:
            if remove and path in LedgerMachine.undeletable:
                troubles += 1
                continue
            if remove and self.aside is None:
                self.missing.add(path)
            if path in account.files and here and (remove or not (self.root / path).exists()):
                count, nbytes = count + 1, nbytes + account.files.pop(path)
                account.what[path] = "cleared" if remove else "damaged"
        forgotten = self.ledger.forget(paths, remove)
        assert (*forgotten[:2], len(forgotten[2])) == (count, nbytes, troubles)

    @rule(letter=st.sampled_from("abc"))
    def record_ages(self, letter: str) -> None:
        path = self.root / path_of(letter, RECORD)
        if path.exists():
            os.utime(path, (1, 1))

    # ----------------------------------------------------------------- the disk

    @rule(pages=st.integers(0, 14))
    def others_write(self, pages: int) -> None:
        LedgerMachine.disk = pages * PAGE

    @rule(file=NUMBER, sticks=st.booleans(), unreadable=st.booleans(), unwritable=st.booleans())
    def disk_changes(self, file: int, sticks: bool, unreadable: bool, unwritable: bool) -> None:
        """A file can't be removed, or can again; folders can't be read; the day's sum can't be written."""
        if sticks:
            LedgerMachine.undeletable.symmetric_difference_update({self.some_path(file)})
        LedgerMachine.unreadable, LedgerMachine.unwritable = unreadable, unwritable

    @precondition(lambda self: self.aside is None)
    @rule()
    def folder_goes(self) -> None:
        self.aside = self.root.with_name("aside")
        self.root.rename(self.aside)

    @precondition(lambda self: self.aside is not None)
    @rule(another=st.booleans())
    def come_back(self, another: bool = False) -> None:
        """`another`: as another file system, whose lock nobody holds."""
        if self.aside is not None and another:
            shutil.copytree(self.aside, self.root, symlinks=True)
            shutil.rmtree(self.aside)
            self.unlocked = True
        elif self.aside is not None:
            self.aside.rename(self.root)
        self.aside = None

    @precondition(lambda self: self.aside is None)
    @rule(noticed=st.booleans(), another=st.booleans())
    def folder_blinks(self, noticed: bool, another: bool) -> None:
        self.folder_goes()
        if noticed:
            self.looks()
        self.come_back(another)
        self.looks()
        self.another_daemon_comes()

    @rule()
    def looks(self) -> None:
        """The clock's turn."""
        usable = self.looks_there()
        if usable:
            self.settles_gone()
        assert self.ledger.check_folder() == usable

    @precondition(lambda self: self.aside is None and not self.unlocked)
    @rule()
    def another_daemon_comes(self) -> None:
        with pytest.raises(LedgerBusy) as refused:
            Ledger(self.root, self.cap).lock()
        assert refused.value.pid == os.getpid()

    @rule()
    def next_day(self) -> None:
        self.today += 1
        self.written_today = self.unseen = 0
        assert self.ledger.stats().written_today_bytes == 0

    @rule(pages=st.integers(2, 12), killed=st.booleans(), letters=LETTERS)
    def restarts(self, pages: int, killed: bool, letters: list[str]) -> None:
        """With all engines, and perhaps another cap."""
        self.come_back()
        account, day = self.account, self.account.day
        if killed:
            self.ledger._has_stock = False
        elif account.has_stock and not self.unlocked and day.saved != day.spent:
            day.save(day.spent)
        unwritable, saved = LedgerMachine.unwritable, self.ledger._writes._saved_ever
        self.ledger.close()
        if killed or unwritable or self.unlocked or not account.has_stock:
            self.written_ever = saved  # `kill -9` loses what was written since the last save, and no more.
        # What was not on file is forgotten.
        on_file = day.on_file[1] if day.on_file[0] == day.day else 0
        if day.day == self.today:
            self.unseen += max(0, day.spent - on_file)
        self.cap = pages * PAGE
        self.engines = []
        self.open(Day(self.daily, self.today, on_file=day.on_file))
        assert self.ledger.stats().written_ever_bytes == self.written_ever
        for letter in letters:
            self.begins(letter)

    # ----------------------------------------------------------------- what must hold

    def possible(self) -> int:
        """Bytes on disk with those that engines may still write."""
        return written_to(self.aside or self.root) + sum(engine.balance for engine in self.engines)

    @invariant()
    def the_cap_holds(self) -> None:
        if not hasattr(self, "ledger"):
            return
        folder = self.aside or self.root
        stats = self.ledger.stats()
        possible = self.possible()
        assert possible <= self.cap, "over the cap"
        if self.aside is None and not stats.folder_away:
            on_account = stats.bytes_used + stats.reserved
            assert possible <= on_account <= self.cap + self.counted_twice, "not on the account"
        assert not self.daily or self.written_today <= self.daily + self.unseen, "over the day's budget"
        for stranger in self.strangers:
            assert os.path.lexists(folder / stranger), "not ours"

    @invariant()
    def the_account_is_right(self) -> None:
        if not hasattr(self, "ledger"):
            return
        account, folder = self.account, self.aside or self.root
        account.day.turn(self.today, account.reserved)
        stats = self.ledger.stats()
        assert stats.reserved == account.reserved, "a grant leaked"
        assert self.ledger._writes.spent == account.day.spent
        assert stats.written_today_bytes <= stats.written_ever_bytes
        assert stats.written_ever_bytes >= max(self.written_ever, account.written), "the sum of all days fell"
        self.written_ever = stats.written_ever_bytes
        assert stats.folder_away == account.away
        assert stats.evicted_files == len(account.evicted)
        for path, word in account.what.items():
            removal = self.ledger.evicted_log.of(path)
            assert is_record(path) or (removal is not None and removal.what == word)
        for engine in self.engines if self.aside is None else ():
            assert engine.writing is None or engine.writing[0].exists(), "it was being written"
        if not account.away:
            assert (stats.files, stats.bytes_used) == (len(account.files), sum(account.files.values()))
            assert stats.written_bytes_total == account.written
            for path in account.files.keys() - self.missing:
                assert (folder / path).exists(), "removed out of turn"


def written_to(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in files_in(folder) if file_kind(path.name))


def room_on_disk(folder: Path) -> int:
    return LedgerMachine.disk - written_to(folder)


def is_record(path: str) -> bool:
    return path.endswith(RECORD_SUFFIX)


class BudgetFiles(FileSystem):
    def open_new(self, path: str) -> int:
        if LedgerMachine.unwritable:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().open_new(path)


@pytest.fixture(autouse=True)
def faults(monkeypatch: pytest.MonkeyPatch) -> None:
    def may_fail(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            if LedgerMachine.unreadable:
                raise OSError(errno.EIO, "Input/output error")
            return function(*args)

        return wrapped

    def unlink(path: str | Path, unlink: Callable[..., Any] = ledger_module.unlink) -> OSError | None:
        sticks = any(str(path).endswith(name) for name in LedgerMachine.undeletable)
        return PermissionError(errno.EPERM, "Operation not permitted") if sticks else unlink(path)

    monkeypatch.setattr(ledger_module, "JUDGE_S", 0.0)
    monkeypatch.setattr(ledger_module, "unlink", unlink)
    monkeypatch.setattr(ledger_module, "disk_room", room_on_disk)
    monkeypatch.setattr(write_budget, "AHEAD", AHEAD)
    for listing in ("entries_of", "subfolders"):
        monkeypatch.setattr(ledger_module, listing, may_fail(getattr(ledger_module, listing)))


def test_two_engines_of_a_model_write_a_record():
    machine = LedgerMachine()
    machine.start(12, 0, ["a", "a"])
    try:
        for number, pages in enumerate((1, 3)):
            machine.writes(number, [(RECORD, pages)], False)
        for number in (1, 0):
            machine.hears(number, 1)
            machine.the_cap_holds()
            machine.the_account_is_right()
    finally:
        machine.teardown()


def test_a_file_that_sticks_counts_beside_its_grant_until_its_engine_speaks():
    machine = LedgerMachine()
    machine.start(4, 0, ["a"])
    try:
        machine.reserves(0, 1)
        machine.disk_changes(0, sticks=True, unreadable=False, unwritable=False)
        machine.begins_to_write(0, 0, 1)
        machine.reserves(0, 3)
        machine.ends_to_write(0)
        machine.folder_blinks(noticed=True, another=False)
        machine.the_cap_holds()
        assert machine.ledger.stats().bytes_used + machine.ledger.stats().reserved == 5 * PAGE
        assert machine.ledger.reserve(PAGE) == 0
        machine.hears(0, 1)
        machine.the_account_is_right()
        assert machine.ledger.stats().bytes_used + machine.ledger.stats().reserved == 4 * PAGE
    finally:
        machine.teardown()


def test_quick():
    run_state_machine_as_test(LedgerMachine, settings=QUICK)


@pytest.mark.slow
def test_long():
    run_state_machine_as_test(LedgerMachine, settings=LONG)
