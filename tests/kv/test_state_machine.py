"""DESIGN.md's invariants after every step of whatever Hypothesis can think of.

The whole store over a real folder, with crashes, restarts, a disk that fails, files that are damaged
and other engines that take the space. The oracle is outside: a block's bytes follow from its hash
(kv_fakes.bytes_of). The pool and its tables alone: test_pool_machine.py.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from faulty_fs import Fault, FaultyFileSystem
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kv_fakes import (
    BLOCK,
    FILE_DISK_BYTES,
    NAMESPACE,
    OTHER_NAMESPACE,
    Rig,
    block_format,
    bytes_of,
    bytes_on_disk,
    chain,
    empty_payload,
    files_in,
    payload_of,
    queued,
    ram_folder,
    state_layout,
    state_of,
    temps_in,
)
from kv_machines import LONG, QUICK

from omlxd.kv.block_pool import BlockTable
from omlxd.kv.checkpoint import CheckpointFiles, checkpoint_name
from omlxd.kv.cold import writer
from omlxd.kv.cold.flusher import IDLE_S
from omlxd.kv.cold.tier import ColdTier
from omlxd.kv.files.block_file import BlockKey
from omlxd.kv.files.paths import LOCK_NAME, namespace_dir

FOLDER = "5" * 32
"""A namespace of nobody's."""

NAN = 0xEE
SPOILED = empty_payload(NAN).tobytes()
"""What stands for KV of NaN: no block of the oracle holds it."""

TOKENS = st.integers(0, 1)
"""Two token ids, so that prefixes meet all the time."""

CHECKPOINT = st.tuples(
    st.integers(1, 3),
    st.lists(st.booleans(), min_size=1, max_size=3),
    st.sampled_from(["", "", "written", "cleared", "lost", "demoted"]),
    st.booleans(),
)
"""After so many blocks; which puts are to be written; what happens after each; whether it is read again."""


@dataclass
class Request:
    table: BlockTable
    keys: list[BlockKey]
    tokens: list[int]


