"""Passes before a prompt's last one on CUDA: a token's KV has the same bits wherever its pass begins.

cuBLAS and cuDNN choose the order of their sums by shapes. So the bits of KV depended on the number of tokens
in a pass, and with it on where a cached prefix ended. Here a product of few rows is padded to the number of
rows from which all have the bits of a whole chunk, and attention has the shapes of `shape_of`. Each kind is
checked when it is first met. Where the check fails, and for quantised weights, experts and adapters, nothing
changes; windows have a kernel that needs no shapes (prompt_attention.py). The last pass needs none of
this: the prompt alone decides how many tokens it has.

On an H100 products of 192 to 2,048 rows have the same bits, with weights of an 8B shape, of a 3B one and of
SmolLM2; those of 64 have others for some. Attention of 64 to 2,048 new tokens has the same bits, and those of
a token do not depend on the tokens behind it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ....common.units import PREFILL_CHUNK
from .compile import kernel_store

log = logging.getLogger(__name__)

MOST_LEAST = 512
"""Rows to which products are padded, at most. Of the 8B shape 64 rows take 0.32 ms a layer, 256 take 0.35,
512 0.50 and 1,024 0.84."""

STEP = 64
"""Rows between two that are checked: passes have a multiple of a block's tokens."""

FINE = 256
"""Tokens of which an attention's shape is a multiple."""

MOST_MORE = 1 << 25
"""Queries that are added, times all tokens. cuDNN plans each new shape, which takes 36 ms; in an 8B model
this takes as long, and its shapes are those of whole chunks, which are planned."""

CHECKED = (256, 256), (512, 512), (1024, 1024), (256, 4096), (768, 3328)
"""Shapes of attention that are compared with whole chunks', which make up the last one's tokens."""

LARGEST = 1 << 16
"""Outputs of a product: of the head, only a prompt's last token has need."""

_fixed = False
_least: dict[tuple[Any, ...], int] = {}
"""Rows that products have at least, by weight and bias; 0: the check failed."""

_own_linear = nn.Linear.__call__


@contextmanager
def fixed_shapes(on: bool) -> Iterator[None]:
    """Whether what is computed inside is a pass before a prompt's last one."""
    global _fixed
    before, _fixed = _fixed, on
    try:
        yield
    finally:
        _fixed = before


def are_fixed() -> bool:
    """Whether what is computed now is such a pass."""
    return _fixed


# ----------------------------------------------------------------- products


def least_rows(module: Any) -> int:
    """Rows that a product with `module` must have now; 0: any number."""
    return _least.get(_key(module), 0) if _fixed else 0


def linear(module: Any, x: mx.array, least: int) -> mx.array:
    """`nn.Linear.__call__`, of at least so many rows."""
    rows = x.size // x.shape[-1]
    if rows >= least:
        return _own_linear(module, x)
    padded = mx.pad(x.reshape(rows, -1), [(0, least - rows), (0, 0)])
    return _own_linear(module, padded)[:rows].reshape(*x.shape[:-1], -1)


def check_products(modules: Iterable[nn.Linear]) -> None:
    """Find of how many rows the products of each kind must be."""
    began = time.perf_counter()
    found = _find_least(modules)
    log.info(
        "products of prompts: of at least %s rows%s, checked in %.1f s",
        max(found, default=0),
        "; some have other bits by their rows" if 0 in found else "",
        time.perf_counter() - began,
    )


def check_ahead(modules: Iterable[nn.Linear]) -> None:
    """Find the same before the weights of `modules` are read: by other weights of their shapes.

    On another thread than the engine's, as long as nothing is computed there. What fails is left to
    `check_products`.
    """
    for rows, width, dtype, has_bias in {_key(module) for module in modules}:
        if rows > LARGEST:
            continue
        stand_in = nn.Linear(1, 1, bias=has_bias)
        stand_in.weight = mx.random.normal((rows, width), key=mx.random.key(1)).astype(dtype)
        if has_bias:
            stand_in.bias = mx.zeros(rows, dtype)
        try:
            _find_least([stand_in])
        except Exception as error:
            log.debug("products of %d by %d are not checked ahead: %s", rows, width, error)


def _find_least(modules: Iterable[nn.Linear]) -> set[int]:
    """`_least` of each kind of `modules`, checked where nobody has."""
    kinds = {_key(module): module for module in modules if module["weight"].shape[0] <= LARGEST}
    for key, module in kinds.items():
        if key not in _least:
            least = partial(_least_of, module)
            _least[key] = kernel_store.remembered("rows of prompts' products", key, least)
    return {_least[key] for key in kinds}


def _key(module: Any) -> tuple[Any, ...]:
    weight = module["weight"]
    return (*weight.shape, weight.dtype, "bias" in module)


