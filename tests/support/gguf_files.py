"""GGUF files made of the suite's tiny models, by llama.cpp's own package, for tests of the import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import quants

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)

_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.switch_mlp.gate_proj": "ffn_gate_exps",
    "mlp.switch_mlp.up_proj": "ffn_up_exps",
    "mlp.switch_mlp.down_proj": "ffn_down_exps",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(
    model: Path, file: Path, arch: str, kind: Type, **metadata: Any
) -> tuple[dict[str, np.ndarray], Path]:
    """A GGUF of the MLX model folder `model`, its matrices of ggml type `kind`.

    Returns the weights under mlx-lm's names as they are after a round through `kind`, float32 by NumPy.
    """
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(file, arch)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if arch == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
    if arch == "qwen3moe":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    for key, value in metadata.items():
        writer.add_uint32(f"{arch}.{key.replace('__', '.')}", value)
    _write_tokenizer(writer, model, config)
    kept: dict[str, np.ndarray] = {}
    for name, array in mx.load(str(model / "model.safetensors")).items():
        values = np.array(array.astype(mx.float32))
        path, _, suffix = name.rpartition(".")
        new = _TOP.get(path) or _layer_name(path, arch)
        stored, offset = values, 0.0
        if arch == "gemma3" and values.ndim == 1:
            stored, offset = values + np.float32(1), 1.0
        order = None
        if arch == "llama" and new.endswith(("attn_q", "attn_k")):
            count = heads if new.endswith("attn_q") else kv_heads
            order = np.arange(len(values)).reshape(count, 2, -1).swapaxes(1, 2).reshape(-1)
            stored = values[order]
        if values.ndim == 1:
            writer.add_tensor(f"{new}.{suffix}", np.ascontiguousarray(stored, np.float32))
            kept[name] = stored - np.float32(offset)
            continue
        raw = quants.quantize(stored, kind)
        writer.add_tensor(f"{new}.{suffix}", raw, raw_dtype=kind)
        back = quants.dequantize(raw, kind).reshape(stored.shape)
        kept[name] = back if order is None else back[np.argsort(order)]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept, file


def _layer_name(path: str, arch: str) -> str:
    _, _, number, part = path.split(".", 3)
    names = _LAYER | _GEMMA if arch == "gemma3" else _LAYER
    return f"blk.{number}.{names[part]}"


def _write_tokenizer(writer: Any, model: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = dict(tokenizer["model"]["vocab"])
    kinds = dict.fromkeys(vocab, 1)
    for added in tokenizer["added_tokens"]:
        vocab[added["content"]] = added["id"]
        kinds[added["content"]] = 3 if added["special"] else 4
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds[token] for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template(TEMPLATE)
