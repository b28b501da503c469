"""Tiny random models of each architecture that omlxd meets, made by the tests themselves.

Seeded, well under 1 MB each, with the demo's tokenizer at a smaller vocabulary and its chat template.
Weights are noise of 1.5/sqrt(fan-in), so that greedy continuations vary and depend on the whole
prompt; the output rows of special tokens are zero, so that no greedy run ends by itself.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, quantize_model, save_config, save_model

from omlxd.models import demo

VOCAB = 1024
WINDOW = 32
"""Sliding window, in tokens, of the families that have one."""

DType = Literal["fp32", "bf16"]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "num_hidden_layers": 3,
}

_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}

_LINEAR_ATTENTION: dict[str, Any] = {
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}

_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_4bit": {"model_type": "qwen3"},
    "llama": {},
    "qwen3_moe": _MOE,
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "gemma3_text": {
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    "gpt_oss": {
        "num_hidden_layers": 4,
        "intermediate_size": 64,
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": {"rope_type": "default"},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_next": {
        **_MOE,
        **_LINEAR_ATTENTION,
        "shared_expert_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
    },
    "qwen3_5": {
        **_LINEAR_ATTENTION,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 2],
        },
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "layer_norm_epsilon": 1e-6,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": "auto",
    },
}

TOKEN_KV = ("qwen3", "llama", "qwen3_moe", "deepseek_v3", "qwen3_4bit")
"""Every layer's cache holds one entry a token: prefixes can be reused block by block."""
OTHERS = ("gemma3_text", "gpt_oss", "qwen3_next", "qwen3_5", "mamba2")
"""At least one layer holds a window or a recurrent state."""
FAMILIES = TOKEN_KV + OTHERS
FP32_ONLY = ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")
"""Mixtures of experts: MLX's GatherMM has only float32 on a CPU."""

CACHE_CLASSES: dict[str, set[str]] = {
    "qwen3": {"KVCache"},
    "llama": {"KVCache"},
    "qwen3_moe": {"KVCache"},
    "deepseek_v3": {"KVCache"},
    "qwen3_4bit": {"KVCache"},
    "gemma3_text": {"KVCache", "RotatingKVCache"},
    "gpt_oss": {"KVCache", "RotatingKVCache"},
    "qwen3_next": {"KVCache", "ArraysCache"},
    "qwen3_5": {"KVCache", "ArraysCache"},
    "mamba2": {"ArraysCache"},
}
"""Classes that `mlx_lm.models.cache.make_prompt_cache` gives, over all layers."""


def build_family(name: str, folder: Path | str, dtype: DType = "fp32", seed: int = 1) -> Path:
    """A model of family `name` (one of FAMILIES) in `folder`; returns `folder`.

    The same arguments give the same weights. Raises ValueError for bf16 where the CPU has none.
    """
    if dtype == "bf16" and name in FP32_ONLY:
        raise ValueError(f"{name} runs in fp32 alone on a CPU")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = demo.write_tokenizer(folder, VOCAB)
    end = tokenizer.token_to_id("<|im_end|>")
    config = {"model_type": name, "eos_token_id": end} | _COMMON | _CONFIGS[name]

    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    bits = np.random.PCG64(seed)
    weights = [
        (path, mx.array(_weight(path, tuple(array.shape), bits, tokenizer, name)))
        for path, array in sorted(tree_flatten(model.parameters()))
    ]
    if dtype == "bf16":
        weights = [(path, array.astype(mx.bfloat16)) for path, array in weights]
    model.load_weights(weights)
    mx.eval(model.parameters())
    if name == "qwen3_4bit":
        model, config = quantize_model(model, config, group_size=32, bits=4)
    save_model(folder, model)
    save_config(dict(config), config_path=folder / "config.json")
    return folder


def _weight(
    path: str, shape: tuple[int, ...], bits: np.random.PCG64, tokenizer: Any, family: str
) -> np.ndarray:
    """One tensor, float32. Kinds are told by name: norms, recurrent constants, biases, matrices."""
    noise = demo.unit_noise(bits, *shape)
    if re.search(r"norm\w*\.weight$", path):
        mean = 2 if re.search(r"[qk]_norm", path) else 1  # attention sharp enough to see one token
        return noise * np.float32(0.1) + np.float32(mean - (family == "gemma3_text"))  # which adds 1
    if path.endswith("A_log"):
        return noise * np.float32(0.5) - np.float32(4)  # a memory of some hundred tokens
    if len(shape) == 1:
        return noise * np.float32(0.3)
    fan_in = int(np.prod(shape[1:])) if "conv1d" in path else shape[-1]
    weight = noise * np.float32(1.5 / fan_in**0.5)
    return weight * demo.embedding_scale(tokenizer, {}) if "lm_head" in path else weight
