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
        name = key.replace("__", ".")
        if name.startswith("general."):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(f"{arch}.{name}", value)
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
        raw = quantize(stored, kind)
        writer.add_tensor(f"{new}.{suffix}", raw, raw_dtype=kind)
        back = quants.dequantize(raw, kind).reshape(stored.shape)
        kept[name] = back if order is None else back[np.argsort(order)]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept, file


def quantize(values: np.ndarray, kind: Type) -> np.ndarray:
    """Raw rows of ggml type `kind`; the package has no packers of its own for Q4_K and Q6_K."""
    packers = {Type.Q4_K: _pack_q4_k, Type.Q6_K: _pack_q6_k}
    if kind not in packers:
        return quants.quantize(values, kind)
    return packers[kind](values.astype(np.float32).reshape(-1, 256)).reshape(len(values), -1)


def _halves(values: np.ndarray) -> np.ndarray:
    return values.astype("<f2").view(np.uint8)


def _pack_q4_k(blocks: np.ndarray) -> np.ndarray:
    """uint8 (blocks, 144): two scales, eight 6-bit scales and minima in 12 bytes, 128 bytes of nibbles."""
    groups = blocks.reshape(-1, 8, 32)
    low = np.minimum(groups.min(2), 0)
    scale = (groups.max(2) - low) / 15
    d, least = scale.max(1, keepdims=True) / 63, -low.min(1, keepdims=True) / 63
    sc, m = (np.rint(a / np.maximum(b, 1e-9)).astype(np.uint8) for a, b in ((scale, d), (-low, least)))
    steps = (groups + (least * m)[:, :, None]) / np.maximum(d * sc, 1e-9)[:, :, None]
    q = np.rint(steps).clip(0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    packed = [
        sc[:, :4] & 63 | sc[:, 4:] >> 4 << 6,
        m[:, :4] & 63 | m[:, 4:] >> 4 << 6,
        sc[:, 4:] & 15 | (m[:, 4:] & 15) << 4,
    ]
    nibbles = (q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([_halves(d), _halves(least), *packed, nibbles], axis=1)


def _pack_q6_k(blocks: np.ndarray) -> np.ndarray:
    """uint8 (blocks, 210): 128 bytes of low bits, 64 of high ones, 16 scales of 8 bits, one scale."""
    groups = blocks.reshape(-1, 16, 16)
    scale = np.abs(groups).max(2) / 31
    d = scale.max(1, keepdims=True) / 127
    sc = np.rint(scale / np.maximum(d, 1e-9)).astype(np.int8)
    steps = groups / np.maximum(d * sc, 1e-9)[:, :, None]
    q = (np.rint(steps).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = q[:, :, :2] & 15 | (q[:, :, 2:] & 15) << 4
    high = np.bitwise_or.reduce(q >> 4 << np.array([0, 2, 4, 6], np.uint8).reshape(4, 1), axis=2)
    parts = [low.reshape(-1, 128), high.reshape(-1, 64), sc.view(np.uint8), _halves(d)]
    return np.concatenate(parts, axis=1)


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
