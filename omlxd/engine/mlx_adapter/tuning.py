"""Trains a LoRA adapter with mlx-lm's own trainer: AdamW, cross-entropy of the answers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import msgspec
from mlx.utils import tree_flatten
from mlx_lm import lora
from mlx_lm.lora import CONFIG_DEFAULTS, train_model
from mlx_lm.tuner import trainer
from mlx_lm.tuner.datasets import create_dataset

from ...errors import ModelError
from ...models.tuning import Example, Job
from . import vision
from .device import backend
from .loading import read_model


class Stopped(Exception):
    """The training ended as it was asked to, after so many steps, which are saved."""

    def __init__(self, steps: int):
        self.steps = steps


class _Lines:
    """mlx-lm's TrainUI as plain lines. Raises Stopped between two steps once `stop` says so.

    before  steps of earlier trainings
    """

    def __init__(self, before: int, stop: Callable[[], bool]):
        self.steps = 0
        self._before, self._stop = before, stop

    def __enter__(self) -> _Lines:
        self._end_if_asked()
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def _end_if_asked(self) -> None:
        if self._stop():
            raise Stopped(self.steps)

    def advance(self) -> None:
        self.steps += 1
        self._end_if_asked()

    @contextmanager
    def val_task(self, total: int) -> Iterator[Callable[[], None]]:
        yield self._end_if_asked

    def report_train(self, step: int, loss: float, tokens_s: float, tokens: int) -> None:
        print(f"step {self._before + step}: loss {loss:.3f}, {tokens_s:.0f} tokens/s", flush=True)

    def report_val(self, step: int, loss: float, seconds: float) -> None:
        print(f"step {self._before + step - 1}: validation loss {loss:.3f}", flush=True)

    def report_save(self, file: Path) -> None:
        print(f"saved, also as {file.name}", flush=True)


def train_adapter(job: Job, reports: Any, before: int, stop: Callable[[], bool]) -> None:
    """Train, and save into `job.adapter_path` what `load` reads. Raises ModelError and Stopped.

    reports  mlx-lm's TrainingCallback
    before   steps of earlier trainings, for the lines that are printed
    stop     asked between steps: whether to end; steps that are done are saved then
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

    lines = _Lines(before, stop)
    patched = cast(Any, trainer), cast(Any, lora)
    # Its own draw boxes in colours into files too, and count a model's parameters wrongly.
    patched[0].TrainUI = lambda *_, **__: lines
    patched[1].print_lora_run_header = lambda *_: None
    patched[1].print_trainable_parameters = _say_what_is_trained

    def dataset(examples: list[Example]) -> Any:
        return (
            create_dataset(msgspec.to_builtins(examples), cast(Any, tokenizer), settings) if examples else []
        )

    try:
        train_model(settings, model, dataset(job.train), dataset(job.valid), reports)
    except Stopped:
        if lines.steps:
            _save(model, Path(job.adapter_path))
        raise
    except (ValueError, KeyError) as error:
        raise ModelError(f"{type(error).__name__}: {error}") from error


def _say_what_is_trained(model: Any) -> None:
    count = sum(cast(mx.array, array).size for _, array in tree_flatten(model.trainable_parameters()))
    print(f"{count} parameters are trained", flush=True)


def _save(model: Any, folder: Path) -> None:
    whole = folder / "whole.safetensors"
    mx.save_safetensors(str(whole), dict(tree_flatten(model.trainable_parameters())))
    whole.replace(folder / "adapters.safetensors")
