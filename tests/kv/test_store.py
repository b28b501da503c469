"""The store: matching, the hot tier and its budget, twins, limits."""
# ruff: noqa: F811 -- `rig` is a fixture of kv_fakes.py

from __future__ import annotations

import os

import pytest
from kv_fakes import (
    BLOCK,
    FILE_DISK_BYTES,
    HASHES,
    KEYS,
    LAYOUT,
    Rig,
    all_bytes,
    bytes_of,
    chain,
    check_pool,
    files_in,
    lone_key,
    on_disk,
    payload_of,
    rig,  # noqa: F401
    state_of,
)

from omlxd.kv.block_pool import BlockPool
from omlxd.kv.ledger import ledger as ledger_module
from omlxd.kv.store import KVStore


def hot(rig: Rig, keys=KEYS) -> list[bool]:
    return [
        (b := rig.pool.get_cached_block(k.block_hash)) is not None and b.payload is not None for k in keys
    ]


# --------------------------------------------------------------------- matching


def test_a_hit_is_served_from_ram_and_after_a_restart_from_disk(tmp_path):
    rig = Rig(tmp_path)
    rig.serve(KEYS)
    assert rig.restore(KEYS) == all_bytes()
    rig.drop()
    rig = Rig(tmp_path)
    assert rig.pool.num_cached == 0
    assert rig.restore(KEYS) == all_bytes()
    assert all(hot(rig)), "what was read is kept hot"
    rig.check()
    rig.drop()


@pytest.mark.parametrize("limit", [-1, 0, 1, 5, 6, 99])
def test_a_match_stops_at_the_limit(rig, limit):
    rig.serve(KEYS)
    table = rig.store.new_table()
    assert rig.store.extend_match(table, HASHES, limit) == max(0, min(limit, 6))
    table.free()
    rig.check()


def test_a_match_stops_at_the_first_miss(tmp_path):
    rig = Rig(tmp_path)
    rig.serve(KEYS)
    rig.drop()
    os.unlink(tmp_path / rig.cold.path_of(HASHES[2]))
    rig = Rig(tmp_path)
    assert rig.restore(KEYS) == all_bytes()[:2]
    rig.drop()


def test_a_match_extends_a_table_later(rig):
    """Two requests share a prefix: the second goes on where the first has got to."""
    second = rig.store.new_table()
    first = rig.compute(KEYS[:3])
    assert rig.store.extend_match(second, HASHES, 5) == 3
    first.append()
    rig.store.put(first, 3, KEYS[3], payload_of(HASHES[3]))
    assert rig.store.extend_match(second, HASHES, 5) == 1
    assert len(second.blocks) == 4 and first.blocks[:4] == second.blocks
    second.truncate(1)
    assert len(second.blocks) == 1 and first.blocks[1].ref_cnt == 2  # the table and the writer
    first.free()
    second.free()
    rig.settle()
    rig.check()


def test_a_branch_hits_its_trunk_and_nothing_else(rig):
    rig.serve(KEYS)
    branch = chain([*range(8), *range(500, 516)])
    assert len(rig.restore(branch)) == 2
    rig.serve(branch)
    assert rig.restore(branch) == all_bytes(branch) and rig.restore(KEYS) == all_bytes()


@pytest.mark.parametrize("hot", [0, 100])
def test_a_request_does_not_evict_what_it_stands_on(tmp_path, hot):
    """The oldest chain is hit and extended on a full disk: its own stores must take others' space."""
    rig = Rig(tmp_path, hot=hot, cap=6)
    rig.serve(KEYS[:3])
    for number in range(3):
        rig.serve([lone_key(100 + number)])
    assert len(files_in(tmp_path)) == 6
    rig.compute(KEYS, matched=3).free()
    rig.settle()
    assert all(rig.cold.has(h) for h in HASHES)
    rig.drop()


# --------------------------------------------------------------------- the hot tier


def test_no_hot_tier_serves_from_disk_alone(tmp_path):
    rig = Rig(tmp_path, hot=0)
    rig.serve(KEYS)
    assert rig.pool.hot_bytes == 0
    assert rig.restore(KEYS) == all_bytes()
    assert rig.pool.hot_bytes == 0 and rig.pool.num_cached == 6, "no name was evicted in vain"
    assert not rig.store.wants(HASHES[0], 0)
    rig.check()
    rig.drop()


def test_a_hot_tier_of_two_blocks_still_serves_all(tmp_path):
    rig = Rig(tmp_path, hot=2)
    rig.serve(KEYS)
    assert rig.pool.hot_bytes <= 2 * LAYOUT.nbytes(BLOCK)
    for _ in range(3):
        assert rig.restore(KEYS) == all_bytes()
        assert rig.pool.hot_bytes <= 2 * LAYOUT.nbytes(BLOCK)
        rig.check()
    rig.drop()


