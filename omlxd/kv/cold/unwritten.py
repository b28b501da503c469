"""Hot blocks that have no file: what each would need to be written, in order of use.

| list   | a block is in it because                                         | leaves it                |
|--------|------------------------------------------------------------------|--------------------------|
| `due`  | it is to be written: later (write-back), or again (it failed)    | handed to a writer       |
| `held` | the write policy has not admitted it                             | admitted: goes to `due`  |

and from both when it leaves RAM. So they are bounded by the hot tier. A block that is being written is
in neither: its writer holds it. The order is that of use, leaf before root, as in the pool's queue;
to be written, blocks come root first, because a chain is worth nothing without its root.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..files.block_file import BlockKey
from ..hashing import BlockHash
from .tier import ColdTier


@dataclass(slots=True)
class Entry:
    """A block's next write. `tier`: where to, None for the store's own. `tries`: how often it failed alone.
    `used_at`: seconds.
    """

    key: BlockKey
    tier: ColdTier | None
    nbytes: int
    tries: int = 0
    used_at: float = 0.0


class Unwritten:
    """Hot blocks without a file. `clock`: seconds, monotonic. Engine thread; the figures may be read from
    any.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.due: OrderedDict[BlockHash, Entry] = OrderedDict()
        self.held: OrderedDict[BlockHash, Entry] = OrderedDict()
        self.due_bytes = 0

    def add(self, key: BlockKey, tier: ColdTier | None, nbytes: int, *, due: bool, tries: int = 0) -> None:
        """Note a block; one that is noted already becomes the most recent, and due if it is now."""
        self.pop(key.block_hash)
        compact = BlockKey(key.block_hash, key.parent, array("I", key.tokens), key.extra_keys)
        entry = Entry(compact, tier, nbytes, tries, self._clock())
        (self.due if due else self.held)[key.block_hash] = entry
        if due:
            self.due_bytes += nbytes

    def pop(self, block_hash: BlockHash) -> tuple[Entry, bool] | None:
        """Forget a block; returns its entry, and whether it was due."""
        entry = self.due.pop(block_hash, None)
        if entry is not None:
            self.due_bytes -= entry.nbytes
            return entry, True
        entry = self.held.pop(block_hash, None)
        return (entry, False) if entry is not None else None

    def admit(self, block_hash: BlockHash) -> None:
        """Make a block due that was held back."""
        entry = self.held.pop(block_hash)
        self.due[block_hash] = entry
        self.due_bytes += entry.nbytes

    def touch(self, block_hash: BlockHash) -> None:
        """Mark a block as used. Pass a chain leaf first."""
        for entries in (self.due, self.held):
            entry = entries.get(block_hash)
            if entry is not None:
                entry.used_at = self._clock()
                entries.move_to_end(block_hash)

    def root_first(self, idle_s: float = 0.0) -> Iterator[Entry]:
        """Yield blocks that are due and unused for `idle_s`: the newest chain first, each from root to leaf.

        Take entries out as they come, by `pop`; the rest stays.
        """
        latest = self._clock() - idle_s
        chosen: dict[BlockHash, Entry] = {}
        for block_hash, entry in self.due.items():
            if idle_s and entry.used_at > latest:
                break
            chosen[block_hash] = entry
        for block_hash in reversed(list(chosen)):
            chain: list[Entry] = []
            while (entry := chosen.pop(block_hash, None)) is not None:
                chain.append(entry)
                block_hash = entry.key.parent
            yield from reversed(chain)
