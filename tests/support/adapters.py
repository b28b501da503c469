"""LoRA adapters of random numbers, for tests."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model


def make_adapter(base: Path, folder: Path, seed: int = 0) -> Path:
    """An adapter of the model in `base` that changes what it says."""
    model, _ = load_model(base)
    model.freeze()
    settings = {"rank": 4, "scale": 20.0, "dropout": 0.5}
    linear_to_lora_layers(model, 2, settings)
    mx.random.seed(seed)
    weights = {n: mx.random.normal(a.shape) * 0.3 for n, a in tree_flatten(model.trainable_parameters())}
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
