"""Maps llama.cpp's parts of a model to mlx-lm's: names, config, and a few changed rows.

A new architecture is one row of ARCHITECTURES. Names and meanings: gguf-py/gguf/constants.py and
convert_hf_to_gguf.py of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .header import Header, Unfit

Config = dict[str, Any]


class Keys:
    """A file's metadata under its architecture's prefix. A missing key raises Unfit."""

    def __init__(self, header: Header, prefix: str):
        self._metadata = header.metadata
        self._prefix = prefix

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise Unfit(f"its metadata lack {self._prefix}.{name}.")
        return value

    def get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self._prefix}.{name}", default)

    def number(self, name: str, most: int = 1 << 24) -> int:
        """Return an integer from 1 to `most`."""
        value = self[name]
        if not isinstance(value, int) or not 0 < value <= most:
            raise Unfit(f"its {self._prefix}.{name} is {str(value)[:40]}; no model has that.")
        return value


@dataclass(frozen=True)
class Architecture:
    """A family of models. model_type: mlx-lm's. names: further parts of a layer, ggml's → mlx-lm's.

    config(keys, header)  what the common config lacks
    permuted              llama.cpp stores the rows of q and k for its interleaved RoPE
    norm_offset           what llama.cpp added to the weights of norms
    """

    model_type: str
    names: dict[str, str]
    config: Callable[[Keys, Header], Config] = lambda keys, header: {}
    permuted: bool = False
    norm_offset: float = 0.0
    dtype: str = "float16"


_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _head_dim(keys: Keys, header: Header) -> Config:
    width = keys.number("embedding_length") // keys.number("attention.head_count")
    return {"head_dim": keys.get("attention.key_length", width)}


def _llama(keys: Keys, header: Header) -> Config:
    config = _head_dim(keys, header) | {
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
    }
    if "rope_freqs.weight" in header.tensors:
        config["rope_scaling"] = _llama3_scaling(keys, header, config["head_dim"])
    return config


def _llama3_scaling(keys: Keys, header: Header, head_dim: int) -> Config:
    """Recover Llama 3.1's RoPE scaling, of which llama.cpp keeps the resulting factors alone."""
    stored = read_floats(header, "rope_freqs.weight")
    scaling = {
        "rope_type": "llama3",
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    base = float(keys.get("rope.freq_base", 10000.0))
    turns = 8192 / (2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim))
    smooth = ((turns - 1) / 3).clip(0, 1)
    factors = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if stored.shape != factors.shape or not np.allclose(stored, factors, rtol=1e-3):
        raise Unfit(
            "its RoPE factors (rope_freqs.weight) are not those of Llama 3.1; omlxd can't express them."
        )
    return scaling


def _gemma3(keys: Keys, header: Header) -> Config:
    head = keys.number("attention.key_length")
    layers, hidden = keys.number("block_count"), keys.number("embedding_length")
    scalar = hidden // keys.number("attention.head_count") if layers == 62 else head  # 27B differs.
    return {
        "head_dim": head,
        "sliding_window": keys.number("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": float(keys.get("rope.freq_base_swa", 10000.0)),
        "query_pre_attn_scalar": scalar,
    }


def _phi3(keys: Keys, header: Header) -> Config:
    original = keys.get("rope.scaling.original_context_length", keys.number("context_length"))
    width = keys.number("embedding_length") // keys.number("attention.head_count")
    config: Config = {
        "original_max_position_embeddings": original,
        "partial_rotary_factor": keys.get("rope.dimension_count", width) / width,
    }
    if "rope_factors_long.weight" in header.tensors:
        config["rope_scaling"] = {
            "type": "longrope",
            "long_factor": read_floats(header, "rope_factors_long.weight").tolist(),
            "short_factor": read_floats(header, "rope_factors_short.weight").tolist(),
        }
    return config


def _qwen3_moe(keys: Keys, header: Header) -> Config:
    return _head_dim(keys, header) | {
        "num_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


_DENSE = _ATTENTION | _MLP | _NORMS
ARCHITECTURES = {
    "llama": Architecture("llama", _DENSE, _llama, permuted=True),
    "qwen2": Architecture("qwen2", _DENSE),
    "qwen3": Architecture("qwen3", _DENSE | _HEAD_NORMS, _head_dim),
    "qwen3moe": Architecture("qwen3_moe", _ATTENTION | _NORMS | _HEAD_NORMS | _EXPERTS, _qwen3_moe),
    "gemma3": Architecture(
        "gemma3_text",
        _ATTENTION
        | _MLP
        | _HEAD_NORMS
        | {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        _gemma3,
        norm_offset=1.0,
        dtype="bfloat16",  # Its activations exceed what float16 holds.
    ),
    "phi3": Architecture(
        "phi3",
        _NORMS
        | {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        _phi3,
    ),
}

NOT_WEIGHTS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
"""Tensors that end up in the config."""


def architecture_of(header: Header) -> tuple[Architecture, Keys]:
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise Unfit(
            f"its architecture is {str(name)[:40]!r}, which omlxd does not import; "
            f"it imports {', '.join(ARCHITECTURES)}."
        )
    return ARCHITECTURES[name], Keys(header, name)


def mlx_name(name: str, architecture: Architecture) -> str | None:
    """Return mlx-lm's name of tensor `name`; None for one that the architecture lacks."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in architecture.names:
        return f"model.layers.{layer[1]}.{architecture.names[layer[2]]}.{suffix}"
    return None


def config_of(header: Header) -> Config:
    """Return the model's config.json, without its quantisation. Raises Unfit."""
    architecture, keys = architecture_of(header)
    metadata = header.metadata
    if "token_embd.weight" not in header.tensors:
        raise Unfit("it has no token embedding: it is no whole model (an adapter or a projector?).")
    heads = keys.number("attention.head_count")
    config = {
        "model_type": architecture.model_type,
        "hidden_size": keys.number("embedding_length"),
        "num_hidden_layers": keys.number("block_count", 1000),
        "intermediate_size": keys.number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": keys.number("context_length", 1 << 30),
        "rope_theta": float(keys.get("rope.freq_base", 10000.0)),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_ids(metadata),
    }
    return config | _scaling(keys) | architecture.config(keys, header)


def eos_ids(metadata: dict[str, Any]) -> list[int]:
    """Return ids that end an answer: of a text, of a turn, of a message."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    values = [metadata.get(f"tokenizer.ggml.{name}") for name in names]
    return list(dict.fromkeys(value for value in values if isinstance(value, int)))


def _scaling(keys: Keys) -> Config:
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none" or (kind == "longrope"):
        return {}
    if kind not in ("linear", "yarn"):
        raise Unfit(f"its RoPE scaling is {str(kind)[:40]!r}; omlxd imports linear and yarn.")
    scaling = {"type": kind, "rope_type": kind, "factor": float(keys["rope.scaling.factor"])}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = keys.number(
            "rope.scaling.original_context_length", 1 << 30
        )
    return {"rope_scaling": scaling}


def read_floats(header: Header, name: str) -> np.ndarray:
    """Read a small F32 tensor, as float32."""
    tensor = header.tensors[name]
    if tensor.type.name != "F32" or tensor.nbytes > 1 << 20:
        raise Unfit(f"its tensor {name} is {tensor.type.name} of {tensor.shape}; F32 of a head was expected.")
    return np.fromfile(tensor.file, "<f4", tensor.nbytes // 4, offset=tensor.start).reshape(tensor.shape)
