"""The machine over guesses with packed verify steps of cuda/step/fused_step.py, by MLX's ops, not kernels."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from omlxd.engine.mlx_adapter.cuda.compile import kernel_store
from omlxd.engine.mlx_adapter.cuda.step import compiled_step
from omlxd.engine.mlx_adapter.cuda.step.fused_step import FusedStep
from omlxd.engine.mlx_adapter.cuda.step.fused_weights import Unfusable
from omlxd.engine.schedule import decode_batch
from omlxd.engine.schedule.decode_batch import DecodeBatch

from ..schedule.test_speculation_machine import run_machine
from .test_fused_step import fuse_passes


def fuse_or_not(model: Any) -> FusedStep | None:
    try:
        return fuse_passes(model, 32)
    except Unfusable:  # The engine that answers plainly records what its model gives.
        return None


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [False, True])
def test_flat_passes_cancels_and_restarts_change_no_token(
    drafts: bool, reference, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Batches have more rows than packed steps at times, and guesses more tokens than there is room for."""
    passes, forward = Counter[bool](), DecodeBatch._forward_packed

    def counted(batch: DecodeBatch, *given: list) -> mx.array | None:
        logits = forward(batch, *given)
        passes[logits is not None] += 1
        return logits

    monkeypatch.setattr(mx, "compile", lambda function, **how: function)  # A trace has no addresses.
    monkeypatch.setattr(compiled_step, "fused_step", fuse_or_not)
    monkeypatch.setattr(decode_batch, "MOST_TOKENS", 3 * 16)
    monkeypatch.setattr(DecodeBatch, "_forward_packed", counted)
    reference()
    # Each restart loads the model, and its checks take seconds: they are made once.
    monkeypatch.setattr(kernel_store, "_folder", tmp_path)
    monkeypatch.setattr(kernel_store, "_passed", {})
    monkeypatch.setattr(kernel_store, "_gpu", lambda: "none")
    monkeypatch.setattr(kernel_store, "_machine", lambda: "this")
    run_machine("qwen3", 0, drafts, 3, monkeypatch, tmp_path)
    assert passes[True] > 10, "packed verify steps"
