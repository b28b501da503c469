"""Ranks in one process: real stores, bridges, plan and follower; a model, links and threads that a test
turns.

Nothing runs by itself. `Ranks.turn` does one thing that could happen next: a frame arrives, an engine thread
makes its next call, an I/O thread reads or writes. A link delivers frames in the order in which they were
sent, and any two links in any order.

The model's KV says what it is of: each token's is its rank, its position, itself, and a number that follows
from all tokens before. A pass looks at all that it finds in the cache.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from faulty_fs import Crash, Fault, FaultyFileSystem
from kv_fakes import BLOCK, Rig, check_pool, ram_folder
from mlx_lm.models.cache import ArraysCache, KVCache

from omlxd import wire
from omlxd.engine.kvio.checkpointer import Checkpointer
from omlxd.engine.kvio.split_bridge import SplitBridge
from omlxd.engine.mlx_adapter.cache.kinds import layout_of, states_of
from omlxd.engine.sequence.sequence import Sequence as Request
from omlxd.engine.server.ranks.follower import Follower
from omlxd.engine.server.ranks.lead import Lead
from omlxd.engine.server.ranks.lead_bridge import LeadBridge
from omlxd.kv.checkpoint import CheckpointFiles, Checkpoints
from omlxd.kv.files.paths import LOCK_NAME
from omlxd.kv.hashing import namespace_of
from omlxd.wire import plan


def kv_of(rank: int, tokens: Sequence[int]) -> np.ndarray:
    """(tokens, 4): what rank `rank` keeps of them."""
    rows, chain = list[list[int]](), 0
    for position, token in enumerate(tokens):
        chain = (chain * 31 + token + 7) % (1 << 20)
        rows.append([rank, position, token, chain])
    return np.array(rows, np.float32).reshape(-1, 4)


class Model:
    """Of one rank. `before_pass`: called before each of its passes."""

    def __init__(self, rank: int, states: bool):
        self._rank, self._states = rank, states
        self.before_pass: Callable[[], None] = lambda: None

    def make_cache(self) -> list[Any]:
        return [KVCache(), ArraysCache(1)] if self._states else [KVCache()]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        self.before_pass()
        new: list[int] = tokens[0].tolist()  # type: ignore[assignment]
        kv = kv_of(self._rank, [*self.tokens_in(cache), *new])
        added = mx.array(kv[-len(new) :])[None, None]
        cache[0].update_and_fetch(added, -added)
        if self._states:
            cache[1][0] = mx.array(kv[-1:])
        return mx.zeros((1, 1, 1))

    def tokens_in(self, cache: list[Any] | None) -> list[int]:
        """Tokens whose KV a cache holds; asserts that it is theirs, all of it."""
        if cache is None or not cache[0].offset:
            return []
        keys = np.array(cache[0].keys[0, 0, : cache[0].offset])
        held = keys[:, 2].astype(int).tolist()
        right = kv_of(self._rank, held)
        assert np.array_equal(keys, right), "wrong keys"
        assert np.array_equal(np.array(cache[0].values[0, 0, : cache[0].offset]), -right), "wrong values"
        assert not self._states or np.array_equal(np.array(cache[1][0]), right[-1:]), "wrong state"
        return held


class Later:
    """An executor whose tasks wait for `Ranks.turn`."""

    def __init__(self) -> None:
        self.tasks: deque[Callable[[], None]] = deque()

    def submit(self, task: Callable[..., None], *args: Any) -> None:
        self.tasks.append(partial(task, *args))

    def shutdown(self, **how: bool) -> None:
        self.tasks.clear()


class Wire:
    """One direction of a link: frames under way, in the order in which they were sent."""

    def __init__(self, type: Any):
        self._decoder = wire.FrameDecoder(type)
        self.under_way: deque[bytes] = deque()
        self.take: Callable[[Any], None] = lambda message: None

    def send(self, message: Any) -> None:
        self.under_way.append(wire.encode(message))

    def deliver(self) -> None:
        for message in self._decoder.feed(self.under_way.popleft()):
            self.take(message)

    def read(self, take: Callable[[Any], None]) -> None:
        self.take = take


class Rank:
    """One rank's store, bridge and threads. `hot`: RAM blocks; `cap`: files."""

    def __init__(self, number: int, folder: Path, states: bool, hot: float, cap: int):
        self.number, self.folder = number, folder
        self.model = Model(number, states)
        one = self.model.make_cache()
        self.model(mx.array([[1]]), one)
        layout, namespace = layout_of(one), namespace_of({"rank": number})
        self.fs = FaultyFileSystem(lock=str(folder / LOCK_NAME))
        self.rig = Rig(folder, hot=hot, cap=cap, fs=self.fs, namespace=namespace, layout=layout)
        checkpoints = None
        if states:
            kept = states_of(one)
            files = CheckpointFiles(folder, namespace, kept.at, self.fs)
            checkpoints = Checkpointer(kept, layout, Checkpoints(self.rig.store, files), BLOCK)
            checkpoints.interval, checkpoints.least_fork = 2 * BLOCK, BLOCK
        kind = SplitBridge if number else LeadBridge
        self.bridge = kind(self.model, layout, self.rig.store, self.rig.posted.append, checkpoints, readers=2)
        self.bridge.reads.close()
        self.reads = Later()
        self.bridge.reads.readers = self.reads  # type: ignore[assignment]

    def call(self) -> None:
        self.rig.posted.popleft()()

    def read(self, index: int = 0) -> None:
        task = self.reads.tasks[index % len(self.reads.tasks)]
        self.reads.tasks.remove(task)
        task()

    def check_cap(self) -> None:
        stats = self.rig.ledger.stats()
        on_disk = sum(file.stat().st_blocks * 512 for file in self.files())
        assert on_disk <= stats.cold_cache_bytes, f"rank {self.number} is over its cap"
        assert stats.bytes_used + stats.reserved <= stats.cold_cache_bytes

    def files(self) -> list[Path]:
        return sorted(self.folder.rglob("*.safetensors"))

    def check_idle(self) -> None:
        """Nothing of any row is left."""
        bridge, ledger = self.bridge, self.rig.ledger.stats()
        assert not bridge._limits and not bridge.reads._under_way and not bridge.reads._tails
        assert not ledger.reserved, f"rank {self.number} holds a lease of {ledger.reserved}"
        check_pool(self.rig.pool, {})
        self.rig.store.trim_hot()
        assert self.rig.pool.hot_bytes <= self.rig.store.hot_budget()


