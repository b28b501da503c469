"""Models of a given shape with random weights, built straight in memory: what benchmarks run on.

Qwen3's architecture through mlx-lm, dense or with experts. The words mean nothing, but the logits behave: a
few rows of the head are longer than the rest, so that the best token leads by more than bfloat16's rounding
and greedy runs can be compared.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3, qwen3_moe
from mlx_lm.models.cache import KVCache, make_prompt_cache

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter import LoadedModel, Quantisation
from omlxd.engine.mlx_adapter.cache.kinds import quantised
from omlxd.models.demo import SPECIALS, VOCAB, build_demo

FAVOUR = 0.3
"""Standard deviation of the logarithm of a head row's length."""

QUIET = -10.0
"""Weight on the constant direction of rows that no tokenizer word has: never the best, never drawn."""

WORDS = VOCAB - len(SPECIALS)


@dataclass(slots=True, frozen=True)
class Shape:
    """Sizes of a decoder. `inner`: width of the MLP, or of each expert. `dtype`: an MLX type by name.

    experts  of a layer; 0: it has none. `active`: of them, how many compute a token
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    dtype: str
    context: int = 131072
    experts: int = 0
    active: int = 0

    def config(self) -> dict[str, Any]:
        """As in a model folder's config.json."""
        experts = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": self.experts,
            "num_experts_per_tok": self.active,
            "moe_intermediate_size": self.inner,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
        dense = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        return (experts if self.experts else dense) | {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.inner,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "attention_bias": False,
            "torch_dtype": self.dtype,
        }


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936, "bfloat16"),
        Shape("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151936, "bfloat16", experts=128, active=8),
        # 44 million parameters: a decode step well above what the engine and the front spend on a token.
        Shape("cpu", 4, 1024, 16, 4, 64, 2048, 4096, "float32"),
        # SmolLM2's smallest: as many layers as models have that people run on CPUs.
        Shape("smollm2", 30, 576, 9, 3, 64, 1536, 49152, "float32"),
        # 1.5 GB in float32: weights that a CPU maps as they are stored.
        Shape("wide", 10, 1536, 16, 4, 96, 6144, 8192, "float32"),
        Shape("tiny", 2, 128, 4, 2, 32, 256, 4096, "float32"),
        Shape("tiny-experts", 2, 128, 4, 2, 32, 64, 4096, "float32", experts=8, active=2),
    )
}


def build(shape: Shape, words: int = WORDS, seed: int = 1, kv: Quantisation | None = None) -> LoadedModel:
    """The model, evaluated, as the engine has it after loading; without a tokenizer.

    words  ids below it may be generated; by default what the demo's tokenizer has, less its special
           tokens: no answer ends early
    kv     per-token KV is kept so

    Call on the thread that will run it. Needs the weights' bytes and one matrix in float32 besides.
    """
    family: Any = qwen3_moe if shape.experts else qwen3
    model = family.Model(family.ModelArgs.from_dict(shape.config()))
    key = mx.random.key(seed)
    for name, lazy in cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())):
        key, own = mx.random.split(key)
        weight = _weight(shape, name, lazy.shape, own, words)
        mx.eval(weight)
        model.load_weights([(name, weight)], strict=False)
    if kv is not None:
        cast(Any, model).make_cache = lambda: quantised([KVCache() for _ in model.layers], kv)
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([[0]]), cache=cache))
    return LoadedModel(
        model=model,
        tokenizer=cast(Any, None),
        config=shape.config(),
        context_length=shape.context,
        vocab_size=shape.vocab,
        weight_bytes=mlx_adapter.tree_bytes(model.parameters()),
        layout=mlx_adapter.layout_of(cache),
        states=mlx_adapter.states_of(cache),
        kv_reuse="",
        batchable=True,
        hook=mlx_adapter.LayerHook(model),
    )


def _weight(shape: Shape, name: str, size: Any, key: mx.array, words: int) -> mx.array:
    dtype = getattr(mx, shape.dtype)
    if name.endswith("norm.weight"):
        return mx.ones(size, dtype=dtype)
    embedding = name.endswith("embed_tokens.weight")
    scale = 1.0 if embedding else size[-1] ** -0.5
    weight = mx.random.normal(size, dtype=dtype, scale=scale, key=key)
    if embedding:
        # As long as all other dimensions together: what layers add to it never turns its sign.
        weight[:, 0] = shape.hidden**0.5
    if name.endswith("lm_head.weight"):
        favour = mx.exp(FAVOUR * mx.random.normal((size[0], 1), key=mx.random.split(key)[0]))
        weight = (weight * favour.astype(dtype)).astype(dtype)
        weight[words:] = 0
        weight[words:, 0] = QUIET
    return weight


def save(shape: Shape, folder: Path) -> None:
    """Write a model folder that the daemon can serve: random weights, the demo model's tokenizer."""
    build_demo(str(folder))
    for file in (*folder.glob("*.safetensors*"), folder / "config.json", folder / "omlxd_demo.json"):
        file.unlink(missing_ok=True)
    loaded = build(shape)
    weights = dict(tree_flatten(loaded.model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = shape.config() | {"eos_token_id": shape.vocab - 1}  # of equally quiet rows never the first
    (folder / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SHAPES:
        sys.exit(f"usage: python -m tools.bench.shapes {{{','.join(SHAPES)}}} FOLDER")
    target = Path(sys.argv[2])
    shutil.rmtree(target, ignore_errors=True)
    save(SHAPES[sys.argv[1]], target)
