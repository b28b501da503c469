"""What the benchmarks of the engine share: a model in memory, its blocks, and requests run on this thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from omlxd.chat import Sampling
from omlxd.engine import mlx_adapter
from omlxd.engine.kvio.bridge import KVBridge
from omlxd.engine.kvio.payload import MLXPayload, copy_blocks
from omlxd.engine.kvio.transport import transport
from omlxd.engine.mlx_adapter.attention import hooks as attention
from omlxd.engine.mlx_adapter.cuda.products import products
from omlxd.engine.mlx_adapter.cuda.step.compiled_step import CompiledStep
from omlxd.engine.schedule.decode_batch import DecodeBatch
from omlxd.engine.schedule.scheduler import Scheduler
from omlxd.engine.sequence.sampling import BatchSampler, RowSampling, SamplerRow, SamplingDefaults
from omlxd.engine.sequence.sequence import Prompt, Sequence, SequenceKV, State
from omlxd.kv.block_pool import BlockPool
from omlxd.kv.cold.flusher import Flusher
from omlxd.kv.cold.tier import ColdTier
from omlxd.kv.cold.writer import StoreWriter
from omlxd.kv.files.block_file import BlockFormat, BlockKey
from omlxd.kv.hashing import chain_root, hash_blocks, namespace_of
from omlxd.kv.ledger.lease import LedgerLease
from omlxd.kv.ledger.ledger import Ledger
from omlxd.kv.store import KVStore
from tools.bench.shapes import SHAPES, build

GREEDY = RowSampling.of(Sampling(temperature=0.0), SamplingDefaults())


def row(*cells: object) -> None:
    print("| " + " | ".join(f"{c:.2f}" if isinstance(c, float) else str(c) for c in cells) + " |", flush=True)


def timed(call: Callable[..., object], *args: object) -> float:
    """Seconds that `call(*args)` takes. It must evaluate what it makes."""
    began = time.perf_counter()
    call(*args)
    return time.perf_counter() - began


class Bench:
    """A model, a folder for block files, and what the sections share."""

    def __init__(self, shape: str, folder: Path, tokens: int, blocks: Seq[int], share: bool = False):
        """`share`: requests hold what they share once, where the model can."""
        mx.set_cache_limit(2 << 30)  # as the engine does
        attention.install()
        self.loaded = build(SHAPES[shape])
        assert self.loaded.layout is not None
        self.layout = self.loaded.layout
        self.model, self.folder, self.tokens, self.blocks = self.loaded.model, folder, tokens, blocks
        self.per_token = self.layout.nbytes(1)
        self.words = min(4096, self.loaded.vocab_size)
        products.prepare(self.model)
        self.compiled = CompiledStep(self.model)
        if share:
            self.loaded.segments = mlx_adapter.share_prefixes(self.model, mlx_adapter.SEGMENT)

    # ----------------------------------------------------------------- material

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(0, self.words, length).tolist()

    def prefilled(self, tokens: Seq[int], chunk: int = 2048, room: int = 1024) -> mlx_adapter.Cache:
        """A plain cache of `tokens`."""
        cache = mlx_adapter.new_cache(self.model, len(tokens) + room)
        for start in range(0, len(tokens), chunk):
            self.model(mx.array([tokens[start : start + chunk]]), cache=cache)
            mx.eval(mlx_adapter.state_arrays(cache))
        return cache

    def payloads(self, cache: mlx_adapter.Cache, length: int, block: int) -> list[MLXPayload]:
        found: list[MLXPayload] = []
        for start in range(0, length, 2048):
            stop = min(start + 2048, length) // block * block
            cut = {n: a[:, :, start:stop] for n, a in mlx_adapter.tensors(cache).items()}
            if stop > start:
                found += copy_blocks(self.layout, cut, range(0, stop - start, block), block)
        return found

    def cold(self, tokens: Seq[int], block: int) -> tuple[ColdTier, list[BlockKey]]:
        namespace = namespace_of({"bench": block})
        hashes = hash_blocks(namespace, tokens, block)
        keys = [
            BlockKey(h, hashes[i - 1] if i else namespace, list(tokens[i * block : (i + 1) * block]))
            for i, h in enumerate(hashes)
        ]
        format = BlockFormat(namespace, self.layout, block, read_bytes=transport().read_bytes)
        return ColdTier(self.folder / f"{block}", format), keys

    def next_logits(self, cache: mlx_adapter.Cache) -> mx.array:
        """A decode step: the first use of restored KV on the device."""
        logits = self.model(mx.array([[1]]), cache=cache)
        mx.eval(logits)
        return logits

    # ----------------------------------------------------------------- requests

    def _bridge(self, block: int, cold: ColdTier | None = None, ledger: Ledger | None = None) -> KVBridge:
        lease = LedgerLease(ledger) if ledger else None
        pool = BlockPool(16)
        writer = StoreWriter(cold, lease, max_queue_bytes=1 << 40) if cold and lease else None
        store = KVStore(
            block_size=block,
            pool=pool,
            hot_budget=lambda: 1 << 40,
            post=self._post,
            cold=cold,
            flusher=Flusher(pool, writer, self._post) if writer else None,
            lease=lease,
        )
        return KVBridge(self.model, self.layout, store, self._post, segments=self.loaded.segments)

    @staticmethod
    def _post(call: Callable[[], None]) -> None:
        call()

    def _sequence(self, tokens: Seq[int], block: int, max_new: int = 1, sink: Any = None) -> Sequence:
        root = chain_root(namespace_of({"bench": block}))
        return Sequence(
            id=0,
            tokens=list(tokens),
            prompt=Prompt(len(tokens), root),
            sampling=SamplerRow(GREEDY, max_new=max_new),
            kv=SequenceKV(hash_blocks(root, tokens, block)),
            sink=sink,
        )

    def _batch(self, rows: int, length: int, factory: Callable[..., DecodeBatch] = DecodeBatch) -> Any:
        batch = factory(self.model, compiled=self.compiled)
        for index in range(rows):
            batch.add_row(self._decoding(length, index))
            mx.eval(batch._inputs, [layer.state[:2] for layer in batch._cache])
        return batch

    def _decoding(self, length: int, seed: int = 0) -> Sequence:
        """A request behind a prompt of `length` tokens, ready to join a batch."""
        tokens = self.prompt(length, seed)
        sequence = self._sequence([*tokens, 1], self.blocks[0])
        sequence.state = State.DECODING
        sequence.kv.cache = self.prefilled(tokens)
        sequence.kv.length = length
        return sequence

    def _run(
        self,
        tokens: Seq[int],
        block: int,
        new: int,
        bridge: KVBridge | None = None,
        others: Seq[Seq[int]] = (),
    ) -> Sequence:
        """A request through the scheduler on this thread, beside those of `others`, which come before it.

        `block` 0: no reuse; no bridge: a hot tier.
        """
        scheduler = Scheduler(self.loaded, None, slots=1 + len(others), block_size=block or self.blocks[0])
        if block:
            scheduler.bridge = bridge or self._bridge(block)
            scheduler.bridge.reads.post = scheduler.bridge.store._post = scheduler.post
        sink = Collector()
        sequence = self._sequence(tokens, block or self.blocks[0], new, sink)
        for other in others:
            scheduler.submit(self._sequence(other, block or self.blocks[0], 2 * new, Collector()))
        scheduler.submit(sequence)
        while not sink.ended or scheduler.active_sequences:
            scheduler.turn()
        return sequence


@contextmanager
def first_logits() -> Iterator[dict[int, tuple[SamplerRow, mx.array]]]:
    """What requests' first tokens are drawn by meanwhile, whichever row of a pass that is: by the identity of
    their samplers, (sampler, logits in float32)."""
    found: dict[int, tuple[SamplerRow, mx.array]] = {}
    own = BatchSampler.__call__

    def watched(self: BatchSampler, logits: mx.array) -> mx.array:
        for index, sampler in enumerate(self.rows):
            if id(sampler) not in found:
                found[id(sampler)] = sampler, logits[index].astype(mx.float32)
                mx.eval(found[id(sampler)][1])
        return own(self, logits)

    BatchSampler.__call__ = watched
    try:
        yield found
    finally:
        BatchSampler.__call__ = own


class Collector:
    """A sink that only waits for the end."""

    ended = False

    def progress(self, event: Any) -> None: ...

    def take(self, drawn: Any, count: Any) -> None: ...

    def count(self, work: Any) -> None: ...

    def finished(self, sequence: Sequence, reason: str) -> None:
        self.ended = True

    def failed(self, sequence: Sequence, error: Exception) -> None:
        raise error
