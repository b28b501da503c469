"""One prefix on its way from the tiers into a sequence's cache.

| transport | I/O threads read into          | the cache                     | hot tier                    |
|-----------|--------------------------------|-------------------------------|-----------------------------|
| direct    | arrays of their final size     | is those arrays               | reads again, in background  |
| staged    | payloads on the device         | is joined, as at a hot hit,   | keeps those payloads        |
|           |                                | while the rest is read        |                             |

Which one: engine/kvio/transport.py. Both end with the longest prefix whose every block was good. One that
turns out to be slow ends early, with what it has read by then (rates.py).

Through the whole daemon over HTTP, H100, 8B shape, page cache warm, ms to the first token (medians of
two, tools/bench/serve.py):

    prompt      computed     hot     after kill -9
     4,096           584      79               159
    16,384           905     127               290
    32,768         1,407     191               377
    98,304         7,973     388             1,068
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from ...kv.layout import KVLayout
from .. import mlx_adapter
from ..mlx_adapter import Cache, LiveSegments, Segment
from ..sequence import Sequence as Request
from .payload import DirectBuffers, MLXPayload, append_blocks, read_payload
from .rates import LEAST_S
from .transport import Load, transport

if TYPE_CHECKING:
    from .cold_reads import ColdReads

log = logging.getLogger(__name__)

JOINED_TOKENS = 8192
"""Tokens that one join takes where KV is not cut into segments. Joins of 32,000 tokens of 36 layers, in 16
segments, take 70 ms of the engine thread's processor time on a CPU; all but the last pass while other
segments are read."""


class DirectArrival:
    """Where blocks arrive: in arrays of their final size, one set a segment if KV is cut into those.

    `put_block` and `load_block` run on I/O threads, an index each. `capacity`: tokens
    """

    run = 0

    def __init__(self, layout: KVLayout, segments: LiveSegments, capacity: int, block_size: int, blocks: int):
        self._segments, self._block = segments, block_size
        self._each = segments.tokens // block_size or blocks + 1
        full, room = blocks // self._each, mlx_adapter.round_up(capacity)
        if segments.tokens:
            room = mlx_adapter.round_up(max(1, capacity - full * segments.tokens))
        sizes = [segments.tokens] * full + [room]
        self._buffers = [DirectBuffers(layout, size, block_size) for size in sizes]

    def put_block(self, index: int, payload: MLXPayload) -> None:
        """Block `index` is hot."""
        self._buffers[index // self._each].put_block(index % self._each, payload)

    def load_block(self, index: int, load: Load) -> bool:
        """Block `index` is what `load` fills in. False: it could not."""
        return load(self._buffers[index // self._each].pieces(index % self._each))

    def make_cache(self, model: Any, live: Seq[Segment], sequence: Request, blocks: int) -> Cache:
        """A cache of `live`, and of the first `blocks` blocks behind; the arrival is over."""
        segments, full, base = [*live], blocks // self._each, sum(segment.tokens for segment in live)
        names = [*self._segments.names(sequence.hashes, self._block, sequence.prompt_length)]
        for index in range(full):
            made = Segment(self._buffers[index].take_arrays(), self._segments.how)
            segments.append(self._segments.hold(made, names[len(segments)]))
        tail = self._buffers[full].take_arrays() if blocks % self._each else {}
        tokens = base + blocks * self._block
        base += full * self._segments.tokens
        cache = mlx_adapter.filled_cache(model, tail, tokens, segments, base)
        length, capacity = sequence.prompt_length, sequence.capacity
        self._segments.cut(cache, sequence.hashes, self._block, length, capacity, last=False)
        return cache

    def payloads(self) -> Seq[MLXPayload | None]:
        """What the hot tier may keep of the blocks. Before `make_cache`."""
        return ()


class StagedArrival:
    """As `DirectArrival`, in payloads that are joined: twice the bytes until the pool has them.

    run  blocks that are joined at a time
    """

    def __init__(self, layout: KVLayout, segments: LiveSegments, block_size: int, blocks: int):
        self._layout, self._segments, self._block = layout, segments, block_size
        self._payloads: list[MLXPayload | None] = [None] * blocks
        self.run = max(1, (segments.tokens or JOINED_TOKENS) // block_size)
        self._cache: Cache | None = None
        self._joined = 0

    def put_block(self, index: int, payload: MLXPayload) -> None:
        self._payloads[index] = payload

    def load_block(self, index: int, load: Load) -> bool:
        self._payloads[index] = payload = read_payload(self._layout, self._block, load)
        return payload is not None

    def join(self, model: Any, live: Seq[Segment], sequence: Request, blocks: int) -> None:
        """Join the whole runs of the first `blocks` blocks, which are there, behind `live`. Engine thread."""
        if self._cache is None:
            at = sum(segment.tokens for segment in live)
            self._cache = mlx_adapter.filled_cache(model, {}, at, live, at)
        while self._joined + self.run <= blocks:
            self._join(self._cache, live, sequence, self._joined + self.run)

    def make_cache(self, model: Any, live: Seq[Segment], sequence: Request, blocks: int) -> Cache:
        if self._joined > blocks:
            self._cache, self._joined = None, 0
        self.join(model, live, sequence, blocks)
        cache, self._cache = self._cache, None
        assert cache is not None
        if self._joined < blocks:
            self._join(cache, live, sequence, blocks)
        self._payloads = []
        return cache

    def _join(self, cache: Cache, live: Seq[Segment], sequence: Request, end: int) -> None:
        """Join the blocks up to `end` to those that are joined."""
        segments, length, capacity = self._segments, sequence.prompt_length, sequence.capacity
        run = [payload for payload in self._payloads[self._joined : end] if payload is not None]
        at = sum(segment.tokens for segment in live) + self._joined * self._block
        room = at + segments.tokens if segments.tokens and len(run) == self.run else capacity
        append_blocks(self._layout, cache, run, at, self._block, room)
        segments.cut(cache, sequence.hashes, self._block, length, capacity, last=False)
        self._joined = end

    def payloads(self) -> Seq[MLXPayload | None]:
        return list(self._payloads)


class Restore:
    """One of `reads`: begun and settled on the engine thread, where `ready`, which gets it, ends it.

    splits  if it ends early, the rest is read and computed at once: the sequence's table keeps it
    """

    def __init__(self, reads: ColdReads, sequence: Request, ready: Callable[[Restore], None], splits: bool):
        self._reads, self._splits = reads, splits
        self._began, self._read = 0.0, 0
        self.ended_early = False
        self._layout, self._store, self._states = reads.layout, reads.store, reads.states
        self._sequence = sequence
        self._ready = ready
        assert sequence.table is not None
        sequence.restores += 1
        self._block = self._store.block_size
        self._state: MLXPayload | None = None
        self._state_cold = False
        # What others hold already is not read: blocks are those behind.
        self._segments = reads.segments
        hashes = sequence.hashes[: len(sequence.table.blocks)]
        self._live = self._segments.find(self._segments.names(hashes, self._block, sequence.prompt_length))
        self._first = sum(segment.tokens for segment in self._live) // self._block
        self._blocks = sequence.table.blocks[self._first :]
        self._cold = [block.payload is None for block in self._blocks]
        self._keys = [sequence.key(self._first + i, self._block) for i in range(len(self._blocks))]
        self._good: list[bool | None] = [None] * len(self._blocks)  # None: not tried.
        self._left = len(self._blocks) + 1
        self._next, self._to_read = itertools.count(), sum(self._cold)
        self._lock = threading.Lock()
        self._arrival: DirectArrival | StagedArrival | None = None
        self._tried: Counter[int] = Counter()  # Blocks of each run.
        self._not_joined: Exception | None = None

    def start(self) -> None:
        self._reads.readers.submit(self._allocate)

    def _allocate(self) -> None:
        try:
            capacity = self._sequence.capacity - self._first * self._block
            if transport().direct:
                self._arrival = DirectArrival(
                    self._layout, self._segments, capacity, self._block, len(self._blocks)
                )
            else:
                self._arrival = StagedArrival(self._layout, self._segments, self._block, len(self._blocks))
        except Exception:
            log.exception("restore: can't allocate")
            self._reads.post(self._settle)
            return
        self._began = time.perf_counter()
        self._reads.readers.submit(self._fill_state)
        for _ in range(min(self._reads.threads, len(self._blocks))):
            self._reads.readers.submit(self._fill_next)

    def _fill_state(self) -> None:
        try:
            if self._states is not None:
                self._state, self._state_cold = self._states.read(self._sequence)
        except Exception:
            log.exception("restore: a checkpoint failed")
        finally:
            self._one_less()

    def _fill_next(self) -> None:
        """Fill block after block: a task for each would cost more turns at Python's lock."""
        while (index := next(self._next)) < len(self._blocks):
            self._fill(index)

    def _fill(self, index: int) -> None:
        arrival = self._arrival
        assert arrival is not None
        try:
            payload = self._blocks[index].payload
            if isinstance(payload, MLXPayload):
                arrival.put_block(index, payload)
                self._good[index] = True
            elif not (self._sequence.cancelled or self.ended_early):
                self._good[index] = False
                key = self._keys[index]
                self._good[index] = arrival.load_block(index, lambda views: self._store.load_into(key, views))
                self._count_read()
        except Exception:
            log.exception("restore: block %d failed", index)
        finally:
            if run := arrival.run:
                with self._lock:
                    self._tried[index // run] += 1
                    ends_run = self._tried[index // run] == run
                if ends_run:
                    self._reads.post(self._join)
            self._one_less()

    def _count_read(self) -> None:
        with self._lock:
            self._read += 1
            took, left = time.perf_counter() - self._began, self._to_read - self._read
            if took > LEAST_S and left:
                self.ended_early = self.ended_early or self._reads.is_slow(
                    self._sequence, took / self._read * left, left, splits=self._splits
                )

    def _one_less(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._reads.post(self._settle)

    def _join(self) -> None:
        """On the engine thread: what came is joined while the rest is read."""
        arrival, sequence = self._arrival, self._sequence
        if isinstance(arrival, StagedArrival) and not (sequence.cancelled or self._not_joined):
            try:
                arrival.join(self._reads.model, self._live, sequence, self._good_blocks())
            except Exception as error:  # The end tells: until then threads fill in payloads.
                self._not_joined = error

    def _good_blocks(self) -> int:
        """Blocks before the first that is not there, or not yet."""
        return next((index for index, good in enumerate(self._good) if not good), len(self._good))

    def _settle(self) -> None:
        """On the engine thread: what came becomes the sequence's, or nothing does and it is computed."""
        try:
            self._accept()
        except Exception:  # out of memory, most likely
            log.exception("restore: can't fill a cache")
            sequence = self._sequence
            sequence.cache, sequence.kv_length, sequence.offered, sequence.resume_at = None, 0, 0, 0
            if sequence.table is not None:
                sequence.table.truncate(0)
        self._ready(self)

    def _accept(self) -> None:
        """The good prefix becomes the sequence's cache."""
        sequence, table, arrival = self._sequence, self._sequence.table, self._arrival
        assert table is not None
        self._arrival = None
        good = self._good_blocks()
        if arrival is not None:
            rates, took = self._reads.rates, time.perf_counter() - self._began
            rates.record_read(self._read * rates.block_bytes, took, ended_early=self.ended_early)
            self._keep_or_lose(arrival)
        if self._states is not None and (good < len(self._good) or self._state is None):
            # A checkpoint serves only the whole prefix that it stands on: match again, shorter.
            good = 0
            sequence.resume_at = 0
        if not (self.ended_early and self._splits):
            table.truncate(self._first + good)
        if arrival is not None and (self._first + good or sequence.resume_at):
            self._take_arrival(arrival, good)

    def _keep_or_lose(self, arrival: DirectArrival | StagedArrival) -> None:
        for block, key, fine in zip(self._blocks, self._keys, self._good, strict=True):
            if fine is False:
                self._store.lose(block, key)
        for block, key, payload in zip(self._blocks, self._keys, arrival.payloads(), strict=False):
            if payload is not None:
                self._store.promote(block, key.block_hash, payload)

    def _take_arrival(self, arrival: DirectArrival | StagedArrival, good: int) -> None:
        """The first `good` blocks, and the state that stands behind them."""
        if self._not_joined is not None:
            raise self._not_joined
        sequence, states = self._sequence, self._states
        blocks = sequence.resume_at or self._first + good
        tokens = blocks * self._block
        sequence.cache = arrival.make_cache(self._reads.model, self._live, sequence, good)
        sequence.kv_length, sequence.offered = tokens, blocks
        cold = sum(self._cold[:good])
        if states is not None and self._state is not None:
            states.put_into(sequence.cache, self._state, tokens)
            if self._state_cold:
                states.keep_hot(sequence, self._state)
            if not good:  # no per-token KV: the state is all that there is
                good, cold = blocks, blocks * self._state_cold
        sequence.restored_cold += cold * self._block
        sequence.restored_hot += (self._first + good - cold) * self._block
