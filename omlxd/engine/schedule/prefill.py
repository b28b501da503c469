"""Chunked prefill: which prompt is computed next, and how many tokens of it in one pass (forward.py).

vLLM bounds a pass by `max_num_batched_tokens`; here the backend does:

| backend | tokens in a pass                          | so KV has the same bits                      |
|---------|-------------------------------------------|----------------------------------------------|
| CPU     | 64 tokens, or a block if that is more     | whatever was restored and whoever else runs, |
|         |                                           | also where sums depend on a pass's shape     |
| CUDA    | `PREFILL_CHUNK`                           | whatever was restored, by prompt_shapes.py;  |
|         |                                           | with packed weights or experts for runs that |
|         |                                           | begin at the same place                      |
| Metal   | a power of two: what takes half a second, | likewise, at rates that give the same pass   |
|         | at most `PREFILL_CHUNK`                   |                                              |

Passes end on an absolute grid. They do not shrink for decoding rows, which step between the layers of
a pass (forward.py), so bits don't depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from ...common.units import CPU_PREFILL_CHUNK, PREFILL_CHUNK
from .. import mlx_adapter
from ..sequence.sequence import Sequence
from .waiting.priority import Levels, pass_levels

SLICE_S = 0.5
"""Seconds that a pass may take on Metal, as far as the measured rate foretells. Other GPUs are never so
slow as to need it. Sizes by a rate, which first passes pull down, since they load kernels, would give the
same prompt other bits in another daemon."""

SMOOTHING = 0.3
"""Weight of the newest pass in the rate, if it was slower."""

OVERTAKE = 4
"""A prompt with this many times less to compute goes before one that has begun."""


PATIENCE = 1.0
"""Tokens of much shorter prompts that go before another one, as a multiple of what that has left to compute:
it takes twice as long at most. As 16 passes of others, whatever they computed, the fourth of four sub-agents
on a CPU waited 47 s for the others' turns of 107 tokens each."""


TOGETHER = 256
"""Tokens of several prompts' ends in one pass, with padding, on a CPU and on Metal. An end that could have
begun waits for so many tokens of other short rests, at most, until their ends share its pass.

SmolLM2-135M in float32 with OpenBLAS, 2,560 cached tokens, answers of 16 (tools/bench/prompt_ends.py), median
of 2; processor seconds beside other work. One after another, those that have begun decode beside the rest.

| rests         | together: first tokens, all have ended | one after another             |
|---------------|----------------------------------------|-------------------------------|
| 4 of 40       | 3.02, 6.11                             | 1.01, 2.42, 4.94, 7.20, 9.20  |
| 2 of 60       | 2.49, 4.86                             | 1.52, 5.05, 7.38              |
| 4 of 60       | 4.54, 7.34                             | 1.20, 2.91, 5.79, 8.89, 10.80 |
| 8 of 20       | 3.09, 7.52                             | 0.60, 1.38 ... 8.80, 11.25    |
| 3 of 64 + 12  | 4.99, 8.01                             | 1.77, 4.49, 8.67, 10.72       |
| 4 of 64 + 12  | 5.63, 8.41                             | 1.64, 4.07, 7.53, 11.15, 13.16|
| 2 of 64 + 56  | 4.56, 7.00                             | 2.52, 6.82, 8.89              |

Beside a decoder whose step takes 0.11 to 0.15 its longest gap is 0.34 to 0.43 either way. Full blocks, which
are stored, each have a pass of their own: what is stored does not depend on who else runs.

A backend that does not pad ends (`pads_last_chunks`) does so only where ends are computed as steps are
(end_steps.py): rows of another pass are copied into one array first.
"""


MOST_PADDED = 1.25
"""Tokens of a pass over several ends, with padding, as a multiple of their own; those that need no more than
a block with it have any. Three ends of 18, 18 and 50 tokens in one pass took 1.9 s of a CPU, and 1.35 s one
by one; ends of 10, 5 and 49 behind a block each 5.7 and 4.7."""


