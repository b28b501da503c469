"""Small block formats, numpy payloads and a whole store on a temporary folder, for the tests of omlxd/kv.

Every payload's bytes follow from its block's hash, so any test, and any process, can say what a file
of a given name must hold without having seen it written: the oracle is outside the store.
"""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from hashlib import shake_128
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omlxd.kv.block import Block, FreeQueue
from omlxd.kv.block_pool import BlockPool, BlockTable
from omlxd.kv.checkpoint import CheckpointFiles, Checkpoints, checkpoint_name
from omlxd.kv.cold.flusher import Flusher, write_policy
from omlxd.kv.cold.health import ColdHealth
from omlxd.kv.cold.tier import ColdTier
from omlxd.kv.cold.writer import StoreWriter, WritablePayload
from omlxd.kv.files.block_file import BlockFormat, BlockKey
from omlxd.kv.files.fs import FileSystem, TempLeft
from omlxd.kv.files.paths import LOCK_NAME, TEMP_SUFFIX, WRITES_NAME
from omlxd.kv.hashing import hash_blocks, namespace_of
from omlxd.kv.layout import Group, KVLayout
from omlxd.kv.ledger.lease import LedgerLease
from omlxd.kv.ledger.ledger import Ledger
from omlxd.kv.ledger.write_budget import WriteBudget
from omlxd.kv.store import CHAIN_SHARE, KVStore

BLOCK = 4
"""Tokens a block."""

LAYOUT = KVLayout((Group(("k0", "v0", "k1", "v1"), 2, 8, "F16"), Group(("latent",), 1, 6, "F32")))
NAMESPACE = namespace_of({"model": "tiny"})
OTHER_NAMESPACE = namespace_of({"model": "other"})


def block_format(namespace: bytes = NAMESPACE, layout: KVLayout = LAYOUT) -> BlockFormat:
    return BlockFormat(namespace, layout, BLOCK)


FILE_DISK_BYTES = ColdTier(Path("unused"), block_format()).bytes_per_block
"""What one block takes on disk."""


class ArrayPayload:
    """A block of numpy arrays, one a group, in the layout's shapes."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self.arrays = list(arrays)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def buffers(self) -> list[memoryview]:
        return [memoryview(array).cast("B") for array in self.arrays]

    def tobytes(self) -> bytes:
        return b"".join(array.tobytes() for array in self.arrays)


def empty_payload(fill: int = 0xEE) -> ArrayPayload:
    return ArrayPayload([np.full(g.nbytes(BLOCK), fill, np.uint8) for g in LAYOUT.groups])


def bytes_of(block_hash: bytes, nbytes: int = LAYOUT.nbytes(BLOCK)) -> bytes:
    """What the block or checkpoint of that name holds, now and always."""
    return shake_128(block_hash).digest(nbytes)


def payload_of(block_hash: bytes) -> ArrayPayload:
    payload = empty_payload()
    data, at = bytes_of(block_hash), 0
    for array in payload.arrays:
        array[:] = np.frombuffer(data, np.uint8, array.nbytes, at)
        at += array.nbytes
    return payload


def state_layout(position: int) -> KVLayout:
    """A checkpoint's: of a window that fills up."""
    return KVLayout((Group(("state",), 1, 2 * min(position, 4 * BLOCK), "F16"),))


def state_of(block_hash: bytes, position: int, fill: int | None = None) -> ArrayPayload:
    """The checkpoint after that block; `fill`: a byte that stands for wrong ones."""
    nbytes = state_layout(position).nbytes(1)
    data = bytes_of(checkpoint_name(block_hash), nbytes) if fill is None else bytes([fill]) * nbytes
    return ArrayPayload([np.frombuffer(data, np.uint8).copy()])


def chain(tokens: Iterable[int], root: bytes = NAMESPACE) -> list[BlockKey]:
    """The keys of the full blocks of `tokens`."""
    ids = list(tokens)
    hashes = hash_blocks(root, ids, BLOCK)
    parents = [root, *hashes]
    return [
        BlockKey(h, parent, ids[i * BLOCK : (i + 1) * BLOCK])
        for i, (h, parent) in enumerate(zip(hashes, parents, strict=False))
    ]


