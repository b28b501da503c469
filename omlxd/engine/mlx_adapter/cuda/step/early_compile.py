"""Compiles, while weights are read, the kernels that a model's load asks for next.

NVRTC takes 0.3 to 5.5 s of a core for each on an H100's host, some 60 s in all for an 8B shape; reading its
weights takes 5 s and few cores. Who asks for a kernel meanwhile waits for it alone (kernel_store.py). What is
guessed wrongly here is compiled for nothing, and what is left out later.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..attention import fused_attention
from ..attention.attention_kernel import Kernel
from ..attention.prompt_attention import PromptKernel
from ..attention.segment_attention import SegmentKernel
from ..compile import driver as cuda_driver
from ..products import embedding_kernel, layer_products, products_kernel
from . import fused_weights

log = logging.getLogger(__name__)


def begin(model: Any) -> None:
    """Begin to compile what steps and prompts of `model` need, whose weights need not be read."""
    pool = ThreadPoolExecutor(max(4, os.cpu_count() or 4), thread_name_prefix="nvrtc")
    try:
        for job in jobs_of(model, cuda_driver.architecture() in fused_attention.ARCHITECTURES):
            pool.submit(_quietly, job)
    except Exception as error:  # Its load says what is wrong.
        log.debug("no kernels are compiled early: %s", error)
    pool.shutdown(wait=False)


def _quietly(job: Callable[[], object]) -> None:
    try:
        job()
    except Exception as error:
        log.debug("a kernel is not compiled early: %s", error)


def jobs_of(model: Any, fuses: bool) -> list[Callable[[], object]]:
    """What to call, longest first. `fuses`: the GPU is one that fused steps run on."""
    if not fused_weights.may_fuse(model):
        return []
    inner, head = model.model, getattr(model, "lm_head", None)
    own, mlp = inner.layers[0].self_attn, inner.layers[0].mlp
    width, group = own.k_proj.weight.shape[0] // own.n_kv_heads, own.n_heads // own.n_kv_heads
    kind = layer_products.TYPES[mx.bfloat16]
    nexts = [own.q_proj, own.k_proj, own.v_proj]
    behind = [own.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    amid = tuple("bias" in linear for linear in (*behind, *nexts))
    last = (*amid[:4], head is not None and "bias" in head)
    jobs: list[Callable[[], object]] = []
    if fuses and type(own.rope) is nn.RoPE:  # Others hold arrays, which are the engine thread's.
        heads = fused_weights.heads_of(inner.layers[0], own.rope)
        fused, layers = fused_attention.FusedAttention(heads), len(inner.layers) - 1
        its, most = (heads, fused.narrow), layer_products.AT_ONCE
        at_once = {min(most, layers - start) for start in range(0, layers, most)}
        for eights in layer_products.FORMS:
            jobs += [partial(layer_products.code, eights, kind, amid, its, n) for n in at_once]
        shapes = (fused.narrow, fused_attention.shape_of(width))
        jobs += [partial(fused_attention.compiled, heads, shape) for shape in shapes]
    for eights in products_kernel.FORMS:
        jobs += [partial(layer_products.code, eights, kind, biases) for biases in (amid, last)]
        jobs.append(partial(products_kernel.code, kind, eights, amid[4:], True))
        jobs.append(partial(products_kernel.code, kind, eights, (False,), False))
    kernel = Kernel(width, group, mx.bfloat16)
    jobs += [kernel.compile_ahead, partial(SegmentKernel, kernel)]
    return [*jobs, partial(PromptKernel, width, group, mx.bfloat16), embedding_kernel.code]