def test_a_budget_of_less_than_a_block_is_none(tmp_path):
    rig = Rig(tmp_path, hot=0.5)
    rig.serve(KEYS)
    assert rig.pool.hot_bytes == 0 and rig.restore(KEYS) == all_bytes()
    rig.drop()


def test_a_payload_larger_than_the_budget_evicts_nothing(rig):
    rig.serve(KEYS)
    rig.hot = 0.5
    other = lone_key(99)
    table = rig.compute([other])
    assert all(hot(rig)), "it could not have fitted"
    table.free()
    rig.settle()


def test_a_shrinking_budget_is_met_leaf_first(rig):
    rig.serve(KEYS)
    rig.hot = 3
    rig.store.trim_hot()
    assert hot(rig) == [True] * 3 + [False] * 3
    rig.hot = 0
    rig.store.trim_hot()
    assert rig.pool.hot_bytes == 0 and rig.restore(KEYS) == all_bytes()
    rig.check()


def test_leaves_leave_ram_before_their_parents_though_written_after_them(rig):
    """The writer lets go of a chain root first, after the request has: the order must not be its."""
    table = rig.compute(KEYS)
    table.free()
    rig.store.record_use(HASHES)
    rig.settle()
    for left in range(5, -1, -1):
        rig.pool.evict(1)
        assert hot(rig) == [True] * left + [False] * (6 - left)


def test_a_block_being_written_does_not_leave_ram(rig):
    rig.compute(KEYS).free()
    rig.hot = 0
    rig.store.trim_hot()
    assert all(hot(rig)), "readable nowhere else yet"
    rig.check()
    rig.settle()
    rig.store.trim_hot()
    assert rig.pool.hot_bytes == 0 and rig.restore(KEYS) == all_bytes()


def test_no_cold_tier_at_all():
    pool = BlockPool(0)
    budget = 4 * LAYOUT.nbytes(BLOCK)
    store = KVStore(block_size=BLOCK, pool=pool, hot_budget=lambda: budget, post=lambda f: f())
    table = store.new_table()
    for index, key in enumerate(KEYS):
        table.append()
        assert store.wants(key.block_hash, index)
        store.put(table, index, key, payload_of(key.block_hash))
    assert store.stats.not_kept == 2 and pool.hot_bytes == budget
    table.free()
    store.record_use(HASHES)
    table = store.new_table()
    assert store.extend_match(table, HASHES, 6) == 4
    table.free()
    assert store.close(1)
    check_pool(pool, {})


def test_promoting_into_a_full_hot_tier_evicts_another(tmp_path):
    rig = Rig(tmp_path, hot=1)
    rig.serve(KEYS[:2])
    rig.restore(KEYS[:2])
    rig.check()
    block = rig.pool.get_cached_block(HASHES[1])
    if block is None:
        table = rig.store.new_table()
        rig.store.extend_match(table, HASHES, 2)
        block = table.blocks[1]
        table.free()
    rig.store.promote(block, HASHES[1], payload_of(HASHES[1]))
    assert block.block_hash == HASHES[1] and hot(rig, KEYS[:2]) == [False, True]
    rig.store.promote(block, HASHES[1], payload_of(HASHES[1]))
    rig.store.promote(block, HASHES[0], payload_of(HASHES[0]))
    assert block.payload.tobytes() == bytes_of(HASHES[1])
    rig.check()
    rig.drop()


# --------------------------------------------------------------------- putting


def test_putting_twice_keeps_and_writes_one(rig):
    table = rig.compute(KEYS[:1])
    rig.store.put(table, 0, KEYS[0], payload_of(HASHES[0]))
    rig.settle()
    rig.store.put(table, 0, KEYS[0], payload_of(HASHES[0]))
    table.free()
    rig.settle()
    assert rig.writer.stats.written == 1 and rig.pool.hot_bytes == LAYOUT.nbytes(BLOCK)
    assert not rig.store.wants(HASHES[0], 0)
    rig.check()


def test_putting_what_is_hot_evicts_nothing(tmp_path):
    rig = Rig(tmp_path, hot=2)
    table = rig.compute(KEYS[:2])
    rig.settle()
    rig.store.put(table, 0, KEYS[0], payload_of(HASHES[0]))
    table.free()
    assert hot(rig, KEYS[:2]) == [True, True]
    rig.drop()


def test_a_block_computed_again_is_written_again_if_its_file_has_gone(tmp_path):
    rig = Rig(tmp_path, hot=0)
    rig.serve(KEYS)
    assert rig.restore(KEYS) == all_bytes(), "its name is known now, and said to be on disk"
    (tmp_path / rig.cold.path_of(HASHES[5])).unlink()
    table = rig.compute(KEYS, matched=5)
    table.free()
    rig.settle()
    assert rig.writer.stats.written == 7 and rig.restore(KEYS) == all_bytes()
    rig.check()
    rig.drop()


