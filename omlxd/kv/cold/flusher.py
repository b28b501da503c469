"""When a hot block is written to the cold tier, and how blocks that are not written yet are remembered.

| mode            | a block is written                                                              |
|-----------------|---------------------------------------------------------------------------------|
| write-through   | when it is stored                                                               |
| write-back      | when it leaves RAM, when nobody has used it for `IDLE_S`, and at `close`        |

in either mode only once the write policy admits it, which is asked when a block is stored and when a
request uses it again. What a failed disk or a full queue refused is tried
again by `tick`, for as long as the block is hot. Nothing is ever waited for but at `close`.

A write policy admits all blocks, those asked for twice, or those of long prompts: flash wears by what is
written to it, and much of what is computed is never asked for again. What it holds back stays in RAM.

Recorded sessions of Claude Code, 19 requests and 667,476 prompt tokens, RAM lost between sessions
(tools/bench/wear.py; written: MB, and of the payload that had to be; recomputed: tokens more than `always`):

                     RAM for all           RAM for 20,000 tokens   no RAM          with checkpoints
                     written   recomputed  written   recomputed    recomputed      written   recomputed
    always           1,669 1.016        0  1,669 1.016        0             0      4,101 1.097        0
    second-use       1,251 0.762      192  1,251 0.762   41,856        75,392      2,740 0.733   49,344
    min-length:8000  1,669 1.016        0  1,669 1.016        0             0      4,101 1.097        0
    min-length:16000 1,433 0.872        0  1,433 0.872        0        12,288      3,616 0.967        0

(16 KiB of KV a token; with checkpoints: 24 KiB, and 64 MiB a checkpoint.) `always` is the default: it is
within 1.05 of the payload for dense models and 1.2 with checkpoints as it is, and a quarter less wear is
not worth 6 to 11% of all tokens computed again where RAM is short, or half of what models with
checkpoints restore from disk. `second-use` is for machines with RAM for all their sessions.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Sequence
from typing import cast

from ..block import Block
from ..block_pool import BlockPool
from ..files.block_file import BlockKey
from ..hashing import BlockHash
from .tier import ColdTier
from .unwritten import Entry, Unwritten
from .writer import StoreWriter, WritablePayload

SEEN_BITS = 1 << 20
"""Bits of each of the two filters of `SecondUse`: 256 KiB of RAM in all."""
SEEN_EACH = 100_000
"""Names after which a filter is full: one in a hundred is then taken for seen that was not."""


WritePolicy = Callable[[BlockHash, int], bool]
"""Decides whether a block is written now that a request of so many tokens stores or uses it."""


class SecondUse:
    """Admits a block at its second request: stored again, or matched by another request.

    What has been seen is kept in two Bloom filters, the older of which is emptied when the newer is
    full: from 100,000 to 200,000 names, in bounded memory. A name taken for seen that was not costs one
    write. They don't survive a restart: what was asked for once before it must be asked for twice after.
    """

    def __init__(self) -> None:
        self._newer, self._older = bytearray(SEEN_BITS // 8), bytearray(SEEN_BITS // 8)
        self._count = 0

    def __call__(self, block_hash: BlockHash, tokens: int) -> bool:
        # Names are SHA-256 digests, so any part of them is as good as a hash of its own.
        bits = [int.from_bytes(block_hash[at : at + 4], "little") % SEEN_BITS for at in (0, 4, 8, 12)]
        for seen in (self._newer, self._older):
            if all(seen[bit >> 3] & (1 << (bit & 7)) for bit in bits):
                return True
        if self._count == SEEN_EACH:
            self._newer, self._older = bytearray(SEEN_BITS // 8), self._newer
            self._count = 0
        for bit in bits:
            self._newer[bit >> 3] |= 1 << (bit & 7)
        self._count += 1
        return False


def write_policy(text: str) -> WritePolicy:
    """Make the policy `always`, `second-use` or `min-length:N`, N in tokens. Raises ValueError."""
    if text == "second-use":
        return SecondUse()
    match = re.fullmatch(r"always|min-length:(\d{1,9})", text)
    if match is not None:
        least = int(match[1] or 0)
        return lambda block_hash, tokens: tokens >= least
    raise ValueError(f"{text!r} is none of always, second-use, min-length:N")


Post = Callable[[Callable[[], None]], None]

IDLE_S = 30.0
"""Seconds without use after which write-back writes a block."""
TRIES = 3
"""Failed stores of one block, while others work, after which the block stays in RAM alone."""
RETRY_S = 30.0
"""Seconds between two tries of a removal that failed."""


class Flusher:
    """Decides what one store writes and when. `post(f)` runs `f` on the engine thread, which alone calls all
    this but `close`.

    writing         blocks that a writer has, by name: a hit until the file is in place, hot tier or none
    held_back       stores that the write policy did not admit
    left_unwritten  blocks that left RAM and that no writer took
    """

    def __init__(
        self,
        pool: BlockPool,
        writer: StoreWriter,
        post: Post,
        policy: WritePolicy = lambda block_hash, tokens: True,
        write_back: bool = False,
    ):
        self.writer = writer
        self.health = writer.health
        self.unwritten = Unwritten()
        self.held_back = 0
        self.left_unwritten = 0
        self._pool = pool
        self._post = post
        self._admits = policy
        self._write_back = write_back
        self.writing: dict[BlockHash, WritablePayload] = {}
        self._removing: set[BlockHash] = set()
        self._removed_at = 0.0
        self._removals = 0  # Calls of the writer's `remove` that are not over.
        self.on_written: Callable[[BlockHash], None] = lambda block_hash: None
        """Called on the engine thread with a block whose file is in place."""
        pool.on_leaving = self._leaving

    @property
    def has_work(self) -> bool:
        """Whether `tick` may have something to do. Any thread."""
        return bool(self.unwritten.due or self._removing)

    def is_removing(self, block_hash: BlockHash) -> bool:
        """Return whether the file of that name is worthless and about to be removed. Any thread."""
        return block_hash in self._removing

    def may_read(self, block_hash: BlockHash) -> bool:
        """Return whether the file of that name can be read, if there is one. Any thread."""
        return block_hash not in self._removing and self.health.may_read()

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """Mark a chain as used, root first."""
        for block_hash in reversed(hashes):
            self.unwritten.touch(block_hash)

    def offer(
        self,
        key: BlockKey,
        payload: WritablePayload,
        block: Block | None,
        tier: ColdTier | None = None,
        *,
        tokens: int,
    ) -> bool:
        """Write a payload that has no file, now or later or not, as policy and mode want.

        block   that holds it hot, or None; only what is hot can be written later
        tokens  length of the prompt that it belongs to
        True: a writer has it.
        """
        if key.block_hash in self.writing:
            return False
        admitted = self._admits(key.block_hash, tokens)
        self.held_back += not admitted
        if admitted and (block is None or not self._write_back) and self.submit(key, payload, block, tier):
            return True
        if block is not None:
            self.unwritten.add(key, tier, payload.nbytes, due=admitted)
        return False

    def used(self, block_hash: BlockHash, tokens: int) -> None:
        """Note that a request of `tokens` tokens uses a block; a block that was held back may be admitted
        now.
        """
        unwritten = self.unwritten
        if block_hash in unwritten.held and self._admits(block_hash, tokens):
            unwritten.admit(block_hash)
            if not self._write_back:
                self._write_later(block_hash)

    def submit(
        self,
        key: BlockKey,
        payload: WritablePayload,
        block: Block | None,
        tier: ColdTier | None = None,
        tries: int = 0,
    ) -> bool:
        """Queue a payload for the cold tier; `block`, if it is hot, stays so until it is in place."""
        if key.block_hash in self.writing or key.block_hash in self._removing:
            return False

        def done(in_place: bool) -> None:
            self._post(lambda: self._written(key, block, in_place, tier, tries))

        if not self.writer.submit(key, payload, done, tier):
            return False
        self.writing[key.block_hash] = payload
        self.unwritten.pop(key.block_hash)
        if block is not None:
            self._pool.touch([block])
        return True

    def _written(
        self, key: BlockKey, block: Block | None, in_place: bool, tier: ColdTier | None, tries: int
    ) -> None:
        self.writing.pop(key.block_hash, None)
        removing = key.block_hash in self._removing
        if in_place and not removing:
            self.on_written(key.block_hash)
        # Not always `block`: that may have been let go, and the same tokens been computed again.
        owner = None if removing else self._pool.get_cached_block(key.block_hash)
        if owner is not None and in_place:
            owner.on_disk = True
            self.unwritten.pop(key.block_hash)
        elif owner is not None and owner.payload is not None and not owner.on_disk:
            tries += self.health.stores_on  # Or else it was the disk's fault, and not this block's.
            if tries < TRIES:
                self.unwritten.add(key, tier, owner.payload.nbytes, due=True, tries=tries)
        if block is not None:
            self._pool.free([block])

    def remove(self, names: Collection[BlockHash]) -> None:
        """Remove the files of these names, queued ones too. No hit counts on one from now on.

        One that is stored again meanwhile is written once they are gone. What can't be removed is tried
        again by `tick` and `close`.
        """
        self._removing.update(names)
        for name in names:
            self.writing.pop(name, None)
            self.unwritten.pop(name)
        self._remove(names)

    def _remove(self, names: Collection[BlockHash]) -> None:
        self._removals += 1
        self._removed_at = time.monotonic()

        def done(gone: Collection[BlockHash]) -> None:
            self._post(lambda: self._removed(gone))

        self.writer.remove(names, done)

    def _removed(self, gone: Collection[BlockHash]) -> None:
        self._removals -= 1
        self._removing.difference_update(gone)

    def _leaving(self, block: Block) -> None:
        """Write a block that is evicted without a file: the last moment."""
        assert block.block_hash is not None
        noted = self.unwritten.pop(block.block_hash)
        if noted is None or not noted[1]:
            return
        entry, payload = noted[0], block.payload
        assert payload is not None
        if not self.submit(entry.key, cast(WritablePayload, payload), None, entry.tier, entry.tries):
            self.left_unwritten += 1

    def _write_later(self, block_hash: BlockHash) -> bool:
        """Write a block that is due. False: no writer takes it now."""
        if block_hash in self._removing:
            return True  # By a later tick.
        entry = self.unwritten.due[block_hash]
        block = self._pool.get_cached_block(block_hash)
        if block is None or block.payload is None or block.on_disk:
            self.unwritten.pop(block_hash)
            return True
        return self.submit(entry.key, cast(WritablePayload, block.payload), block, entry.tier, entry.tries)

    def tick(self) -> None:
        """Write what is due by now. Call it every few seconds on the engine thread."""
        if self._removing and not self._removals and time.monotonic() - self._removed_at >= RETRY_S:
            self._remove(list(self._removing))
        if self.health.refuses:
            return  # Asked all the same, each look would count as a store that was dropped.
        idle_s = IDLE_S if self._write_back else 0.0
        for entry in self.unwritten.root_first(idle_s):
            if not self._write_later(entry.key.block_hash):
                break

    def close(self, deadline_s: float) -> bool:
        """Write what is due, newest chain first and root to leaf, remove what must go, and stop the writers.

        The engine thread must have ended. False: the deadline came first, or the disk refused; what is
        not written is lost.
        """
        deadline = time.monotonic() + deadline_s
        complete = True
        if self._removing:  # First, since some may have been stored again.
            self.writer.remove(list(self._removing), self._removing.difference_update)
            self.writer.flush(max(0.0, deadline - time.monotonic()))
        for entry in self.unwritten.root_first():
            complete = self._write_at_end(entry, deadline)
            if not complete:
                break
        flushed = self.writer.flush(max(0.0, deadline - time.monotonic()))
        self.writer.close()
        return flushed and complete and self._removing.isdisjoint(self.unwritten.due)

    def _write_at_end(self, entry: Entry, deadline: float) -> bool:
        if not self.writer.wait_for_room(entry.nbytes, max(0.0, deadline - time.monotonic())):
            return False
        return self._write_later(entry.key.block_hash)
