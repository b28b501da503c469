"""Attention of one new token a row on CUDA, for rows of unequal length: each reads its own KV alone.

MLX hands attention of single tokens to cuDNN. Rows of unequal length need a mask there, which costs five
times as much (table in `SPAN`), and it reads their padding. This kernel reads a row from its own first
token, in spans cut at fixed positions, and merges them by log-sum-exp.

`install` puts it in place of mlx-lm's `scaled_dot_product_attention`. It takes over for single tokens of rows
of unequal length in an `EvenBatchKVCache`, in 16 bits, with 2 to 16 query heads a KV head, without window
or sinks, once a check beside MLX's own passed; everything else goes on to MLX. A row alone and rows of equal
length stay there too: cuDNN takes as long, and calling it costs the host less. It never runs on Metal or a
CPU.
"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import BatchKVCache

from .device import backend

log = logging.getLogger(__name__)

SPAN = 512
"""Tokens of a row that one block of threads reads. Cut at fixed places, not by how many rows there are.

Milliseconds a layer, 32 query heads on 8 of 128 in bfloat16, one H100 (tools/bench/gpu.py --only attention):

| rows                | MLX, no mask | 256  | 512  | 1024 | bytes at 3.35 TB/s |
|---------------------|--------------|------|------|------|--------------------|
| 4: 16,000 to 20,500 | 0.13         | 0.14 | 0.12 | 0.13 | 0.09               |
| 4: 2,000 to 32,000  | 0.19         | 0.12 | 0.11 | 0.11 | 0.07               |
| 8: 32,000           | 0.36         | 0.39 | 0.39 | 0.38 | 0.31               |
| 32: 500 to 1,647    | 0.10         | 0.08 | 0.08 | 0.07 | 0.04               |
| 1: 16,000           | 0.05         | 0.06 | 0.07 | 0.05 | 0.02               |
| 1: 500              | 0.02         | 0.03 | 0.03 | 0.05 | 0.00               |

With a mask MLX's own takes 0.77, 1.22, 2.12, 0.59, 0.24 and 0.09. A kernel that went by shared memory took
0.14, 0.13, 0.45, 0.10, 0.07 and 0.03.
"""

WARPS = 4
"""Of a block of threads. 8 took as long."""

UNROLL = 4
"""Tokens that a lane has on their way from memory. 2 took a tenth longer for long rows, 8 as long."""

WIDTHS = (64, 128, 256)
MOST_HEADS = 16
"""Query heads a KV head. A lane keeps those of up to 8 in its registers; more are parts of their own."""

CLOSE = 0.02
"""Largest difference from MLX's own in float32, for values of a normal distribution: bfloat16's rounding."""

_HEADER = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
template <typename T> struct PairOf;
template <> struct PairOf<__nv_bfloat16> { using type = __nv_bfloat162; };
template <> struct PairOf<__half> { using type = __half2; };
__device__ inline float2 omlxd_floats(__nv_bfloat162 x) { return __bfloat1622float2(x); }
__device__ inline float2 omlxd_floats(__half2 x) { return __half22float2(x); }
__device__ inline float omlxd_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
template <typename Pair> __device__ inline void omlxd_eight(uint4 bits, float* out) {
  const Pair* pairs = reinterpret_cast<const Pair*>(&bits);
  #pragma unroll
  for (int e = 0; e < 4; e++) {
    const float2 x = omlxd_floats(pairs[e]);
    out[2 * e] = x.x;
    out[2 * e + 1] = x.y;
  }
}
"""

