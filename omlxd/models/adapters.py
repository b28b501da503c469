"""Reads a LoRA adapter's files, without MLX: whether it is complete, and can share an engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ..errors import AdapterError, ModelError
from .config.json_files import BrokenJSON, read_json
from .resolve import read_tensors

ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")
_IN_A_LAYER = re.compile(r"(.*\.)?layers\.\d+\..+\.(lora_a|lora_b|m)")


class _Parameters(msgspec.Struct):
    rank: Annotated[int, msgspec.Meta(ge=1)]
    scale: float
    dropout: float


class _Config(msgspec.Struct):
    num_layers: int | None = None
    lora_parameters: _Parameters | None = None
    fine_tune_type: Literal["lora", "dora", "full"] = "lora"


def check_adapter(folder: Path) -> str:
    """Say why the adapter in `folder` can't share an engine with its base; "": it can.

    Raises AdapterError, which names the file, for what is no whole adapter.
    """
    config_file, weights = (folder / name for name in ADAPTER_FILES)
    try:
        config = read_json(config_file, _Config)
        tensors = read_tensors(weights)
    except ModelError as error:
        raise _broken(error.message) from error
    except OSError as error:
        file, why = error.filename or folder, error.strerror or error
        raise _broken(f"{file} can't be read: {why}") from error
    except BrokenJSON as error:
        raise _broken(f"{config_file} is no adapter_config.json of mlx-lm's ({error})") from error
    if not tensors:
        raise _broken(f"{weights} holds no tensors")
    if config.fine_tune_type == "full":
        return "it replaces whole weights"
    if config.lora_parameters is None or config.num_layers is None:
        raise _broken(f"{config_file} has no num_layers or no lora_parameters, which mlx-lm writes")
    if beyond := next((name for name in tensors if not _IN_A_LAYER.fullmatch(name)), None):
        return f"{beyond} is in no layer"
    return ""


def adapter_bytes(folder: Path) -> int:
    """Return the bytes of an adapter's matrices on disk; 0 when they can't be read."""
    try:
        return (folder / ADAPTER_FILES[1]).stat().st_size
    except OSError:
        return 0


def adapter_state(folder: Path) -> tuple[int, ...]:
    """Return what changes with the adapter's files; () when they can't be read."""
    try:
        stats = [(folder / name).stat() for name in ADAPTER_FILES]
    except OSError:
        return ()
    return tuple(part for stat in stats for part in (stat.st_ino, stat.st_size, stat.st_mtime_ns))


def _broken(what: str) -> AdapterError:
    return AdapterError(f"the adapter can't be used: {what}.", param="model")