def lone_key(number: int) -> BlockKey:
    """A one-block chain of its own."""
    return chain(range(number * BLOCK, (number + 1) * BLOCK))[0]


# --------------------------------------------------------------------- the folder, seen from outside


def ram_folder() -> str | None:
    """Where files cost no disk, for tests of thousands of opens; None where there is no room."""
    there = os.access("/dev/shm", os.W_OK | os.X_OK)
    return "/dev/shm" if there and shutil.disk_usage("/dev/shm").free > 50 << 20 else None


def files_in(root: Path) -> list[Path]:
    """Every ordinary file but the lock and the day's writes, temporary files among them, in order of name."""
    found = sorted(Path(folder) / name for folder, _, names in os.walk(root) for name in names)
    found = [path for path in found if not path.name.startswith((LOCK_NAME, WRITES_NAME))]
    return [path for path in found if path.is_file() and not path.is_symlink()]


def bytes_on_disk(root: Path) -> int:
    """Blocks that the file system has allocated to those files."""
    return sum(path.stat().st_blocks * 512 for path in files_in(root))


def temps_in(root: Path) -> list[Path]:
    return [path for path in files_in(root) if path.name.endswith(TEMP_SUFFIX)]


# --------------------------------------------------------------------- the pool, seen from inside


def queued(queue: FreeQueue) -> list[Block]:
    """Front to back."""
    blocks: list[Block] = []
    block = queue._sentinel.next_free
    while block is not None and block is not queue._sentinel:
        blocks.append(block)
        block = block.next_free
    return blocks


def check_pool(pool: BlockPool, references: dict[int, int] | None = None) -> None:
    """Assert every invariant, in O(blocks). `references`: block id → references held outside."""
    cached, spare = queued(pool._cached), queued(pool._spare)
    assert len(cached) == len(pool._cached) and len(spare) == len(pool._spare)
    assert all(b.block_hash is not None for b in cached)
    assert all(b.block_hash is None for b in spare)
    free = {b.block_id for b in cached + spare}
    assert len(free) == len(cached) + len(spare)
    assert free == {b.block_id for b in pool._blocks if b.ref_cnt == 0}
    assert all(b.block_hash == h for h, b in pool._by_hash.items())
    assert len(pool._by_hash) == sum(b.block_hash is not None for b in pool._blocks)
    assert pool.hot_bytes == sum(b.payload.nbytes for b in pool._blocks if b.payload is not None)
    assert all(b.block_hash is not None for b in pool._blocks if b.payload is not None)
    if references is not None:
        taken = {b.block_id: b.ref_cnt for b in pool._blocks if b.ref_cnt}
        assert taken == {i: n for i, n in references.items() if n}


# --------------------------------------------------------------------- a whole store


def retry_now(health: ColdHealth) -> None:
    """Let every pause after a failure be over."""
    now = health._clock()
    health._stores_until = None if health._stores_until is None else now
    health._reads_until = None if health._reads_until is None else now


class ManualWriter(StoreWriter):
    """A writer with no threads: `step` does the oldest job, on the caller's thread.

    left  temporary files that stayed
    """

    left = 0

    def __init__(self, cold: ColdTier, lease: LedgerLease, *, max_queue_bytes: int = 1 << 20):
        super().__init__(cold, lease, max_queue_bytes=max_queue_bytes, threads=0)

    submits = 0

    def submit(self, *args: Any, **named: Any) -> bool:
        self.submits += 1
        return super().submit(*args, **named)

    def _write(self, job: Any, nbytes: int) -> OSError | None:
        error = super()._write(job, nbytes)
        self.left += isinstance(error, TempLeft)
        return error

    def step(self) -> bool:
        """False: there was nothing to do."""
        if self._queue.empty():
            return False
        job = self._queue.get_nowait()
        if job is not None:
            self._work(job)
        return True

    def flush(self, deadline_s: float = 0) -> bool:
        while self.step():
            pass
        return super().flush(0)

    def wait_for_room(self, nbytes: int, timeout_s: float) -> bool:
        while not self.has_room(nbytes) and self.step():
            pass
        return super().wait_for_room(nbytes, 0)

    def resume(self) -> None:
        retry_now(self.health)


