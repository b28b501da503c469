"""Tiny configurations of the model families that omlxd meets, and what is promised of each.

A family's `promise` is about KV that was computed a token at a time, as an answer's is, where a run
without reuse computes it a chunk at a time:

| promise | logits of a hit on an answer's KV, on a CPU                | greedy tokens |
|---------|------------------------------------------------------------|---------------|
| bits    | those of a cold run, to the last bit                       | the same      |
| tokens  | may differ in the last bits: kernels for one row round     | the same      |
|         | otherwise than those for many                              |               |

A hit on a prompt's KV gives the cold run's bits for every family whose kernels don't look at a chunk's
bounds; those that do have `grid` set: a hit that begins inside of one of the cold run's chunks keeps
the tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

VOCAB = 1024
WINDOW = 32
"""Sliding window, in tokens, of the families that have one."""


@dataclass(slots=True, frozen=True)
class Family:
    """config: what differs from `COMMON`. classes: its caches'. fp32_only: see families.FP32_ONLY."""

    config: dict[str, Any]
    classes: frozenset[str] = frozenset({"KVCache"})
    fp32_only: bool = False
    promise: Literal["bits", "tokens"] = "bits"
    grid: bool = False

    @property
    def per_token(self) -> bool:
        """Every layer's cache holds one entry a token and nothing else."""
        return self.classes == {"KVCache"}


COMMON: dict[str, Any] = {
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

_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}

_CHOSEN: dict[str, Any] = {
    **_ROUTED,
    **_MLA,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "index_topk": 160,
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

_HALF_SLIDING: dict[str, Any] = {
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

_QWEN3_5: dict[str, Any] = {
    **_LINEAR_ATTENTION,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 2],
    },
}

_SHARED_KV: dict[str, Any] = {  # the last layers read the KV of earlier ones
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 16,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 30.0,
}

_SMALL_TOWER: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 64,
}

WINDOWED = frozenset({"KVCache", "RotatingKVCache"})
HYBRID = frozenset({"KVCache", "ArraysCache"})

