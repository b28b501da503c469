"""Heads for multi-token prediction, put into a tiny model's folder as its family's files have them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.model import positions
from omlxd.engine.mlx_adapter.model.drafters.drafter import embeddings_of
from omlxd.engine.mlx_adapter.model.vlm.vision import import_vlm

NORMS = ("norm.weight", "norm_embedding.weight", "norm_hidden.weight")
"""Names of weights that Qwen's files hold less 1."""

HEADS: dict[str, dict[str, Any]] = {
    "qwen3_5": {},
    "qwen3_next": {},
    "glm_moe_dsa": {"num_nextn_predict_layers": 1},
    "qwen4_exp": {},
    "glm5_next": {},
    "nemotron_h": {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*", "n_routed_experts": 4},
}
"""Families with heads: what their configs say of them."""


def add_heads(folder: Path, texts: Sequence[Sequence[int]] = (), steps: int = 80) -> Any:
    """Write random heads beside the weights; trained to guess what follows in `texts`, if there are any.

    Their losses, first and last.
    """
    config = json.loads((folder / "config.json").read_text())
    splitter = import_vlm("speculative.drafters.mtp_split").get_mtp_splitter(source_config=config)
    package = import_vlm(f"speculative.drafters.{splitter.output_model_type}")
    text = splitter.read_text_config(config)
    mx.random.seed(3)
    own = {"model_type": splitter.output_model_type, "text_config": text}
    drafter = package.Model(package.ModelConfig.from_dict(own))
    for each in drafter.modules():
        if isinstance(getattr(each, "e_score_correction_bias", None), mx.array):
            each.e_score_correction_bias = mx.zeros_like(each.e_score_correction_bias)
    _write(folder, drafter)  # The model's own weights are read otherwise beside heads.
    losses = []
    if texts:
        losses = _train(drafter, folder, texts, steps)
        _write(folder, drafter)
    return losses


def _write(folder: Path, drafter: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    heads: dict[str, Any] = {}
    for name, array in tree_flatten(drafter.parameters()):
        if family.startswith("qwen3"):
            heads[f"mtp.{name}"] = array - 1 if name.endswith(NORMS) else array
        elif family.startswith("glm"):
            name = name.removeprefix("mtp.").removeprefix("mtp_block.")
            name = name.replace("shared_head_norm", "shared_head.norm")
            layers = config.get("text_config", config)["num_hidden_layers"]
            heads[f"model.layers.{layers}.{name}"] = array
        else:
            heads[f"mtp.{name}"] = array
    mx.save_safetensors(str(folder / "mtp.safetensors"), heads)
    index = folder / "model.safetensors.index.json"
    weights: Any = mx.load(str(folder / "model.safetensors"))
    names = dict.fromkeys(weights, "model.safetensors") | dict.fromkeys(heads, "mtp.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))


def _train(drafter: Any, folder: Path, texts: Sequence[Sequence[int]], steps: int) -> list[float]:
    loaded = mlx_adapter.load(folder)
    drafter._input_embed, drafter._lm_head_fn = embeddings_of(loaded.model)
    states = []
    positions.keep_hidden()
    for each in texts:
        loaded.model(mx.array([each]), cache=mlx_adapter.new_cache(loaded.model, 1))
        states.append(mlx_adapter.take_hidden())
    positions.forget_hidden()
    mx.eval(states)

    def loss(drafter: Any) -> mx.array:
        total: Any = 0
        for each, hidden in zip(texts, states, strict=True):
            drafter._cache, drafter._next_position = drafter.make_cache(), 0
            out = drafter._forward_tokens(mx.array([[*each[1:-1]]]), hidden[:, :-2], mx.int32)
            out = out[0] if isinstance(out, tuple) else out
            with mlx_adapter.last_positions(len(each)):
                logits = drafter._lm_head_fn(out)
            total = total + nn.losses.cross_entropy(logits[0], mx.array(each[2:])).mean()
        return total

    step, optimiser, losses = nn.value_and_grad(drafter, loss), optim.Adam(3e-3), []
    for _ in range(steps):
        value, grads = step(drafter)
        optimiser.update(drafter, grads)
        mx.eval(drafter.parameters(), optimiser.state)
        losses.append(value.item())
    return [losses[0], losses[-1]]
