"""Weights made float32 for a CPU: the same model, another type, KV of its own."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from daemon import family_model
from families import build_family

from omlxd import wire
from omlxd.engine import mlx_adapter
from omlxd.engine.host import EngineHost
from omlxd.models.footprint import footprint


def logits(loaded: mlx_adapter.LoadedModel) -> mx.array:
    return loaded.model(mx.array([[5, 6, 7, 8, 9]]))


def test_quantised_weights_become_the_numbers_that_they_stand_for():
    folder = family_model("qwen3_4bit")
    stored, made = mlx_adapter.load(folder), mlx_adapter.load(folder, float32=True)
    assert (stored.float32, made.float32) == (False, True)
    assert made.weight_bytes > 3 * stored.weight_bytes
    assert mx.allclose(logits(stored), logits(made), rtol=1e-3, atol=1e-4)


def test_sixteen_bits_become_float32_with_kv_of_its_type(tmp_path: Path):
    folder = build_family("llama", tmp_path / "m", "bf16")
    stored, made = mlx_adapter.load(folder), mlx_adapter.load(folder, float32=True)
    assert stored.layout is not None and made.layout is not None
    assert made.layout.nbytes(1) == 2 * stored.layout.nbytes(1)
    assert mx.abs(logits(stored) - logits(made)).max().item() < 0.2
    assert made.float32


def test_float32_weights_stay_what_they_are():
    folder = family_model("qwen3")
    stored, made = mlx_adapter.load(folder), mlx_adapter.load(folder, float32=True)
    assert not made.float32
    assert mx.array_equal(logits(stored), logits(made))


@pytest.mark.parametrize("dtype", ["4bit", "bf16"])
def test_the_estimate_counts_float32(dtype: str, tmp_path: Path):
    folder = family_model("qwen3_4bit") if dtype == "4bit" else build_family("qwen3", tmp_path / "m", "bf16")
    guess, made = footprint(folder, float32=True), mlx_adapter.load(folder, float32=True)
    assert made.layout is not None
    assert guess.weights == made.weight_bytes
    assert guess.kv_per_token == made.layout.nbytes(1)


def test_each_type_has_its_own_namespace():
    """Quantised weights with float32 scales: the KV's layout is the same, its numbers differ."""
    folder, namespaces = family_model("qwen3_4bit"), set()
    for float32 in (False, True):
        budget = wire.Budget(float32=float32)
        load = wire.Load(model_path=str(folder), model_id="m", cache=wire.CacheSettings(), budget=budget)
        namespaces.add(EngineHost(load, None, None).namespace)  # type: ignore[arg-type]
    assert len(namespaces) == 2
