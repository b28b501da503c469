"""Fail or crash at the N-th file operation, for every N, then reopen and check (SQLite's method).

The scenario stores three blocks, reads them back cold, stores more until the ledger evicts, restarts
in the middle and damages one file; so every operation of the seam is met, reads and writes alike.
Whatever happens: never wrong bytes, never over the cap, the account equals the disk, and after the
next open no temporary file is left and the store works again.
"""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import pytest
from faulty_fs import Crash, Fault, FaultyFileSystem, Kind
from kv_fakes import (
    FILE_DISK_BYTES,
    Rig,
    bytes_of,
    bytes_on_disk,
    chain,
    files_in,
    lone_key,
    ram_folder,
    temps_in,
)

CAP = 4
KEYS = chain(range(12))
LATER = [lone_key(number) for number in (100, 101, 102)]
ERRNOS = [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EMFILE]
KINDS: tuple[Kind, ...] = get_args(Kind)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="omlxd-kv-", dir=ram_folder()) as folder:
        yield Path(folder)


class Scenario:
    """One run over `root`. `over`: sizes seen beyond the cap, at any operation.

    back  in write-back, so that what was served is written by the flush at the end, or as it leaves RAM
    """

    def __init__(self, root: Path, fault: Fault | None, back: bool = False):
        self.root = root
        self.back = back
        self.over: list[int] = []
        self.fs = FaultyFileSystem(fault, self.watch)
        self.restored: list[int] = []

    def watch(self) -> None:
        if (real := bytes_on_disk(self.root)) > CAP * FILE_DISK_BYTES:
            self.over.append(real)

    def open(self) -> Rig:
        # A day's budget that is never met: its file is written all the same.
        return Rig(
            self.root, hot=3 if self.back else 1, cap=CAP, fs=self.fs, write_back=self.back, daily=1000
        )

    def end(self, rig: Rig) -> None:
        if self.back:
            rig.store.close(0)
            rig.pump()

    def run(self) -> None:
        """Raises Crash where the fault is one."""
        rig = self.open()
        try:
            rig.serve(KEYS)
            self.restored.append(len(rig.restore(KEYS)))
            self.account(rig)
            self.end(rig)
            self.account(rig)
            rig.drop()
            rig = self.open()
            self.restored.append(len(rig.restore(KEYS)))
            for key in LATER:
                rig.serve([key])
                self.account(rig)
            self.end(rig)
            for path in files_in(self.root)[:1]:
                path.write_bytes(path.read_bytes()[:-1] + b"\0")
            for keys in (KEYS, *([key] for key in LATER)):
                rig.restore(keys)
            self.account(rig, tampered=True)
        finally:
            rig.drop()

    def account(self, rig: Rig, *, tampered: bool = False) -> None:
        rig.check()
        stats = rig.ledger.stats()
        assert stats.reserved == rig.writer.left * FILE_DISK_BYTES, "a grant leaked"
        assert len(temps_in(self.root)) == rig.writer.left
        if not tampered:
            assert bytes_on_disk(self.root) <= stats.bytes_used + stats.reserved
            assert len(files_in(self.root)) == stats.files + rig.writer.left


def reopened(root: Path) -> None:
    """After anything at all, on a disk that works again."""
    rig = Rig(root, hot=0, cap=CAP)
    assert temps_in(root) == []
    stats = rig.ledger.stats()
    assert (stats.bytes_used, stats.files) == (bytes_on_disk(root), len(files_in(root)))
    for keys in (KEYS, *([key] for key in LATER)):
        rig.restore(keys)  # each block the oracle's bytes, or a miss
    rig.serve(KEYS)
    assert rig.restore(KEYS) == [bytes_of(key.block_hash) for key in KEYS]
    rig.check()
    rig.drop()


def operations(root: Path, back: bool = False) -> int:
    """How many operations the scenario has when nothing fails."""
    scenario = Scenario(root, None, back)
    scenario.run()
    assert scenario.restored == [3, 3] and scenario.over == []
    return scenario.fs.count


@pytest.mark.parametrize("back", [False, True])
def test_without_a_fault_all_is_restored(tmp_path, back):
    assert operations(tmp_path, back) > 60
    reopened(tmp_path)


def fail_everywhere(
    root: Path, kind: Kind, numbers: Sequence[int], back: bool = False, first: int = 1, step: int = 1
) -> None:
    """At operation `first` and at each `step`-th from there on.

    numbers  the errno of operation N is the N-th of these, round and round
    """
    for at in range(first, operations(root / "0", back) + 1, step):
        folder = root / str(at)
        scenario = Scenario(folder, Fault(at, kind, numbers[at % len(numbers)]), back)
        if kind.startswith("crash"):
            with pytest.raises(Crash):
                scenario.run()
        else:
            scenario.run()
        assert scenario.fs.hit
        assert scenario.over == [], f"over the cap at operation {at}"
        reopened(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("back", [False, True])
def test_a_fault_at_one_operation_in_five(tmp_path, kind, back):
    """Kinds begin apart, so that together they meet each operation."""
    fail_everywhere(tmp_path, kind, ERRNOS, back, first=1 + KINDS.index(kind) % 5, step=5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("back", [False, True])
def test_a_fault_at_every_operation(tmp_path, kind, back):
    fail_everywhere(tmp_path, kind, ERRNOS, back)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number", "back"),
    [
        (kind, number, (at + place) % 2 == 0)
        for at, kind in enumerate(("error", "error forever", "short then error"))
        for place, number in enumerate(ERRNOS)
    ],
)
def test_every_errno_at_every_operation(tmp_path, kind, number, back):
    fail_everywhere(tmp_path, kind, [number], back)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 60, 6))
def test_two_crashes_one_after_the_other(tmp_path, first):
    """The second run opens what the first one's crash has left, and crashes too, unless it ends before.

    It may have less to do than the first: what is there already is not written again.
    """
    crashes = 0
    for second in range(1, 60):
        root = tmp_path / str(second)
        scenario = Scenario(root, Fault(first, "crash after"))
        with pytest.raises(Crash):
            scenario.run()
        assert scenario.over == []
        scenario = Scenario(root, Fault(second, "crash after"))
        with contextlib.suppress(Crash):
            scenario.run()
        assert scenario.fs.crashed or scenario.fs.count < second
        crashes += scenario.fs.crashed
        assert scenario.over == []
        reopened(root)
    assert crashes >= 30
