"""Sequences that decode together: one forward pass a step, joined and left between steps.

A step is started before the one before it has been read, so the device never waits for the host:
`step` starts step n + 1 from tokens that are still on the device, then hands out those of step n.
A row that ends is noticed one step late; its extra token is thrown away.

One row keeps the cache that it was prefilled into: no merge, no padding, no mask. Joining copies
every row's KV (stock attention wants one array), which is why `best_batch` weighs it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, cast

import mlx.core as mx

from .. import mlx_adapter
from ..mlx_adapter import LoadedModel
from ..sequence import SamplerRow, Sequence
from .sampling import NO_TOKEN, BatchSampler, StepLogprobs, set_likelihoods


class DecodeBatch:
    """`model`: called as model(tokens (rows, 1), cache=…). Rows are `Sequence`s, prefilled."""

    def __init__(self, model: Any):
        self._model = model
        self.rows: list[Sequence] = []
        self._cache: mlx_adapter.Cache = []
        self._merged = False
        self._inputs: mx.array | None = None
        self._unread: list[bool] = []
        self._sampler: BatchSampler | None = None
        self._logprobs: tuple[list[SamplerRow], StepLogprobs | None] = [], None

    def __len__(self) -> int:
        return len(self.rows)

    # ----------------------------------------------------------------- joining and leaving

    def add_row(self, sequence: Sequence) -> None:
        """Add a prefilled row whose first token has been sampled, read and reported."""
        if not self.rows:
            self._cache, self._merged = sequence.take_cache(), False
        else:
            if not self._merged:
                self._cache, self._merged = mlx_adapter.merge([self._cache]), True
            mlx_adapter.extend(self._cache, sequence.take_cache())
        _advance(sequence, sequence.tokens[-1])
        first = mx.array([sequence.tokens[-1]])
        self._inputs = first if self._inputs is None else mx.concatenate([self._inputs, first])
        self._unread.append(False)
        self.rows.append(sequence)
        self._sampler = None

    def remove_rows(self, rows: Seq[Sequence]) -> None:
        """Remove `rows`. What they need of the cache must have been copied before."""
        keep = [i for i, sequence in enumerate(self.rows) if sequence not in rows]
        self.rows = [self.rows[i] for i in keep]
        self._unread = [self._unread[i] for i in keep]
        self._sampler = None
        if not keep:
            self._cache, self._inputs, self._merged = [], None, False
            self._logprobs = [], None
            return
        assert self._inputs is not None
        mlx_adapter.keep_rows(self._cache, keep)
        self._inputs = self._inputs[mx.array(keep)]

    def row_tensors(self, sequence: Sequence, start: int, stop: int) -> dict[str, mx.array]:
        """KV of tokens `start` to `stop` of a row; lazy slices. Evaluate and drop them before `step`."""
        if not self._merged:
            tensors = mlx_adapter.tensors(self._cache)
            return {name: array[:, :, start:stop] for name, array in tensors.items()}
        index = self.rows.index(sequence)
        return mlx_adapter.row_tensors(self._cache, index, sequence.kv_length, start, stop)

    def row_states(self, sequence: Sequence) -> dict[str, mx.array]:
        """State of a row that exists only at its position; lazy, as `row_tensors`."""
        if not self._merged:
            return mlx_adapter.state_tensors(self._cache)
        return mlx_adapter.row_states(self._cache, self.rows.index(sequence))

    # ----------------------------------------------------------------- stepping

    def step(self) -> list[tuple[Sequence, int]]:
        """Start a step, and return the tokens of the one before it (none on the first)."""
        inputs, unread = self._inputs, self._unread
        assert inputs is not None
        if self._sampler is None:
            self._sampler = BatchSampler([sequence.sampler for sequence in self.rows])
        deltas = [sequence.images.delta if sequence.images is not None else 0 for sequence in self.rows]
        moved = {"deltas": deltas} if any(deltas) else {}
        logits = self._model(inputs[:, None], cache=self._cache, **moved)[:, -1, :]
        if self._sampler.constrained:
            # What a constrained row may say follows from its token of the step before: that is read
            # here, while the device is at work on this one.
            mx.async_eval(logits)
            tokens = self._read_tokens(inputs, unread)
            for sequence, token in tokens:
                _advance(sequence, token)
        else:
            tokens = None
        self._inputs = self._sampler(logits)
        likelihoods = self._sampler.logprobs
        mx.async_eval(self._inputs, *(likelihoods or ()))
        self._unread = [True] * len(self.rows)
        for sequence in self.rows:
            sequence.kv_length += 1
        if tokens is None:
            tokens = self._read_tokens(inputs, unread)
        self._logprobs = self._sampler.rows, likelihoods
        return tokens

    def wait(self) -> None:
        """Until the step that was started last has been computed."""
        if self._inputs is not None:
            mx.eval(self._inputs)

    def _read_tokens(self, inputs: mx.array, unread: list[bool]) -> list[tuple[Sequence, int]]:
        """Wait for the tokens of the step before."""
        if not any(unread):
            return []
        tokens = cast(list[int], inputs.tolist())
        set_likelihoods(*self._logprobs)
        rows = zip(self.rows, tokens, unread, strict=True)
        return [(sequence, token) for sequence, token, new in rows if new]


def _advance(sequence: Sequence, token: int) -> None:
    """Advance a row's constraint by its newest token; if that fails, the row alone does."""
    constraint = sequence.sampler.constraint
    if constraint is None or token == NO_TOKEN:
        return
    constraint.advance(token)
    if constraint.error is not None and not sequence.cancelled:
        sequence.sink.failed(sequence, constraint.error)
        sequence.cancelled = True


MASKED_COST = 6.0
"""Times the KV bytes of rows of unequal length, where attention with a mask leaves its fused kernel.

CUDA, H100, 8B shape in bfloat16, ms a layer with and without a mask: 8 rows padded to 4,096 tokens 0.40 and
0.13, 8 to 32,000 2.2 and 0.42, 32 to 16,000 4.4 and 0.76, 2 to 100,000 1.7 and 0.31. So 32,768 and 4,096
tokens decode at 79 tok/s in two passes and at 62 in one (tools/bench/gpu.py --only uneven).
"""


def best_batch(batches: Seq[DecodeBatch], sequence: Sequence, loaded: LoadedModel) -> DecodeBatch | None:
    """The batch whose step grows least in bytes read by taking the sequence in; None: a new one grows less.

    A step reads the weights once and every row padded to the longest. Joining a batch of much
    longer or shorter rows can cost more than a pass of its own (facts: 219 ms against 115).
    """
    if not loaded.batchable:
        return None
    per_token = loaded.layout.nbytes(1) if loaded.layout else 0
    masked = MASKED_COST if mlx_adapter.backend() == "cuda" and not mlx_adapter.reads_own_rows() else 1.0

    def kv_cost(lengths: list[int]) -> float:
        longest = max(lengths)
        uneven = min(lengths) < longest
        return len(lengths) * longest * per_token * (masked if uneven else 1.0)

    best, best_cost = None, loaded.weight_bytes + kv_cost([sequence.kv_length])
    for batch in batches:
        lengths = [row.kv_length for row in batch.rows]
        cost = kv_cost([*lengths, sequence.kv_length]) - kv_cost(lengths)
        if cost <= best_cost:
            best, best_cost = batch, cost
    return best
