"""What a fused step (fused_step.py) takes of a model: its heads and weights, known by their classes."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils

from ..attention.fused_attention import Heads
from ..products.layer_products import LayerProducts

MODULES = {f"mlx_lm.models.{name}" for name in ("llama", "qwen2", "qwen3")}
ROPES = (nn.RoPE, rope_utils.Llama3RoPE, rope_utils.YarnRoPE, rope_utils.SuScaledRoPE)


class Unfusable(Exception):
    """The model is of another kind, or the kernels don't compute what it does."""


def is_known(module: Any) -> bool:
    """Whether its class is one of `MODULES`, or made from one."""
    return any(kind.__module__ in MODULES for kind in type(module).__mro__)


def may_fuse(model: Any) -> bool:
    """Whether `model` is of a kind that `FusedStep` knows. Computes nothing."""
    if not is_known(model):
        return False
    projection = model.model.layers[0].self_attn.q_proj
    return type(projection) is nn.Linear and projection.weight.dtype == mx.bfloat16


class Linear(NamedTuple):
    weight: mx.array
    bias: mx.array | None


class Start(NamedTuple):
    """Weights of a layer before its attention. `qk_norms`: of queries and keys, or None."""

    norm: mx.array
    qkv: tuple[Linear, ...]
    qk_norms: tuple[mx.array, mx.array] | None


class Layer(NamedTuple):
    """Weights of a layer behind its attention. `next_norms`: `Start.qk_norms` of the layer behind it."""

    products: LayerProducts
    next_norms: tuple[mx.array, mx.array] | None


def heads_of(layer: Any, rope: Any) -> Heads:
    """Raises Unfusable, AttributeError."""
    if not is_known(layer):
        raise Unfusable("another kind of layer")
    own = layer.self_attn
    if getattr(layer, "use_sliding", False) or not _same_turns(own.rope, rope):
        raise Unfusable("layers of several kinds")
    width = own.k_proj.weight.shape[0] // own.n_kv_heads
    norm = "q_norm" in own
    turned = own.rope.dim if isinstance(rope, rope_utils.SuScaledRoPE) else own.rope.dims
    if turned > width or turned % 2:
        raise Unfusable(f"heads of {width} dimensions, {turned} of them rotated")
    return Heads(
        width=width,
        heads=own.n_heads,
        kv_heads=own.n_kv_heads,
        turned=turned,
        traditional=bool(getattr(rope, "traditional", False)),
        norm=norm,
        scale=own.scale,
        eps=own.q_norm.eps if norm else 0.0,
        dtype=own.k_proj.weight.dtype,
    )


def _same_turns(one: Any, other: Any) -> bool:
    if type(one) not in ROPES or type(one) is not type(other) or vars(one) != vars(other):
        return False
    return all(mx.array_equal(one[name], other[name]).item() for name in one)


def qkv_of(layer: Any) -> tuple[Linear, ...]:
    own = layer.self_attn
    return linear_of(own.q_proj), linear_of(own.k_proj), linear_of(own.v_proj)


def layer_of(layer: Any, behind: tuple[mx.array, tuple[Linear, ...]], following: Any) -> Layer:
    """`behind`: the next layer's norm, and its queries, keys and values, or the head. `following`: the next
    layer, or None."""
    own, mlp, eps = layer.self_attn, layer.mlp, layer.input_layernorm.eps
    linears = *map(linear_of, (own.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)), *behind[1]
    return Layer(
        LayerProducts(
            weights=tuple(linear.weight for linear in linears),
            biases=tuple(linear.bias for linear in linears),
            norms=(norm_of(layer.post_attention_layernorm, eps), behind[0]),
            eps=eps,
        ),
        None if following is None else qk_norms(following.self_attn),
    )


def qk_norms(own: Any) -> tuple[mx.array, mx.array] | None:
    if "q_norm" not in own:
        return None
    return norm_of(own.q_norm, own.k_norm.eps), norm_of(own.k_norm, own.q_norm.eps)


def norm_of(norm: Any, eps: float) -> mx.array:
    if type(norm) is not nn.RMSNorm or norm.eps != eps:
        raise Unfusable("another kind of norm")
    return norm.weight


def linear_of(linear: Any) -> Linear:
    """Raises Unfusable for packed weights, and where an adapter is beside them."""
    if type(linear) is not nn.Linear:
        raise Unfusable(f"a {type(linear).__name__}")
    return Linear(linear.weight, linear.get("bias"))
