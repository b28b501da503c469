"""Trains a LoRA adapter with mlx-lm's own trainer: AdamW, cross-entropy of the answers alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import msgspec
from mlx_lm.lora import CONFIG_DEFAULTS, train_model
from mlx_lm.tuner.datasets import create_dataset

from ...errors import ModelError
from ...models.tuning import Example, Job
from . import vision
from .device import backend
from .loading import read_model


def train_adapter(job: Job, reports: Any) -> None:
    """Train, and save into `job.adapter_path` what `load` reads. Raises ModelError.

    reports  mlx-lm's TrainingCallback
    """
    path = Path(job.model)
    mx.set_memory_limit(job.memory_limit)
    # A CPU's 16-bit products use no BLAS.
    model, tokenizer, _, _ = read_model(path, backend() == "cpu", vision.blindness(path))
    named = {name: getattr(job, name) for name in job.__struct_fields__ if name in CONFIG_DEFAULTS}
    layers = len(model.layers)
    settings = SimpleNamespace(
        **CONFIG_DEFAULTS
        | named
        | {
            "num_layers": min(job.num_layers or layers, layers),
            "train": True,
            "optimizer": "adamw",
            "mask_prompt": job.train[0].kind != "text",
            "val_batches": 25,
            "steps_per_report": max(1, job.iters // 50),
            "steps_per_eval": max(1, job.iters // 5),
            "save_every": 100,
            "resume_adapter_file": f"{job.adapter_path}/adapters.safetensors" if job.resume else None,
        }
    )

    def dataset(examples: list[Example]) -> Any:
        return (
            create_dataset(msgspec.to_builtins(examples), cast(Any, tokenizer), settings) if examples else []
        )

    try:
        train_model(settings, model, dataset(job.train), dataset(job.valid), reports)
    except (ValueError, KeyError) as error:
        raise ModelError(f"{type(error).__name__}: {error}") from error
