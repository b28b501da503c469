"""Trains a LoRA adapter with mlx-lm's own trainer: AdamW, cross-entropy of the answers alone."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import msgspec
import numpy as np
from mlx import nn, optimizers
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm import lora
from mlx_lm.lora import CONFIG_DEFAULTS, train_model
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner import trainer
from mlx_lm.tuner.datasets import create_dataset

from .....common.units import human
from .....errors import ModelError
from .....models.tuning import Example, Job
from ...runtime.device import backend
from ..load import read_model
from ..vlm import vision

ADAPTER = "adapters.safetensors"
OPTIMIZER = "optimizer.safetensors"
"""AdamW's moments and steps, beside the adapter that they belong to. Whoever serves it does not read them."""
_ADAPTED = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear, nn.Embedding)
WARM_UP = 20
"""Steps in which the rate rises, where an adapter goes on without its moments."""


class Stopped(Exception):
    """The training ended as it was asked to, after so many steps, which are saved."""

    def __init__(self, steps: int):
        self.steps = steps


class _Progress:
    """mlx-lm's TrainUI as plain lines, which also moves what mlx-lm saved in `folder` to the folder above.

    The earlier adapter stays as it is until a new one is whole and on disk.

    moments  of the optimizer, set as the training starts
    before   steps of earlier trainings
    stop     asked between steps: whether to end
    stopped  it said so; mlx-lm then saves and returns as at the end
    """

    def __init__(self, folder: Path, reports: Any, before: int, stop: Callable[[], bool]):
        self.steps, self.stopped = 0, False
        self.moments: _Moments | None = None
        self._folder, self._reports, self._before, self._stop = folder, reports, before, stop

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is Stopped

    def _end_if_asked(self) -> None:
        self.stopped = self._stop()
        if self.stopped:
            raise Stopped(self.steps)

    def advance(self) -> None:
        self.steps += 1
        self._end_if_asked()

    @contextmanager
    def val_task(self, total: int) -> Iterator[Callable[[], None]]:
        yield self._end_if_asked

    def report_train(self, step: int, loss: float, tokens_s: float, tokens: int) -> None:
        speed = f", {tokens_s:.0f} tokens/s" if tokens_s >= 1 else ""  # The first step compiles.
        say(f"step {self._before + step}: loss {loss:.3f}{speed}")

    def report_val(self, step: int, loss: float, seconds: float) -> None:
        say(f"step {self._before + step - 1}: validation loss {loss:.3f}")

    def report_save(self, file: Path) -> None:
        copy = file.replace(file.with_name(f"{self._before + self.steps:07d}_{ADAPTER}"))
        self.publish()
        say(f"saved, also as {copy.name}")

    def publish(self) -> None:
        """Raises OSError, and RuntimeError of MLX."""
        assert self.moments is not None
        self.moments.save(self._folder)
        # The adapter's matrices are the last.
        for file in sorted(self._folder.iterdir(), key=lambda file: file.name == ADAPTER):
            with file.open("rb+") as opened:
                os.fsync(opened.fileno())
            file.replace(self._folder.parent / file.name)
        self._reports.on_save(self.steps)


class _Moments:
    """What AdamW remembers between steps, on disk too.

    Without them, a step moves each number by the whole rate, however small its gradient, which a trained
    adapter does not bear. So the rate then rises for `WARM_UP` steps, over later trainings, too.
    """

    def __init__(self, optimizer: Any, parameters: Any, resumed: Path | None):
        """`resumed`: folder of the adapter whose training goes on."""
        self._optimizer, self._rises = optimizer, False
        optimizer.init(parameters)
        if resumed is not None and not self._load(resumed):
            say(f"no fitting {OPTIMIZER} is beside the adapter: the rate rises for {WARM_UP} steps")
            self._rises = True
        if self._rises:
            rate = optimizer.learning_rate.item()
            optimizer._maybe_schedule(
                "learning_rate", optimizers.linear_schedule(rate / WARM_UP, rate, WARM_UP)
            )

    def _flat(self) -> dict[str, mx.array]:
        flat = cast(dict[str, mx.array], tree_flatten(self._optimizer.state, destination={}))
        return {name: array for name, array in flat.items() if name != "learning_rate"}

    def save(self, folder: Path) -> None:
        """Beside the adapter in `folder`."""
        said = {"adapter": _digest(folder / ADAPTER), "rises": "yes" if self._rises else ""}
        mx.save_safetensors(str(folder / OPTIMIZER), self._flat(), said)

    def _load(self, folder: Path) -> bool:
        """Whether those in `folder` are there, and of its adapter as it is."""
        own = self._flat()
        try:
            kept, said = cast(Any, mx.load(str(folder / OPTIMIZER), return_metadata=True))
            if said.get("adapter") != _digest(folder / ADAPTER):
                return False
            if {name: array.shape for name, array in kept.items()} != {
                name: array.shape for name, array in own.items()
            }:
                return False
            mx.eval(kept)
        except (OSError, RuntimeError, ValueError):
            return False
        state = {name: array.astype(own[name].dtype) for name, array in kept.items()}
        state["learning_rate"] = self._optimizer.learning_rate
        self._optimizer.state = tree_unflatten(state)
        self._rises = bool(said.get("rises"))
        return True


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def say(line: str) -> None:
    with suppress(OSError):  # Nobody reads it any more.
        print(line, flush=True)


