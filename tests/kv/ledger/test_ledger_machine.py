"""The ledger's promise after every step: what lies on disk and what engines may still write fits the cap.

Several engines write files of several sizes and replace some (records), and each one's messages come late.
Engines die at any moment, folders can't be read, and the cache dir goes and comes back. The oracle is
outside: bytes of real files, and the grants that the engines themselves count.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from kv_fakes import bytes_on_disk, files_in, ram_folder, temps_in
from kv_machines import LONG, QUICK
from ledger_files import PAGE, name

import omlxd.kv.ledger.ledger as ledger_module
from omlxd.kv.ledger.ledger import Ledger

ENGINES = st.integers(0, 9)


@dataclass(eq=False)
class Engine:
    """balance      bytes that it may still write
    outstanding  bytes that the front has granted it, less what it has said of them
    messages     what it has said and the ledger has not heard yet
    writing      its temporary file, the file's name, and bytes
    """

    pid: int
    namespace: str
    balance: int = 0
    outstanding: int = 0
    messages: deque[Callable[[], None]] = field(default_factory=deque)
    writing: tuple[Path, str, int] | None = None


class LedgerMachine(RuleBasedStateMachine):
    """One ledger, engines of two models, and one folder."""

    unreadable = False

    @initialize(pages=st.integers(2, 12), letters=st.lists(st.sampled_from("ab"), min_size=2, max_size=4))
    def start(self, pages: int, letters: list[str]) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="omlxd-ledger-", dir=ram_folder()))
        self.cap = pages * PAGE
        self.pids = 0
        self.open()
        for letter in letters:
            self.begins(letter)

    def open(self) -> None:
        self.engines: list[Engine] = []
        self.aside: Path | None = None
        LedgerMachine.unreadable = False
        self.ledger = Ledger(self.root, self.cap)
        self.ledger.open()
        assert temps_in(self.root) == []

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.come_back()
            self.ledger.close()
            shutil.rmtree(self.root)

    def pick(self, number: int) -> Engine:
        return self.engines[number % len(self.engines)]

    # ----------------------------------------------------------------- engines

    @precondition(lambda self: len(self.engines) < 4)
    @rule(letter=st.sampled_from("ab"))
    def begins(self, letter: str) -> None:
        self.pids += 1
        engine = Engine(self.pids, letter * 32)
        self.ledger.engine_loaded(engine.namespace, str(self.root))
        self.engines.append(engine)

    @precondition(lambda self: self.engines)
    @rule(number=ENGINES, pages=st.integers(1, 4))
    def reserves(self, number: int, pages: int) -> None:
        engine = self.pick(number)
        self.hears(number, len(engine.messages))
        granted = self.ledger.reserve(pages * PAGE)
        assert granted in (0, pages * PAGE)
        engine.balance += granted
        engine.outstanding += granted

    @precondition(lambda self: self.engines)
    @rule(number=ENGINES, file=st.integers(0, 3), pages=st.integers(1, 3))
    def begins_to_write(self, number: int, file: int, pages: int) -> None:
        engine = self.pick(number)
        nbytes = min(pages * PAGE, engine.balance)
        if engine.writing is not None or not nbytes or self.aside is not None:
            return
        path = name(file, engine.namespace)
        temp = self.root / f"{path}.{engine.pid}-1.tmp"
        temp.parent.mkdir(parents=True, exist_ok=True)
        temp.write_bytes(bytes(nbytes))
        engine.balance -= nbytes
        engine.writing = temp, path, nbytes

    @precondition(lambda self: self.engines)
    @rule(number=ENGINES)
    def ends_to_write(self, number: int) -> None:
        engine = self.pick(number)
        if engine.writing is None:
            return
        (temp, path, nbytes), engine.writing = engine.writing, None
        if not temp.exists():  # The folder is away, or was counted anew meanwhile.
            engine.balance += nbytes
            if self.aside is not None:
                (self.aside / temp.relative_to(self.root)).unlink(missing_ok=True)
            return
        temp.rename(self.root / path)

        def said() -> None:
            self.ledger.stored([(path, nbytes)])
            engine.outstanding -= nbytes

        engine.messages.append(said)

    @precondition(lambda self: self.engines)
    @rule(number=ENGINES, file=st.integers(0, 3), pages=st.integers(1, 3))
    def writes(self, number: int, file: int, pages: int) -> None:
        """All of it; the ledger hears of the file later."""
        if self.pick(number).balance < pages * PAGE:
            self.reserves(number, pages)
        self.begins_to_write(number, file, pages)
        self.ends_to_write(number)

    @precondition(lambda self: self.engines)
    @rule(number=ENGINES)
    def gives_back(self, number: int) -> None:
        engine = self.pick(number)
        nbytes, engine.balance = engine.balance, 0

        def said() -> None:
            self.ledger.released(nbytes)
            engine.outstanding -= nbytes

        engine.messages.append(said)

    @precondition(lambda self: self.engines)
    @rule(number=ENGINES, file=st.integers(0, 3))
    def finds_damage(self, number: int, file: int) -> None:
        path = name(file, self.pick(number).namespace)
        (self.root / path).unlink(missing_ok=True)
        self.pick(number).messages.append(lambda: self.ledger.dropped([path]))

    @precondition(lambda self: self.engines)
    @rule(number=ENGINES, count=st.integers(1, 3))
    def hears(self, number: int, count: int) -> None:
        messages = self.pick(number).messages
        for _ in range(min(count, len(messages))):
            messages.popleft()()

    @precondition(lambda self: self.engines)
    @rule(number=ENGINES, unsaid=st.integers(0, 2))
    def dies(self, number: int, unsaid: int) -> None:
        """Killed; its last words may not have been sent."""
        engine = self.pick(number)
        self.hears(number, max(0, len(engine.messages) - unsaid))
        self.engines.remove(engine)
        self.ledger.engine_gone(engine.outstanding, engine.pid, engine.namespace)

    # ----------------------------------------------------------------- the folder

    @rule(unreadable=st.booleans())
    def reads_fail(self, unreadable: bool) -> None:
        LedgerMachine.unreadable = unreadable

    @precondition(lambda self: self.aside is None)
    @rule()
    def folder_goes(self) -> None:
        self.aside = self.root.with_name(f"{self.root.name}-aside")
        self.root.rename(self.aside)

    @precondition(lambda self: self.aside is not None)
    @rule()
    def come_back(self) -> None:
        if self.aside is not None:
            self.aside.rename(self.root)
            self.aside = None

    @precondition(lambda self: self.aside is None)
    @rule(noticed=st.booleans())
    def folder_blinks(self, noticed: bool) -> None:
        self.folder_goes()
        if noticed:
            self.looks()
        self.come_back()
        self.looks()

    @rule()
    def looks(self) -> None:
        """The clock's turn."""
        self.ledger.check_folder()
        assert self.ledger.stats().folder_away == (self.aside is not None) or self.unreadable

    @rule(pages=st.integers(2, 12))
    def restarts(self, pages: int) -> None:
        """With all engines, and perhaps another cap."""
        self.come_back()
        self.ledger.close()
        self.cap = pages * PAGE
        self.open()

    # ----------------------------------------------------------------- what must hold

    @invariant()
    def the_cap_holds(self) -> None:
        if not hasattr(self, "ledger"):
            return
        folder = self.aside or self.root
        stats = self.ledger.stats()
        possible = bytes_on_disk(folder) + sum(engine.balance for engine in self.engines)
        assert possible <= self.cap, "over the cap"
        if self.aside is None and not stats.folder_away:
            assert possible <= stats.bytes_used + stats.reserved <= self.cap, "not on the account"
        heard = not any(engine.messages or engine.outstanding for engine in self.engines)
        if self.aside is None and heard and not stats.folder_away and not self.ledger._gone:
            assert stats.reserved == 0, "a grant leaked"
            assert len(files_in(folder)) <= stats.files


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    def may_fail(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            if LedgerMachine.unreadable:
                raise OSError(errno.EIO, "Input/output error")
            return function(*args)

        return wrapped

    monkeypatch.setattr(ledger_module, "JUDGE_S", 0.0)
    for listing in ("entries_of", "subfolders"):
        monkeypatch.setattr(ledger_module, listing, may_fail(getattr(ledger_module, listing)))


def test_quick():
    run_state_machine_as_test(LedgerMachine, settings=QUICK)


@pytest.mark.slow
def test_long():
    run_state_machine_as_test(LedgerMachine, settings=LONG)
