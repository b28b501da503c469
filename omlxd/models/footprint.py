"""What a model will take, told from its own files: config.json and the headers of its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


def read_config(folder: Path) -> dict[str, Any]:
    """config.json; empty when it can't be read."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes())
    except (OSError, msgspec.MsgspecError):
        return {}
    return config if isinstance(config, dict) else {}


def context_of_folder(folder: Path) -> int | None:
    """Tokens that the model was made for; None when its config does not say."""
    config = read_config(folder)
    for holder in (config, config.get("text_config") or {}):
        for key in ("max_position_embeddings", "max_sequence_length", "n_positions", "seq_length"):
            if isinstance(value := holder.get(key), int) and value > 0:
                return value
    return None


def weight_bytes(folder: Path) -> int:
    """Bytes of the weight files; 0 when there are none to be read."""
    try:
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    except OSError:
        return 0
