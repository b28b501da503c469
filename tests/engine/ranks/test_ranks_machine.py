"""What ranks restore is right and equal, whatever happens to any of them in whatever order.

Real stores, bridges, plan and follower (rank_fakes.py); with processes: test_ranks.py.
"""

from __future__ import annotations

import errno
from typing import Literal

import pytest
from faulty_fs import Fault
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kv_fakes import BLOCK, NAMESPACE, retry_now
from kv_machines import LONG, QUICK
from rank_fakes import Ranks

from omlxd.engine.kvio.hot_budget import evict_unused
from omlxd.engine.mlx_adapter import new_cache
from omlxd.engine.sequence.sequence import Prompt, SamplerRow, Sequence, SequenceKV
from omlxd.kv.hashing import hash_blocks
from omlxd.wire import plan

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=5)
"""Of two ids, each `BLOCK` times, so that prefixes meet all the time."""
ANY = st.integers(0, 1 << 20)
TURNS = st.lists(ANY, max_size=8)


class RanksMachine(RuleBasedStateMachine):
    """hits: rows that were restored. waiting: rows that nobody has called back for."""

    hits = 0

    @initialize(
        number=st.integers(2, 3),
        states=st.booleans(),
        hot=st.lists(st.sampled_from([100, 3, 0, 100]), min_size=3, max_size=3),
        cap=st.lists(st.sampled_from([60, 6, 60, 0]), min_size=3, max_size=3),
    )
    def start(self, number: int, states: bool, hot: list[int], cap: list[int]) -> None:
        self.ranks = Ranks(number, states, hot, cap)
        self.waiting: list[Sequence] = []
        self.ready: list[Sequence] = []
        self.names: list[bytes] = []
        self.served = 0
        """Rows since the last start."""

    def teardown(self) -> None:
        if hasattr(self, "ranks"):
            self.ranks.remove()

    # ----------------------------------------------------------------- rows

    @rule(blocks=TOKENS, more=st.integers(1, BLOCK), pins=st.booleans(), wait=st.booleans(), turns=TURNS)
    def ask(self, blocks: list[int], more: int, pins: bool, wait: bool, turns: list[int]) -> None:
        row = self.ask_for(blocks, more, pins)
        if wait:
            self.wait_for(row)
        self.go_on(turns)

    @rule(blocks=TOKENS, count=st.sampled_from([BLOCK, 2 * BLOCK + 1, 64]), answer=st.integers(0, 2 * BLOCK))
    def serve(self, blocks: list[int], count: int, answer: int) -> None:
        """A request from its beginning to its end, which others' reads and writes may outlast."""
        row = self.ask_for(blocks, 1, pins=False)
        self.wait_for(row)
        while len(row.tokens) < row.prompt.length + answer or row.kv.length < row.prompt.length:
            self.compute_next(row, count, len(row.tokens) % 2)
        self.end(row)

    def wait_for(self, row: Sequence) -> None:
        for choice in range(100_000):
            if row in self.ready:
                return
            assert self.ranks.turn(choice), "nobody calls back"

    def ask_for(self, blocks: list[int], more: int, pins: bool) -> Sequence:
        tokens = [token for token in blocks for _ in range(BLOCK)] + [1] * more
        hashes = hash_blocks(NAMESPACE, tokens, BLOCK)
        prompt = Prompt(len(tokens), NAMESPACE, pins=tuple(self.names) if pins else ())
        self.names = hashes[:2]
        row = Sequence(0, tokens, prompt, SamplerRow(None, max_new=64), SequenceKV(hashes))
        self.match(row)
        return row

    def match(self, row: Sequence) -> None:
        def ready() -> None:
            self.waiting.remove(row)  # Raises if it was called twice.
            self.ranks.check_row(row)
            assert row.kv.length < row.prompt.length
            RanksMachine.hits += row.kv.length > 0
            self.ready.append(row)
            if row.cancelled:
                self.end(row)

        self.waiting.append(row)
        assert self.ranks.bridge.match(row, ready)

    @rule(turns=st.lists(ANY, min_size=10, max_size=60))
    def go_on(self, turns: list[int]) -> None:
        """Whatever comes next, here or there."""
        for choice in turns:
            self.ranks.turn(choice)

    @precondition(lambda self: self.ready)
    @rule(which=ANY, count=st.integers(1, 3 * BLOCK), turns=TURNS)
    def compute(self, which: int, count: int, turns: list[int]) -> None:
        self.compute_next(self.ready[which % len(self.ready)], count, which % 2)
        self.go_on(turns)

    def compute_next(self, row: Sequence, count: int, drawn: int) -> None:
        """A pass over `count` tokens of a prompt, or over one that was `drawn`."""
        bridge, start = self.ranks.bridge, row.kv.length
        assert not bridge.match(row, lambda: None)
        if start >= row.prompt.length:
            row.tokens.append(drawn)
            stop = len(row.tokens)
        else:
            last = row.last_boundary(BLOCK)
            stop = min(start + count, last if start < last else row.prompt.length)
        if row.kv.cache is None:
            row.kv.cache = new_cache(self.ranks.all[0].model, row.capacity)
        bridge.compute(row, start, row.tokens[start:stop], row.kv.cache)  # type: ignore[attr-defined]
        row.kv.length = stop
        self.ranks.check_row(row)
        bridge.offer(row)

    @precondition(lambda self: self.ready)
    @rule(which=ANY, how=st.sampled_from(["", "", "cancelled", "failed", "spoiled", "gives way"]))
    def finish(self, which: int, how: str) -> None:
        row = self.ready[which % len(self.ready)]
        if how == "failed":
            row.kv.cache = None
        row.cancelled = how in ("cancelled", "failed")
        fresh = not row.kv.length
        self.end(row, spoiled=how == "spoiled")
        if how == "gives way" and fresh:
            self.match(row)

    def end(self, row: Sequence, spoiled: bool = False) -> None:
        self.ready.remove(row)
        self.served += 1
        self.ranks.bridge.finish(row, spoiled=spoiled)

    @precondition(lambda self: self.waiting)
    @rule(which=ANY)
    def cancel_waiting(self, which: int) -> None:
        """As the scheduler does: it ends once the I/O threads have let go of its arrays."""
        self.waiting[which % len(self.waiting)].cancelled = True

    # ----------------------------------------------------------------- RAM and files

    @rule(which=ANY, everywhere=st.booleans())
    def evict(self, which: int, everywhere: bool) -> None:
        rank = self.ranks.all[which % self.ranks.number]
        if everywhere:
            self.ranks.lead.send(plan.Trim())
        evict_unused(rank.rig.store)

    @rule(which=ANY, hot=st.sampled_from([0, 1, 3, 100]))
    def share_ram(self, which: int, hot: int) -> None:
        rank = self.ranks.all[which % self.ranks.number]
        self.ranks.hot[rank.number] = rank.rig.hot = hot
        rank.rig.store.trim_hot()

    @rule(which=ANY, file=ANY, how=st.sampled_from(["gone", "all gone", "cut", "flipped"]))
    def damage(self, which: int, file: int, how: str) -> None:
        files = self.ranks.all[which % self.ranks.number].files()
        for path in files if how == "all gone" else [files[file % len(files)]] if files else []:
            if how in ("gone", "all gone"):
                path.unlink()
                continue
            data = bytearray(path.read_bytes())
            data[-1 - file % len(data)] ^= 1
            path.write_bytes(data if how == "flipped" else data[: len(data) // 2])

    @rule(which=ANY, full=st.booleans())
    def fill_disk(self, which: int, full: bool) -> None:
        rank = self.ranks.all[which % self.ranks.number]
        rank.fs.fault = Fault(rank.fs.count + 1, "error forever", errno.ENOSPC) if full else None
        if not full:
            retry_now(rank.rig.writer.health)

    @precondition(lambda self: self.served > 1)
    @rule(which=ANY, operations=st.integers(0, 8), how=st.sampled_from(["settled", "killed", "other cap"]))
    def lose(self, which: int, operations: int, how: Literal["killed", "settled", "other cap"]) -> None:
        """One is killed, perhaps in the middle of a write, and all start again on their folders."""
        number = which % self.ranks.number
        if how != "killed":
            self.ranks.settle()
        if how == "other cap":
            self.ranks.cap[number] = operations
        self.waiting, self.ready, self.served = [], [], 0
        self.ranks.kill(number, operations)

    @rule()
    def all_end(self) -> None:
        """Nothing is lost, nothing is left over."""
        self.ranks.settle()
        assert not self.waiting, "nobody calls back"
        for row in [*self.ready]:
            self.end(row)
        self.ranks.settle()
        self.ranks.check_idle()

    @invariant()
    def caps_are_held(self) -> None:
        for rank in self.ranks.all if hasattr(self, "ranks") else ():
            rank.check_cap()


def run(examples: settings) -> None:
    RanksMachine.hits = 0
    run_state_machine_as_test(RanksMachine, settings=examples)
    assert RanksMachine.hits


def test_ranks_restore_what_all_have():
    run(QUICK)


@pytest.mark.slow
def test_ranks_restore_what_all_have_longer():
    run(settings(LONG, max_examples=LONG.max_examples // 5))  # Each has a store a rank.
