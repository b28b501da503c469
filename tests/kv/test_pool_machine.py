"""The pool and its tables after every step of whatever Hypothesis can think of.

Does every table read back its own tokens?
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

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
from kv_fakes import check_pool
from kv_machines import LONG, QUICK

from omlxd.kv.block import Block
from omlxd.kv.block_pool import BlockPool, BlockTable
from omlxd.kv.hashing import hash_blocks

TOKENS = st.integers(0, 1)
"""Two token ids, so that prefixes meet all the time."""


@dataclass(frozen=True)
class Sized:
    nbytes: int


@dataclass
class Sequence_:
    """A request's table, beside the tokens that it should hold."""

    table: BlockTable
    tokens: list[int] = field(default_factory=list)


class PoolMachine(RuleBasedStateMachine):
    """Blocks of one token. `pages` plays the KV itself: what was written into each block, by its id."""

    @initialize(initial=st.integers(0, 4), most=st.integers(1, 12))
    def start(self, initial: int, most: int) -> None:
        self.pool = BlockPool(initial, most)
        self.most = max(initial, most)
        self.live: list[Sequence_] = []
        self.pages: dict[int, int] = {}
        self.loose: list[Block] = []
        self.most_held = 0

    def pick(self, number: int) -> Sequence_:
        return self.live[number % len(self.live)]

    def hashes(self, tokens: list[int]) -> list[bytes]:
        return hash_blocks(b"root", tokens, 1)

    @rule(tokens=st.lists(TOKENS, max_size=5))
    def request(self, tokens: list[int]) -> None:
        """Match what is cached, as a prompt does; it holds what was written under those names."""
        sequence = Sequence_(BlockTable(self.pool))
        hits = []
        for block_hash in self.hashes(tokens):
            block = self.pool.get_cached_block(block_hash)
            if block is None:
                break
            hits.append(block)
        sequence.table.extend_cached(hits)
        sequence.tokens = tokens[: len(hits)]
        self.live.append(sequence)
        self.append(len(self.live) - 1, tokens[len(sequence.tokens) :])

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 99), tokens=st.lists(TOKENS, max_size=3))
    def append(self, number: int, tokens: list[int]) -> None:
        sequence = self.pick(number)
        for token in tokens:
            sequence.table.append()
            block = sequence.table.blocks[-1]
            assert block.ref_cnt == 1, "written to while shared"
            self.pages[block.block_id] = token
            sequence.tokens.append(token)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 99), nbytes=st.sampled_from([None, 0, 1, 10]))
    def cache(self, number: int, nbytes: int | None) -> None:
        sequence = self.pick(number)
        for index, block_hash in enumerate(self.hashes(sequence.tokens)):
            block = sequence.table.blocks[index]
            if block.block_hash is None:
                owner = sequence.table.cache(index, block_hash, None if nbytes is None else Sized(nbytes))
                assert owner is self.pool.get_cached_block(block_hash)
                assert owner.payload is not None or nbytes is None

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 99))
    def free(self, number: int) -> None:
        sequence = self.live.pop(number % len(self.live))
        sequence.table.free()
        assert sequence.table.blocks == []

    @rule(tokens=st.lists(TOKENS, max_size=3))
    def touch(self, tokens: list[int]) -> None:
        """A writer, or a reader, holds what is cached of a chain."""
        found = [b for h in self.hashes(tokens) if (b := self.pool.get_cached_block(h)) is not None]
        self.pool.touch(found)
        self.loose.extend(found)

    @rule()
    def let_go(self) -> None:
        self.pool.free(self.loose)
        self.loose = []

    @rule(nbytes=st.integers(0, 40))
    def evict(self, nbytes: int) -> None:
        before = self.pool.hot_bytes
        freed = self.pool.evict(nbytes)
        assert before - self.pool.hot_bytes == freed
        if freed < nbytes:
            assert all(b.ref_cnt for b in self.pool._by_hash.values()), "gave up too early"

    @rule(tokens=st.lists(TOKENS, min_size=1, max_size=3), what=st.sampled_from(["forget", "drop"]))
    def lose(self, tokens: list[int], what: str) -> None:
        block = self.pool.get_cached_block(self.hashes(tokens)[-1])
        if block is not None:
            (self.pool.forget if what == "forget" else self.pool.drop_payload)(block)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "pool"):
            return
        references = Counter(b.block_id for s in self.live for b in s.table.blocks)
        references.update(b.block_id for b in self.loose)
        check_pool(self.pool, references)
        assert len(self.pool._cached) + len(self.pool._spare) == len(self.pool) - len(references)
        # A record is made beyond the bound only where every other one is held.
        self.most_held = max(self.most_held, len(references))
        assert len(self.pool) <= max(self.most, self.most_held + 1)
        for sequence in self.live:
            table, tokens = sequence.table, sequence.tokens
            for block, token, name in zip(table.blocks, tokens, self.hashes(tokens), strict=True):
                assert self.pages[block.block_id] == token, "a table reads another's tokens"
                assert block.block_hash in (None, name)


def test_quick():
    run_state_machine_as_test(PoolMachine, settings=QUICK)


@pytest.mark.slow
def test_long():
    run_state_machine_as_test(PoolMachine, settings=LONG)