class TrackedFlusher(Flusher):
    """Knows which blocks its writers hold a reference to, and what waits to be written."""

    held: dict[bytes, Block]
    waiting: set[bytes]

    def submit(
        self,
        key: BlockKey,
        payload: WritablePayload,
        block: Block | None,
        tier: ColdTier | None = None,
        tries: int = 0,
    ) -> bool:
        taken = super().submit(key, payload, block, tier, tries)
        if taken and block is not None:
            self.held[key.block_hash] = block
        if taken:
            self.waiting.add(key.block_hash)
        return taken

    def remove(self, names: Collection[bytes]) -> None:
        self.waiting.difference_update(names)
        super().remove(names)

    def _written(
        self, key: BlockKey, block: Block | None, in_place: bool, tier: ColdTier | None, tries: int
    ) -> None:
        self.held.pop(key.block_hash, None)
        self.waiting.discard(key.block_hash)
        super()._written(key, block, in_place, tier, tries)


class Rig:
    """Pool, hot tier, ledger, cold tier and a manual writer over one folder.

    `hot`: the hot budget, in blocks. `cap`: the ledger's, in files. Both may be changed at any time
    (the cap by reopening). `daily`: files that may be written on one day, 0 for any number. `deep`: blocks
    of a chain that may be written, 0 for any number.
    """

    def __init__(
        self,
        root: Path,
        *,
        hot: float = 100,
        cap: int = 100,
        fs: FileSystem | None = None,
        namespace: bytes = NAMESPACE,
        max_records: int = 1 << 20,
        max_queue_bytes: int = 1 << 20,
        admission: str = "always",
        write_back: bool = False,
        daily: int = 0,
        deep: int = 0,
        today: Callable[[], str] = lambda: "2026-01-31",
        layout: KVLayout = LAYOUT,
    ):
        self.root = root
        self.hot = hot
        self.cold = ColdTier(root, block_format(namespace, layout), fs)
        self.file_bytes = self.cold.bytes_per_block
        writes = WriteBudget(root, daily * self.file_bytes, fs if daily else None, today)
        self.ledger = Ledger(root, cap * self.file_bytes, writes)
        self.ledger.open()
        self.lease = LedgerLease(self.ledger)
        self.writer = ManualWriter(self.cold, self.lease, max_queue_bytes=max_queue_bytes)
        self.pool = BlockPool(0, max_records)
        self.posted: deque[Callable[[], None]] = deque()
        self.flusher = TrackedFlusher(
            self.pool, self.writer, self.posted.append, write_policy(admission), write_back
        )
        self.flusher.held, self.flusher.waiting = {}, set()
        self.store = KVStore(
            block_size=BLOCK,
            pool=self.pool,
            hot_budget=lambda: int(self.hot * layout.nbytes(BLOCK)),
            post=self.posted.append,
            cold=self.cold,
            flusher=self.flusher,
            lease=self.lease,
            cold_limit=math.ceil(deep * self.file_bytes / CHAIN_SHARE),
        )
        self.states = Checkpoints(self.store, CheckpointFiles(root, namespace, state_layout, fs))
        self.in_ram_alone: set[bytes] = set()
        """What is never to be written: checkpoints that nobody has asked for, what no chain on disk has."""

    def use_writer(self, writer: StoreWriter) -> None:
        """Another writer, with threads."""
        self.flusher.writer, self.flusher.health = writer, writer.health

    def tick(self) -> None:
        """The clock's turn: write what is due, and settle."""
        self.flusher.tick()
        self.settle()

    def pump(self) -> None:
        """The engine thread's turn: run what was posted."""
        while self.posted:
            self.posted.popleft()()

    def settle(self) -> None:
        """Write all that is queued, and let the engine thread know."""
        self.writer.flush()
        self.pump()

    def compute(self, keys: Sequence[BlockKey], *, matched: int = 0) -> BlockTable:
        """A request that computes and puts the blocks of `keys` after its first `matched`."""
        table = self.store.new_table()
        assert self.store.extend_match(table, [k.block_hash for k in keys], matched) == matched
        for index in range(matched, len(keys)):
            table.append()
            self.store.put(table, index, keys[index], payload_of(keys[index].block_hash))
        return table

    def serve(self, keys: Sequence[BlockKey]) -> None:
        """A request from start to end: match, restore, compute the rest, finish; then settle."""
        table = self.store.new_table()
        self.store.extend_match(table, [k.block_hash for k in keys], len(keys))
        for index, block in enumerate(list(table.blocks)):
            data = self.read(keys[index], block)
            if data is None:
                table.truncate(index)
                break
            assert data == bytes_of(keys[index].block_hash), "wrong bytes served"
        for index in range(len(table.blocks), len(keys)):
            table.append()
            if self.store.wants(keys[index].block_hash, index):
                self.store.put(table, index, keys[index], payload_of(keys[index].block_hash))
        table.free()
        self.store.record_use([k.block_hash for k in keys])
        self.settle()

    def read(self, key: BlockKey, block: Block) -> bytes | None:
        """Bytes of a matched block, from the tier that has it; None and the loss told if none has."""
        if block.payload is not None:
            return block.payload.tobytes()
        payload = empty_payload()
        if self.store.load_into(key, payload.buffers()):
            self.store.promote(block, key.block_hash, payload)
            return payload.tobytes()
        self.store.lose(block, key)
        return None

    def restore_one(self, key: BlockKey) -> bytes | None:
        """A block's bytes from its file, wherever it stands in its chain."""
        payload = empty_payload()
        return payload.tobytes() if self.store.load_into(key, payload.buffers()) else None

    def restore(self, keys: Sequence[BlockKey]) -> list[bytes]:
        """What a request for `keys` gets back, each checked against the oracle. Frees its table."""
        table = self.store.new_table()
        self.store.extend_match(table, [k.block_hash for k in keys], len(keys))
        got: list[bytes] = []
        for key, block in zip(keys, table.blocks, strict=False):
            data = self.read(key, block)
            if data is None:
                break
            assert data == bytes_of(key.block_hash), "wrong bytes served"
            got.append(data)
        table.truncate(len(got))
        table.free()
        return got

    def check(self, tables: Iterable[BlockTable] = ()) -> None:
        """The cap, the account and the pool's invariants. `tables`: those alive, which hold references."""
        references = Counter(block.block_id for table in tables for block in table.blocks)
        references.update(block.block_id for block in self.flusher.held.values())
        check_pool(self.pool, references)
        stats = self.ledger.stats()
        assert bytes_on_disk(self.root) <= stats.cold_cache_bytes
        assert stats.bytes_used + stats.reserved <= stats.cold_cache_bytes
        unwritten = self.flusher.unwritten
        assert not set(unwritten.due) & set(unwritten.held)
        assert unwritten.due_bytes == sum(entry.nbytes for entry in unwritten.due.values())
        for block_hash in (*unwritten.due, *unwritten.held):
            block = self.pool.get_cached_block(block_hash)
            assert block is not None and block.payload is not None and not block.on_disk
            assert block_hash not in self.flusher.writing
        ends = self.writer.stats
        ended = ends.written + ends.dropped_full + ends.refused + ends.failed
        waiting = len(self.writer._unsettled)
        assert ended + waiting == self.writer.submits, "a store ends in one way"
        for name in self.flusher.waiting:
            assert self.store.where(name) == "hot", "it waits to be written, and is no hit"
        for name, block in self.pool._by_hash.items():
            assert block.payload is not None or block.on_disk, "named, and readable nowhere"
            noted = name in unwritten.due or name in unwritten.held
            on_its_way = name in self.flusher.writing or self.flusher.is_removing(name)
            written = block.on_disk or name in self.in_ram_alone
            assert written or noted or on_its_way or ends.failed, "dirty, and nobody will write it"

    def drop(self) -> None:
        """What a crash leaves: the lock given up, everything in RAM forgotten, queued stores lost."""
        self.ledger._has_stock = False  # A crash saves no sums.
        self.ledger.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.drop()


KEYS = chain(range(24))
"""Six blocks, for tests that need no particular ones."""
HASHES = [key.block_hash for key in KEYS]


def on_disk(rig: Rig, keys: Sequence[BlockKey] = KEYS) -> list[bool]:
    """Which of `keys` have a file."""
    return [rig.cold.has(key.block_hash) for key in keys]


def all_bytes(keys: Sequence[BlockKey] = KEYS) -> list[bytes]:
    """What the payloads of `keys` hold."""
    return [bytes_of(key.block_hash) for key in keys]
