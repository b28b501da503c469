"""Tiny models that embed or score, with random weights, and what NumPy alone computes of two of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tokenizers.processors import TemplateProcessing

from omlxd.engine.mlx_adapter.model.vlm.vision import import_vlm
from omlxd.models import demo

VOCAB = 512
_ENCODER = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 48, "max_position_embeddings": 96},
}
_DECODER = {
    **_ENCODER,
    **{"num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0},
    **{"tie_word_embeddings": True},
}
EMBEDDERS: dict[str, dict[str, Any]] = {
    "bert": _ENCODER,
    "modernbert": {**_ENCODER, "local_attention": 16},
    "xlm-roberta": {**_ENCODER, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1},
    "qwen3": _DECODER,
    "gemma3_text": {
        **_DECODER,
        "query_pre_attn_scalar": 8,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
}
_MODULES = {"xlm-roberta": "xlm_roberta", "qwen3": "qwen3_embedding", "gemma3_text": "gemma3_embedding"}


def build_embedder(family: str, folder: Path, pooling: str = "", scores: bool = False) -> Path:
    """Write a model. `pooling`: what its `1_Pooling` says; "": it has none. `scores`: it is a reranker."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = demo.write_tokenizer(folder, VOCAB)
    begin, end = "<|im_start|>", "<|im_end|>"
    tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} $B:1 {end}:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in (begin, end)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = "ForSequenceClassification" if scores else "Model"
    config = {"model_type": family, "architectures": [f"Tiny{kind}"], **EMBEDDERS[family]}
    demo.write_json(folder / "config.json", config)
    if pooling:
        (folder / "1_Pooling").mkdir()
        demo.write_json(folder / "1_Pooling" / "config.json", {f"pooling_mode_{pooling}": True})
    module = import_vlm("models." + _MODULES.get(family, family))
    package = import_vlm(module.__name__.removeprefix("mlx_vlm.") + "." + module.__name__.rpartition(".")[2])
    model = (package.SequenceClassificationModel if scores else package.Model)(
        module.ModelConfig.from_dict({**config, "num_labels": 1})
    )
    draw = np.random.default_rng(7)
    weights = {
        name: mx.array(draw.normal(float("norm" in name.lower() and "weight" in name), 0.2, value.shape))
        for name, value in tree_flatten(model.parameters())
    }
    weights = {name: value.astype(mx.float32) for name, value in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


# --------------------------------------------------------------------------- references


def reference(folder: Path, ids: list[int], pooling: str) -> np.ndarray:
    """The vector of one text, float64, by NumPy alone: of a BERT or of a Qwen3."""
    config = json.loads((folder / "config.json").read_text())
    weights = {
        name: np.array(w, np.float64) for name, w in mx.load(str(folder / "model.safetensors")).items()
    }
    hidden = (_bert if config["model_type"] == "bert" else _qwen3)(config, weights, np.array(ids))
    pooled = {"mean_tokens": hidden.mean(0), "cls_token": hidden[0], "lasttoken": hidden[-1]}[pooling]
    return pooled / np.linalg.norm(pooled)


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | float) -> np.ndarray:
    """Arrays of (heads, tokens, width); the result is (tokens, heads x width)."""
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1]) + mask
    parts = np.exp(scores - scores.max(-1, keepdims=True))
    out = parts / parts.sum(-1, keepdims=True) @ v
    return out.transpose(1, 0, 2).reshape(q.shape[1], -1)


def _heads(x: np.ndarray, count: int) -> np.ndarray:
    return x.reshape(len(x), count, -1).transpose(1, 0, 2)


def _bert(config: dict[str, Any], w: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * w[name + ".weight"] + w[name + ".bias"]

    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for at in range(config["num_hidden_layers"]):
        here, heads = f"encoder.layer.{at}", config["num_attention_heads"]
        q, k, v = (_heads(linear(x, f"{here}.attention.self.{n}"), heads) for n in ("query", "key", "value"))
        out = linear(_attend(q, k, v, 0.0), f"{here}.attention.output.dense")
        x = norm(out + x, f"{here}.attention.output.LayerNorm")
        inner = linear(x, f"{here}.intermediate.dense")
        inner = inner * (1 + np.vectorize(math.erf)(inner / math.sqrt(2))) / 2
        x = norm(linear(inner, f"{here}.output.dense") + x, f"{here}.output.LayerNorm")
    return x


def _qwen3(config: dict[str, Any], w: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[name + ".weight"]

    def rope(x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        angles = np.outer(np.arange(x.shape[1]), config["rope_theta"] ** (-np.arange(half) / half))
        a, b = x[..., :half], x[..., half:]
        return np.concatenate(
            [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
        )

    count, shared = config["num_attention_heads"], config["num_key_value_heads"]
    mask = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    x = w["model.embed_tokens.weight"][ids]
    for at in range(config["num_hidden_layers"]):
        here = f"model.layers.{at}"
        y, name = norm(x, f"{here}.input_layernorm"), f"{here}.self_attn"
        q = rope(norm(_heads(y @ w[f"{name}.q_proj.weight"].T, count), f"{name}.q_norm"))
        k = rope(norm(_heads(y @ w[f"{name}.k_proj.weight"].T, shared), f"{name}.k_norm"))
        v = _heads(y @ w[f"{name}.v_proj.weight"].T, shared)
        k, v = (np.repeat(one, count // shared, 0) for one in (k, v))
        x = x + _attend(q, k, v, mask) @ w[f"{name}.o_proj.weight"].T
        y, name = norm(x, f"{here}.post_attention_layernorm"), f"{here}.mlp"
        gate = y @ w[f"{name}.gate_proj.weight"].T
        inner = gate / (1 + np.exp(-gate)) * (y @ w[f"{name}.up_proj.weight"].T)
        x = x + inner @ w[f"{name}.down_proj.weight"].T
    return norm(x, "model.norm")
