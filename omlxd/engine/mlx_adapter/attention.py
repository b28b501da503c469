"""Attention of few new tokens a row on CUDA: each row reads its own KV alone, with sums in a fixed order.

MLX hands attention to cuDNN. Rows of unequal length need a mask there, which costs five times as much
(tables in attention_kernel.py), and their padding is read. Each shape, so each length of the KV, is planned
at its first call, which takes 60 to 120 ms where there are several new tokens: for the end of each prompt and
each pass with guesses. And for single tokens its sums come in another order from run to run. The kernels of
attention_kernel.py read a row from its own first token, in spans cut at fixed positions, and merge them by
log-sum-exp.

`install` puts them in place of mlx-lm's `scaled_dot_product_attention`. They take over for up to `MOST_NEW`
tokens of each row of a `KVCache` or an `EvenBatchKVCache`, in 16 bits, with 2 to 16 query heads a KV head,
without window or sinks, once a check beside MLX's own passed; everything else goes on to MLX. They never run
on Metal or a CPU.
"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import BatchKVCache, KVCache

from .attention_kernel import MOST_NEW, SPAN, Kernel
from .device import backend

log = logging.getLogger(__name__)

WIDTHS = (64, 128, 256)
MOST_HEADS = 16
"""Query heads a KV head. A lane keeps those of up to 8 in its registers; more are parts of their own."""

CLOSE = 0.02
"""Largest difference from MLX's own in float32, for values of a normal distribution: bfloat16's rounding."""

_kernels: dict[tuple[int, int, Any], Kernel | None] = {}
_mlx_own = base.scaled_dot_product_attention


def reads_own_rows() -> bool:
    """Whether decode reads no padding: some kernel is in use."""
    return any(_kernels.values())


def install() -> None:
    """Let every model of mlx-lm attend by `attend` from now on. Does nothing but on CUDA, and once."""
    if backend() != "cuda" or installed():
        return
    cast(Any, BatchKVCache).keys_and_values = _noting(BatchKVCache.keys_and_values)
    cast(Any, KVCache).update_and_fetch = _noting(KVCache.update_and_fetch)
    attend_by(attend)


def attend_by(function: Any) -> None:
    """Let mlx-lm's models call `function` in place of `scaled_dot_product_attention`."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and hasattr(module, "scaled_dot_product_attention"):
            cast(Any, module).scaled_dot_product_attention = function


def installed() -> bool:
    """Whether mlx-lm's models attend by `attend`."""
    return base.scaled_dot_product_attention is attend


