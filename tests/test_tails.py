"""What is kept of less than a block (kv/tails.py): looking up, replacing, bounds, bytes."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from omlxd.kv import tails as tails_module
from omlxd.kv.block_pool import BlockPool
from omlxd.kv.tails import Tails

A, B = b"a" * 32, b"b" * 32


@dataclass(frozen=True, eq=False)
class Sized:
    nbytes: int = 10


def nothing_hot(name: bytes) -> None:
    return None


def begins(tails: Tails, parent: bytes, tokens: list[int]) -> int:
    found = tails.longest(parent, tokens, nothing_hot)
    return found[1] if found else 0


def test_the_tail_with_most_in_common_is_found():
    tails = Tails()
    few, most = Sized(), Sized()
    tails.put(A, [1, 2, 3, 9, 9], 5, few)
    tails.put(A, [1, 2, 3, 4, 5], 5, most)
    tails.put(B, [1, 2, 3, 4, 6], 5, Sized())
    assert tails.longest(A, [1, 2, 3, 4, 6], nothing_hot) == (most, 4, 5)
    assert tails.longest(A, [7], nothing_hot) is None and tails.longest(b"c" * 32, [1], nothing_hot) is None
    tails.check()


@pytest.mark.parametrize(("shared", "usable"), [(3, 3), (4, 4), (5, 4), (6, 6), (8, 8)])
def test_tokens_computed_alone_are_taken_only_with_the_answer(shared: int, usable: int):
    """Four of a prompt's, its last one, and an answer's three."""
    tails = Tails()
    tails.put(A, [1, 2, 3, 4, 5, 6, 7, 8], 4, Sized())
    assert begins(tails, A, [*range(1, shared + 1), 99, 99]) == usable


def test_a_tail_takes_the_place_of_those_that_it_covers():
    tails = Tails()
    tails.put(A, [1, 2], 2, Sized(2))
    tails.put(A, [1, 3], 2, Sized(2))
    tails.put(A, [1, 2, 3], 2, Sized(3))
    assert len(tails) == 2 and tails.nbytes == 5
    assert tails.known(A, [1, 2], 2, nothing_hot) and tails.known(A, [1, 2, 3], 1, nothing_hot)
    assert not tails.known(A, [1, 2], 3, nothing_hot), "that one would have more computed together"
    assert not tails.known(B, [1, 2], 2, nothing_hot)
    tails.put(A, [1, 2, 3, 4], 0, Sized(4))  # an answer's own: the better half of the other stays
    assert len(tails) == 3
    tails.check()


def test_a_note_is_worth_what_its_block_is():
    tails, payload = Tails(), Sized()
    hot = {B: payload}
    tails.put(A, [1, 2, 3], 3, B)
    assert tails.nbytes == 0
    assert tails.longest(A, [1, 2, 9], hot.get) == (payload, 2, 3)
    assert tails.known(A, [1, 2], 2, hot.get)
    hot.clear()
    assert not tails.known(A, [1, 2], 2, hot.get)
    assert tails.longest(A, [1, 2, 9], hot.get) is None and len(tails) == 0
    tails.check()


def test_the_least_used_goes_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tails_module, "MOST_A_PARENT", 2)
    tails = Tails()
    for first in (1, 2):
        tails.put(A, [first, 0], 2, Sized())
    assert begins(tails, A, [1]) == 1
    tails.put(A, [3, 0], 2, Sized())
    assert [begins(tails, A, [first]) for first in (1, 2, 3)] == [1, 0, 1]
    tails.put(B, [4], 1, Sized())
    assert begins(tails, A, [1]) == 1
    assert tails.shed(1) == 10 and tails.nbytes == 20
    assert [begins(tails, A, [first]) for first in (1, 3)] == [1, 0]
    assert tails.shed(1000) == 20 and tails.shed(1) == 0 and len(tails) == 0
    tails.check()


def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch):
    for limit in ("MOST_OWN", "MOST_NOTES", "MOST_A_PARENT"):
        monkeypatch.setattr(tails_module, limit, 5)
    tails, rng, most = Tails(), random.Random(1), 0
    for _ in range(400):
        parent = bytes([rng.randrange(4)]) * 32
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 6))]
        source = Sized(rng.randrange(5)) if rng.random() < 0.5 else rng.randbytes(32)
        tails.put(parent, tokens, rng.randrange(len(tokens) + 1), source)
        if rng.random() < 0.1:
            tails.shed(rng.randrange(10))
        tails.check()
        most = max(most, len(tails))
    assert most == 10


def test_short_memory_takes_tails_before_blocks_and_a_full_tier_blocks_before_tails():
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(3)]
    for index, block in enumerate(blocks):
        pool.cache(block, bytes([index]) * 32, Sized(10))
    pool.free(blocks)
    pool.tails.put(A, [1], 1, Sized(5))
    assert pool.hot_bytes == 35
    assert pool.evict(10) == 10 and pool.tails.nbytes == 5
    assert pool.give_back(4) == 5 and pool.hot_bytes == 20 and pool.num_cached == 2
    pool.tails.put(A, [1], 1, Sized(5))
    assert pool.evict(1000) == 25 and pool.hot_bytes == 0
    pool.check({})
