"""The backend of CUDA: what the engine asks of the kernels in this folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..attention.backend import AttentionBackend, AttentionCall
from ..attention.kv_spec import KVSpec
from . import prompt_shapes
from .attention import attend
from .compile import driver, kernel_store
from .products import products
from .rows.addressed_rows import AddressedKVCache
from .rows.mla_rows import AddressedLatentsKVCache
from .step import early_compile, warm_up
from .step.compiled_step import CompiledStep
from .step.fused_weights import may_fuse
from .step.model_checks import kind_of, packed_share, reads_by_address, steps_share

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


STICKY = (
    *("an illegal memory access was encountered", "misaligned address", "unspecified launch failure"),
    *("an illegal instruction was encountered", "device-side assert triggered", "invalid program counter"),
    *(
        "uncorrectable ECC error",
        "uncorrectable NVLink error",
        "the launch timed out",
        "hardware stack error",
    ),
    "operation not supported on global/shared address space",
)
"""What CUDA says of errors that each later call of the process gets, too."""

GRAPHS = "MLX_USE_CUDA_GRAPHS"
"""MLX reads it when it first computes. With `0` each kernel is launched by itself, which suits steps of few
and large ones: to make a launch graph of a step takes the host 3.6 to 5 ms of the 6 to 10 that a step takes
(8B shape, H100s), and each new shape more. 32 short streams there, two servers of one run: 2,860 tokens a
second and first tokens after 3.7 s with graphs, 3,110 and 2.3 s without. Other models' steps have many small
kernels, between which a graph leaves shorter gaps: they keep it."""


class CudaBackend(AttentionBackend):
    name = "cuda"
    pads_last_chunks = False
    compiles_late = True
    views_in_place = False
    memory_reserve = MEMORY_RESERVE
    uneven_up_to = SHORT
    gathered_multiple = GATHERED
    equal_segments = True
    compares_rows = True
    loads_beside_cpu = True
    own_memory = True
    gpu_faults = STICKY

    def install(self) -> None:
        attend.note_caches()

    def forward(self, call: AttentionCall) -> mx.array | None:
        return attend.attend(call)

    def over_segments(self, call: AttentionCall) -> mx.array | None:
        return attend.attend_over_segments(call)

    def before_weights(self, model: Any) -> None:
        if may_fuse(model):
            os.environ.setdefault(GRAPHS, "0")

    def beside_weights(self, model: Any) -> None:
        early_compile.begin(model)
        products.compile_activations(model)

    def prepare(self, model: Any) -> None:
        products.prepare(model)

    def warm_up(self, model: Any) -> None:
        if not vars(model).get("omlxd_fused"):
            warm_up.compiles(model)
        warm_up.attend_unequal(model)

    def decode_step(self, model: Any) -> CompiledStep:
        return CompiledStep(model)

    def remembered(
        self, what: str, model: Any, depends: tuple[object, ...], check: Callable[[], bool]
    ) -> bool:
        return kernel_store.remembered(what, (kind_of(model), *depends), check)

    def reads_rows(self, model: Any, shares: bool) -> bool:
        return reads_by_address(model, shares)

    def shares_prefix(self, model: Any, tokens: int, how: Any) -> bool:
        if hasattr(model, "vlm"):  # mlx-vlm's models.
            return False
        return packed_share(tokens) if how is not None else steps_share(model)

    def steps_read_segments(self, model: Any) -> bool:
        return bool(vars(model).get("omlxd_fused")) or warm_up.compiles(model)

    def row_batch(self, rows: Sequence[Any], spec: KVSpec) -> AddressedKVCache:
        if spec.kind == "index":
            raise RuntimeError("no kernel reads an index by address")
        return AddressedLatentsKVCache(rows) if spec.kind == "mla" else AddressedKVCache(rows)

    @property
    def shares_prefixes(self) -> bool:
        return True

    @property
    def masked_cost(self) -> float:
        return 1.0 if self.reads_own_rows() else MASKED_COST

    def reads_own_rows(self) -> bool:
        return attend.reads_own_rows()

    def use_kernel_folder(self, folder: Path, tries: int = 2) -> None:
        kernel_store.use_folder(folder)

    def chunk(self, *, final: bool) -> AbstractContextManager[None]:
        return prompt_shapes.fixed_shapes(not final)

    def trim_memory(self) -> None:
        driver.trim_pool()

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

    def check_work(self) -> None:
        """Nothing is kept after a fault: to copy it from the device fails as well."""

    def fault_help(self, fault: str) -> str:
        return "Lines with `NVRM: Xid` in the kernel's log (`dmesg`) say what the GPU met."