def _noting(fetch: Any) -> Any:
    """`fetch`, which also notes the arrays that it returns in `given_out`.

    A model may derive other arrays from them for its attention; the kernel reads the cache's own.
    """

    def noted(self: Any, *new: Any) -> Any:
        keys, values = fetch(self, *new)
        if not new or new[0].shape[2] <= MOST_NEW:
            self.given_out = weakref.ref(keys), weakref.ref(values)
        return keys, values

    return noted


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's `scaled_dot_product_attention`: by the kernel where it can, else by MLX's own."""
    if hasattr(cache, "attend"):  # A step that is being compiled.
        return cache.attend(queries, keys, values, scale, mask, sinks)
    new = queries.shape[2]
    if new <= MOST_NEW and sinks is None and (places := _places(cache, keys, values, mask, new)) is not None:
        kernel = kernel_for(queries, keys)
        if kernel is not None and new <= kernel.most_new:
            return kernel(queries, cache.keys, cache.values, places, scale)
    return _mlx_own(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


def _places(
    cache: Any, keys: mx.array, values: mx.array, mask: Any, new: int
) -> tuple[list[int], list[int]] | None:
    """(first column of each row, its end) of the KV in `cache`'s own arrays.

    None: `keys` or `values` are other arrays, or the mask hides more than what lies outside of a row and
    what comes after a token.
    """
    given_out = getattr(cache, "given_out", None)
    if given_out is None or given_out[0]() is not keys or given_out[1]() is not values:
        return None
    alone = isinstance(cache, KVCache)
    if isinstance(mask, mx.array):
        plain = mask is _plain_mask()
    else:
        plain = mask == (None if new == 1 else "causal") and (alone or cache.is_even)
    if not plain:
        return None
    return ([0], [cache.offset]) if alone else (cache.starts, cache.ends)


_plain_mask: Any = lambda: None  # noqa: E731  (a weak reference once there is one)


def note_plain_mask(mask: mx.array) -> None:
    """Note that `mask` hides what lies outside of a row, and what comes after a token, and nothing else: the
    kernel does without it."""
    global _plain_mask
    _plain_mask = weakref.ref(mask)


def kernel_for(queries: mx.array, keys: mx.array) -> Kernel | None:
    width, group = queries.shape[3], queries.shape[1] // keys.shape[1]
    key = width, group, queries.dtype
    if key not in _kernels:
        fits = width in WIDTHS and 2 <= group <= MOST_HEADS and keys.dtype == queries.dtype
        fits = fits and queries.dtype in (mx.bfloat16, mx.float16)
        _kernels[key] = _checked(*key) if fits else None
    return _kernels[key]


def _checked(width: int, group: int, dtype: Any) -> Kernel | None:
    """A kernel that computes what MLX's own does, on rows of unequal length; None, and a line in the log."""
    kernel, began, far = Kernel(width, group, dtype), time.perf_counter(), 0.0
    try:
        for new in {1, min(5, kernel.most_new)}:
            far = max(far, _difference(kernel, width, group, dtype, new))
        far = max(far, _step_difference(kernel, width, group, dtype))
    except Exception as error:
        log.warning("decode attends by MLX's own kernels: ours does not run here (%s)", error)
        return None
    if not far < CLOSE:  # NaN too
        log.warning("decode attends by MLX's own kernels: ours differs by %.3g", far)
        return None
    log.info(
        "decode attends by omlxd's kernel (%s, %d wide, %d query heads a KV head): within %.4f of MLX's own, "
        "checked in %.1f s",
        dtype,
        width,
        group,
        far,
        time.perf_counter() - began,
    )
    return kernel


def _difference(kernel: Any, width: int, group: int, dtype: Any, new: int) -> float:
    """The largest from MLX's own in float32, for `new` tokens of each of two rows; NaN too."""
    end = 3 * SPAN + 17
    shape = (2, 2, end + 15, width)
    queries, keys, values = (
        mx.random.normal(size, key=mx.random.key(seed)).astype(dtype)
        for seed, size in enumerate([(2, 2 * group, new, width), shape, shape])
    )
    places, scale = ([0, SPAN + 5], [end - SPAN - 1, end]), width**-0.5
    starts, ends = (mx.array(at)[:, None, None, None] for at in places)
    own = ends - new + mx.arange(new)[:, None]
    mask = (mx.arange(end) >= starts) & (mx.arange(end) <= own)
    got = kernel(queries, keys, values, places, scale)
    exact = [x.astype(mx.float32) for x in (queries, keys[:, :, :end], values[:, :, :end])]
    want = mx.fast.scaled_dot_product_attention(*exact, scale=scale, mask=mask)
    far = cast(float, mx.abs(got.astype(mx.float32) - want).max().item())
    return far if far == far else float("inf")


def _step_difference(kernel: Any, width: int, group: int, dtype: Any) -> float:
    """The largest of what `Kernel.step` gives and puts, from what it should; no rounding: infinite or 0."""
    end, shape = SPAN + 17, (2, 2, SPAN + 40, width)
    queries, keys, values = (
        mx.random.normal(size, key=mx.random.key(seed)).astype(dtype)
        for seed, size in enumerate([(2, 2 * group, 1, width), shape, shape])
    )
    starts, ends, scale = [3, 0], [end, end - 9], width**-0.5
    want = kernel(queries, keys, values, (starts, ends), scale)
    columns = [mx.arange(2), [e - 1 for e in ends]]
    fresh = tuple(array[columns[0], :, mx.array(columns[1])][:, :, None] for array in (keys, values))
    seen = mx.arange(shape[2]) != mx.array(columns[1])[:, None]
    held = tuple(mx.where(seen[:, None, :, None], array, 0) for array in (keys, values))
    mx.eval(want, fresh, held)
    got = kernel.step(queries, fresh, held, mx.array(starts), mx.array(ends), scale)
    mx.eval(got)
    same = all(mx.array_equal(a, b).item() for a, b in zip(got, (want, keys, values), strict=True))
    return 0.0 if same else float("inf")
