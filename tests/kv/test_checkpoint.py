"""Checkpoints: looking at one changes nothing, and going on from one records its use."""
# ruff: noqa: F811 -- `rig` is a fixture of kv_fakes.py

from __future__ import annotations

from kv_fakes import BLOCK, HASHES, LAYOUT, NAMESPACE, Rig, payload_of, queued, rig, state_of  # noqa: F401

from omlxd.kv.checkpoint import CheckpointFiles, Checkpoints, checkpoint_name


def in_order(rig: Rig) -> list[bytes | None]:
    """Names in RAM, the next to leave first."""
    return [block.block_hash for block in queued(rig.pool._cached)]


def test_only_a_use_makes_a_checkpoint_recent(rig):
    files = CheckpointFiles(rig.root, NAMESPACE, lambda position: LAYOUT)
    checkpoints = Checkpoints(rig.store, files)
    first, second = (checkpoint_name(name) for name in HASHES[:2])
    for at in range(2):
        checkpoints.put(HASHES[at], at + 1, payload_of(HASHES[at]), write=False)
    assert in_order(rig) == [first, second]
    assert checkpoints.hot(HASHES[0]) is not None and checkpoints.stands(HASHES[0])
    checkpoints.put(HASHES[0], 1, payload_of(HASHES[0]), write=False)
    assert in_order(rig) == [first, second]
    assert checkpoints.deepest(HASHES[:1], 1) == 1
    rig.settle()
    assert in_order(rig) == [second, first]


def test_one_whose_file_was_evicted_is_written_again(rig):
    """Also where no writer takes it at once."""
    rig.states.put(HASHES[0], BLOCK, state_of(HASHES[0], BLOCK), write=True)
    rig.settle()
    name = checkpoint_name(HASHES[0])
    rig.ledger.forget([rig.cold.path_of(name)], True)
    rig.writer.health.store_refused()
    assert not rig.states.put(HASHES[0], BLOCK, state_of(HASHES[0], BLOCK), write=True)
    rig.settle()
    assert not rig.cold.has(name)
    rig.writer.resume()
    rig.tick()
    assert rig.cold.has(name)


def test_a_file_that_proved_bad_is_none_that_was_there_before(rig):
    """So that what is stored in its place, and withdrawn, does not stay."""
    rig.states.put(HASHES[0], BLOCK, state_of(HASHES[0], BLOCK), write=True)
    rig.settle()
    name = checkpoint_name(HASHES[0])
    rig.pool.evict(1 << 20)
    rig.store._distrust(name)  # As where it could not be removed.
    had_file = rig.states.put(HASHES[0], BLOCK, state_of(HASHES[0], BLOCK, fill=0xEE), write=True)
    rig.settle()
    rig.store.withdraw({name: had_file})
    rig.settle()
    assert not had_file and not rig.cold.has(name) and not rig.states.stands(HASHES[0])
