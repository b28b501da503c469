"""LoRA adapters of random numbers, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model


def make_adapter(base: Path, folder: Path, seed: int = 0, *, rank: int = 4, **config: Any) -> Path:
    """An adapter of the model in `base` that changes what it says.

    config  of its file: `num_layers`, `scale`, `fine_tune_type`, `keys`
    """
    model, _ = load_model(base)
    model.freeze()
    settings = {"rank": rank, "scale": config.get("scale", 20.0), "dropout": 0.5}
    if "keys" in config:
        settings["keys"] = config["keys"]
    kind, layers = config.get("fine_tune_type", "lora"), config.get("num_layers", 2)
    linear_to_lora_layers(model, layers, settings, use_dora=kind == "dora")
    mx.random.seed(seed)
    weights = {n: mx.random.normal(a.shape) * 0.3 for n, a in tree_flatten(model.trainable_parameters())}
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    told = {"fine_tune_type": kind, "num_layers": layers, "lora_parameters": settings}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder
