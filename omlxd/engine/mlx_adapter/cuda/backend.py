"""The backend of CUDA: what the engine asks of the kernels in this folder."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..attention.backend import AttentionBackend, AttentionCall
from ..cache.kinds import INDEX, LATENTS
from . import attend, driver, kernel_store, prompt_shapes
from .addressed_rows import AddressedKVCache
from .mla_rows import AddressedLatentsKVCache

MASKED_COST = 6.0
"""Times the KV bytes of rows of unequal length, where attention with a mask leaves its fused kernel.

H100, 8B shape in bfloat16, ms a layer with and without a mask: 8 rows padded to 4,096 tokens 0.40 and 0.13, 8
to 32,000 2.2 and 0.42, 32 to 16,000 4.4 and 0.76, 2 to 100,000 1.7 and 0.31. So 32,768 and 4,096 tokens
decode at 79 tok/s in two passes and at 62 in one (tools/bench/gpu.py --only uneven).
"""

MEMORY_RESERVE = 0.08
"""Also for copies of a layer, and room, as rows join a batch."""

SHORT = 1024
"""Tokens up to which a batch stays with MLX's own kernel (cache/batch.py, `GROW_STEP`)."""

GATHERED = 8
"""Each side of a matrix in a gathered product is a multiple of this: with ranks of 2, 3 and 4, or 30 outputs,
MLX's ends with "misaligned address", after which nothing of the process runs on the GPU (H200)."""


class CudaBackend(AttentionBackend):
    name = "cuda"
    pads_last_chunks = False
    compiles_late = True
    views_in_place = False
    memory_reserve = MEMORY_RESERVE
    uneven_up_to = SHORT
    gathered_multiple = GATHERED

    def install(self) -> None:
        attend.note_caches()

    def forward(self, call: AttentionCall) -> mx.array | None:
        return attend.attend(call)

    def over_segments(self, call: AttentionCall) -> mx.array | None:
        return attend.attend_over_segments(call)

    def row_batch(self, rows: Sequence[Any], kind: str) -> AddressedKVCache:
        if kind == INDEX:
            raise RuntimeError("no kernel reads an index by address")
        return AddressedLatentsKVCache(rows) if kind == LATENTS else AddressedKVCache(rows)

    @property
    def shares_prefixes(self) -> bool:
        return True

    @property
    def masked_cost(self) -> float:
        return 1.0 if self.reads_own_rows() else MASKED_COST

    def reads_own_rows(self) -> bool:
        return attend.reads_own_rows()

    def use_kernel_folder(self, folder: Path) -> None:
        kernel_store.use_folder(folder)

    def chunk(self, *, final: bool) -> AbstractContextManager[None]:
        return prompt_shapes.fixed_shapes(not final)

    def trim_memory(self) -> None:
        driver.give_spare_back()

    def free_memory(self) -> int | None:
        try:
            return driver.free_memory()
        except driver.DriverError:
            return None

    def keep_on_host(self, view: memoryview) -> str:
        try:
            driver.keep_on_host(view)
        except driver.DriverError as error:
            return str(error)
        return ""

    def wait(self) -> None:
        driver.wait()
