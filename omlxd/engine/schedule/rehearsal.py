"""Requests of no client's, at a load, so that no client waits for what a first pass makes ready.

Plans of cuDNN, functions of cuBLAS, kernels and launches are made at their first use, which takes 0.2 to 1 s
for a first chunk of a prompt on an H100, and MLX compiles what it finds nowhere on disk. Here prompts of
several lengths are computed, rows join, decode together and leave one by one.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np

from ...common.units import PREFILL_CHUNK
from ...kv.hashing import chain_root, hash_blocks
from .. import mlx_adapter
from ..mlx_adapter import LoadedModel
from ..sequence.sampling import RowSampling
from ..sequence.sequence import Prompt, SamplerRow, Sequence, SequenceKV
from .prefill import PrefillBudget
from .scheduler import Scheduler

log = logging.getLogger(__name__)

PROMPTS = (2 * PREFILL_CHUNK + 500, 12), (600, 9), (90, 7), (20, 5)
"""Tokens of a prompt, and of its answer."""

RATE_PROMPTS = ((1100, 3),)
"""Where passes are as large as a rate says (prefill.py). They grow from one block, and a client's first
prompt begins with the size that they reached. Without them it begins with 64 tokens a pass, each of which
reads all weights."""

MOST_S, RATE_S = 10.0, 1.5
"""Seconds after which a rehearsal ends with the pass under way; of `RATE_PROMPTS`, `RATE_S`."""

GREEDY = RowSampling(0, 1, 0, 0, 1, 0, 0, 0, (), None)


class _Rehearsed:
    """A sink that notes an error."""

    error: Exception | None = None

    def progress(self, event: Any) -> None: ...

    def take(self, drawn: Any, count: Any) -> None: ...

    def count(self, work: Any) -> None: ...

    def finished(self, sequence: Sequence, reason: str) -> None: ...

    def failed(self, sequence: Sequence, error: Exception) -> None:
        self.error = error


def rehearse(loaded: LoadedModel, block_size: int, pass_limit: int = 0, *, anywhere: bool = False) -> float:
    """Compute `PROMPTS` and their answers where kernels are compiled late, or `RATE_PROMPTS` where passes
    follow a rate. Returns tokens of prefill a second; 0: they were not measured. What fails goes to the log.

    pass_limit  as Load has it
    anywhere    compute `PROMPTS` in any case
    """
    late = anywhere or mlx_adapter.attention_backend().compiles_late
    if not late and not PrefillBudget(block_size).follows_rate:
        return 0.0
    prompts, most_s = (PROMPTS, MOST_S) if late else (RATE_PROMPTS, RATE_S)
    began = time.monotonic()
    scheduler = Scheduler(loaded, None, slots=len(prompts), block_size=block_size, pass_limit=pass_limit)
    sinks: list[_Rehearsed] = []
    try:
        sequences: list[Sequence] = []
        for seed, (length, answer) in enumerate(prompts):
            length = min(length, loaded.context_length - answer - 1)
            if length <= 0:
                continue
            sinks.append(_Rehearsed())
            sequences.append(_request(loaded, block_size, length, answer, seed, sinks[-1]))
            scheduler.submit(sequences[-1])
        while scheduler.active_sequences:
            if time.monotonic() - began > most_s:
                for sequence in sequences:
                    scheduler.cancel(sequence)
            scheduler.turn()
        errors = [sink.error for sink in sinks if sink.error is not None]
        if errors:
            raise errors[0]
    except Exception as error:
        mlx_adapter.end_if_fault(error)
        log.warning("the rehearsal of a few requests failed", exc_info=True)
        return 0.0
    finally:
        mlx_adapter.give_memory_back()
    rate, seconds = scheduler.prefill_budget.rate, time.monotonic() - began
    log.info(
        "%d requests were rehearsed in %.1f s, at %.0f prompt tokens a second", len(sinks), seconds, rate
    )
    return rate


def _request(
    loaded: LoadedModel, block_size: int, length: int, answer: int, seed: int, sink: _Rehearsed
) -> Sequence:
    tokens: list[int] = np.random.default_rng(seed).integers(0, min(1000, loaded.vocab_size), length).tolist()
    root = chain_root(b"rehearsal".ljust(32), str(seed))
    return Sequence(
        id=0,
        tokens=tokens,
        prompt=Prompt(length, root),
        sampling=SamplerRow(GREEDY, max_new=answer),
        kv=SequenceKV(hash_blocks(root, tokens, block_size)),
        sink=sink,
    )
