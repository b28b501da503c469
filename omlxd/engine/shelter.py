"""A parent's blocks, held while its sub-agent runs: nothing that the sub-agent computes evicts them.

Held blocks have a reference, so the pool can't evict them; where that leaves the hot tier no room, the
sub-agent's own blocks go to the cold tier alone. Engine thread.
"""

from __future__ import annotations

from ..kv.store import KVStore
from .sequence import Sequence


def hold(store: KVStore, sequence: Sequence) -> None:
    """Take references to the blocks of `sequence.shelter` that are cached; once."""
    if sequence.shelter and not sequence.sheltered:
        found = (store.pool.get_cached_block(name) for name in sequence.shelter)
        sequence.sheltered = [block for block in found if block is not None]
        store.pool.touch(sequence.sheltered)


def let_go(store: KVStore, sequence: Sequence) -> None:
    """Give them back, more recent than what the sub-agent has used: call it after that."""
    held, sequence.sheltered = sequence.sheltered, []
    names, sequence.shelter = list(sequence.shelter), ()
    if held:
        store.pool.free(held)
    if names:
        store.record_use(names)
