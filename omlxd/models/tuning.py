"""Examples of a data folder for `omlxd tune`, as mlx-lm's tuner reads them, and a job's memory.

`train.jsonl` and, if it is there, `valid.jsonl`: one JSON object a line, all of one kind.

| fields                                | trained on                          |
|---------------------------------------|-------------------------------------|
| `messages`, and `tools` if it has any | the last message, the assistant's   |
| `prompt`, `completion`                | the completion, as a chat's answer  |
| `text`                                | all of it, without a chat template  |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ..common.files import read_small
from ..common.units import PREFILL_CHUNK
from ..errors import ConfigError
from .config.json_files import BrokenJSON, read_json
from .footprint import Footprint

VALID_PART = 10
"""Examples of which one is for validation, without `valid.jsonl`."""
MOST_BYTES = 1 << 30
"""Bytes of a data file at most."""
BACKWARD = 4
"""Memory of a pass with gradients over that of a forward pass."""


class Message(msgspec.Struct, omit_defaults=True):
    role: str
    content: str | None = None
    tool_calls: list[dict[str, Any]] = []


class Example(msgspec.Struct, omit_defaults=True):
    messages: list[Message] = []
    tools: list[dict[str, Any]] = []
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None

    @property
    def kind(self) -> str:
        """Field that holds the example; "": none."""
        if self.messages and self.messages[-1].role == "assistant":
            return "messages"
        return "prompt" if self.prompt is not None and self.completion else "text" if self.text else ""


class Job(msgspec.Struct, kw_only=True):
    """For `omlxd.engine.server.tune`, as JSON on its standard input. Names as mlx-lm's tuner has them.

    memory_limit  bytes that MLX keeps to
    resume        go on with the adapter in `adapter_path`
    dtype         of the adapter and of AdamW's sums: `float32` or `bfloat16`
    lora_parameters  rank, scale, dropout; `keys`: names of matrices, or the ends of their names; none: all
    """

    model: str
    data: str
    adapter_path: str
    train: list[Example]
    valid: list[Example]
    iters: int
    batch_size: int
    learning_rate: float
    num_layers: int
    lora_parameters: dict[str, Any]
    max_seq_length: int
    seed: int
    grad_checkpoint: bool = False
    resume: bool = False
    memory_limit: int = 0
    dtype: str = "float32"
    weight_decay: float = 0.01


def read_data(folder: Path) -> tuple[list[Example], list[Example]]:
    """Read examples to train on, and for validation. Raises ConfigError, which names file and line."""
    train = _read_examples(folder / "train.jsonl")
    file = folder / "valid.jsonl"
    valid = _read_examples(file) if file.exists() else train[VALID_PART - 1 :: VALID_PART]
    if not file.exists():
        train = [one for at, one in enumerate(train, 1) if at % VALID_PART]
    kinds = {one.kind for one in (*train, *valid)}
    if len(kinds) > 1:
        raise _wrong(folder, f"examples of one kind are needed, and here are {' and '.join(sorted(kinds))}")
    return train, valid


def _read_examples(file: Path) -> list[Example]:
    try:
        lines = read_small(file, MOST_BYTES).splitlines()
    except OSError as error:
        raise _wrong(file, f"{error.strerror}; a line is an object with messages, prompt or text") from None
    examples: list[Example] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            examples.append(msgspec.json.decode(line, type=Example))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _wrong(file, f"line {number}: {error}") from None
        if not examples[-1].kind:
            what = "it has none of: messages that end with the assistant's, prompt and completion, or text"
            empty = next((name for name in ("completion", "text") if getattr(examples[-1], name) == ""), "")
            raise _wrong(file, f"line {number}: {f'its {empty} is empty' if empty else what}")
    if not examples:
        raise _wrong(file, "it holds no example")
    return examples


def _wrong(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"--data: {path}: {problem}.")


def lora_of(adapter: Path) -> tuple[int, dict[str, Any]]:
    """Return layers (0: all) and `lora_parameters` of mlx-lm's LoRA adapter there. Raises ConfigError."""
    file = adapter / "adapter_config.json"
    try:
        config = read_json(file, _AdapterConfig)
    except (OSError, BrokenJSON) as error:
        raise ConfigError(f"--resume: {file}: {error}.") from None
    if config.fine_tune_type != "lora" or not isinstance(config.lora_parameters.get("rank"), int):
        raise ConfigError(f"--resume: {adapter} is no LoRA adapter of mlx-lm's.")
    return max(0, config.num_layers), config.lora_parameters


class _AdapterConfig(msgspec.Struct):
    num_layers: int
    lora_parameters: dict[str, Any]
    fine_tune_type: str = "lora"


def memory_need(prints: Footprint, job: Job) -> int:
    """Estimate generously the bytes of `job`, by its files; it remembers one layer's or each layer's work."""
    tokens = job.batch_size * job.max_seq_length
    layer = prints.working * tokens // PREFILL_CHUNK
    held = 4 * tokens * prints.hidden_size * prints.layers if job.grad_checkpoint else layer * prints.layers
    logits = 3 * 4 * tokens * prints.vocab_size
    return prints.weights + BACKWARD * layer + held + logits