@pytest.mark.parametrize("budget", [0, 1, 100])
def test_twins_computed_at_once(tmp_path, budget):
    rig = Rig(tmp_path, hot=budget)
    tables = [rig.store.new_table() for _ in range(2)]
    for index, key in enumerate(KEYS):
        for table in tables:
            table.append()
            rig.store.put(table, index, key, payload_of(key.block_hash))
    tables[0].free()
    rig.settle()
    tables[1].free()
    assert rig.writer.stats.written == 6 and rig.writer.stats.written_bytes == 6 * FILE_DISK_BYTES
    rig.check()
    assert rig.restore(KEYS) == all_bytes()
    rig.drop()


def test_wants_spares_the_copy(tmp_path):
    rig = Rig(tmp_path, hot=0)
    assert rig.store.wants(HASHES[0], 0)
    table = rig.compute(KEYS[:1])
    assert not rig.store.wants(HASHES[0], 0), "it is being written"
    rig.settle()
    table.free()
    rig.drop()


# --------------------------------------------------------------------- counting


def test_hits_are_counted_by_tier(rig):
    rig.store.count_match(100, 40, 24)
    rig.store.count_match(10, 0, 0)
    stats = rig.store.stats
    assert (stats.queries, stats.hits_hot, stats.hits_cold) == (110, 40, 24)


def test_the_records_are_bounded_and_the_tiers_still_agree(tmp_path):
    rig = Rig(tmp_path, max_records=4)
    rig.serve(KEYS)
    assert len(rig.pool) == 6, "all six were held at once"
    for number in range(20):
        rig.serve([lone_key(100 + number)])
        rig.check()
    assert len(rig.pool) == 6
    assert rig.restore(KEYS) == all_bytes()
    rig.drop()


def test_a_chain_that_a_nearly_full_disk_has_no_room_for_is_not_written_again_and_again(
    tmp_path, monkeypatch
):
    rig = Rig(tmp_path, hot=0, cap=100, deep=100)
    monkeypatch.setattr(
        ledger_module, "disk_room", lambda root: 4.5 * FILE_DISK_BYTES - rig.ledger.stats().bytes_used
    )
    written = list[int]()
    for _ in range(5):
        rig.serve(KEYS)
        rig.tick()
        written.append(rig.writer.stats.written)
    assert written[0] == len(KEYS), "nobody has told the engine yet"
    assert written[1] == written[-1] <= 8
    rig.drop()


def test_a_chain_that_is_larger_than_the_disks_limit_keeps_its_head_there(tmp_path, caplog):
    """What a request writes must not evict what the same request has written."""
    rig = Rig(tmp_path, hot=100, cap=4, deep=4)
    for _ in range(3):
        rig.serve(KEYS)
        rig.tick()
        assert [rig.cold.has(name) for name in HASHES] == [True] * 4 + [False] * 2
    assert rig.writer.stats.written == 4 and rig.ledger.stats().evicted_files == 0
    assert rig.pool.hot_bytes == 6 * LAYOUT.nbytes(BLOCK)
    said = [
        record.message for record in caplog.records if "smaller than the KV of one prompt" in record.message
    ]
    assert len(said) == 1 and f"its first {4 * BLOCK} tokens" in said[0]
    state = state_of(HASHES[3], 4 * BLOCK)
    assert not rig.states.put(HASHES[3], 4 * BLOCK, state, write=True)
    assert rig.states.hot(HASHES[3]) is state and not rig.flusher.writing, "it would evict a block"
    rig.drop()
    again = Rig(tmp_path, hot=0, cap=4, deep=4)
    assert len(again.restore(KEYS)) == 4
    assert not again.store.wants(HASHES[4], 4) and not again.store.wants(HASHES[3], 3)
    again.drop()


def test_what_waits_to_be_written_is_a_hit_without_a_hot_tier(tmp_path):
    """A quick next turn: what only the write queue has; RAM is given back after."""
    rig = Rig(tmp_path, hot=0)
    rig.compute(KEYS).free()
    state = state_of(HASHES[3], 4 * BLOCK)
    rig.states.put(HASHES[3], 4 * BLOCK, state, write=True)
    assert rig.pool.num_cached == 0 and on_disk(rig) == [False] * len(KEYS)
    assert rig.restore(KEYS) == all_bytes()
    assert rig.states.deepest(HASHES, len(KEYS)) == 4 and rig.states.hot(HASHES[3]) is state
    rig.store.record_use(HASHES)
    rig.settle()
    assert rig.pool.hot_bytes == 0 and on_disk(rig) == [True] * len(KEYS)
    assert rig.restore(KEYS) == all_bytes()
    rig.drop()


def test_what_a_writer_has_and_is_withdrawn_is_no_hit(tmp_path):
    rig = Rig(tmp_path, hot=0)
    rig.compute(KEYS).free()
    rig.store.withdraw(dict.fromkeys(HASHES[2:], False))
    assert rig.restore(KEYS) == all_bytes()[:2]
    rig.settle()
    assert on_disk(rig) == [True] * 2 + [False] * 4
    rig.drop()
