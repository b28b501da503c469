"""The KV store of one engine: pool, hot tier and cold tier as one thing to match, put and read.

Threads. Everything here but `load_into` runs on the engine thread, which alone touches the pool;
writer and reader threads come back to it through `post`. Payloads are immutable once made.

A block that has a name is always readable somewhere: until its file is in place its writer holds a
reference, so the hot copy can't be evicted. Where the hot tier has no room the block has no name until
its file is in place, and one that leaves RAM without a file loses its name; the writer's payload serves
a match meanwhile, which gives it a name and a place in RAM until the request ends. When a block is
written: flusher.py.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .block import Block
from .block_pool import BlockPool, BlockTable
from .cold.flusher import Flusher, Post
from .cold.tier import ColdTier
from .cold.writer import Lease, WritablePayload
from .files.block_file import BlockFileError, BlockKey
from .hashing import BlockHash

log = logging.getLogger(__name__)

UNREADABLE_LIMIT = 10_000
"""Names of bad files that are remembered, so that they are written anew when they are computed again."""

CHAIN_SHARE = 15 / 16
"""Share of the cold tier's limit that one chain may take; the rest is for leases (a 64th each) and records.
"""


@dataclass(slots=True)
class StoreStats:
    """Counts since the start. Queries and hits are in tokens, as vLLM counts its prefix cache.

    new_…_bytes  payload of full blocks that were computed, and of one checkpoint a request: what has to
                 be written at least, for write amplification
    """

    queries: int = 0
    hits_hot: int = 0
    hits_cold: int = 0
    corrupt: int = 0
    lost: int = 0
    restored: int = 0
    restored_bytes: int = 0
    puts: int = 0
    not_kept: int = 0
    new_token_bytes: int = 0
    new_state_bytes: int = 0


class KVStore:
    """One engine's KV. `hot_budget`: bytes that the hot tier may hold now. `cold`, `flusher`, `lease`: all or
    none.

    `cold_limit`: bytes that the cold tier may take, over all stores; 0: no limit is known.
    `post(f)` runs `f` on the engine thread, soon; callable from any thread.
    """

    def __init__(
        self,
        *,
        block_size: int,
        pool: BlockPool,
        hot_budget: Callable[[], int],
        post: Post,
        cold: ColdTier | None = None,
        flusher: Flusher | None = None,
        lease: Lease | None = None,
        cold_limit: int = 0,
    ):
        self.block_size = block_size
        self.pool = pool
        self.cold = cold
        self.flusher = flusher
        self._lease = lease
        self._cold_limit = cold_limit
        self._said_too_long = False
        self._borrows = False  # Matches took payloads from the write queue, which may be over the budget.
        self.hot_budget = hot_budget
        self._post = post
        self._reader_lock = threading.Lock()
        self._unreadable: set[BlockHash] = set()  # Files that are there, and are worth nothing.
        self.stats = StoreStats()
        if flusher is not None:
            flusher.on_written = self._trust

    def new_table(self) -> BlockTable:
        return BlockTable(self.pool)

    # ----------------------------------------------------------------- matching

    def extend_match(self, table: BlockTable, hashes: Sequence[BlockHash], limit: int) -> int:
        """Extend `table` by what follows it in either tier; returns blocks added.

        hashes  all of the chain; those past `table` are tried until the first miss
        limit   blocks that the table may hold: a hit must leave a token to compute
        """
        start = len(table.blocks)
        for index in range(start, min(limit, len(hashes))):
            block = self.pool.get_cached_block(hashes[index])
            if block is not None and (block.payload is not None or self.may_read(hashes[index])):
                table.extend_cached([block])
                if self.flusher is not None:
                    self.flusher.used(hashes[index], len(hashes) * self.block_size)
                continue
            if block is None and (queued := self.queued(hashes[index])) is not None:
                table.append()
                table.cache(index, hashes[index], queued)
                self._borrows = True
                continue
            if block is not None or not self._has_file(hashes[index]):
                break  # A record is no file: reads of a failing disk wait, whoever asks.
            table.append()
            table.cache(index, hashes[index], None).on_disk = True
        added = len(table.blocks) - start
        if added:
            # Now, and not only at the request's end: its own stores could evict what it stands on.
            self.record_use(hashes[: start + added])
        return added

    def where(self, block_hash: BlockHash) -> Literal["hot", "cold", ""]:
        """Return the tier that has a block; "" for neither. Any thread, changes nothing."""
        block = self.pool.get_cached_block(block_hash)
        if (block is not None and block.payload is not None) or self.queued(block_hash) is not None:
            return "hot"
        return "cold" if self._has_file(block_hash) else ""

    def queued(self, block_hash: BlockHash) -> WritablePayload | None:
        """Return the payload of that name that a writer has and whose file is not in place. Any thread."""
        return None if self.flusher is None else self.flusher.writing.get(block_hash)

    def count_match(self, prompt_tokens: int, hot: int, cold: int) -> None:
        """Account for a prompt and what was restored of it, in tokens."""
        self.stats.queries += prompt_tokens
        self.stats.hits_hot += hot
        self.stats.hits_cold += cold

    # ----------------------------------------------------------------- storing

    def fits_disk(self, blocks: int, more: int = 0) -> bool:
        """Return whether a chain of `blocks` blocks and `more` bytes fit into the cold tier together.

        What doesn't is not written: the chain's own blocks would be evicted for it, and written again by the
        next request.
        """
        if not self._cold_limit or self.cold is None or self._lease is None:
            return True
        most = int(min(self._cold_limit, self._lease.capacity or self._cold_limit) * CHAIN_SHARE)
        fits = blocks * self.cold.bytes_per_block + more <= most
        if not fits and not self._said_too_long:
            self._said_too_long = True
            log.warning(
                "the SSD cache's limit, or disk, is smaller than the KV of one prompt: it keeps its first %d "
                "tokens; raise --paged-ssd-cache-max-size, or make room, to keep all",
                most // self.cold.bytes_per_block * self.block_size,
            )
        return fits

    def wants(self, block_hash: BlockHash, index: int) -> bool:
        """Return whether `put` would keep this block's payload; ask before copying it."""
        block = self.pool.get_cached_block(block_hash)
        if block is not None and block.payload is not None:
            return False
        if self.hot_budget() > 0:
            return True
        if self.flusher is None or block is not None or block_hash in self.flusher.writing:
            return False
        if self.flusher.is_removing(block_hash) or not self.fits_disk(index + 1):
            return False
        return self.distrusts(block_hash) or not self._has_file(block_hash)

    def put(
        self, table: BlockTable, index: int, key: BlockKey, payload: WritablePayload, tokens: int = 0
    ) -> bool:
        """Keep the full block at `index` of `table`: hot where there is room, cold behind it.

        tokens  length of the prompt that it belongs to, for the write policy
        True: a file of it was there before, and stays as it is.
        """
        self.stats.puts += 1
        owner = self.pool.get_cached_block(key.block_hash)
        # A block may have been computed again because one before it was lost: its own file is as good as
        # ever. And one that was on disk may have been evicted since: or else it would never be written.
        on_disk = self._has_file(key.block_hash) and not self.distrusts(key.block_hash)
        if owner is not None and owner.on_disk and not on_disk:
            self.lose(owner, key)
            owner = self.pool.get_cached_block(key.block_hash)
        hot = owner is not None and owner.payload is not None
        room = hot or self.make_room(payload.nbytes)
        block = table.cache(index, key.block_hash, payload) if room else None
        writing = False
        if on_disk:
            if block is not None:
                block.on_disk = True
            if self.flusher is not None:  # Noted while reads were paused.
                self.flusher.unwritten.pop(key.block_hash)
        elif self.flusher is not None and self.fits_disk(index + 1):
            writing = self.flusher.offer(key, payload, block, tokens=tokens)
        if not (room or writing or on_disk or self.queued(key.block_hash) is not None):
            self.stats.not_kept += 1
        return on_disk

    def withdraw(self, names: Mapping[BlockHash, bool]) -> None:
        """Forget what was just stored under `names` (blocks, checkpoints): its payloads are worthless.

        names  and whether a file was there before: that one stays
        """
        for name, had_file in names.items():
            block = self.pool.get_cached_block(name)
            if block is not None and had_file and block.on_disk:
                self.pool.drop_payload(block)
            elif block is not None:
                self.pool.forget(block)
        if self.flusher is not None:
            self.flusher.remove([name for name, had_file in names.items() if not had_file])

    def may_read(self, block_hash: BlockHash) -> bool:
        """Return whether the file of that name can be read, if there is one. Any thread."""
        return self.flusher is None or self.flusher.may_read(block_hash)

    def _has_file(self, block_hash: BlockHash) -> bool:
        return self.cold is not None and self.may_read(block_hash) and self.cold.has(block_hash)

    def make_room(self, nbytes: int) -> bool:
        budget = self.hot_budget()
        if nbytes > budget:
            return False  # Evicting everything would not help.
        self.pool.evict(self.pool.hot_bytes + nbytes - budget)
        return self.pool.hot_bytes + nbytes <= budget

    def trim_hot(self) -> None:
        """Evict down to the budget, which may have shrunk."""
        self.pool.evict(self.pool.hot_bytes - self.hot_budget())

    # ----------------------------------------------------------------- reading the cold tier

    def load_into(self, key: BlockKey, buffers: Sequence[memoryview], tier: ColdTier | None = None) -> bool:
        """Read a block's file into `buffers` and check it. Any thread. False: a miss, nothing usable.

        A file on its way out is not read, and none while reads pause (kv/cold/health.py).

        tier  where from, if not from the store's own cold tier (another format in the same folder)
        """
        tier = tier or self.cold
        assert tier is not None
        if not self.may_read(key.block_hash):
            self._count("lost")
            return False
        try:
            tier.load(key, buffers)
        except BlockFileError as error:
            path = tier.path_of(key.block_hash)
            log.warning("cold tier: %s: %s; removed", path, error)
            self._count("corrupt")
            self._distrust(key.block_hash)  # It may not have been possible to remove it.
            if self._lease is not None:
                self._lease.dropped(path)
            return False
        except FileNotFoundError:
            self._count("lost")
            return False
        except OSError as error:
            self._count("lost")
            self._distrust(key.block_hash)
            if self.flusher is not None:
                self.flusher.health.read_failed(error)
            return False
        if self.flusher is not None:
            self.flusher.health.was_read()
        self._trust(key.block_hash)
        with self._reader_lock:
            self.stats.restored += 1
            self.stats.restored_bytes += sum(map(len, buffers))
        return True

    def _count(self, counter: Literal["corrupt", "lost"]) -> None:
        with self._reader_lock:
            setattr(self.stats, counter, getattr(self.stats, counter) + 1)

    def _distrust(self, block_hash: BlockHash) -> None:
        with self._reader_lock:
            if len(self._unreadable) >= UNREADABLE_LIMIT:
                self._unreadable.clear()
            self._unreadable.add(block_hash)

    def _trust(self, block_hash: BlockHash) -> None:
        """Trust a file that was written anew, or read without an error."""
        with self._reader_lock:
            self._unreadable.discard(block_hash)

    def distrusts(self, block_hash: BlockHash) -> bool:
        """Return whether a file of that name has proved worthless."""
        return block_hash in self._unreadable

    def lose(self, block: Block, key: BlockKey) -> None:
        """Forget the unusable file of `key`: a hot copy is written again, else the name goes."""
        if block.block_hash == key.block_hash:
            block.on_disk = False
            if block.payload is None:
                self.pool.forget(block)
            elif self.flusher is not None and key.block_hash not in self.flusher.writing:
                self.flusher.unwritten.add(key, None, block.payload.nbytes, due=True)

    def promote(self, block: Block, block_hash: BlockHash, payload: WritablePayload) -> None:
        """Keep a payload read from the cold tier hot, if there is room and nobody else has it."""
        if block.block_hash != block_hash or block.payload is not None:
            return
        self.pool.touch([block])  # Or making room could evict the very block.
        if self.make_room(payload.nbytes):
            self.pool.set_payload(block, payload)
        self.pool.free([block])

    # ----------------------------------------------------------------- recency

    def record_use(self, hashes: Sequence[BlockHash], clean: Sequence[BlockKey] = ()) -> None:
        """Make a chain recent in both tiers, leaf to root, once what is being written of it is in place.

        Call it for each match, and once at a request's end, however it ends. Until then what a request
        stores stands root first, and a block whose reference is given back stands at the back; nothing
        else changes the order of use, in RAM or on disk. `clean`: its hot blocks that have a file; one whose
        file is gone is written again. Any thread; with a writer it returns at once.
        """
        if not hashes:
            return
        if self.flusher is None:
            self._record_use(hashes, ())
        else:
            self.flusher.writer.after_queued(lambda: self._record_use(hashes, clean))

    def _record_use(self, hashes: Sequence[BlockHash], clean: Sequence[BlockKey]) -> None:
        gone: list[BlockKey] = []
        if self.cold is not None:
            gone = [k for k in clean if self.may_read(k.block_hash) and not self.cold.has(k.block_hash)]
            leaf_first = list(reversed(hashes))
            self.cold.touch(leaf_first)
            if self._lease is not None:
                self._lease.touched([self.cold.path_of(h) for h in leaf_first])
        # After the writer's releases, which were posted before: those queued root first.
        self._post(lambda: self._requeue(hashes, gone))

    def _requeue(self, hashes: Sequence[BlockHash], gone: Sequence[BlockKey]) -> None:
        for key in gone:
            block = self.pool.get_cached_block(key.block_hash)
            if block is not None and block.on_disk and block.payload is not None:
                self.lose(block, key)
        blocks = [b for h in hashes if (b := self.pool.get_cached_block(h)) is not None]
        self.pool.touch(blocks)
        self.pool.free(blocks)
        if self.flusher is not None:
            self.flusher.touch(hashes)
        if self._borrows:
            self.trim_hot()
            self._borrows = self.pool.hot_bytes > self.hot_budget()

    def close(self, deadline_s: float) -> bool:
        """Write what is still to be written. The engine thread must have ended. See `Flusher.close`."""
        return self.flusher is None or self.flusher.close(deadline_s)
