"""Less than a block of a sequence's KV, out of its cache and back into another's (kv/tails.py).

Only for a model whose KV is all per token, and only on a CPU. There a row of a pass has the same bits
whatever else is in it, so long as it isn't alone where it would not have been, or the other way round:
a prompt that begins inside of a block keeps to that. On a GPU kernels depend on a pass's size, so that the
logits after a hit would no longer be those of a cold run, and a pass for one token costs as much as
one for a block.

Engine thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..kv.layout import KVLayout
from ..kv.store import KVStore
from . import mlx_adapter
from .payload import MLXPayload, append_blocks, copy_blocks
from .sequence import Sequence, capacity_for

log = logging.getLogger(__name__)

LEAST = 4
"""Tokens that a tail must have to be worth its copies."""


class HotTails:
    """The tails of one engine's store."""

    def __init__(self, model: Any, layout: KVLayout, store: KVStore):
        self._model = model
        self._layout = layout
        self._store = store
        self._block = store.block_size

    def keep(self, sequence: Sequence, tensors: Callable[[int, int], dict[str, mx.array]]) -> None:
        """Keep what follows the sequence's last full block. Its blocks' hashes must be known.

        tensors(start, stop)  as `KVBridge.harvest` gets it
        """
        # An answer's last token has been put through the model, but nobody has seen that numbers came of it.
        full, count = divmod(min(sequence.kv_length, len(sequence.tokens) - 1), self._block)
        start, many = full * self._block, self._many(sequence, full)
        if count <= many + 1:
            count = min(count, many)
        if count < LEAST:
            return
        parent, tokens = self._parent(sequence, full), sequence.tokens[start : start + count]
        if not self._store.wants_tail(parent, tokens, many, self._layout.nbytes(count)):
            return
        try:
            payload = copy_blocks(self._layout, tensors(start, start + count), [0], count)[0]
        except Exception:  # No memory for a copy, most likely: nobody's answer fails for it.
            log.exception("request %d: what follows block %d is not kept", sequence.id, full)
            return
        self._store.put_tail(parent, tokens, min(many, count), payload)

    def note(self, sequence: Sequence, index: int) -> None:
        """The sequence's full block `index` is hot."""
        key = sequence.key(index, self._block)
        many = self._many(sequence, index)
        self._store.pool.tails.put(key.parent, key.tokens, many, key.block_hash)

    def extend(self, sequence: Sequence) -> None:
        """Append what a tail has of the prompt to a cache that ends with a full block: one copy."""
        start = sequence.kv_length
        room = min(self._block, sequence.prompt_length - 1 - start)
        if start % self._block or room < LEAST:
            return
        parent = self._parent(sequence, start // self._block)
        found = self._store.longest_tail(parent, sequence.tokens[start : start + room])
        if found is None:
            return
        payload, count, many = found
        if not isinstance(payload, MLXPayload):
            return
        if room - count == 1:
            count -= 1  # A cold run computes no token of the chunk alone: leave two.
        if count < LEAST:
            return
        if count > many:
            sequence.singly = start + many
        capacity = capacity_for(sequence.prompt_length, sequence.max_new)
        if sequence.cache is None:
            sequence.cache = mlx_adapter.new_cache(self._model, capacity)
        rows = MLXPayload(tuple(array[:, :, :count] for array in payload.arrays))
        append_blocks(self._layout, sequence.cache, [rows], start, count, capacity)
        sequence.kv_length += count
        sequence.restored_hot += count

    def _parent(self, sequence: Sequence, blocks: int) -> bytes:
        return sequence.hashes[blocks - 1] if blocks else sequence.root

    def _many(self, sequence: Sequence, index: int) -> int:
        """Tokens of block `index` up to the first that may have been computed in a pass of its own."""
        start, end = index * self._block, sequence.prompt_length - 1
        if end - start == 1:
            return 0
        if sequence.singly is not None and sequence.singly >= start:
            end = min(end, sequence.singly)
        return max(0, min(self._block, end - start))
