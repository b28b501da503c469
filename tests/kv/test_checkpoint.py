"""Checkpoints: looking at one changes nothing, and going on from one records its use."""
# ruff: noqa: F811 -- `rig` is a fixture of kv_fakes.py

from __future__ import annotations

from kv_fakes import HASHES, LAYOUT, NAMESPACE, Rig, payload_of, queued, rig  # noqa: F401

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
