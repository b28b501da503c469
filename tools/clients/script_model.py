"""The smallest model that can play a script: the demo's tokenizer and template, one narrow layer.

    python tools/clients/script_model.py FOLDER

Its words don't matter, only that KV is really computed. An agent's prompt of 20,000 tokens takes a
second or two on a laptop's CPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from omlxd.models import demo

HIDDEN, HEAD, INNER = 32, 16, 32


def build_script_model(folder: Path, context: int = 131072, template: str = "") -> Path:
    """Write the model into `folder`, unless one is there; returns `folder`.

    context   tokens
    template  a chat template of ChatML and `<think>`; "": the demo's
    """
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = demo.write_tokenizer(folder, demo.VOCAB)
    if template:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        demo.write_json(folder / "tokenizer_config.json", {**settings, "chat_template": template})
    end = tokenizer.token_to_id("<|im_end|>")
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "intermediate_size": INNER,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": end,
    }
    demo.write_json(folder / "config.json", config)
    save_file(_weights(config), folder / "model.safetensors", metadata={"format": "mlx"})
    return folder


def _weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    bits = np.random.PCG64(1)

    def linear(out: int, fan_in: int) -> np.ndarray:
        return demo.unit_noise(bits, out, fan_in) * np.float32(fan_in**-0.5)

    def norm(width: int) -> np.ndarray:
        return np.ones(width, np.float32)

    at = "model.layers.0."
    return {
        "model.embed_tokens.weight": linear(config["vocab_size"], HIDDEN),
        "model.norm.weight": norm(HIDDEN),
        at + "self_attn.q_proj.weight": linear(HEAD, HIDDEN),
        at + "self_attn.k_proj.weight": linear(HEAD, HIDDEN),
        at + "self_attn.v_proj.weight": linear(HEAD, HIDDEN),
        at + "self_attn.o_proj.weight": linear(HIDDEN, HEAD),
        at + "self_attn.q_norm.weight": norm(HEAD),
        at + "self_attn.k_norm.weight": norm(HEAD),
        at + "mlp.gate_proj.weight": linear(INNER, HIDDEN),
        at + "mlp.up_proj.weight": linear(INNER, HIDDEN),
        at + "mlp.down_proj.weight": linear(HIDDEN, INNER),
        at + "input_layernorm.weight": norm(HIDDEN),
        at + "post_attention_layernorm.weight": norm(HIDDEN),
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: script_model.py FOLDER")
    print(build_script_model(Path(sys.argv[1])))