class _Lead(Lead):
    """A lead of ranks that are in this process."""

    def __init__(self, ranks: Ranks, to: dict[int, Wire], back: dict[int, Wire]):
        self._ranks = [SimpleNamespace(number=n, link=to[n]) for n in to]  # type: ignore[assignment]
        self.world, self._rows, self._matches = len(to) + 1, 0, {}
        self._model, self._post = ranks.all[0].model, ranks.all[0].rig.posted.append
        self._closing = True
        for number, wire_back in back.items():
            reads = SimpleNamespace(number=number, link=wire_back, said=SimpleNamespace(put=lambda _: None))
            self._read(reads)  # type: ignore[arg-type]

    def end(self, why: str, lasting: bool = False) -> None:
        raise AssertionError(why)


class Ranks:
    """`number` ranks on folders of their own, which outlive `start`."""

    def __init__(self, number: int, states: bool, hot: Sequence[float], cap: Sequence[int]):
        self.root = Path(tempfile.mkdtemp(prefix="omlxd-kv-", dir=ram_folder()))
        self.states, self.hot, self.cap, self.number = states, [*hot], [*cap], number
        self.start()

    def start(self) -> None:
        """A new engine on all folders."""
        self.all = [
            Rank(n, self.root / str(n), self.states, self.hot[n], self.cap[n]) for n in range(self.number)
        ]
        numbers = range(1, self.number)
        self.to, self.back = (
            {n: Wire(plan.ToRank) for n in numbers},
            {n: Wire(plan.FromRank) for n in numbers},
        )
        self.followers = {n: self._follower(n) for n in numbers}
        self.lead = _Lead(self, self.to, self.back)
        self.bridge = self.all[0].bridge
        assert isinstance(self.bridge, LeadBridge)
        self.bridge.lead = self.lead
        self.all[0].model.before_pass = self._meet
        self._passes = dict.fromkeys(numbers, 0)

    def _follower(self, number: int) -> Follower:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            follower = Follower(theirs)
        rank = self.all[number]
        follower._link = self.back[number]  # type: ignore[assignment]
        follower._bridge, follower._rank = rank.bridge, number
        follower._load = SimpleNamespace(cache=SimpleNamespace(block_size=BLOCK))  # type: ignore[assignment]
        follower._loaded = SimpleNamespace(model=rank.model)  # type: ignore[assignment]
        self.to[number].take = lambda message: rank.rig.posted.append(partial(follower._handle, message))
        rank.model.before_pass = partial(self._count, number)
        return follower

    def _count(self, number: int) -> None:
        self._passes[number] += 1

    def _meet(self) -> None:
        """Rank 0 is in a sum, in which it waits for all others."""
        for number in self.to:
            before = self._passes[number]
            while self._passes[number] == before:
                assert self._turn_of(number), f"rank {number} never comes to this pass"

    def _turn_of(self, number: int) -> bool:
        rank = self.all[number]
        if rank.rig.posted:
            rank.call()
        elif self.to[number].under_way:
            self.to[number].deliver()
        else:
            return False
        return True

    # ----------------------------------------------------------------- what could happen next

    def _next(self) -> list[Callable[[int], object]]:
        turns: list[Callable[[int], object]] = []
        for rank in self.all:
            turns += [lambda _, rank=rank: rank.call()] if rank.rig.posted else []
            turns += [rank.read] if rank.reads.tasks else []
            turns += (
                [lambda _, rank=rank: rank.rig.writer.step()] if not rank.rig.writer._queue.empty() else []
            )
        for wires in (self.to, self.back):
            turns += [lambda _, each=each: each.deliver() for each in wires.values() if each.under_way]
        return turns

    def turn(self, choice: int) -> bool:
        """One of the things that could happen next. False: nothing could."""
        if turns := self._next():
            turns[choice % len(turns)](choice // len(turns))
        return bool(turns)

    def settle(self) -> None:
        """All that can happen, until nothing can."""
        for choice in range(100_000):
            if not self.turn(choice):
                return
        raise AssertionError("it never comes to rest")

    # ----------------------------------------------------------------- rows

    def row_on(self, number: int, request: Request) -> Request:
        """The same row on another rank."""
        return self.followers[number]._rows[self.bridge._rows[request]] if number else request  # type: ignore[attr-defined]

    def check_row(self, request: Request) -> None:
        """All ranks hold the KV of its first tokens, of equally many."""
        for rank in self.all:
            row = self.row_on(rank.number, request)
            held = rank.model.tokens_in(row.kv.cache)
            assert len(held) == row.kv.length == request.kv.length, f"rank {rank.number} holds another prefix"
            assert held == request.tokens[: len(held)], f"rank {rank.number} holds another's KV"

    def check_idle(self) -> None:
        for follower in self.followers.values():
            assert not follower._rows
        assert not self.lead._matches and not self.bridge._rows and not self.bridge._told  # type: ignore[attr-defined]
        for rank in self.all:
            rank.check_idle()

    # ----------------------------------------------------------------- the end of some

    def kill(self, number: int, operations: int) -> None:
        """`kill -9` of rank `number`, so many operations on files from now on; all others end with it."""
        rank = self.all[number]
        rank.fs.fault = Fault(rank.fs.count + operations + 1, "crash")
        with contextlib.suppress(Crash):
            while rank.rig.writer.step():
                pass
        rank.fs.fault = None
        self.drop()
        self.start()

    def drop(self) -> None:
        for rank in self.all:
            rank.rig.drop()

    def remove(self) -> None:
        self.drop()
        shutil.rmtree(self.root, ignore_errors=True)
