"""Sequences that decode together: one forward pass a step, joined and left between steps.

A step is started before the one before it has been read, so the device never waits for the host:
`step` starts step n + 1 from tokens that are still on the device, then hands out those of step n.
A row that ends is noticed one step late; its extra token is thrown away.

One row keeps the cache that it was prefilled into: no merge, no padding, no mask. Joining copies
every row's KV (stock attention wants one array), which is why `best_batch` weighs it.

One row may also speculate (speculation.py): a pass with guesses is read before the next one starts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Any, cast

import mlx.core as mx

from .. import mlx_adapter
from ..mlx_adapter import LoadedModel
from ..sequence import SamplerRow, Sequence
from .sampling import NO_TOKEN, BatchSampler, StepLogprobs, sampler_rows, set_likelihoods
from .speculation import RowSpeculator, Speculation


class DecodeBatch:
    """Rows are `Sequence`s, prefilled.

    model        called as model(tokens (rows, n), cache=…)
    speculation  of the engine; None: every pass computes one token a row
    """

    def __init__(self, model: Any, speculation: Speculation | None = None):
        self._model = model
        self._speculation = speculation
        self._speculator: RowSpeculator | None = None
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
        self._compose()

    def _compose(self) -> None:
        """The rows have changed."""
        self._sampler = self._speculator = None
        if self._speculation is None or len(self.rows) != 1 or not mlx_adapter.can_trim(self._cache):
            return
        sampler = self.rows[0].sampler
        if self._speculation.repeatable and not sampler.params.greedy and sampler.params.seed is None:
            return
        if sampler.constraint is None and sampler.top_logprobs is None:
            self._speculator = RowSpeculator(self._speculation, self.rows[0].tokens)

    def remove_rows(self, rows: Seq[Sequence]) -> None:
        """Remove `rows`. What they need of the cache must have been copied before."""
        keep = [i for i, sequence in enumerate(self.rows) if sequence not in rows]
        self.rows = [self.rows[i] for i in keep]
        self._unread = [self._unread[i] for i in keep]
        if not keep:
            self._cache, self._inputs, self._merged = [], None, False
            self._logprobs = [], None
        else:
            assert self._inputs is not None
            mlx_adapter.keep_rows(self._cache, keep)
            self._inputs = self._inputs[mx.array(keep)]
        self._compose()

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
        """Start a step, and return the tokens of the one before it (none on the first).

        After a pass with guesses a row has several tokens, in their order; those behind the one that ends
        it count for nothing.
        """
        if (speculator := self._speculator) is None:
            return self._step()
        sequence, tokens = self.rows[0], []
        if speculator.promising and self._unread[0]:
            assert self._inputs is not None
            tokens = self._read_tokens(self._inputs, self._unread)
            self._unread = [False]
            speculator.add_tokens([token for _, token in tokens])
        room = sequence.max_new - sequence.generated - len(tokens) - 1
        if tokens and (room < 0 or tokens[0][1] in sequence.eos):
            return tokens
        guesses = [] if self._unread[0] else speculator.guesses(room)
        if guesses:
            return tokens + self._check(guesses, speculator)
        began = time.perf_counter()
        read = self._step()
        if read and speculator is self._speculator:
            speculator.shared.times.record_pass(0, time.perf_counter() - began)
            speculator.add_tokens([token for _, token in read])
        return tokens + read

    def _check(self, guesses: list[int], speculator: RowSpeculator) -> list[tuple[Sequence, int]]:
        """Compute the newest token and `guesses` in one pass: tokens drawn, up to the first not guessed."""
        sequence, began = self.rows[0], time.perf_counter()
        assert self._inputs is not None
        inputs = mx.concatenate([self._inputs, mx.array(guesses, dtype=self._inputs.dtype)])
        count = len(guesses) + 1
        with mlx_adapter.last_positions(count):
            logits = self._forward(inputs[None])[0, -count:]
        rows = sampler_rows(sequence.sampler, guesses)
        sampled = BatchSampler(rows)(logits)
        drawn = cast(list[int], sampled.tolist())
        held = next((i for i, guess in enumerate(guesses) if drawn[i] != guess), len(guesses))
        mlx_adapter.trim(self._cache, len(guesses) - held)
        sequence.kv_length += held + 1
        sequence.sampler.step, sequence.sampler.penalties = rows[held].step, rows[held].penalties
        self._inputs, self._unread = sampled[held : held + 1], [False]
        speculator.record_pass(len(guesses), drawn[: held + 1], time.perf_counter() - began)
        sequence.drafted += len(guesses)
        sequence.accepted += held
        return [(sequence, token) for token in drawn[: held + 1]]

    def _step(self) -> list[tuple[Sequence, int]]:
        """One token a row."""
        inputs, unread = self._inputs, self._unread
        assert inputs is not None
        if self._sampler is None:
            self._sampler = BatchSampler([sequence.sampler for sequence in self.rows])
        logits = self._forward(inputs[:, None])[:, -1, :]
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

    def _forward(self, tokens: mx.array) -> mx.array:
        """Logits of `tokens` (rows, n), whose KV goes into the cache."""
        deltas = [sequence.images.delta if sequence.images is not None else 0 for sequence in self.rows]
        moved = {"deltas": deltas} if any(deltas) else {}
        return self._model(tokens, cache=self._cache, **moved)

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
