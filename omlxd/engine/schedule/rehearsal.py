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
from .scheduler import Scheduler

log = logging.getLogger(__name__)

PROMPTS = (2 * PREFILL_CHUNK + 500, 12), (600, 9), (90, 7), (20, 5)
"""Tokens of a prompt, and of its answer."""

MOST_S = 10.0
"""A rehearsal that takes longer ends with the pass under way."""

GREEDY = RowSampling(0, 1, 0, 0, 1, 0, 0, 0, (), None)


class _Rehearsed:
    """A sink that notes the end."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.ended = False

    def progress(self, event: Any) -> None: ...

    def take(self, drawn: Any, count: Any) -> None: ...

    def count(self, work: Any) -> None: ...

    def finished(self, sequence: Sequence, reason: str) -> None:
        self.ended = True

    def failed(self, sequence: Sequence, error: Exception) -> None:
        self.error, self.ended = error, True


def rehearse(loaded: LoadedModel, block_size: int, *, anywhere: bool = False) -> None:
    """Compute `PROMPTS` and their answers; whatever fails goes to the log.

    anywhere  also where nothing is compiled late
    """
    if not (anywhere or mlx_adapter.attention_backend().compiles_late):
        return
    began = time.monotonic()
    scheduler = Scheduler(loaded, None, slots=len(PROMPTS), block_size=block_size)
    sinks: list[_Rehearsed] = []
    try:
        sequences: list[Sequence] = []
        for seed, (length, answer) in enumerate(PROMPTS):
            length = min(length, loaded.context_length - answer - 1)
            if length <= 0:
                continue
            sinks.append(_Rehearsed())
            sequences.append(_request(loaded, block_size, length, answer, seed, sinks[-1]))
            scheduler.submit(sequences[-1])
        while not all(sink.ended for sink in sinks):
            if time.monotonic() - began > MOST_S:
                for sequence in sequences:
                    scheduler.cancel(sequence)
            scheduler.turn()
        errors = [sink.error for sink in sinks if sink.error is not None]
        if errors:
            raise errors[0]
    except Exception as error:
        mlx_adapter.end_if_fault(error)
        log.warning("the rehearsal of a few requests failed", exc_info=True)
        return
    finally:
        mlx_adapter.give_memory_back()
    log.info("%d requests were rehearsed in %.1f s", len(sinks), time.monotonic() - began)


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
