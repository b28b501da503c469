"""Counts the work of one scheduler: tokens, steps and seconds."""

from __future__ import annotations

import time
from collections import Counter

import mlx.core as mx

from ..mlx_adapter import Adapter
from ..sequence.sequence import Sequence

Tokens = Counter[Adapter | None]


class Counts:
    """Tokens by adapter, or by None for the model itself; steps and seconds of all. Any thread may read.

    prefilled      of prompts, that were computed
    restored_hot, restored_cold  of prompts, that were cached: once the first token is there, or it ends
    decoded        of answers, as far as these have them
    steps          passes and layers: it grows while work gets done
    decodes        decode steps, one of each batch; decode_s: their seconds
    """

    def __init__(self) -> None:
        self.prefilled, self.decoded = Tokens(), Tokens()
        self.restored_hot, self.restored_cold = Tokens(), Tokens()
        self.steps, self.decodes, self.decode_s = 0, 0, 0.0

    def forget(self, adapter: Adapter) -> None:
        for tokens in (self.prefilled, self.decoded, self.restored_hot, self.restored_cold):
            tokens.pop(adapter, None)

    def count_prompt(self, sequence: Sequence, computed: int) -> None:
        """Count tokens of a prompt that were `computed`."""
        if not (sequence.again or sequence.carried):
            self.prefilled[sequence.adapter] += computed

    def count_restored(self, sequence: Sequence) -> None:
        """Count the tokens that it restored: before its first token is noted, or as it ends without one."""
        stats = sequence.stats
        if not (stats.first_token_s or sequence.again or sequence.carried):
            self.restored_hot[sequence.adapter] += stats.restored_hot
            self.restored_cold[sequence.adapter] += stats.restored_cold

    def count_token(self, adapter: Adapter | None) -> None:
        self.decoded[adapter] += 1

    def note_good(self, sequence: Sequence) -> None:
        """The KV of `sequence` so far gave finite logits."""
        stats = sequence.stats
        stats.end_pass()
        self.count_restored(sequence)
        stats.first_token_s = stats.first_token_s or time.monotonic() - stats.asked
        sequence.kv.stored.clear()
        stats.peak_bytes = max(stats.peak_bytes, mx.get_peak_memory())