CONFIGS: dict[str, Family] = {
    # ------------------------------------------------------------- one entry a token
    "qwen3": Family({}),
    "qwen3_4bit": Family({"model_type": "qwen3"}),
    "llama": Family({}),
    "phi3": Family({}),
    "qwen3_vl": Family({}),
    "qwen3_moe": Family(_MOE, fp32_only=True),
    "glm4_moe": Family(
        {
            **_ROUTED,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "rope_scaling": None,
            "use_qk_norm": True,
            "attention_bias": False,
            "partial_rotary_factor": 0.5,
        },
        fp32_only=True,
    ),
    "deepseek_v3": Family({**_ROUTED, **_MLA}, fp32_only=True, promise="tokens"),
    "deepseek_v32": Family(_CHOSEN, fp32_only=True, promise="tokens"),
    "glm_moe_dsa": Family(
        {
            **_CHOSEN,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "moe_layer_freq": 1,
            "attention_bias": False,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        fp32_only=True,
        promise="tokens",
    ),
    # ------------------------------------------------------------- sliding windows
    "gemma3_text": Family(
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 16,
        },
        WINDOWED,
        promise="tokens",
    ),
    "gemma3n": Family(
        {
            "text_config": {
                **COMMON,
                **_SHARED_KV,
                "model_type": "gemma3n_text",
                "rope_local_base_freq": 10000.0,
                "layer_types": ["sliding_attention", "full_attention"] * 3,
                "activation_sparsity_pattern": [0.0] * 6,
                "altup_num_inputs": 2,
                "altup_coef_clip": 120.0,
                "altup_correct_scale": True,
                "altup_active_idx": 0,
                "laurel_rank": 8,
            }
        },
        WINDOWED,
        promise="tokens",
    ),
    "gemma4_text": Family(
        {
            **_SHARED_KV,
            "sliding_window_pattern": 2,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
        WINDOWED,
        promise="tokens",
    ),
    "gpt_oss": Family(
        {
            **_HALF_SLIDING,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_scaling": {"rope_type": "default"},
        },
        WINDOWED,
        fp32_only=True,
        promise="tokens",
    ),
    "ministral3": Family(
        {
            **_HALF_SLIDING,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "default",
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 16384,
            },
        },
        WINDOWED,
        promise="tokens",
    ),
    "olmo3": Family(_HALF_SLIDING, WINDOWED, promise="tokens"),
    # ------------------------------------------------------------- recurrent layers beside attention
    "qwen3_next": Family(
        {
            **_MOE,
            **_LINEAR_ATTENTION,
            "shared_expert_intermediate_size": 32,
            "partial_rotary_factor": 0.5,
        },
        HYBRID,
        fp32_only=True,
    ),
    "qwen3_5": Family(_QWEN3_5, HYBRID),
    "kimi_linear": Family(
        {
            "num_hidden_layers": 4,
            "linear_attn_config": {
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
                "num_heads": 4,
                "head_dim": 32,
                "short_conv_kernel_size": 4,
            },
            "model_max_length": 32768,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            **_MLA,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
        HYBRID,
        fp32_only=True,
    ),
    "falcon_h1": Family(
        {
            "mamba_d_head": 16,
            "mamba_d_ssm": 128,
            "mamba_d_state": 16,
            "mamba_n_heads": 8,
            "mamba_d_conv": 4,
        },
        HYBRID,
        promise="tokens",
        grid=True,
    ),
    "jamba": Family(
        {
            "num_hidden_layers": 4,
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_conv": 4,
            "mamba_d_state": 8,
            "mamba_expand": 2,
            "num_experts": 2,
            "num_experts_per_tok": 1,
        },
        HYBRID,
        fp32_only=True,
    ),
    "granitemoehybrid": Family(
        {
            "num_hidden_layers": 4,
            "attention_bias": False,
            "embedding_multiplier": 1.0,
            "attention_multiplier": 0.25,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "layer_types": ["mamba", "attention"] * 2,
            "shared_intermediate_size": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_proj_bias": False,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_n_groups": 1,
            "mamba_conv_bias": True,
        },
        HYBRID,
        promise="tokens",
        grid=True,
    ),
    "nemotron_h": Family(
        {
            "attention_bias": False,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "mamba_proj_bias": False,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "n_groups": 1,
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-6,
            "use_bias": False,
            "use_conv_bias": True,
            "hybrid_override_pattern": ["M", "*", "-", "M", "*", "-"],
            "time_step_limit": [0.001, 100.0],
        },
        HYBRID,
        promise="tokens",
        grid=True,
    ),
    "lfm2": Family(
        {
            "num_hidden_layers": 4,
            "norm_eps": 1e-6,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 64,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "full_attn_idxs": [1, 3],
        },
        HYBRID,
    ),
    # ------------------------------------------------------------- no entry a token at all
    "mamba2": Family(
        {
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
        frozenset({"ArraysCache"}),
        promise="tokens",
        grid=True,
    ),
    "rwkv7": Family(
        {
            "head_dim": 32,
            "norm_eps": 1e-5,
            "a_low_rank_dim": 8,
            "v_low_rank_dim": 8,
            "gate_low_rank_dim": 8,
            "decay_low_rank_dim": 8,
        },
        frozenset({"ArraysCache"}),
    ),
    "recurrent_gemma": Family(
        {
            "num_key_value_heads": 1,
            "attention_bias": False,
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "attention_window_size": WINDOW,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
        frozenset({"ArraysCache", "RotatingKVCache"}),
    ),
}

_LATENTS_WITHOUT_ROPE: dict[str, Any] = {**_MLA, **_ROUTED, "qk_rope_head_dim": 0}

VLM_TEXT: dict[str, Family] = {  # mlx-vlm has them, and mlx-lm has not
    "k2_horizon": Family({}),
    "kolibri1": Family(
        {**_HALF_SLIDING, **_MOE, "shared_expert_intermediate_size": 32},
        WINDOWED,
        fp32_only=True,
        promise="tokens",
    ),
    "qwen4_exp": Family(
        {
            "text_config": {
                **COMMON,
                **_MOE,
                **_QWEN3_5,
                "model_type": "qwen4_exp_text",
                "num_hidden_layers": 2,
                "full_attention_interval": 2,
                "eos_token_id": 2,
                "shared_expert_intermediate_size": 32,
                "hc_count": 2,
                "hc_lowrank": 16,
                "ple_layer_ids": [1],
                "ple_embed_dim": 64,
                "heads_per_ngram": 2,
                "ngram_vocab_size_base": 200,
                "make_ngram_vocab_size_divisible_by": 8,
                "split_ngram_parts": 2,
                "indexer_n_heads": 2,
                "indexer_head_dim": 16,
                "indexer_budget": 96,
                "indexer_kv_heads": 1,
                "indexer_compress_ratio": 4,
            },
            "vision_config": {**_SMALL_TOWER, "num_position_embeddings": 64},
        },
        frozenset({"ArraysCache", "QSAKVCache"}),
        fp32_only=True,
        promise="tokens",
    ),
    "glm5_next": Family(
        {
            "text_config": {
                **COMMON,
                **_LATENTS_WITHOUT_ROPE,
                "model_type": "glm5_next_text",
                "num_hidden_layers": 3,
                "layer_types": ["linear_attention", *["deepseek_sparse_attention"] * 2],
                "indexer_types": ["full", "full", "shared"],
                "index_topk": 96,
                "index_head_dim": 32,
                "index_n_heads": 2,
                "linear_attn_config": {"num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4},
                "hc_mult": 2,
                "hc_sinkhorn_iters": 2,
            },
            "vision_config": {**_SMALL_TOWER, "projection_intermediate_size": 32},
        },
        frozenset({"ArraysCache", "PooledKVCache", "LatentKVCache"}),
        fp32_only=True,
        promise="tokens",
    ),
    "deepseek_v4": Family(
        {
            **_ROUTED,
            "num_key_value_heads": 1,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "compress_ratios": [0, 4, 128],
            "hc_mult": 2,
            "hc_sinkhorn_iters": 2,
            "num_hash_layers": 1,
            "sliding_window": WINDOW,
            "o_groups": 2,
            "o_lora_rank": 16,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 16,
        },
        frozenset({"RotatingKVCache", "CacheList"}),
        fp32_only=True,
        promise="tokens",
    ),
}
"""`config`: of the whole model. Some see images too, which nothing here shows them."""
NOT_REUSED = ("deepseek_v4",)
"""Those of them that keep what omlxd can't store."""
