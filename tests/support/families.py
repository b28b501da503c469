"""Tiny random models of each architecture that omlxd meets, made by the tests themselves.

Seeded, well under 1 MB each, with the demo's tokenizer at a smaller vocabulary and its chat template.
Weights are noise of 1.5/sqrt(fan-in), so that greedy continuations vary and depend on the whole
prompt; the output rows of special tokens are zero, so that no greedy run ends by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from family_configs import COMMON, CONFIGS, VLM_TEXT, VOCAB
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, quantize_model, save_config, save_model

from omlxd.engine.mlx_adapter.model.vlm import vision
from omlxd.models import demo

DType = Literal["fp32", "bf16"]

FAMILIES = tuple(CONFIGS)
TOKEN_KV = tuple(name for name, family in CONFIGS.items() if family.per_token)
"""Every layer's cache holds one entry a token: prefixes can be reused block by block."""
OTHERS = tuple(name for name in FAMILIES if name not in TOKEN_KV)
"""At least one layer holds a window or a recurrent state."""
FP32_ONLY = tuple(name for name, family in CONFIGS.items() if family.fp32_only)
"""Mixtures of experts: MLX's GatherMM has only float32 on a CPU."""


def build_family(
    name: str,
    folder: Path | str,
    dtype: DType = "fp32",
    seed: int = 1,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """A model of family `name` (one of FAMILIES or VLM_TEXT) in `folder`; returns `folder`.

    changes  to the family's config

    The same arguments give the same weights. Raises ValueError for bf16 where the CPU has none.
    """
    if dtype == "bf16" and name in FP32_ONLY:
        raise ValueError(f"{name} runs in fp32 alone on a CPU")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = demo.write_tokenizer(folder, VOCAB)
    end = tokenizer.token_to_id("<|im_end|>")
    config = {"model_type": name, "eos_token_id": end} | COMMON | (CONFIGS | VLM_TEXT)[name].config
    config |= changes or {}

    if name in VLM_TEXT:
        model = make_model(config)
    else:
        model_class, args_class = _get_classes(config)
        model = model_class(args_class.from_dict(config))
    bits = np.random.PCG64(seed)
    weights = [
        (path, mx.array(_weight(path, tuple(array.shape), bits, tokenizer, name)))
        for path, array in sorted(tree_flatten(model.parameters()))
        if array.dtype == mx.float32
    ]
    if dtype == "bf16":
        weights = [(path, array.astype(mx.bfloat16)) for path, array in weights]
    model.load_weights(weights, strict=False)  # Integers stay.
    mx.eval(model.parameters())
    if name == "qwen3_4bit":
        model, config = quantize_model(model, config, group_size=32, bits=4)
    save_model(folder, model)
    if name in VLM_TEXT:
        demo.write_json(folder / "config.json", config)  # `save_config` leaves the tower out.
    else:
        save_config(dict(config), config_path=folder / "config.json")
    return folder


def make_model(config: dict[str, Any]) -> Any:
    """mlx-vlm's model of `config`, its weights untouched."""
    config = {key: value for key, value in json.loads(json.dumps(config)).items() if key != "audio_config"}
    package, utils = vision._model_package(config), vision.import_vlm("utils")
    config.setdefault("text_config", config.pop("llm_config", {}))
    made = package.ModelConfig.from_dict(config)
    made = utils.update_module_configs(made, package, config, ["text", "vision", "perceiver", "projector"])
    return package.Model(made)


def add_foreign_token(folder: Path) -> None:
    """Have the tokenizer know `<extra>`, a token that its model lacks, as Gemma 3's knows an image's."""
    file = folder / "tokenizer.json"
    facts = json.loads(file.read_text())
    names = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    facts["added_tokens"].append({"id": VOCAB, "content": "<extra>", "special": True, **names})
    file.write_text(json.dumps(facts))


def _weight(
    path: str, shape: tuple[int, ...], bits: np.random.PCG64, tokenizer: Any, family: str
) -> np.ndarray:
    """One tensor, float32. Kinds are told by name: norms, recurrent constants, biases, matrices."""
    noise = demo.unit_noise(bits, *shape)
    if re.search(r"norm\w*\.weight$", path):
        mean = 2 if re.search(r"[qk]_norm", path) else 1  # attention sharp enough to see one token
        adds_one = family in ("gemma3_text", "qwen4_exp")
        return noise * np.float32(0.1) + np.float32(mean - adds_one)
    if path.endswith("A_log"):
        return noise * np.float32(0.5) - np.float32(4)  # a memory of some hundred tokens
    if path.endswith(("recurrent_param", "w_lora.lora.2.bias")):
        return noise * np.float32(0.5) - np.float32(6)  # the same, in other models' words
    if len(shape) == 1:
        return noise * np.float32(0.3)
    fan_in = int(np.prod(shape[1:])) if "conv1d" in path else shape[-1]
    weight = noise * np.float32(1.5 / fan_in**0.5)
    return weight * demo.embedding_scale(tokenizer, {}) if "lm_head" in path else weight
