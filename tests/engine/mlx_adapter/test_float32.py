"""Weights made float32 for a CPU: the same model, another type, KV of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from daemon import family_model
from families import build_family

from omlxd import wire
from omlxd.engine import mlx_adapter
from omlxd.engine.server.host import EngineHost
from omlxd.errors import ModelError
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


def awq(source: Path, folder: Path, **changes: object) -> Path:
    """`source` in AutoAWQ's layout: 4 bits in groups of 32, eight numbers of a row in a word, shuffled."""
    shutil.copytree(source, folder)
    tensors: dict[str, mx.array] = {}
    for name, array in mx.load(str(folder / "model.safetensors")).items():
        if "_proj" not in name:
            tensors[name] = array.astype(mx.float16)
            continue
        path = name.removesuffix(".weight")
        groups = np.array(array.astype(mx.float32)).T.reshape(-1, 32, len(array))  # (groups, inputs, outputs)
        low, high = groups.min(1), groups.max(1)
        scale = (high - low) / 15
        zero = np.clip(np.rint(-low / scale), 0, 15)
        q = np.clip(np.rint(groups / scale[:, None] + zero[:, None]), 0, 15).reshape(-1, len(array))
        tensors[path + ".qweight"] = mx.array(words(q))
        tensors[path + ".qzeros"] = mx.array(words(zero))
        tensors[path + ".scales"] = mx.array(scale).astype(mx.float16)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def words(q: np.ndarray) -> np.ndarray:
    places = np.array([0, 4, 1, 5, 2, 6, 3, 7], np.uint32) * 4
    parts = q.astype(np.uint32).reshape(len(q), -1, 8) << places
    return np.bitwise_or.reduce(parts, axis=-1).view(np.int32)


def test_awq_folders_are_read_and_estimated(tmp_path: Path):
    source = family_model("llama")
    folder = awq(source, tmp_path / "awq")
    stored, made = mlx_adapter.load(folder), mlx_adapter.load(folder, float32=True)
    assert footprint(folder).weights == pytest.approx(stored.weight_bytes, rel=0.1)
    assert footprint(folder, float32=True).weights == made.weight_bytes
    assert mx.abs(logits(stored) - logits(made)).max().item() < 0.05
    plain = logits(mlx_adapter.load(source)).reshape(-1)
    likeness = mx.sum(plain * logits(made).reshape(-1)) / mx.linalg.norm(plain) / mx.linalg.norm(logits(made))
    assert likeness.item() > 0.9  # The same model, but for rounding to 4 bits.


def test_gptq_folders_are_refused_with_a_sentence(tmp_path: Path):
    folder = awq(family_model("llama"), tmp_path / "gptq", quant_method="gptq")
    tensors = mx.load(str(folder / "model.safetensors"))
    tensors["model.layers.0.mlp.up_proj.g_idx"] = mx.zeros((32,), mx.int32)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    with pytest.raises(ModelError, match=rf"{folder}: .*g_idx\) are not currently supported"):
        mlx_adapter.load(folder)


@pytest.mark.cpu_rules("weights become float32 on a CPU alone")
def test_each_type_has_its_own_namespace():
    """Quantised weights with float32 scales: the KV's layout is the same, its numbers differ."""
    folder, namespaces = family_model("qwen3_4bit"), set()
    for float32 in (False, True):
        budget = wire.Budget(float32=float32)
        load = wire.Load(model_path=str(folder), model_id="m", cache=wire.CacheSettings(), budget=budget)
        namespaces.add(EngineHost(load, None, None).namespace)  # type: ignore[arg-type]
    assert len(namespaces) == 2
