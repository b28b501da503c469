"""The attention backend of another device, for as long as a test runs."""

from __future__ import annotations

from typing import Any

import pytest

from omlxd.engine.mlx_adapter.attention import backend, row_costs
from omlxd.engine.mlx_adapter.attention.backend import AttentionBackend, MlxBackend
from omlxd.engine.mlx_adapter.cuda.backend import CudaBackend


def use_backend(monkeypatch: pytest.MonkeyPatch, name: str, **changes: Any) -> AttentionBackend:
    """Have `backend.current()` give that of `name` (`mlx` or `cuda`), with these attributes changed."""
    made = CudaBackend() if name == "cuda" else MlxBackend()
    for attribute, value in changes.items():
        setattr(made, attribute, value)
    monkeypatch.setattr(backend, "_current", made)
    return made


def let_rows_pay(monkeypatch: pytest.MonkeyPatch, pays: bool) -> None:
    """Have rows of a batch attend by themselves, or never; else a measurement decides."""
    monkeypatch.setattr(row_costs, "pays", lambda: pays)
    monkeypatch.setattr(row_costs, "pays_for", lambda lengths, are_alone: pays)