_SPANS = """
  // grid (spans, KV heads x parts of a group, rows); a warp reads EACH tokens at once, LANES lanes a token
  using Pair = typename PairOf<T>::type;
  constexpr int LANES = D / 8, EACH = 32 / LANES;
  const int span = blockIdx.x, row = blockIdx.z, kv_head = blockIdx.y / (GROUP / H);
  const int from = starts[row] + span * SPAN, end = ends[row], to = min(from + SPAN, end);
  if (from >= end) return;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, slot = lane / LANES, part = lane % LANES;
  const long query = ((long)row * KV_HEADS * GROUP + (long)blockIdx.y * H);
  const long head = ((long)row * KV_HEADS + kv_head) * keys_shape[2];
  const uint4* K = reinterpret_cast<const uint4*>(keys) + head * LANES + part;
  const uint4* V = reinterpret_cast<const uint4*>(values) + head * LANES + part;
  float qs[H][8], best[H], total[H], sum[H][8];
  #pragma unroll
  for (int h = 0; h < H; h++) {
    omlxd_eight<Pair>(reinterpret_cast<const uint4*>(q)[(query + h) * LANES + part], qs[h]);
    best[h] = -1e30f; total[h] = 0.f;
    #pragma unroll
    for (int e = 0; e < 8; e++) { qs[h][e] *= scale[0] * 1.44269504f; sum[h][e] = 0.f; }
  }
  for (int base = from + warp * EACH + slot; base - slot < to; base += WARPS * EACH * UNROLL) {
    uint4 k[UNROLL], v[UNROLL];
    #pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int token = base + u * WARPS * EACH;
      k[u] = token < to ? K[(long)token * LANES] : make_uint4(0, 0, 0, 0);
      v[u] = token < to ? V[(long)token * LANES] : make_uint4(0, 0, 0, 0);
    }
    float score[UNROLL][H];
    #pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      float x[8];
      omlxd_eight<Pair>(k[u], x);
      #pragma unroll
      for (int h = 0; h < H; h++) {
        float dot = 0.f;
        #pragma unroll
        for (int e = 0; e < 8; e++) dot += x[e] * qs[h][e];
        #pragma unroll
        for (int o = LANES / 2; o; o >>= 1) dot += __shfl_xor_sync(~0u, dot, o);
        score[u][h] = base + u * WARPS * EACH < to ? dot : -INFINITY;
      }
    }
    #pragma unroll
    for (int h = 0; h < H; h++) {
      float now = best[h];
      #pragma unroll
      for (int u = 0; u < UNROLL; u++) now = fmaxf(now, score[u][h]);
      const float shrink = omlxd_exp2(best[h] - now);
      best[h] = now;
      total[h] *= shrink;
      #pragma unroll
      for (int e = 0; e < 8; e++) sum[h][e] *= shrink;
      #pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        score[u][h] = omlxd_exp2(score[u][h] - now);
        total[h] += score[u][h];
      }
    }
    #pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      float x[8];
      omlxd_eight<Pair>(v[u], x);
      #pragma unroll
      for (int h = 0; h < H; h++)
        #pragma unroll
        for (int e = 0; e < 8; e++) sum[h][e] += score[u][h] * x[e];
    }
  }
  __shared__ float tops[WARPS][H], masses[WARPS][H], vectors[WARPS][H][D];
  #pragma unroll
  for (int h = 0; h < H; h++) {
    float top = best[h];
    #pragma unroll
    for (int o = LANES; o < 32; o <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    const float shrink = omlxd_exp2(best[h] - top);
    float mass = total[h] * shrink;
    #pragma unroll
    for (int o = LANES; o < 32; o <<= 1) mass += __shfl_xor_sync(~0u, mass, o);
    #pragma unroll
    for (int e = 0; e < 8; e++) {
      float x = sum[h][e] * shrink;
      #pragma unroll
      for (int o = LANES; o < 32; o <<= 1) x += __shfl_xor_sync(~0u, x, o);
      if (slot == 0) vectors[warp][h][part * 8 + e] = x;
    }
    if (lane == 0) { tops[warp][h] = top; masses[warp][h] = mass; }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < H * D; i += 32 * WARPS) {
    const int h = i / D, d = i % D;
    float top = -1e30f, mass = 0.f, x = 0.f;
    #pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w][h]);
    #pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float weight = omlxd_exp2(tops[w][h] - top);
      mass += weight * masses[w][h];
      x += weight * vectors[w][h][d];
    }
    const long place = (query + h) * gridDim.x + span;
    sums[place * D + d] = x;
    if (d == 0) { weights[place * 2] = top; weights[place * 2 + 1] = mass; }
  }
"""

_MERGE = """
  // grid (query heads x rows); a thread for each dimension
  const long head = blockIdx.x;
  const int most = sums_shape[2], row = head / HEADS, spans = (ends[row] - starts[row] + SPAN - 1) / SPAN;
  const float* pairs = weights + head * most * 2;
  float best = -1e30f, total = 0.f, x = 0.f;
  for (int s = 0; s < spans; s++) best = fmaxf(best, pairs[s * 2]);
  #pragma unroll 4
  for (int s = 0; s < spans; s++) {
    const float weight = omlxd_exp2(pairs[s * 2] - best);
    total += weight * pairs[s * 2 + 1];
    x += weight * sums[(head * most + s) * D + threadIdx.x];
  }
  out[head * D + threadIdx.x] = static_cast<T>(x / total);
"""


