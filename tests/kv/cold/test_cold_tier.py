"""The cold tier: paths, atomic stores, recency, many threads."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

import pytest
from faulty_fs import Fault, FaultyFileSystem
from kv_fakes import (
    NAMESPACE,
    OTHER_NAMESPACE,
    block_format,
    bytes_of,
    chain,
    empty_payload,
    files_in,
    lone_key,
    payload_of,
    temps_in,
)

from omlxd.kv.cold.tier import ColdTier
from omlxd.kv.files.fs import FileSystem, TempLeft

KEY = lone_key(0)


@pytest.fixture
def tier(tmp_path: Path) -> ColdTier:
    return ColdTier(tmp_path, block_format())


def store(tier: ColdTier, key=KEY) -> None:
    tier.store(key, payload_of(key.block_hash).buffers())


def load(tier: ColdTier, key=KEY) -> bytes:
    payload = empty_payload()
    tier.load(key, payload.buffers())
    return payload.tobytes()


def test_the_path_is_the_index(tier, tmp_path):
    assert not tier.has(KEY.block_hash)
    store(tier)
    name = KEY.block_hash.hex()
    path = tmp_path / NAMESPACE.hex()[:32] / name[:2] / f"{name}.safetensors"
    assert path.is_file() and tier.has(KEY.block_hash)
    assert files_in(tmp_path) == [path]
    assert path.stat().st_size == tier.format.file_bytes <= tier.bytes_per_block
    assert path.stat().st_blocks * 512 <= tier.bytes_per_block
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700


def test_namespaces_do_not_meet(tier, tmp_path):
    other = ColdTier(tmp_path, block_format(OTHER_NAMESPACE))
    store(tier)
    assert not other.has(KEY.block_hash)
    with pytest.raises(FileNotFoundError):
        load(other)


def test_the_name_appears_only_when_the_file_is_whole(tmp_path):
    seen: list[bool] = []

    class Watching(FileSystem):
        def writev(self, fd, buffers):
            seen.append(tier.has(KEY.block_hash))
            return os.write(fd, memoryview(buffers[0])[:1000])

    tier = ColdTier(tmp_path, block_format(), Watching())
    store(tier)
    assert len(seen) > 10 and not any(seen)
    assert load(tier) == bytes_of(KEY.block_hash)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EMFILE])
def test_a_failed_store_leaves_nothing(tmp_path, number):
    for at in range(1, 100):
        fs = FaultyFileSystem(Fault(at, "error", number))
        (tmp_path / str(at)).mkdir()
        tier = ColdTier(tmp_path / str(at), block_format(), fs)
        try:
            store(tier)
        except OSError as error:
            assert error.errno == number
            assert files_in(tmp_path / str(at)) == []
        if not fs.hit:
            break
    assert at > 5


def test_a_temporary_file_that_stays_is_told(tmp_path):
    """open, (folder,) open, write, close, rename: from the write on, unlink fails too."""
    fs = FaultyFileSystem(Fault(4, "error forever", errno.EIO))
    with pytest.raises(TempLeft):
        store(ColdTier(tmp_path, block_format(), fs))
    assert len(temps_in(tmp_path)) == 1


def test_storing_again_replaces_a_damaged_file(tier, tmp_path):
    store(tier)
    path = files_in(tmp_path)[0]
    path.write_bytes(b"damaged")
    store(tier)
    assert load(tier) == bytes_of(KEY.block_hash)
    assert files_in(tmp_path) == [path]


def test_touch_makes_the_last_the_most_recent(tier, tmp_path):
    keys = chain(range(40))
    for key in keys:
        store(tier, key)
    before = max(path.stat().st_mtime_ns for path in files_in(tmp_path))
    hashes = [key.block_hash for key in reversed(keys)]
    tier.touch([*hashes[:3], b"\0" * 32, *hashes[3:]])
    times = [os.stat(tmp_path / tier.path_of(h)).st_mtime_ns for h in hashes]
    assert times == sorted(times) and len(set(times)) == len(times)
    assert times[-1] > before - 1_000_000


def test_many_threads_store_and_load_the_same_blocks(tier, tmp_path):
    keys = [lone_key(i) for i in range(8)]
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(40):
                key = keys[(i * seed) % len(keys)]
                if (i + seed) % 3 == 0:
                    store(tier, key)
                with contextlib.suppress(FileNotFoundError):
                    assert load(tier, key) == bytes_of(key.block_hash)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and temps_in(tmp_path) == []


def test_no_folder_is_made_in_place_of_a_cache_dir_that_went_away(tmp_path):
    """Removed, replaced by an empty one (a mount point), or by another daemon's."""
    root, lock = tmp_path / "cache", tmp_path / "cache" / ".lock"
    root.mkdir()
    lock.touch()
    tier = ColdTier(root, block_format(), FileSystem(str(lock)))
    root.rename(tmp_path / "aside")
    keys = chain(range(4))
    for make in (lambda: None, root.mkdir, lock.touch):
        make()
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(OSError, match="the cache folder is away"):
            tier.store(keys[0], payload_of(keys[0].block_hash).buffers())
        assert sorted(tmp_path.rglob("*")) == before
    lock.unlink()
    root.rmdir()
    (tmp_path / "aside").rename(root)
    tier.store(keys[0], payload_of(keys[0].block_hash).buffers())
    assert tier.has(keys[0].block_hash)
