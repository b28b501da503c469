"""Which prompt is computed next, and how much of it before the rows that decode get their turn."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from .sequence import Sequence

IDLE_CHUNK = 2048
"""Tokens a chunk when nothing decodes: mlx-lm's own prefill step."""

MIN_CHUNK = 256
"""Tokens a chunk at least, while others decode: below it a chunk's cost is mostly fixed."""

SLICE_S = 0.25
"""Seconds that a chunk may hold up decoding rows, as far as the measured rate foretells."""

SMOOTHING = 0.3
"""Weight of the newest chunk in the rate."""

OVERTAKE = 4
"""A prompt with this many times less to compute goes before one that has begun."""


PATIENCE = 16
"""Times that a prompt is overtaken in a row: then it gets a chunk, or short ones could starve it."""


class PrefillPacer:
    """`rate`: tokens a second, measured over the chunks so far; 0 before the first."""

    def __init__(self, block_size: int):
        self._block = block_size
        self.rate = 0.0

    def pick(self, ready: Seq[Sequence]) -> Sequence:
        """The one that has begun, else the first come; a much shorter one goes before either."""
        current = min(ready, key=lambda s: (s.kv_length == 0, s.arrival))
        shortest = min(ready, key=lambda s: s.remaining_prefill)
        short = shortest.remaining_prefill * OVERTAKE <= current.remaining_prefill
        if short and current.overtaken < PATIENCE:
            current.overtaken += 1
            return shortest
        current.overtaken = 0
        return current

    def next_stop(self, sequence: Sequence, *, decoding: bool) -> int:
        """Where the next chunk of `sequence` ends. The last one begins at its last boundary, or past it."""
        start, last = sequence.kv_length, self.last_boundary(sequence)
        if start >= last:
            stop = sequence.prompt_length
        else:
            stop = min(last, self.chunk_end(start, decoding=decoding))
        fork = sequence.fork * self._block
        return min(stop, fork) if start < fork else stop

    def last_boundary(self, sequence: Sequence) -> int:
        """The last multiple of a block before the prompt's end."""
        return (sequence.prompt_length - 1) // self._block * self._block

    def chunk_end(self, start: int, *, decoding: bool) -> int:
        """Where a chunk that begins at token `start` ends: the next multiple of the budget."""
        budget = IDLE_CHUNK
        if decoding and self.rate:
            budget = max(MIN_CHUNK, min(IDLE_CHUNK, int(self.rate * SLICE_S)))
            # Powers of two keep chunks on one absolute grid, whatever the rate was.
            budget = 1 << (budget.bit_length() - 1)
        budget = max(budget, self._block)
        return (start // budget + 1) * budget

    def note(self, tokens: int, seconds: float) -> None:
        """A chunk of `tokens` took `seconds`."""
        rate = tokens / max(seconds, 1e-6)
        self.rate = rate if not self.rate else (1 - SMOOTHING) * self.rate + SMOOTHING * rate
