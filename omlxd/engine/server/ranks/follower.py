"""A rank that follows: rank 0's calls, in its order, on its own share of the model and of the KV.

| thread | does                                                                                        |
|--------|---------------------------------------------------------------------------------------------|
| main   | loads the share, then makes the calls one by one; asleep without any                        |
| rank-0 | reads frames and answers pings; its end, or rank 0's silence, ends this process             |
| kv-…   | read and write block files                                                                  |

It has no scheduler, draws no token and serves nobody. What goes wrong here ends the engine on all ranks,
since the others wait in a sum for this one.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from .... import wire
from ....common.ports import free_addresses
from ....errors import ModelError, OmlxdError
from ....kv.files.paths import namespace_dir
from ....kv.hashing import hash_blocks
from ....wire import plan
from ... import mlx_adapter
from ...kvio.fingerprint import differing, file_identities
from ...kvio.hot_budget import evict_unused
from ...kvio.lease import FrontLease
from ...kvio.open_store import ModelStore, memo_dir
from ...kvio.split_bridge import SplitBridge
from ...sequence.sequence import Prompt, SamplerRow, Sequence, SequenceKV
from ..model_load import load_model
from .compute import FollowingSampler, RankBatch, compute, time_link
from .figures import held
from .joined import Home
from .link import PING_S, Link

log = logging.getLogger(__name__)

IDLE_S = 5.0
"""Seconds without a call after which memory is given back."""


class Follower:
    """One rank over one connected socket. `run` returns when the program should exit.

    home  to the `omlxd join` of this machine; None: rank 0 runs on it, too
    """

    def __init__(self, sock: socket.socket, home: socket.socket | None = None):
        self._link = Link(sock, plan.ToRank, held=self._held)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._home = Home(home) if home is not None else None
        self._lease = FrontLease(self._link.send) if self._home is None else self._home.lease
        self._parent = os.getppid()
        self._rank = 0
        self._load: wire.Load
        self._loaded: mlx_adapter.LoadedModel
        self._store: ModelStore
        self._bridge: SplitBridge | None = None
        self._group: mlx_adapter.Group
        self._rows: dict[int, Sequence] = {}
        self._batches: dict[int, RankBatch] = {}
        self._over = False
        self.terminated = False

    def run(self) -> None:
        for name, work in (("rank-0", self._read), ("watch", self._watch)):
            threading.Thread(target=work, name=name, daemon=True).start()
        worked = False
        while not self._over:
            try:
                call = self._calls.get(timeout=IDLE_S if worked else None)
            except queue.Empty:
                worked = False
                self._give_memory_back()
                continue
            worked = True
            try:
                call()
            except Exception as error:
                self._break(error)

    def terminate(self) -> None:
        """End at once: rank 0 notices."""
        os._exit(1)

    def release_memory(self) -> None:
        mlx_adapter.release_memory()

    def _break(self, error: Exception) -> None:
        """Say why this rank ends, and end."""
        if not isinstance(error, OmlxdError):
            log.exception("rank %d ends", self._rank, exc_info=error)
        reason = error.message if isinstance(error, OmlxdError) else f"{type(error).__name__}: {error}"
        self._link.send(plan.Broken(reason, isinstance(error, ModelError) and error.code == ModelError.code))
        mlx_adapter.release_memory()
        os._exit(3)

    # ----------------------------------------------------------------- beside the calls

    def _read(self) -> None:
        def take(message: Any) -> None:
            if isinstance(message, wire.Grant):
                self._lease.granted(message)  # A writer's thread waits for it, perhaps beside a long pass.
            else:
                self._calls.put(partial(self._handle, message))

        try:
            self._link.read(take)
        except ValueError:
            log.exception("rank 0 says what makes no sense")
        mlx_adapter.release_memory()
        os._exit(0 if self._over else 1)

    def _watch(self) -> None:
        """End rank 0, too, if it is stopped: nobody else notices soon."""
        while True:
            time.sleep(PING_S)
            here = self._home is None
            if self._link.is_lost(self._parent if here else None, loads=self._bridge is None):
                log.error("rank %d ends: rank 0 does not answer", self._rank)
                if here and os.getppid() == self._parent:
                    os.kill(self._parent, signal.SIGKILL)
                mlx_adapter.release_memory()
                os._exit(1)

    def _held(self) -> plan.Pong:
        """For a ping. Any thread."""
        own = held(self._bridge.store if self._bridge is not None else None)
        return own if self._home is None else replace(own, kv_cold_bytes=self._home.cold_bytes)

    def _give_memory_back(self, everything: bool = False) -> None:
        if self._bridge is not None:
            if everything:
                evict_unused(self._bridge.store)
            self._bridge.store.trim_hot()
        mlx_adapter.give_memory_back()

    # ----------------------------------------------------------------- the calls

    def _handle(self, message: Any) -> None:
        match message:
            case plan.Pass():
                self._compute(message)
            case plan.Step():
                self._step(message)
            case plan.Enter():
                sequence = self._rows[message.row]
                sequence.tokens += message.tokens
                if message.batch not in self._batches:
                    self._batches[message.batch] = RankBatch(
                        self._loaded.model, self._group, FollowingSampler
                    )
                self._batches[message.batch].add_row(sequence)
            case plan.Leave():
                batch = self._batches[message.batch]
                batch.remove_rows([sequence for sequence in batch.rows if sequence.id in message.rows])
                if not batch.rows:
                    del self._batches[message.batch]
            case plan.Open():
                self._open(message)
            case plan.Offer() | plan.Match() | plan.Finish():
                assert self._bridge is not None
                self._ask_bridge(self._bridge, message)
            case plan.Follow():
                self._rank, self._load = message.rank, message.load
                logging.getLogger("omlxd").setLevel(message.load.log_level.upper())
                self._link.send(plan.Here(self._agree(message)))
            case plan.Join():
                self._load_share(message.hosts)
            case plan.Begin():
                # On another machine its fate is its own.
                lead = message.lead if self._home is None else ""
                bridge = self._bridge = self._store.open(self._lease, self._calls.put, SplitBridge, lead)
                bridge.reads.warm_up()
                bridge.weights_changed = self._loaded.mapped.changed
                self._store.read_newest(self._calls.put)
            case wire.Budget():
                self._store.share_hot(message.hot)
                mlx_adapter.set_limits(self._loaded.weight_bytes, message)
            case plan.TimeLink():
                time_link(self._loaded.model)
            case plan.Trim():
                self._give_memory_back(everything=True)
            case wire.Quit():
                self._close(message.deadline_s)
            case _:
                log.warning("unexpected frame %s", type(message).__name__)

    def _agree(self, message: plan.Follow) -> str:
        """Where to meet, on another machine than rank 0's. Raises ModelError for other weights."""
        if self._home is None:
            return ""
        load = self._load = self._home.own(message.load)
        if differs := differing(Path(load.model_path), message.weights, memo_dir(load)):
            raise ModelError(f"its {load.model_id} is not rank 0's: {differs}")
        return free_addresses(self._home.address, 1)[0]

    def _load_share(self, hosts: tuple[str, ...]) -> None:
        load = self._load
        files = file_identities(Path(load.model_path), "")
        mlx_adapter.set_limits(0, load.budget)
        self._link.send(plan.Here())
        self._group = mlx_adapter.join_group(self._rank, hosts, load.link)
        self._link.met()
        self._loaded = load_model(load, self._group)
        mlx_adapter.set_limits(self._loaded.weight_bytes, load.budget)
        if (layout := self._loaded.layout) is None:
            raise ModelError(f"several ranks can't serve this model: {self._loaded.kv_reuse}")
        self._store = ModelStore(load, self._loaded, files)
        gc.collect()
        gc.freeze()  # As rank 0 does: what was loaded lives as long as the process.
        ready = plan.Ready(namespace_dir(self._store.namespace), self._loaded.weight_bytes, layout.nbytes(1))
        if self._home is not None:
            self._home.loaded(load, ready.namespace, ready.weight_bytes, ready.kv_bytes_per_token)
        self._link.send(ready)

    def _open(self, message: plan.Open) -> None:
        tokens = [*message.tokens]
        hashes = hash_blocks(message.root, tokens, self._load.cache.block_size)
        self._rows[message.row] = Sequence(
            id=message.row,
            tokens=tokens,
            prompt=Prompt(len(tokens), message.root, pins=message.pins),
            sampling=SamplerRow(None, max_new=message.room, reserve=message.room),
            kv=SequenceKV(hashes),
            name=f"row {message.row}",
        )

    def _compute(self, message: plan.Pass) -> None:
        sequence = self._rows[message.row]
        if sequence.kv.length != message.start:
            raise RuntimeError(f"{sequence.name} is at {sequence.kv.length}, and rank 0's at {message.start}")
        if sequence.kv.cache is None:
            sequence.kv.cache = mlx_adapter.new_cache(self._loaded.model, sequence.capacity)
        compute(self._loaded.model, message.tokens, sequence.kv.cache)
        sequence.kv.length += len(message.tokens)

    def _step(self, message: plan.Step) -> None:
        batch = self._batches[message.batch]
        if (lengths := tuple(row.kv.length for row in batch.rows)) != message.lengths:
            raise RuntimeError(f"rows that decode are at {lengths}, and rank 0's at {message.lengths}")
        for row, tokens in message.offers:
            self._rows[row].tokens += tokens
            assert self._bridge is not None
            self._bridge.offer(self._rows[row], batch)
        batch.step()
        mlx_adapter.give_outgrown_back()

    def _ask_bridge(self, bridge: SplitBridge, message: plan.Offer | plan.Match | plan.Finish) -> None:
        row = message.row
        sequence = self._rows[row]
        match message:
            case plan.Offer():
                sequence.tokens += message.tokens
                bridge.offer(sequence)
            case plan.Match():
                bridge.restore(
                    sequence,
                    message.limit,
                    lambda: self._link.send(plan.Matched(row, sequence.kv.length)),
                )
            case plan.Finish():
                del self._rows[row]
                sequence.tokens += message.tokens
                sequence.kv.length, sequence.cancelled = message.length, message.cancelled
                if not message.kept:
                    sequence.kv.cache = None
                batches = [
                    batch for batch in self._batches.values() if message.kept and sequence in batch.rows
                ]
                bridge.finish(sequence, *batches, spoiled=message.spoiled)

    def _close(self, deadline_s: float) -> None:
        if hasattr(self, "_store"):
            self._store.close(deadline_s)
            self._lease.release_all()
        self._link.send(plan.Closed())
        self._over = True