class Kernel:
    """The kernel for one width, group and type. Compiles at its first call. Raises what MLX raises.

    Its calls are compiled too: a call then costs the host 28 microseconds, and 51 if MLX puts the source
    together each time.
    """

    def __init__(self, width: int, group: int, dtype: Any, span: int = SPAN):
        self._width, self._group, self._dtype, self._span = width, group, dtype, span
        self._heads = max(heads for heads in range(1, 9) if group % heads == 0)
        self._spans: Any = mx.fast.cuda_kernel(
            "omlxd_decode_spans",
            ["q", "keys", "values", "starts", "ends", "scale"],
            ["sums", "weights"],
            _SPANS,
            _HEADER,
        )
        self._merge: Any = mx.fast.cuda_kernel(
            "omlxd_decode_merge", ["sums", "weights", "starts", "ends"], ["out"], _MERGE, _HEADER
        )
        self._compiled: Any = mx.compile(self._attend)

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        places: tuple[Sequence[int], Sequence[int]],
        scale: float,
    ) -> mx.array:
        """(rows, heads, 1, width). `keys`, `values`: (rows, KV heads, capacity, width); row r's KV lies in
        columns `starts[r]` to `ends[r]` of `places`."""
        starts, ends = (
            _constant(name, tuple(at), mx.int32) for name, at in zip(("starts", "ends"), places, strict=True)
        )
        return self._compiled(queries, keys, values, starts, ends, _constant("scale", (scale,), mx.float32))

    def _attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        starts: mx.array,
        ends: mx.array,
        scale: mx.array,
    ) -> mx.array:
        rows, heads = queries.shape[:2]
        kv_heads, capacity = keys.shape[1:3]
        spans = -(-capacity // self._span)
        sums, weights = self._spans(
            inputs=[queries, keys, values, starts, ends, scale],
            template=[
                ("T", self._dtype),
                ("D", self._width),
                ("GROUP", self._group),
                ("H", self._heads),
                ("KV_HEADS", kv_heads),
                ("SPAN", self._span),
                ("WARPS", WARPS),
                ("UNROLL", UNROLL),
            ],
            grid=(spans * 32 * WARPS, heads // self._heads, rows),
            threadgroup=(32 * WARPS, 1, 1),
            output_shapes=[(rows, heads, spans, self._width), (rows, heads, spans, 2)],
            output_dtypes=[mx.float32, mx.float32],
        )
        return self._merge(
            inputs=[sums, weights, starts, ends],
            template=[("T", self._dtype), ("D", self._width), ("HEADS", heads), ("SPAN", self._span)],
            grid=(rows * heads * self._width, 1, 1),
            threadgroup=(self._width, 1, 1),
            output_shapes=[queries.shape],
            output_dtypes=[self._dtype],
        )[0]


_constants: dict[str, tuple[Any, mx.array]] = {}


def _constant(name: str, values: tuple[float, ...], dtype: Any) -> mx.array:
    """An array of these numbers; all layers of a step share it."""
    cached = _constants.get(name)
    if cached is None or cached[0] != values:
        cached = _constants[name] = values, mx.array(values, dtype)
    return cached[1]


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
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and hasattr(module, "scaled_dot_product_attention"):
            cast(Any, module).scaled_dot_product_attention = attend


def installed() -> bool:
    """Whether mlx-lm's models attend by `attend`."""
    return base.scaled_dot_product_attention is attend


def _noting(keys_and_values: Any) -> Any:
    """`keys_and_values`, which also notes the arrays that it returns in `given_out`.

    A model may derive other arrays from them for its attention; the kernel reads the cache's own.
    """

    def noted(self: Any) -> Any:
        keys, values = keys_and_values(self)
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
    if queries.shape[2] == 1 and sinks is None and (places := _places(cache, keys, values, mask)) is not None:
        kernel = _kernel_for(queries, keys)
        if kernel is not None:
            return kernel(queries, cache.keys, cache.values, places, scale)
    return _mlx_own(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


def _places(cache: Any, keys: mx.array, values: mx.array, mask: Any) -> tuple[list[int], list[int]] | None:
    """(first column of each row, its end) of the KV in `cache`'s own arrays.

    None: `keys` or `values` are other arrays, or the mask hides more than what lies outside of a row.
    """
    given_out = getattr(cache, "given_out", None)
    if given_out is None or given_out[0]() is not keys or given_out[1]() is not values:
        return None
    if mask is None or mask is not _plain_mask():
        return None
    return cache.starts, cache.ends


_plain_mask: Any = lambda: None  # noqa: E731  (a weak reference once there is one)


def note_plain_mask(mask: mx.array) -> None:
    """Note that `mask` hides what lies outside of a row and nothing else: the kernel does without it."""
    global _plain_mask
    _plain_mask = weakref.ref(mask)


def _kernel_for(queries: mx.array, keys: mx.array) -> Kernel | None:
    width, group = queries.shape[3], queries.shape[1] // keys.shape[1]
    key = width, group, queries.dtype
    if key not in _kernels:
        fits = width in WIDTHS and 2 <= group <= MOST_HEADS and keys.dtype == queries.dtype
        fits = fits and queries.dtype in (mx.bfloat16, mx.float16)
        _kernels[key] = _checked(*key) if fits else None
    return _kernels[key]


def _checked(width: int, group: int, dtype: Any) -> Kernel | None:
    """A kernel that computes what MLX's own does, on rows of unequal length; None, and a line in the log."""
    kernel, rows, end = Kernel(width, group, dtype), 2, 3 * SPAN + 17
    shape = (rows, 2, end + 15, width)
    queries, keys, values = (
        mx.random.normal(size, key=mx.random.key(seed)).astype(dtype)
        for seed, size in enumerate([(rows, 2 * group, 1, width), shape, shape])
    )
    places, scale = ([0, SPAN + 5], [end - SPAN - 1, end]), width**-0.5
    starts, ends = (mx.array(at)[:, None, None, None] for at in places)
    mask = (mx.arange(end) >= starts) & (mx.arange(end) < ends)
    began = time.perf_counter()
    try:
        got = kernel(queries, keys, values, places, scale)
        exact = [x.astype(mx.float32) for x in (queries, keys[:, :, :end], values[:, :, :end])]
        want = mx.fast.scaled_dot_product_attention(*exact, scale=scale, mask=mask)
        far = cast(float, mx.abs(got.astype(mx.float32) - want).max().item())
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
