"""Block pool, free queue and block tables: examples. The state machine is in test_state_machine.py."""

from dataclasses import dataclass

import pytest
from kv_fakes import check_pool

from omlxd.kv.block_pool import BlockPool, BlockTable
from omlxd.kv.hashing import chain_root, hash_blocks, namespace_of


@dataclass
class Bytes:
    nbytes: int


def cached_chain(pool: BlockPool, names: list[bytes], nbytes: int = 10) -> list:
    """Allocate, name and free a chain, as a finished request does."""
    table = BlockTable(pool)
    for index, name in enumerate(names):
        table.append()
        table.cache(index, name, Bytes(nbytes))
    blocks = list(table.blocks)
    table.free()
    return blocks


def test_leaves_are_evicted_before_their_parents():
    pool = BlockPool(4)
    cached_chain(pool, [b"root", b"middle", b"leaf"])
    assert pool.evict(1) == 10
    assert [pool.get_cached_block(n) is not None for n in (b"root", b"middle", b"leaf")] == [
        True,
        True,
        False,
    ]
    pool.evict(1)
    assert pool.get_cached_block(b"middle") is None
    assert pool.get_cached_block(b"root") is not None
    check_pool(pool, {})


def test_a_hit_makes_the_whole_chain_recent():
    pool = BlockPool(0)
    old = cached_chain(pool, [b"a0", b"a1"])
    cached_chain(pool, [b"b0", b"b1"])
    pool.touch(old)
    pool.free(old)
    pool.evict(20)
    assert pool.get_cached_block(b"b0") is None
    assert pool.get_cached_block(b"a1") is not None


def test_blocks_in_use_are_never_evicted():
    pool = BlockPool(0)
    chain = cached_chain(pool, [b"x"])
    pool.touch(chain)
    assert pool.evict(1000) == 0
    assert pool.get_cached_block(b"x") is chain[0]
    pool.free(chain)
    assert pool.evict(1000) == 10
    assert pool.hot_bytes == 0


def test_the_twin_of_a_block_computed_twice_stays_nameless():
    pool = BlockPool(0)
    first, second = BlockTable(pool), BlockTable(pool)
    first.append()
    second.append()
    owner = first.cache(0, b"same", Bytes(10))
    assert second.cache(0, b"same", Bytes(10)) is owner is first.blocks[0]
    assert pool.hot_bytes == 10
    second.free()
    first.free()
    check_pool(pool, {})
    assert pool.get_cached_block(b"same") is owner


def test_allocation_grows_the_pool_before_it_evicts_a_cached_block():
    pool = BlockPool(1, max_records=3)
    cached_chain(pool, [b"one", b"two"])
    assert pool.allocate().block_id == 2
    assert pool.num_cached == 2
    pool.allocate()
    assert pool.num_cached == 1 and len(pool) == 3


def test_forgetting_a_block_in_use_keeps_its_references():
    pool = BlockPool(0)
    chain = cached_chain(pool, [b"bad"])
    pool.touch(chain)
    pool.forget(chain[0])
    assert pool.get_cached_block(b"bad") is None and pool.hot_bytes == 0
    check_pool(pool, {chain[0].block_id: 1})
    pool.free(chain)
    check_pool(pool, {})


def test_hash_chain_depends_on_everything_before_it_and_on_nothing_after():
    root = chain_root(namespace_of({"model": "m", "block": 4}))
    base = hash_blocks(root, range(16), 4)
    assert len(base) == 4 and len(set(base)) == 4
    assert hash_blocks(root, range(15), 4) == base[:3]
    edited = list(range(16))
    edited[5] = 99
    assert hash_blocks(root, edited, 4)[0] == base[0]
    assert not set(hash_blocks(root, edited, 4)[1:]) & set(base)
    assert hash_blocks(chain_root(root, "salt"), range(16), 4)[0] != base[0]
    with_image = hash_blocks(root, range(16), 4, {1: [("image", "d1")]})
    assert with_image[0] == base[0] and not set(with_image[1:]) & set(base)


@pytest.mark.parametrize("facts", [{"weights": "b"}, {"weights": "a", "kv_bits": 8}])
def test_another_fact_is_another_namespace(facts):
    assert namespace_of({"weights": "a"}) != namespace_of(facts)
