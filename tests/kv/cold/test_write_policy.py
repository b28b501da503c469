"""Which blocks are written at all: admission policies."""

from __future__ import annotations

import random

import pytest
from kv_fakes import (
    BLOCK,
    KEYS,
    Rig,
    files_in,
    on_disk,
    payload_of,
)

from omlxd.kv.cold.flusher import SEEN_EACH, SecondUse, write_policy
from omlxd.kv.cold.unwritten import Unwritten
from omlxd.kv.files.block_file import BlockKey


def test_second_use_writes_what_a_second_request_finds_hot(tmp_path):
    rig = Rig(tmp_path, admission="second-use")
    rig.serve(KEYS)
    assert files_in(tmp_path) == [] and rig.flusher.held_back == 6
    rig.serve(KEYS[:3])
    assert on_disk(rig) == [True] * 3 + [False] * 3
    rig.serve(KEYS)
    assert on_disk(rig) == [True] * 6 and rig.writer.stats.written == 6
    rig.serve(KEYS)
    assert rig.writer.stats.written == 6
    rig.check()
    rig.drop()


@pytest.mark.parametrize("hot", [0, 2])
def test_second_use_writes_what_is_computed_twice(tmp_path, hot):
    rig = Rig(tmp_path, hot=hot, admission="second-use")
    rig.serve(KEYS[:2])
    rig.pool.evict(1 << 30)
    assert files_in(tmp_path) == []
    rig.serve(KEYS[:2])
    assert on_disk(rig, KEYS[:2]) == [True] * 2
    rig.check()
    rig.drop()


def test_second_use_forgets_at_a_restart(tmp_path):
    rig = Rig(tmp_path, admission="second-use")
    rig.serve(KEYS)
    rig.drop()
    rig = Rig(tmp_path, admission="second-use")
    rig.serve(KEYS)
    assert files_in(tmp_path) == []
    rig.drop()


def test_min_length_goes_by_the_prompt(tmp_path):
    rig = Rig(tmp_path, admission=f"min-length:{4 * BLOCK}")

    def ask(keys, tokens: int) -> None:
        table = rig.store.new_table()
        rig.store.extend_match(table, [k.block_hash for k in keys], len(keys))
        for index in range(len(table.blocks), len(keys)):
            table.append()
            rig.store.put(table, index, keys[index], payload_of(keys[index].block_hash), tokens)
        table.free()
        rig.settle()

    ask(KEYS[:3], 3 * BLOCK)
    assert files_in(tmp_path) == []
    ask(KEYS, 6 * BLOCK)
    assert on_disk(rig) == [True] * 6, "the short prompt's blocks are a long one's too by now"
    rig.check()
    rig.drop()


@pytest.mark.parametrize(
    "text", ["", "never", "min-length", "min-length:", "min-length:-1", "min-length:1e9"]
)
def test_a_policy_that_is_none(text):
    with pytest.raises(ValueError, match="none of always"):
        write_policy(text)


def test_what_was_seen_is_bounded_and_seldom_wrong():
    policy, dice = SecondUse(), random.Random(1)
    size = len(policy._newer) + len(policy._older)
    old = [dice.randbytes(32) for _ in range(1000)]
    assert sum(policy(h, 0) for h in old) == 0
    assert all(policy(h, 0) for h in old)
    wrong = sum(policy(dice.randbytes(32), 0) for _ in range(SEEN_EACH))
    assert wrong < SEEN_EACH * 0.01
    assert all(policy(h, 0) for h in old), "one filter back"
    for _ in range(2 * SEEN_EACH):
        policy(dice.randbytes(32), 0)
    assert sum(policy(h, 0) for h in old) < 50, "forgotten"
    assert len(policy._newer) + len(policy._older) == size


def test_a_block_that_is_written_late_keeps_what_is_in_its_key_beside_its_tokens():
    image = (("image", "digest"),)
    waiting = Unwritten()
    key = BlockKey(KEYS[0].block_hash, KEYS[0].parent, KEYS[0].tokens, image)
    for due in (False, True):
        waiting.add(key, None, 10, due=due)
        noted, was_due = waiting.pop(key.block_hash) or pytest.fail("it is not noted")
        assert was_due is due and noted.key.extra_keys == image
        assert list(noted.key.tokens) == list(key.tokens)