def _least_of(module: nn.Linear) -> int:
    """Rows from which each number of them has the bits of a chunk's; 0: there are more than `MOST_LEAST`."""
    weight = module["weight"]
    x = mx.random.normal((PREFILL_CHUNK, weight.shape[1]), key=mx.random.key(0)).astype(weight.dtype)
    want = _own_linear(module, x)[-STEP:]
    least = PREFILL_CHUNK
    for rows in range(PREFILL_CHUNK - STEP, 0, -STEP):
        if not mx.array_equal(_own_linear(module, x[-rows:])[-STEP:], want).item():
            break
        least = rows
    return least if least <= MOST_LEAST else 0


# ----------------------------------------------------------------- attention


def shape_of(new: int, tokens: int) -> tuple[int, int]:
    """Queries and tokens of the attention that computes a pass of `new` tokens, `tokens` in all.

    The new ones stand where they stand, among others whose results nobody reads. Wherever it costs less than
    a plan of cuDNN's, the shape is a whole chunk's.
    """
    start = tokens - new
    end = max(FINE, 1 << (tokens - 1).bit_length())
    if end > PREFILL_CHUNK:
        end = -(-tokens // PREFILL_CHUNK) * PREFILL_CHUNK
    queries = min(end, PREFILL_CHUNK)
    if end - start > queries or (queries - new) * end > MOST_MORE:
        end = -(-tokens // FINE) * FINE
        queries = -(-(end - start) // FINE) * FINE
    return queries, end


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array | None:
    """Attention (1, heads, new tokens, width) of a pass before a prompt's last; None: not of this kind.

    keys, values  (1, KV heads, tokens, width), the new tokens' last
    """
    if not _fixed or not isinstance(mask, str):
        return None
    width, group = queries.shape[3], queries.shape[1] // keys.shape[1]
    same = keys.shape == values.shape and keys.dtype == queries.dtype and len(queries) == 1
    if not same or not keeps_bits(width, group, queries.dtype, sinks is not None):
        return None
    new, tokens = queries.shape[2], keys.shape[2]
    count, end = shape_of(new, tokens)
    behind = end - tokens
    queries = mx.pad(queries, [(0, 0), (0, 0), (count - new - behind, behind), (0, 0)])
    if behind:
        keys, values = (mx.pad(array, [(0, 0), (0, 0), (0, behind), (0, 0)]) for array in (keys, values))
    return _attend(queries, keys, values, scale, sinks)[:, :, count - new - behind : count - behind]


def _attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, sinks: mx.array | None
) -> mx.array:
    keys, values = mx.contiguous(keys), mx.contiguous(values)  # A plan is for what arrays have room for, too.
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask="causal", sinks=sinks
    )


def heads_of(model: Any) -> tuple[int, int, Any] | None:
    """(width, query heads a KV head, type) of its first layer's attention; None: it has other names."""
    try:
        own = model.model.layers[0].self_attn
        width, group = own.k_proj.weight.shape[0] // own.n_kv_heads, own.n_heads // own.n_kv_heads
        return width, group, own.k_proj["scales" if "scales" in own.k_proj else "weight"].dtype
    except (AttributeError, IndexError, TypeError):
        return None


@cache
def keeps_bits(width: int, group: int, dtype: Any, has_sinks: bool) -> bool:
    """Whether a token's result does not depend on the shape in which it is computed."""
    if dtype not in (mx.bfloat16, mx.float16):
        return False
    kind = width, group, dtype, has_sinks
    return kernel_store.remembered("bits of prompts' attention", kind, partial(_are_kept, *kind))


def _are_kept(width: int, group: int, dtype: Any, has_sinks: bool) -> bool:
    """What `keeps_bits` says, computed."""
    most = max(tokens for _, tokens in CHECKED)
    queries, keys, values = (
        mx.random.normal((1, heads, most, width), key=mx.random.key(heads)).astype(dtype)
        for heads in (2 * group, 2, 2)
    )

    sinks = mx.random.normal((2 * group,), key=mx.random.key(1)).astype(dtype) if has_sinks else None

    def of(new: int, tokens: int) -> mx.array:
        held = keys[:, :, :tokens], values[:, :, :tokens]
        return _attend(queries[:, :, tokens - new : tokens], *held, width**-0.5, sinks)

    ends = range(PREFILL_CHUNK, most + 1, PREFILL_CHUNK)
    whole = mx.concatenate([of(PREFILL_CHUNK, end) for end in ends], axis=2)
    alike = all(
        mx.array_equal(of(new, tokens), whole[:, :, tokens - new : tokens]).item() for new, tokens in CHECKED
    )
    if not alike:
        log.info("attention of prompts (%d wide): bits depend on where a pass begins", width)
    return alike