def train_adapter(job: Job, reports: Any, before: int, stop: Callable[[], bool]) -> None:
    """Train, and save into `job.adapter_path` what `load` reads. Raises ModelError and Stopped.

    reports  mlx-lm's TrainingCallback, and its `on_save` is told how many steps are saved
    before   steps of earlier trainings, for the lines that are printed
    stop     asked between steps: whether to end; steps that are done are saved then
    """
    path, target = Path(job.model), Path(job.adapter_path)
    unfinished = target / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)  # Of a training that was killed.
    mx.set_memory_limit(job.memory_limit)
    # A CPU's 16-bit products use no BLAS.
    model, tokenizer, _, _ = read_model(path, backend() == "cpu", vision.blindness(path))
    settings = _settings(job, model, unfinished)
    progress = _Progress(unfinished, reports, before, stop)
    patched = cast(Any, trainer), cast(Any, lora)
    # Its own draw boxes in colours into files too, and count a model's parameters wrongly.
    patched[0].TrainUI = lambda *_, **__: progress
    patched[1].print_lora_run_header = lambda *_: None
    patched[1].print_trainable_parameters = lambda model: _make_ready(model, getattr(mx, job.dtype))

    def train(model: Any, optimizer: Any, **rest: Any) -> None:
        resumed = target if job.resume else None
        progress.moments = _Moments(optimizer, model.trainable_parameters(), resumed)
        if job.grad_checkpoint:
            _checkpoint_layers(model)
            rest["args"].grad_checkpoint = False  # Done.
        np.random.seed([job.seed, before])  # mlx-lm's order of examples: another one when it goes on.
        trainer.train(model=model, optimizer=optimizer, **rest)

    patched[1].train = train

    def dataset(examples: list[Example]) -> Any:
        return (
            create_dataset(msgspec.to_builtins(examples), cast(Any, tokenizer), settings) if examples else []
        )

    try:
        train_model(settings, model, dataset(job.train), dataset(job.valid), reports)
        if progress.steps:
            progress.publish()
    except (ValueError, KeyError) as error:
        raise ModelError(f"{type(error).__name__}: {error}") from error
    except (AttributeError, TypeError) as error:  # Of models whose code no adapter fits.
        raise ModelError(f"mlx-lm can't train an adapter of this model: {error}") from error
    except (OSError, RuntimeError) as error:  # MLX's is the second.
        free = human(shutil.disk_usage(target).free)
        raise ModelError(
            f"the training ended, and what was saved before is kept: {error} ({free} are free in {target})"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    if progress.stopped:
        raise Stopped(progress.steps)


def _settings(job: Job, model: Any, unfinished: Path) -> SimpleNamespace:
    """What mlx-lm's trainer asks for. unfinished: the folder that it saves into."""
    named = {name: getattr(job, name) for name in job.__struct_fields__ if name in CONFIG_DEFAULTS}
    layers = len(model.layers)
    if (keys := job.lora_parameters.get("keys")) is not None:
        named["lora_parameters"] = {**job.lora_parameters, "keys": full_keys(model, keys)}
    return SimpleNamespace(
        **CONFIG_DEFAULTS
        | named
        | {
            "adapter_path": str(unfinished),
            "num_layers": min(job.num_layers or layers, layers),
            "train": True,
            "optimizer": "adamw",
            # Without it, its first 20 steps are three to six times the rate.
            "optimizer_config": {"adamw": {"bias_correction": True, "weight_decay": job.weight_decay}},
            "mask_prompt": job.train[0].kind != "text",
            "val_batches": 25,
            "steps_per_report": max(1, job.iters // 50),
            "steps_per_eval": max(1, job.iters // 5),
            "save_every": 100,
            "resume_adapter_file": str(Path(job.adapter_path) / ADAPTER) if job.resume else None,
        }
    )


def full_keys(model: Any, names: list[str]) -> list[str]:
    """What mlx-lm calls the matrices of a layer that `names` mean: `q_proj` is `self_attn.q_proj`.

    Raises ModelError for a name that none has.
    """
    there = {
        name
        for layer in model.layers
        for name, module in layer.named_modules()
        if (name and hasattr(module, "to_lora")) or isinstance(module, _ADAPTED)
    }
    found = {name: [key for key in there if key == name or key.endswith(f".{name}")] for name in names}
    for name, keys in found.items():
        if not keys:
            raise ModelError(f"--keys: no layer has {name!r}; there are: {', '.join(sorted(there))}")
    return sorted({key for keys in found.values() for key in keys})


def _checkpoint_layers(model: Any) -> None:
    """Have each layer compute again what its gradient needs. mlx-lm's does so for the first layer's class."""
    for layer in {type(layer): layer for layer in model.layers}.values():
        trainer.grad_checkpoint(layer)


def _make_ready(model: Any, dtype: Any) -> None:
    """Give the adapter in `model`, new or resumed, its type, and say how large it is."""
    model.update(tree_map(lambda array: array.astype(dtype), model.trainable_parameters()))
    count = sum(cast(mx.array, array).size for _, array in tree_flatten(model.trainable_parameters()))
    say(f"{count} parameters are trained")
