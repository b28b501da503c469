"""Blocks that are lost: damaged, gone or unreadable files, and what is served and counted then."""
# ruff: noqa: F811 -- `rig` is a fixture of kv_fakes.py

from __future__ import annotations

import threading

import pytest
from kv_fakes import (
    HASHES,
    KEYS,
    Rig,
    all_bytes,
    check_pool,
    empty_payload,
    lone_key,
    on_disk,
    rig,  # noqa: F401
)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove", "symlink", "folder"])
def test_a_lost_block_is_a_miss_once_and_whole_again_after(tmp_path, damage, known):
    """`known`: the pool believes that the file is there."""
    rig = Rig(tmp_path, hot=0)
    rig.serve(KEYS)
    if known:
        assert rig.restore(KEYS) == all_bytes()
    path = tmp_path / rig.cold.path_of(HASHES[3])
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 4
    path.unlink()
    match damage:
        case "flip":
            path.write_bytes(raw)
        case "truncate":
            path.write_bytes(raw[:-1])
        case "empty":
            path.write_bytes(b"")
        case "symlink":
            path.symlink_to(tmp_path / rig.cold.path_of(HASHES[2]))
        case "folder":
            path.mkdir()
    assert rig.restore(KEYS) == all_bytes()[:3]
    corrupt, lost = rig.store.stats.corrupt, rig.store.stats.lost
    if damage in ("flip", "truncate", "empty"):
        assert (corrupt, lost) == (1, 0)
    else:
        assert corrupt + lost == known
    rig.check()
    table = rig.compute(KEYS, matched=3)
    table.free()
    rig.settle()
    if damage == "folder":
        path.rmdir()
        rig.serve(KEYS)
    assert rig.restore(KEYS) == all_bytes()
    rig.check()
    rig.drop()


def test_losing_a_file_keeps_the_hot_copy(rig, tmp_path):
    rig.serve(KEYS)
    block = rig.pool.get_cached_block(HASHES[0])
    rig.cold.remove(HASHES[0])
    rig.store.lose(block, KEYS[0])
    assert block.payload is not None and not block.on_disk
    assert rig.restore(KEYS) == all_bytes()
    rig.check()
    rig.tick()
    assert block.on_disk and rig.cold.has(HASHES[0]), "written again"


def test_a_hot_block_whose_file_the_owner_cleared_is_written_at_its_next_use(rig):
    rig.serve(KEYS)
    rig.ledger.forget([rig.cold.path_of(name) for name in HASHES], True)
    rig.store.record_use(HASHES, KEYS)
    rig.settle()
    rig.check()
    rig.tick()
    assert on_disk(rig) == [True] * len(KEYS)
    written = rig.writer.stats.written
    rig.store.record_use(HASHES, KEYS)
    rig.settle()
    rig.tick()
    assert rig.writer.stats.written == written, "files that are there stay as they are"
    rig.check()


def test_losing_a_file_that_is_being_written_again_notes_nothing(rig):
    rig.serve(KEYS)
    block = rig.pool.get_cached_block(HASHES[0])
    block.on_disk = False
    assert rig.flusher.submit(KEYS[0], block.payload, block)
    block.on_disk = True
    rig.store.lose(block, KEYS[0])
    rig.check([])
    rig.settle()
    assert block.on_disk and not rig.flusher.unwritten.due


def test_losing_a_block_in_use_leaves_the_tables_whole(rig, tmp_path):
    rig.serve(KEYS)
    rig.hot = 0
    rig.store.trim_hot()
    table = rig.store.new_table()
    rig.store.extend_match(table, HASHES, 6)
    twin = rig.store.new_table()
    rig.store.extend_match(twin, HASHES, 6)
    rig.store.lose(table.blocks[5], KEYS[5])
    assert table.blocks[5].block_hash is None
    check_pool(rig.pool, {b.block_id: 2 for b in table.blocks})
    table.free()
    twin.free()
    rig.check()


def test_readers_count_their_losses_exactly(rig):
    rig.serve(KEYS)

    def miss() -> None:
        for _ in range(200):
            assert not rig.store.load_into(lone_key(77), empty_payload().buffers())

    threads = [threading.Thread(target=miss) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rig.store.stats.lost == 800
