"""Records beside the blocks: whole or not at all, checked, counted, evicted, private."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path

import pytest
from faulty_fs import Crash, Fault, FaultyFileSystem
from kv_fakes import (
    FILE_DISK_BYTES,
    NAMESPACE,
    OTHER_NAMESPACE,
    Rig,
    bytes_on_disk,
    files_in,
    lone_key,
    payload_of,
)

from omlxd.kv.files.paths import file_kind, is_stored_path
from omlxd.kv.files.record_file import FORMAT, MOST_AGE_S, MOST_BYTES, Record, RecordError, RecordFiles
from omlxd.kv.ledger.ledger import Ledger

NAME, OTHER = b"n" * 32, b"o" * 32
PAGE = 4096


def put(files: RecordFiles, payload: bytes = b"payload", name: bytes = NAME) -> Path:
    record = Record(files, name, payload)
    record.store(record.key, record.buffers())
    return Path(files.full(name))


@pytest.fixture
def files(tmp_path: Path) -> RecordFiles:
    return RecordFiles(tmp_path, NAMESPACE)


def test_a_record_comes_back_and_is_private(files: RecordFiles):
    path = put(files)
    assert files.load(NAME) == b"payload"
    assert put(files, b"another") == path and files.load(NAME) == b"another"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert file_kind(path.name) == "record"
    assert is_stored_path(files.path_of(NAME))
    assert files.remove(NAME) and files.remove(NAME) and not path.exists()
    with pytest.raises(FileNotFoundError):
        files.load(NAME)


def test_every_flip_is_found_and_the_file_goes(files: RecordFiles):
    whole = put(files).read_bytes()
    for at in range(len(whole)):
        path = put(files)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(RecordError):
            files.load(NAME)
        assert not path.exists()


@pytest.mark.parametrize(
    "bad", [b"", b"short", FORMAT + bytes(16) + b"payload", bytes(MOST_BYTES + 1)], ids=len
)
def test_what_is_no_record(files: RecordFiles, bad: bytes):
    put(files).write_bytes(bad)
    with pytest.raises(RecordError):
        files.load(NAME)


def test_another_records_file_and_another_namespaces(files: RecordFiles, tmp_path: Path):
    path = put(files)
    other = put(files, b"x", OTHER)
    os.replace(path, other)
    with pytest.raises(RecordError):
        files.load(OTHER)
    put(files)
    with pytest.raises(FileNotFoundError):
        RecordFiles(tmp_path, OTHER_NAMESPACE).load(NAME)


@pytest.mark.parametrize("kind", ["error", "short then error", "crash", "crash after"])
def test_whatever_fails_an_old_record_stays_or_the_new_one_is_there(tmp_path: Path, kind):
    for at in range(1, 50):
        root = tmp_path / f"{kind} {at}"
        root.mkdir()
        put(RecordFiles(root, NAMESPACE), b"old" * 100)
        fs = FaultyFileSystem(Fault(at, kind, 5))
        with contextlib.suppress(OSError, Crash):
            put(RecordFiles(root, NAMESPACE, fs), b"new" * 100)
        assert RecordFiles(root, NAMESPACE).load(NAME) in (b"old" * 100, b"new" * 100)
        if not fs.hit:
            break
    else:
        pytest.fail("the scenario never ends")


# --------------------------------------------------------------------------- in the cold tier's account


def write(rig: Rig, record: Record) -> bool:
    taken: list[bool] = []
    assert rig.writer.submit(record.key, record, taken.append, record)
    rig.settle()
    return taken == [True]


def test_records_are_counted_in_the_cap_and_evicted_with_the_blocks(tmp_path: Path):
    rig = Rig(tmp_path, cap=2)
    files = RecordFiles(tmp_path, NAMESPACE)
    cap = rig.ledger.cold_cache_bytes
    for number in range(3 * cap // PAGE):
        assert write(rig, Record(files, number.to_bytes(32, "big"), b"x" * 100))
        assert rig.ledger.stats().bytes_used == bytes_on_disk(tmp_path) <= cap
    assert len(files_in(tmp_path)) == cap // PAGE
    key = lone_key(1)
    assert rig.writer.submit(key, payload_of(key.block_hash), lambda done: None)
    rig.settle()
    assert rig.cold.has(key.block_hash) and bytes_on_disk(tmp_path) <= cap
    # The oldest went for it, and the newest are there.
    assert files.load((3 * cap // PAGE - 1).to_bytes(32, "big")) == b"x" * 100
    assert rig.ledger.stats().files == len(files_in(tmp_path)) == 1 + (cap - FILE_DISK_BYTES) // PAGE


def test_a_restart_counts_them_in_their_order_and_drops_what_nobody_used(tmp_path: Path):
    files = RecordFiles(tmp_path, NAMESPACE)
    names = [bytes([number]) * 32 for number in range(4)]
    for name in names:
        put(files, b"x", name)
    then = time.time() - MOST_AGE_S - 60
    os.utime(files.full(names[0]), (then, then))
    files.touch([names[3], names[2], names[1]])
    left = Path(f"{files.full(names[1])}.7-0.tmp")
    left.write_bytes(bytes(100))
    ledger = Ledger(tmp_path, 3 * PAGE)
    ledger.open()
    assert ledger.stats().files == 3 and ledger.stats().bytes_used == 3 * PAGE and not left.exists()
    assert not os.path.exists(files.full(names[0]))
    assert ledger.reserve(PAGE) == PAGE and not os.path.exists(files.full(names[3]))
    ledger.close()
