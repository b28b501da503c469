"""Passes as every rank makes them: equal calls, in one order, or a sum waits for ever.

A step of rows that decode is started before the one before is read, on all ranks: rank 0 draws, and its
tokens reach the others by a sum of their own, the last of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ... import mlx_adapter
from ...mlx_adapter import Cache, Group
from ...schedule.decode_batch import DecodeBatch, Draw
from ...sequence.sampling import BatchSampler
from ...sequence.sequence import SamplerRow


def time_link(model: Any) -> mlx_adapter.LinkTimes:
    return mlx_adapter.time_link(model, mlx_adapter.new_cache(model, 1))


def compute(model: Any, tokens: list[int] | tuple[int, ...], cache: Cache) -> mx.array:
    """Logits (1, 1, vocabulary) of the last of `tokens`, whose KV goes into `cache`. All is evaluated."""
    logits = model(mx.array([tokens]), cache=cache)
    mx.eval(logits, mlx_adapter.state_arrays(cache))
    return logits


class SharedSampler(BatchSampler):
    """Draws on rank 0, and gives all ranks what it draws."""

    def __init__(self, group: Group, rows: Sequence[SamplerRow]):
        super().__init__(rows)
        self._group = group

    def __call__(self, logits: mx.array) -> mx.array:
        return mx.distributed.all_sum(super().__call__(logits), group=self._group)


class FollowingSampler(BatchSampler):
    """Gets what rank 0 draws."""

    def __init__(self, group: Group, rows: Sequence[SamplerRow]):
        self.rows, self.logprobs = [], None
        self._group, self._nothing = group, mx.zeros((len(rows),), mx.int32)

    def __call__(self, logits: mx.array) -> mx.array:
        # Behind the pass's sums, as on rank 0.
        return mx.distributed.all_sum(mx.depends(self._nothing, logits), group=self._group)


class RankBatch(DecodeBatch):
    """Rows that decode together on all ranks. `sampler`: one of these two."""

    def __init__(
        self, model: Any, group: Group, sampler: Callable[[Group, Sequence[SamplerRow]], BatchSampler]
    ):
        super().__init__(model, sampler=partial(sampler, group))

    def step(self) -> list[Draw]:
        if mlx_adapter.backend() == "cpu":
            # Two ranks on two busy cores, tiny llama: 13 to 20 ms a step of one row where it is put together
            # beside the one before, which MLX's ring spins for; 2.5 to 5 ms behind it.
            self.wait()
        return super().step()
