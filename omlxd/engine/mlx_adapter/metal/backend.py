"""The backend of Metal: MLX's own attention, and the kernels of this folder where rule.py lets them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from ....wire import Kernel
from ..attention.backend import AttentionCall, MlxBackend
from ..attention.kv_spec import KVSpec
from ..cache.packed import Quantisation
from . import rule
from .attention.choice import KERNEL, NO_KERNEL, Choices
from .attention.rows import SpanRowsKVCache, over_segments
from .delta import layers as delta
from .products import install as products


class MetalBackend(MlxBackend):
    name = "metal"

    def __init__(self) -> None:
        self._attention = Choices()

    def use_kernel_folder(self, folder: Path, tries: int = rule.MOST_TRIES) -> None:
        rule.use_folder(folder, tries)

    def stop_judging(self) -> None:
        rule.stopped()

    def prepare(self, model: Any) -> None:
        self._attention.since_load = {}
        products.prepare(model)
        delta.prepare(model)

    def kernels(self) -> tuple[Kernel, ...]:
        judged = [verdict.as_wire() for verdict in rule.verdicts().values()]
        misfits = [Kernel(KERNEL, "", f"{NO_KERNEL}: {why}") for why in self._attention.misfits]
        return (*judged, *misfits)

    def why_not_shared(self) -> str:
        if self._attention.rows or not self._attention.since_load:
            return ""
        told = "; ".join(each.why for each in self.kernels() if each.name == KERNEL and each.why)
        return f"omlxd's attention kernel is not used{f' ({told})' if told else ''}"

    def kernel_metrics(self) -> dict[str, float]:
        used = [verdict.is_used for verdict in rule.verdicts().values()]
        counts = {"metal_kernels_used": used.count(True), "metal_kernels_refused": used.count(False)}
        return {**counts, "metal_attention_kernel": float(self._attention.rows)}

    @property
    def samples(self) -> dict[str, Callable[[], object]]:
        """What `judge_sample` calls, by its names."""
        return {
            "attend_rows": lambda: self._attention.judge_sample(None),
            "attend_rows 8bit": lambda: self._attention.judge_sample(Quantisation(8)),
            "few rows 4 bits": lambda: products.judge_sample(4),
            "few rows 8 bits": lambda: products.judge_sample(8),
            "few rows experts": products.judge_experts,
            "delta prompts": delta.judge_prompts,
            "delta steps": delta.judge_steps,
        }

    def judge_sample(self, name: str) -> list[str]:
        known = set(rule.verdicts())
        self.samples[name]()
        return [verdict.told() for at, verdict in rule.verdicts().items() if at not in known]

    def forward(self, call: AttentionCall) -> mx.array | None:
        """What is seen first, a load sees."""
        return None if self._attention.note(call).rows else super().forward(call)

    def over_segments(self, call: AttentionCall) -> mx.array | None:
        return over_segments(call) if self._attention.note(call).alone else None

    def reads_rows(self, model: Any, shares: bool) -> bool:
        self.compares_rows, self.writes_rows = self._attention.rows, self._attention.writes
        return True

    def joins_alone(self, row: Any) -> bool:
        return self._attention.of_row(row).alone

    def row_batch(self, rows: Sequence[Any], spec: KVSpec) -> SpanRowsKVCache | None:
        return SpanRowsKVCache(rows) if self._attention.of_row(rows[0]).rows else None

    def rows_pay(self) -> bool:
        return self._attention.rows or super().rows_pay()

    def rows_pay_for(self, lengths: Sequence[int], are_apart: bool) -> bool:
        return self._attention.rows or super().rows_pay_for(lengths, are_apart)

    def reads_own_rows(self) -> bool:
        return self._attention.rows

    def steps_read_segments(self, model: Any) -> bool:
        return self._attention.rows

    @property
    def shares_prefixes(self) -> bool:
        return True