class PrefillBudget:
    """`rate`: tokens a second, measured over the passes so far; 0 before the first.

    largest       tokens a pass at most; a `limit` that is not 0 bounds it, down to one block
    together      `TOGETHER`, within that limit
    follows_rate  passes are as large as the rate says
    """

    def __init__(self, block_size: int, limit: int = 0):
        self._block = block_size
        self._backend = mlx_adapter.backend()
        self.set_limit(limit)
        self.follows_rate = self._backend == "metal"
        self.rate = 0.0
        self._levels = Levels[tuple[int, bool]]()

    def set_limit(self, limit: int) -> None:
        """Bound passes from now on; 0: as suits the device."""
        most = CPU_PREFILL_CHUNK if self._backend == "cpu" else PREFILL_CHUNK
        self.largest, self.together = max(self._block, most), TOGETHER
        if limit:
            limit = max(self._block, limit // self._block * self._block)
            self.largest, self.together = min(self.largest, limit), min(TOGETHER, limit)

    def pick_sequence(self, sequences: Seq[Sequence]) -> Sequence:
        """The one whose next pass is the next. Of those whose turn it is by priority: the one that has begun,
        else the first that got its slot; a much shorter one goes before either."""
        levels = pass_levels(sequences)
        level = self._levels.next_level(levels.values())
        self._levels.take_turn(level)
        sequences = [sequence for sequence in sequences if levels[sequence] == level]
        sequence = min(sequences, key=lambda sequence: (not sequence.begun, sequence.stats.admitted))
        shortest = min(sequences, key=self._to_compute)
        left, less = self._to_compute(sequence), self._to_compute(shortest)
        if less * OVERTAKE <= left and sequence.stats.overtaken + less <= PATIENCE * left:
            sequence.stats.overtaken += self._next_pass(shortest)
            return shortest
        return sequence

    def before_its_end(self, first: Sequence, sequences: Seq[Sequence]) -> Sequence | None:
        """Another one with a short rest, which goes before the end of `first`, so that one pass computes both
        ends. None: there is none, or `first` is not at its end."""
        if not self._end(first):
            return None
        ends = [self._end(sequence) for sequence in self.ends_together(first, sequences)]
        for other in sorted(sequences, key=self._to_compute):
            its_end = other.prompt.length % self._block if other.prompt.length > self._block else 0
            alike = mlx_adapter.may_share_pass([first.adapter, other.adapter])
            joins = other is not first and its_end and alike and self._is_plain(other)
            waits = first.stats.overtaken + self._to_compute(other) <= TOGETHER
            if joins and waits and self._fit([*ends, its_end]) and not self._end(other):
                first.stats.overtaken += self._next_pass(other)
                return other
        return None

    def ends_together(self, first: Sequence, sequences: Seq[Sequence]) -> list[Sequence]:
        """Sequences whose prompts' ends one pass may compute: `first`, and others if that is one of them."""
        together, ends = [first], [self._end(first)]
        for sequence in sorted(sequences, key=lambda sequence: sequence.arrival):
            end = self._end(sequence)
            alike = mlx_adapter.may_share_pass([row.adapter for row in (sequence, *together)])
            if sequence is not first and end and alike and self._fit([*ends, end]):
                together.append(sequence)
                ends.append(end)
        return together if ends[0] else [first]

    def _fit(self, ends: Seq[int]) -> bool:
        """Whether one pass may compute them: rows as long as the longest, but where steps do."""
        padded = max(ends) * len(ends)
        pads = mlx_adapter.attention_backend().pads_last_chunks
        return padded <= self.together and (not pads or padded <= max(self._block, sum(ends) * MOST_PADDED))

    def _end(self, sequence: Sequence) -> int:
        """Tokens of its last pass, if that is next, behind KV that it has or will find in RAM; else 0.

        An end that fills a block is none: what is stored of a prompt does not depend on who else runs.
        """
        behind = self._behind(sequence)
        last = behind and self._is_plain(sequence) and behind >= sequence.last_boundary(self._block)
        return sequence.prompt.length - behind if last and sequence.prompt.length % self._block else 0

    @staticmethod
    def _is_plain(sequence: Sequence) -> bool:
        """Whether a pass may compute its end and others'."""
        others = (
            sequence.prompt.images is not None
            or sequence.prompt.keys_file
            or sequence.prompt.labels
            or sequence.prompt.write_kv
        )
        return not others

    def _to_compute(self, sequence: Sequence) -> int:
        """Tokens of its prompt that are left to compute."""
        return sequence.prompt.length - self._behind(sequence)

    def _next_pass(self, sequence: Sequence) -> int:
        """Tokens of its next pass, where its own checkpoints do not end that before."""
        behind = self._behind(sequence)
        last = sequence.last_boundary(self._block)
        end = min(last, self.chunk_end(behind)) if behind < last else sequence.prompt.length
        return end - behind

    def _behind(self, sequence: Sequence) -> int:
        """Tokens of its prompt that it has KV of, or will find in RAM before its first pass."""
        if sequence.kv.length or sequence.kv.table is None or sequence.kv.compute_to:
            return sequence.kv.length
        return len(sequence.kv.table.blocks) * self._block

    def next_stop(self, sequence: Sequence) -> int:
        """Where the next pass of `sequence` ends. The last one begins at its last boundary, or past it."""
        start, last = sequence.kv.length, sequence.last_boundary(self._block)
        if start >= last:
            return sequence.prompt.length
        checkpoints = (
            blocks * self._block for blocks in (sequence.kv.divergence, *sequence.kv.before_images)
        )
        places = (place for place in (*checkpoints, sequence.kv.compute_to) if start < place)
        stop = min(last, self.chunk_end(start), *places)
        while not sequence.may_end(stop):
            stop += self._block
        return stop

    def chunk_end(self, start: int) -> int:
        """Where a pass that begins at token `start` ends: the next multiple of its size."""
        size = self.largest
        if self.follows_rate:  # Without one, a pass of one block.
            size = 1 << max(1, min(size, int(self.rate * SLICE_S))).bit_length() - 1
        size = max(size, self._block)
        return (start // size + 1) * size

    def seconds(self, tokens: int) -> float:
        """How long a pass of `tokens` is thought to take; infinite before the first."""
        return tokens / self.rate if self.rate else float("inf")

    def begin_with(self, rate: float) -> None:
        """Have the first pass follow `rate`, where passes follow one."""
        if self.follows_rate:
            self.rate = rate

    def record_pass(self, tokens: int, seconds: float) -> None:
        """A pass of `tokens` took `seconds`."""
        rate = tokens / max(seconds, 1e-6)
        self.rate = max(rate, (1 - SMOOTHING) * self.rate + SMOOTHING * rate)


STEP_SHARE = 0.7
"""Prefill between two steps, as a share of a step, which takes longer beside a prefill than alone.

SmolLM2's shape, 1,024 tokens beside one row (tools/bench/prefill_gap.py, 2 CPUs), median gap alone and
beside: 70 and 153 ms with 1.0, 69 and 124 with this; the cold prompt 16.4 and 20.4 s.
"""


LEAST_SLICE_S = 0.03
"""Prefill between two steps, at least. A gap of 40 ms nobody notices, and beside steps of 8 ms, as of an 8B
shape on an H200, `STEP_SHARE` alone leaves prompts two fifths of the device.

Two agents and two sub-agents, then four growing sessions there (tools/bench/turns.py), seconds of both runs:

| least | all answered | TTFT p50   | TTFT p90   | gap p99    |
|-------|--------------|------------|------------|------------|
| 0     | 7.9, 9.8     | 0.66, 0.47 | 6.0, 4.5   | 0.09, 0.08 |
| 0.03  | 8.7, 8.4     | 0.64, 0.41 | 5.2, 2.3   | 0.12, 0.12 |
| 0.06  | 6.7, 7.9     | 0.60, 0.44 | 3.4, 2.1   | 0.15, 0.16 |

(The second row was the first server on that host, which has what is slow once.)
"""


MOST_SLICE_S = 0.25
"""Seconds of prefill between two steps, at most, where more prompts wait than rows decode. Up to it, each
request gets the same share of the device.

Four growing sessions at once (tools/bench/turns.py --grow, 800 tokens and three turns of 70, answers of 32),
SmolLM2-135M in float32 with OpenBLAS, seconds of two runs each, in turn:

|                     | all answered | TTFT p90   | later turns, p50 | gap p99    |
|---------------------|--------------|------------|------------------|------------|
| `STEP_SHARE` alone  | 66.2, 68.0   | 39.6, 40.9 | 2.9, 3.1         | 0.32, 0.32 |
| this                | 60.3, 61.9   | 30.4, 30.5 | 2.5, 2.7         | 0.43, 0.47 |
| three steps, always | 51.2         | 21.4       | 1.6              | 0.69       |
"""


def slice_seconds(step_s: float, layer_s: float, prompts: int = 1, rows: int = 1) -> float:
    """Seconds of prefill between two decode steps, so that a gap between tokens is at most two steps alone,
    or a step and `LEAST_SLICE_S`; longer, up to `MOST_SLICE_S`, where `prompts` outnumber `rows`.

    Whole layers, since a layer is never interrupted: one that takes longer than a step has one step after
    it, and the gap is a step and that layer. (The other bound keeps what is left of a pass after its last
    layer from being taken for one.)

    Measured with layers that sleep (a step as long as 21 prompt tokens and more, 320 tokens beside one row):

    | layers × seconds a layer, in steps | half a step: gap, cold prompt | this: gap, cold prompt |
    |------------------------------------|-------------------------------|------------------------|
    | 16 × 0.25                          | 1.5, 8.8 s                    | 1.6, 6.8 s             |
    | 4 × 1.0                            | 2.1, 4.1 s                    | 2.0, 4.0 s             |
    | 4 × 2.9                            | 3.5, 8.6 s                    | 3.6, 8.3 s             |

    Half a step gives prefill a third of the device, which made a cold prompt three times as long.
    """
    slice_s = STEP_SHARE * step_s
    if prompts > rows:
        slice_s = max(slice_s, min(prompts / rows * step_s, MOST_SLICE_S))
    return max(slice_s - layer_s, layer_s / 2, LEAST_SLICE_S - layer_s / 2)
