"""Where the blocks of a cached prefix arrive, and how they become a sequence's cache.

| transport | I/O threads read into          | the cache                     | hot tier                    |
|-----------|--------------------------------|-------------------------------|-----------------------------|
| direct    | arrays of their final size     | is those arrays               | reads again, in background  |
| staged    | payloads on the device         | is joined, as at a hot hit,   | keeps those payloads        |
|           |                                | while the rest is read        |                             |

Which one: engine/kvio/transport.py.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from ....kv.layout import KVLayout
from ... import mlx_adapter
from ...mlx_adapter import Cache, LiveSegments, Segment
from ...sequence.sequence import Sequence as Request
from ..payload import DirectBuffers, MLXPayload, append_blocks, read_payload
from ..transport import Load

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
        names = [*self._segments.names(sequence.kv.hashes, self._block, sequence.prompt.length)]
        for index in range(full):
            made = Segment(self._buffers[index].take_arrays(), self._segments.how)
            segments.append(self._segments.hold(made, names[len(segments)]))
        tail = self._buffers[full].take_arrays() if blocks % self._each else {}
        tokens = base + blocks * self._block
        base += full * self._segments.tokens
        cache = mlx_adapter.filled_cache(model, tail, tokens, segments, base)
        length, capacity = sequence.prompt.length, sequence.capacity
        self._segments.cut(cache, sequence.kv.hashes, self._block, length, capacity, last=False)
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
        segments, length, capacity = self._segments, sequence.prompt.length, sequence.capacity
        run = [payload for payload in self._payloads[self._joined : end] if payload is not None]
        at = sum(segment.tokens for segment in live) + self._joined * self._block
        room = at + segments.tokens if segments.tokens and len(run) == self.run else capacity
        append_blocks(self._layout, cache, run, at, self._block, room)
        segments.cut(cache, sequence.kv.hashes, self._block, length, capacity, last=False)
        self._joined = end

    def payloads(self) -> Seq[MLXPayload | None]:
        return list(self._payloads)
