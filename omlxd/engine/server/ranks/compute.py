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


def compiled_step(model: Any) -> mlx_adapter.DecodeStep | None:
    """Of shares of heads, one for all of their batches: its sums are of the graph that is replayed. None: of
    shares of layers, where a graph's outputs may not depend on what it sends.

    Host's time, most of a step: 8B shape in bfloat16 behind 16,000 tokens, one rank on one H200, so without
    sums: a row 8.8 ms by the model itself and 7.0 so, four rows 11.2 and 9.5.
    """
    if not mlx_adapter.split_of(model).startswith("tp:"):
        return None
    if "omlxd_step" not in vars(model):
        step = mlx_adapter.attention_backend().decode_step(model)
        object.__setattr__(model, "omlxd_step", step)
    return vars(model)["omlxd_step"]


class RankBatch(DecodeBatch):
    """Rows that decode together on all ranks. `sampler`: one of these two."""

    def __init__(
        self, model: Any, group: Group, sampler: Callable[[Group, Sequence[SamplerRow]], BatchSampler]
    ):
        super().__init__(model, compiled=compiled_step(model), sampler=partial(sampler, group))

    def step(self) -> list[Draw]:
        if mlx_adapter.backend() == "cpu":
            # Two ranks on two busy cores, tiny llama: 13 to 20 ms a step of one row where it is put together
            # beside the one before, which MLX's ring spins for; 2.5 to 5 ms behind it.
            self.wait()
        return super().step()
