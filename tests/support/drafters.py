"""Tiny drafters for a tiny model, in folders of their own, as mlx-vlm reads them."""

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
from omlxd.engine.mlx_adapter.model.drafters.drafter import target_of
from omlxd.engine.mlx_adapter.model.drafters.drafter_folder import eagle_layers
from omlxd.engine.mlx_adapter.model.vlm.vision import import_vlm

KINDS = ("eagle3", "eagle3-sglang", "dflash", "dflash2", "dspark")
OTHERS = ("laguna", "gemma4_dspark")
"""Of one family each, whose shapes are all that they ask of a target."""

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_BLOCK = 5


def config_of(kind: str, target: Path, **changes: Any) -> dict[str, Any]:
    """The config of a drafter for the model in folder `target`; `changes` to its sizes."""
    model = json.loads((target / "config.json").read_text())
    sizes = {**_SIZES, "vocab_size": model["vocab_size"], **changes}
    if kind == "eagle3-sglang":
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLMEagle3"],
            **sizes,
            "num_hidden_layers": 1,
            "draft_vocab_size": sizes["vocab_size"] - 100,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        }
    if kind == "eagle3":
        return {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": {**sizes, "num_hidden_layers": 1},
            "draft_vocab_size": sizes["vocab_size"] - 100,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        }
    own: dict[str, Any] = {"mask_token_id": 3, "target_layer_ids": [0, 2]}
    if kind in OTHERS:
        return _of_family(kind, sizes, own, model["num_hidden_layers"])
    if kind == "dflash2":
        own |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
    if kind == "dspark":
        own |= {"projector_type": "dspark", "markov_rank": 8, "block_size": _BLOCK - 1}
    return {
        "model_type": "qwen3",
        "architectures": ["DFlash2DraftModel" if kind == "dflash2" else "DFlashDraftModel"],
        **sizes,
        "num_hidden_layers": 2,
        "block_size": _BLOCK,
        "num_target_layers": model["num_hidden_layers"],
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 40,
        "dflash_config": own,
    }


def _of_family(kind: str, sizes: dict[str, Any], own: dict[str, Any], layers: int) -> dict[str, Any]:
    common = {**sizes, "num_hidden_layers": 2, "max_position_embeddings": 4096, "num_target_layers": layers}
    if kind == "gemma4_dspark":
        return {
            "model_type": "gemma4_text",
            "architectures": ["Gemma4DSparkModel"],
            **common,
            "global_head_dim": 16,
            "block_size": _BLOCK - 1,
            "markov_rank": 8,
            **own,
        }
    return {
        "model_type": "laguna",
        **common,
        "draft_vocab_size": sizes["vocab_size"],
        "rope_theta": 10000.0,
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 40,
        "gating": "per-head",
        "eagle_aux_hidden_state_layer_ids": [1, 3],
        "dflash_config": {**own, "block_size": _BLOCK, "num_target_layers": layers, "causal": True},
    }


def build_drafter(
    kind: str, folder: Path, target: Path, texts: Sequence[Sequence[int]] = (), **changes: Any
) -> list[float]:
    """Write a random drafter of `kind` for the model in `target`; trained to guess what follows in `texts`.

    Its losses, first and last, if there are any texts.
    """
    sglang, kind = kind == "eagle3-sglang", kind.removesuffix("-sglang")
    config = config_of(kind, target, **changes)
    package = import_vlm("utils").get_model_and_args(dict(config))[0]
    mx.random.seed(3)
    module = package.Model(package.ModelConfig.from_dict(config))
    module.update({name: value for name, value in module.parameters().items() if value is not None})
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if kind == "eagle3":  # It knows the tokens from 100 on.
        module.d2t = mx.full(module.d2t.shape, 100, mx.int32)
    own = [name for name, _ in tree_flatten(module.parameters())]
    losses = _train(kind, module, target, texts) if texts else []
    weights: Any = {name: array for name, array in tree_flatten(module.parameters()) if name in own}
    if sglang:
        (folder / "config.json").write_text(json.dumps(config_of("eagle3-sglang", target, **changes)))
        del weights["embed_tokens.weight"]
        weights = {name.replace("layers.0.", "midlayer."): array for name, array in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return losses


def _train(kind: str, module: Any, target: Path, texts: Sequence[Sequence[int]]) -> list[float]:
    loaded = mlx_adapter.load(target)
    layers = eagle_layers(module.config, 3) if kind == "eagle3" else module.config.target_layer_ids
    positions.keep_layers(loaded.model, layers)
    states = []
    for each in texts:
        loaded.model(mx.array([each]), cache=mlx_adapter.new_cache(loaded.model, 1))
        states.append(mlx_adapter.take_hidden())
    positions.forget_hidden()
    mx.eval(states)
    if kind != "eagle3":
        module.bind(target_of(loaded))
        module.embed_tokens.freeze()
        if isinstance(module.lm_head, nn.Module):
            module.lm_head.freeze()

    def eagle_loss(module: Any, text: Sequence[int], hidden: mx.array) -> mx.array:
        module._cache, module._next_position = module.make_cache(), 1
        out = module._forward_tokens(mx.array([[*text[1:-1]]]), hidden[:, :-2], mx.int32)
        known = mx.array([token - 100 if token >= 100 else 0 for token in text[2:]])
        loss = nn.losses.cross_entropy(module._logits(out)[0], known)
        return (loss * mx.array([token >= 100 for token in text[2:]])).mean()

    def block_loss(module: Any, text: Sequence[int], hidden: mx.array) -> mx.array:
        total, anchors = mx.array(0.0), range(len(text) - 80, len(text) - _BLOCK, 7)
        for anchor in anchors:
            block = [text[anchor], *[module.config.mask_token_id] * (_BLOCK - 1)]
            with mlx_adapter.last_positions(_BLOCK):
                logits = module(mx.array([block]), hidden[:, :anchor], module.make_cache())
            behind = mx.array([*text[anchor + 1 : anchor + _BLOCK]])
            total = total + nn.losses.cross_entropy(logits[0, 1:], behind).mean()
        return total / len(anchors)

    one = eagle_loss if kind == "eagle3" else block_loss

    def loss(module: Any) -> mx.array:
        return sum((one(module, *each) for each in zip(texts, states, strict=True)), mx.array(0.0))

    if kind == "eagle3":
        module.freeze(keys=["d2t"])
    step, optimiser, losses = nn.value_and_grad(module, loss), optim.Adam(4e-3), []
    for _ in range(30):
        module._fused_context_kv_weight = None
        value, grads = step(module)
        optimiser.update(module, grads)
        mx.eval(module.parameters(), optimiser.state)
        losses.append(value.item())
    return [losses[0], losses[-1]]