class StoreMachine(RuleBasedStateMachine):
    """The store over a folder, and everything that can happen to either."""

    @initialize(
        hot=st.sampled_from([0, 1, 3, 8]),
        cap=st.integers(0, 10),
        records=st.integers(1, 30),
        back=st.booleans(),
        admission=st.sampled_from(["always", "always", "second-use", f"min-length:{2 * BLOCK}"]),
        daily=st.sampled_from([0, 0, 0, 6]),
        deep=st.sampled_from([0, 0, 1, 3]),
    )
    def start(
        self, hot: int, cap: int, records: int, back: bool, admission: str, daily: int, deep: int
    ) -> None:
        self.deep, self.too_deep = deep, set[bytes]()
        self.back, self.admission, self.daily = back, admission, daily
        self.day, self.now = 1, 0.0
        self.root = Path(tempfile.mkdtemp(prefix="omlxd-kv-", dir=ram_folder()))
        self.over: list[int] = []
        self.spoiled: set[bytes] = set()
        self.earlier: set[bytes] = set()
        self.places: list[list[int]] = []
        """Blocks before the checkpoints."""
        self.cap = cap
        self.records = records
        self.open(hot)

    def open(self, hot: float) -> None:
        self.fs = FaultyFileSystem(watch=self.watch, lock=str(self.root / LOCK_NAME))
        self.rig = Rig(
            self.root,
            hot=hot,
            cap=self.cap,
            fs=self.fs,
            max_records=self.records,
            max_queue_bytes=6 * len(bytes_of(b"")),
            admission=self.admission,
            write_back=self.back,
            daily=self.daily,
            deep=self.deep,
            today=lambda: f"2026-01-{self.day}",
        )
        self.rig.flusher.unwritten._clock = lambda: self.now
        self.rig.in_ram_alone |= self.too_deep
        self.live: list[Request] = []
        self.tampered = False
        self.aside: Path | None = None
        self.outside = 0  # bytes granted to another engine and not settled
        assert temps_in(self.root) == [], "a temporary file survived an open"

    def watch(self) -> None:
        if (real := bytes_on_disk(self.root)) > self.cap * FILE_DISK_BYTES:
            self.over.append(real)

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.come_back()
            self.rig.drop()
            shutil.rmtree(self.root, ignore_errors=True)

    def pick(self, number: int) -> Request:
        return self.live[number % len(self.live)]

    # ----------------------------------------------------------------- requests

    @rule(blocks=st.lists(TOKENS, max_size=6), leave=st.integers(0, 1))
    def request(self, blocks: list[int], leave: int) -> None:
        """A prompt: match, restore and check each block, lose what is wrong, compute the rest."""
        tokens = [token for block in blocks for token in [block] * BLOCK]
        keys = chain(tokens)
        table = self.match(keys, len(keys) - leave)
        request = Request(table, keys[: len(table.blocks)], tokens[: len(table.blocks) * BLOCK])
        self.live.append(request)
        self.compute(request, tokens[len(request.tokens) :])

    def match(self, keys: list[BlockKey], limit: int) -> BlockTable:
        """What the store has of a chain, each block as the oracle says."""
        table = self.rig.store.new_table()
        matched = self.rig.store.extend_match(table, [k.block_hash for k in keys], limit)
        assert matched == len(table.blocks) <= max(0, limit)
        for index, block in enumerate(table.blocks):
            paused, on_disk = not self.rig.flusher.health.may_read(), block.payload is None
            assert not (paused and on_disk), "a record is read while reads pause"
            data = self.rig.read(keys[index], block)
            name = keys[index].block_hash
            if data == SPOILED and name in self.earlier:
                self.rig.store.withdraw({name: False})  # As the engine does before the first token.
                data = None
            if data is None:
                table.truncate(index)
                break
            assert data == bytes_of(name), "wrong bytes"
        return table

    @rule(blocks=st.lists(TOKENS, min_size=1, max_size=6))
    def next_turn(self, blocks: list[int]) -> None:
        """What a request has stored is a hit for the next, be it still in the write queue."""
        self.request(blocks, 0)
        self.finish(len(self.live) - 1, False)
        keys, waiting = (
            chain(token for block in blocks for token in [block] * BLOCK),
            self.rig.flusher.waiting,
        )
        queued = next((at for at, key in enumerate(keys) if key.block_hash not in waiting), len(keys))
        table = self.match(keys, len(keys))
        assert len(table.blocks) >= queued, "it waits to be written, and is no hit"
        table.free()

    @rule(blocks=st.lists(TOKENS, min_size=1, max_size=6), leave=st.integers(0, 1))
    def serve(self, blocks: list[int], leave: int) -> None:
        """A request from its start to its end, with all that follows from it."""
        self.request(blocks, leave)
        keys = self.live[-1].keys
        recorded = self.rig.writer._actions < writer.MOST_ACTIONS and self.fs.fault is None
        self.finish(len(self.live) - 1, True)
        self.settle()
        if recorded and self.fs.fault is None:
            self.parents_are_younger([key.block_hash for key in keys])

    def parents_are_younger(self, names: list[bytes]) -> None:
        """A chain whose use was recorded leaves from its leaf on, in RAM and on disk."""
        place = {block.block_hash: at for at, block in enumerate(queued(self.rig.pool._cached))}
        places = [place[name] for name in names if name in place]
        assert places == sorted(places, reverse=True), "a parent leaves RAM before its child"
        if self.aside is None and not self.tampered:
            files = [self.root / self.rig.cold.path_of(name) for name in names]
            used = [path.stat().st_mtime_ns for path in files if path.exists()]
            assert used == sorted(used, reverse=True), "a parent leaves the disk before its child"
            order = self.rig.ledger._files._lists.get(namespace_dir(NAMESPACE), {})
            stamps = [order[path][1] for name in names if (path := self.rig.cold.path_of(name)) in order]
            assert stamps == sorted(stamps, reverse=True), "a parent is evicted before its child"

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 99), blocks=st.lists(TOKENS, max_size=3))
    def decode(self, number: int, blocks: list[int]) -> None:
        self.compute(self.pick(number), [token for block in blocks for token in [block] * BLOCK])

    def chain_of(self, tokens: list[int]) -> list[BlockKey]:
        keys = chain(tokens)
        deep = {key.block_hash for key in keys[self.deep :] if self.deep}
        self.too_deep |= deep
        self.rig.in_ram_alone |= deep
        return keys

    def compute(self, request: Request, tokens: list[int]) -> None:
        request.tokens += tokens
        request.table.append(len(tokens) // BLOCK)
        done = len(request.keys)
        request.keys = self.chain_of(request.tokens)
        for index in range(done, len(request.keys)):
            key = request.keys[index]
            if self.rig.store.wants(key.block_hash, index):
                self.rig.store.put(request.table, index, key, payload_of(key.block_hash))

    @precondition(lambda self: self.live)
    @rule(
        number=st.integers(0, 99),
        blocks=st.lists(TOKENS, min_size=1, max_size=3),
        steps=st.integers(0, 4),
        writes=st.lists(st.booleans(), max_size=2),
        unreadable=st.booleans(),
    )
    def spoil(self, number: int, blocks: list[int], steps: int, writes: list[bool], unreadable: bool) -> None:
        """A request stores NaN, and withdraws it; whatever the queues hold, it is never read again."""
        request, own = self.pick(number), {}
        request.tokens += [token for block in blocks for token in [block] * BLOCK]
        request.table.append(len(blocks))
        done, request.keys = len(request.keys), self.chain_of(request.tokens)
        for index, key in enumerate(request.keys[done:], done):
            if self.rig.store.wants(key.block_hash, index):
                own[key.block_hash] = self.rig.store.put(request.table, index, key, empty_payload(NAN))
        last, position = request.keys[-1].block_hash, len(request.keys) * BLOCK
        name = checkpoint_name(last)
        if writes and unreadable and self.aside is None:
            self.put_state(last, position, True)
            self.write_all()
            self.demote(99)
            self.spoil_file(name)
        for write in writes:
            if self.rig.states.hot(last) is None:
                had_file = self.put_state(last, position, write, NAN)
                own[name] = own.get(name, True) and had_file
            self.write(steps)
        self.write(steps)
        self.rig.store.withdraw(own)
        self.spoiled.update(name for name, had_file in own.items() if not had_file)

    # ----------------------------------------------------------------- checkpoints

    @rule(checkpoints=st.lists(CHECKPOINT, min_size=1, max_size=4))
    def keep_states(self, checkpoints: list[tuple[int, list[bool], str, bool]]) -> None:
        """Prompts that begin alike keep their state at the same places, and a file may go in between."""
        for length, writes, between, read in checkpoints:
            self.checkpoint([0] * length, writes, between)
            if read:
                self.write_all()
                self.demote(99)
                self.resume(-1, [], 0, False)

    def checkpoint(self, blocks: list[int], writes: list[bool], between: str) -> None:
        self.places.append(blocks)
        last = chain(token for block in blocks for token in [block] * BLOCK)[-1].block_hash
        name = checkpoint_name(last)
        for write in writes:
            self.put_state(last, len(blocks) * BLOCK, write)
            if between:
                self.write_all()
            block = self.rig.pool.get_cached_block(name)
            if between == "lost" and block is not None and block.on_disk:
                self.rig.pool.drop_payload(block)
            if between in ("cleared", "lost"):
                self.rig.ledger.forget([self.rig.cold.path_of(name)], True)
            if between == "demoted":
                self.demote(4)

    def write_all(self) -> None:
        self.tick(True)
        self.settle()

    def put_state(self, block_hash: bytes, position: int, write: bool, fill: int | None = None) -> bool:
        """True: a file of it was there before."""
        states, name = self.rig.states, checkpoint_name(block_hash)
        nbytes = CheckpointFiles(self.root, NAMESPACE, state_layout).at(position).bytes_per_block
        room = self.deep * FILE_DISK_BYTES - position // BLOCK * FILE_DISK_BYTES
        asked, write = write, write and (not self.deep or nbytes <= room)
        before = states.hot(block_hash)
        if before is None:
            self.rig.in_ram_alone.add(name)
        else:
            fill = NAN  # What is in RAM stays, so these bytes are never read.
        had_file = states.put(block_hash, position, state_of(block_hash, position, fill), write=asked)
        if self.fs.fault is None:
            assert had_file == (states._may_load(name) and not self.rig.store.distrusts(name))
        hot = states.hot(block_hash)
        assert before is None or hot is before, "it stays as it is"
        if not had_file and (write or before is None):
            block = self.rig.pool.get_cached_block(name)
            assert block is None or not block.on_disk, "counted on, and gone"
        if write and not had_file:
            self.rig.in_ram_alone.discard(name)
            noted = {*self.rig.flusher.unwritten.due, *self.rig.flusher.unwritten.held}
            assert hot is None or name in self.rig.flusher.writing or name in noted, "never written"
        return had_file

    @precondition(lambda self: self.places)
    @rule(
        number=st.integers(-99, -1),
        more=st.lists(TOKENS, max_size=2),
        leave=st.integers(0, 2),
        keep=st.booleans(),
    )
    def resume(self, number: int, more: list[int], leave: int, keep: bool) -> None:
        """A prompt goes on from the deepest checkpoint that stands within its match."""
        blocks = [*self.places[number % len(self.places)], *more]
        names = [key.block_hash for key in chain(token for block in blocks for token in [block] * BLOCK)]
        states, reach = self.rig.states, max(0, len(names) - leave)
        stands = [length for length in range(1, reach + 1) if states.stands(names[length - 1])]
        missing = states.missing
        length = states.deepest(names, reach)
        if self.fs.fault is None:
            assert length == max(stands, default=0)
        assert states.missing - missing == (length < reach)
        if not length:
            return
        last, position = names[length - 1], length * BLOCK
        hot = states.hot(last)
        data = hot.tobytes() if hot is not None else self.read_state(last, position)
        name = checkpoint_name(last)
        if data == state_of(last, position, NAN).tobytes() and name in self.earlier:
            self.rig.store.withdraw({name: False})
        elif data is not None:
            assert data == state_of(last, position).tobytes(), "wrong state"
            if keep:
                self.put_state(last, position, False)

    def read_state(self, block_hash: bytes, position: int) -> bytes | None:
        buffer = bytearray(state_layout(position).nbytes(1))
        return (
            bytes(buffer) if self.rig.states.load_into(block_hash, position, [memoryview(buffer)]) else None
        )

    def spoil_file(self, name: bytes) -> None:
        """It is no good, and could not be removed when that was seen."""
        path = self.root / self.rig.cold.path_of(name)
        if path.is_file() and not path.is_symlink():
            path.write_bytes(bytes(path.stat().st_size))
            self.tampered = True
            self.rig.store._distrust(name)

    @rule(count=st.integers(1, 4))
    def busy(self, count: int) -> None:
        """The queue of actions is full."""
        for _ in range(count):
            self.rig.writer.after_queued(lambda: None)

    @rule(blocks=st.lists(TOKENS, min_size=1, max_size=3))
    def read_fails(self, blocks: list[int]) -> None:
        """The disk hangs until a read times out: from then on nobody reads, by file or by record."""
        self.serve(blocks, 0)
        for block in list(self.rig.pool._by_hash.values()):
            if block.on_disk:
                self.rig.pool.drop_payload(block)
        self.rig.flusher.health.read_failed(OSError(errno.ETIMEDOUT, "timed out"))
        self.request(blocks, 0)

    @precondition(lambda self: self.aside is None)
    @rule(replaced=st.booleans())
    def folder_goes(self, replaced: bool) -> None:
        """Unmounted: the path is gone, or an empty mount point."""
        self.aside = self.root.with_name(f"{self.root.name}-aside")
        self.root.rename(self.aside)
        if replaced:
            self.root.mkdir()

    @precondition(lambda self: self.aside is not None)
    @rule()
    def folder_returns(self) -> None:
        assert self.aside is not None
        if self.root.exists():
            self.root.rmdir()  # Raises if anything was made in it.
        self.aside.rename(self.root)
        self.aside, self.tampered = None, True

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 99))
    def put_again(self, number: int) -> None:
        request = self.pick(number)
        for index, key in enumerate(request.keys):
            self.rig.store.put(request.table, index, key, payload_of(key.block_hash))

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 99), use=st.booleans())
    def finish(self, number: int, use: bool) -> None:
        request = self.live.pop(number % len(self.live))
        request.table.free()
        if use:
            self.rig.store.record_use([k.block_hash for k in request.keys])

    # ----------------------------------------------------------------- the background

    @rule(steps=st.integers(1, 5))
    def write(self, steps: int) -> None:
        for _ in range(steps):
            self.rig.writer.step()

    @rule()
    def pump(self) -> None:
        self.rig.pump()

    @rule()
    def settle(self) -> None:
        self.rig.settle()
        assert not self.rig.flusher.held and not self.rig.flusher.writing
        assert not self.rig.flusher._removals, "a removal was dropped"
        stats = self.rig.ledger.stats()
        # A temporary file that could not be removed keeps its grant while its engine lives, and an engine
        # that died while the folder is away keeps its own until that is back.
        kept = self.rig.writer.left * FILE_DISK_BYTES + sum(
            gone.outstanding for gone in self.rig.ledger._gone
        )
        assert stats.reserved == self.outside + kept, "a grant leaked"

    @rule(idle=st.booleans())
    def tick(self, idle: bool) -> None:
        """The clock's turn: what is due is written, and tried again; `idle`: after a pause."""
        self.now += IDLE_S + 1 if idle else 1
        self.rig.flusher.tick()

    @rule(blocks=st.lists(TOKENS, min_size=1, max_size=6))
    def touch(self, blocks: list[int]) -> None:
        """A chain is used, from leaf to root, as far as it is known."""
        self.rig.store.record_use([k.block_hash for k in chain(t for b in blocks for t in [b] * BLOCK)])

    @rule(count=st.integers(1, 4))
    def demote(self, count: int) -> None:
        """Blocks leave RAM for the disk: at once where they are there already, else through a writer."""
        self.rig.pool.evict(count * len(bytes_of(b"")))

    @rule(blocks=st.lists(TOKENS, min_size=1, max_size=6))
    def promote(self, blocks: list[int]) -> None:
        """Blocks come back from the disk to RAM; the oracle looks at each."""
        keys = chain(token for block in blocks for token in [block] * BLOCK)
        self.match(keys, len(keys)).free()

    @rule()
    def next_day(self) -> None:
        self.day += 1
        self.rig.writer.resume()

    @rule(hot=st.integers(0, 8))
    def budget(self, hot: int) -> None:
        self.rig.hot = hot
        self.rig.store.trim_hot()
        held = sum(b.payload.nbytes for b in self.rig.pool._by_hash.values() if b.payload and b.ref_cnt)
        assert self.rig.pool.hot_bytes <= max(hot * len(bytes_of(b"")), held)

    # ----------------------------------------------------------------- disasters

    @rule(hot=st.sampled_from([0, 1, 3, 8]), cap=st.integers(0, 10), temp=st.booleans())
    def crash(self, hot: int, cap: int, temp: bool) -> None:
        """The process is gone between two operations, or amid a write."""
        self.come_back()
        if temp:
            (self.root / FOLDER / "00").mkdir(parents=True, exist_ok=True)
            (self.root / FOLDER / "00" / f"{'0' * 64}.safetensors.1-1.tmp").write_bytes(bytes(5000))
        self.rig.drop()
        self.earlier |= self.spoiled  # What was to be removed may be there again.
        self.cap = cap
        self.open(hot)

    def come_back(self) -> None:
        if self.aside is not None:
            self.folder_returns()

    @rule(hot=st.integers(0, 8))
    def restart(self, hot: int) -> None:
        """A clean stop: what was queued is on disk after it, unless the disk refused it."""
        self.come_back()
        self.fs.fault = None
        self.rig.writer.resume()
        self.rig.pump()
        keys = [key for request in self.live for key in request.keys]
        self.rig.settle()
        due, refused = list(self.rig.flusher.unwritten.due), self.rig.writer.stats.refused
        evicted = self.rig.ledger.stats().evicted_files
        complete = self.rig.store.close(0)
        stats = self.rig.writer.stats
        if complete and not stats.failed and stats.refused == refused:
            gone = [h for h in due if not self.rig.cold.has(h)]
            assert len(gone) <= self.rig.ledger.stats().evicted_files - evicted, "not flushed"
        held = {k.block_hash for k in keys if self.rig.cold.has(k.block_hash)}
        self.rig.ledger.close()
        self.rig.drop()
        self.open(hot)
        assert {k.block_hash for k in keys if self.rig.cold.has(k.block_hash)} == held

    @rule(
        at=st.integers(1, 8),
        kind=st.sampled_from(["error", "error forever", "short", "short then error"]),
        number=st.sampled_from([errno.ENOSPC, errno.EIO, errno.EACCES, errno.EMFILE]),
    )
    def disk_stumbles(self, at: int, kind: Literal["error", "short"], number: int) -> None:
        self.fs.fault = Fault(self.fs.count + at, kind, number)

    @rule()
    def disk_recovers(self) -> None:
        self.fs.fault = None
        self.rig.writer.resume()

    @rule(
        number=st.integers(0, 99),
        at=st.integers(0, 1 << 20),
        how=st.sampled_from(["header", "payload", "truncate", "remove", "link", "other", "zeros"]),
        cold=st.booleans(),
    )
    def damage(self, number: int, at: int, how: str, cold: bool) -> None:
        """One file goes bad; `cold`: and what was hot is let go, so that it will be read."""
        if cold:
            self.rig.settle()
            self.rig.pool.evict(1 << 30)
        files = [path for path in sorted(files_in(self.root)) if path.suffix == ".safetensors"]
        if not files:
            return
        self.tampered = True
        path, another = files[number % len(files)], files[at % len(files)]
        raw = bytearray(path.read_bytes())
        start = self.rig.cold.format.header_bytes
        match how:
            case "header" if len(raw) >= 512:
                raw[at % 512] ^= 1 << (at % 8)
                path.write_bytes(raw)
            case "payload" if len(raw) > start:
                raw[start + at % (len(raw) - start)] ^= 1 << (at % 8)
                path.write_bytes(raw)
            case "truncate":
                path.write_bytes(raw[: at % (len(raw) + 1)])
            case "remove":
                path.unlink()
            case "link":
                path.unlink()
                path.symlink_to(another)
            case "other":
                # No larger than it was counted at a restart: growing it is no fault of a disk's.
                path.write_bytes(another.read_bytes()[: max(len(raw), 1)])
            case "zeros":
                path.write_bytes(bytes(len(raw)))
            case _:
                pass

    @rule(count=st.integers(1, 4))
    def another_engine_reserves(self, count: int) -> None:
        self.outside += self.rig.ledger.reserve(count * FILE_DISK_BYTES)

    @precondition(lambda self: self.outside and self.aside is None)
    @rule(number=st.integers(0, 9), told=st.booleans())
    def another_engine_stores(self, number: int, told: bool) -> None:
        other = ColdTier(self.root, block_format(OTHER_NAMESPACE))
        key = chain([number] * BLOCK, OTHER_NAMESPACE)[0]
        if not told and other.has(key.block_hash):
            return
        other.store(key, payload_of(key.block_hash).buffers())
        self.watch()
        if told:
            self.rig.ledger.stored([(other.path_of(key.block_hash), FILE_DISK_BYTES)])
            self.outside -= FILE_DISK_BYTES
        else:
            self.another_engine_dies()

    @rule()
    def another_engine_dies(self) -> None:
        self.rig.ledger.engine_gone(self.outside, 0)
        self.outside = 0

    # ----------------------------------------------------------------- what must hold

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "rig"):
            return
        if self.aside is not None:
            assert not self.root.exists() or list(self.root.iterdir()) == [], "made anew in its place"
        self.rig.check(request.table for request in self.live)
        assert self.over == [], "over the cap at some instant"
        stats = self.rig.ledger.stats()
        assert bytes_on_disk(self.root) <= stats.bytes_used + stats.reserved <= stats.cold_cache_bytes
        assert not any(map(self.rig.cold.has, self.too_deep)), "its chain does not go onto the disk"
        assert not self.daily or stats.written_today_bytes <= self.daily * FILE_DISK_BYTES
        if self.aside is None and not self.tampered and not temps_in(self.root):
            assert bytes_on_disk(self.root) == stats.bytes_used and len(files_in(self.root)) == stats.files
        for request in self.live:
            assert len(request.table.blocks) * BLOCK == len(request.tokens)


@pytest.fixture(autouse=True)
def few_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MOST_ACTIONS", 3)


def test_quick():
    run_state_machine_as_test(StoreMachine, settings=QUICK)


@pytest.mark.slow
def test_long():
    run_state_machine_as_test(StoreMachine, settings=LONG)


def test_the_oracle_notices_wrong_bytes(tmp_path):
    """The machine would be worth nothing if damage went unseen: with the check off, it must be seen."""
    rig = Rig(tmp_path, hot=0)
    keys = chain(range(BLOCK))
    rig.serve(keys)
    path = next(p for p in files_in(tmp_path))
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    rig.cold.format.read = lambda fs, fd, key, buffers: os.preadv(fd, buffers, rig.cold.format.header_bytes)
    with pytest.raises(AssertionError, match="wrong bytes"):
        rig.restore(keys)
    rig.drop()
