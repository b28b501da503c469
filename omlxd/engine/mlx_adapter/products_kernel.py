"""CUDA kernel of products of few rows with 16-bit weights; products.py says when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from . import cuda_driver, nvrtc
from .attention_kernel import HEADER, TYPES

MOST_ROWS = 32

WARPS = 8
"""Of a block of threads: each adds an eighth of the K of the block's results. So it, like `CHUNK`, belongs to
the order of sums, and is one for any number of rows."""

CHUNK = 2
"""Times 32 of K: what a warp reads of a weight's row at once."""

FORMS = {1: (1, 6, 2), 2: (2, 6, 1), 4: (2, 4, 1)}
"""Rows of x in eights: (sixteens of a weight's rows that a block computes at once, chunks on their way from
memory, blocks of a multiprocessor)."""

_BODY = r"""
template <typename T> __device__ inline float omlxd_float(T x) { return omlxd_floats<T>(x.bits).x; }
template <typename T> struct Products {
  const T *x, *norm, *residual, *w[3], *bias[3];
  T* y[3];
  int n[3];
  int rows, k;
  float eps;
};

template <typename T, int NT, int MT, int KW, int CH, int ST, bool NORM, bool SILU>
__device__ __forceinline__ void omlxd_products(const Products<T>& p) {
  constexpr int PIECES = CH * MT * 2, ROWS = 16 * MT, COLS = 8 * NT, PAD = ROWS + 4;
  extern __shared__ uint4 omlxd_shared[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quad = lane & 3;
  constexpr int STAGE = PIECES * 32;  // uint4s
  uint4* ring = omlxd_shared + warp * ST * STAGE + lane;
  float* sums = reinterpret_cast<float*>(omlxd_shared + KW * ST * STAGE);  // [2][KW][COLS][PAD]
  float* squares = sums + 2 * KW * COLS * PAD;  // [KW][COLS]
  constexpr int HALF = SILU ? ROWS / 2 : ROWS;
  int tiles[3];
  #pragma unroll
  for (int i = 0; i < 3; i++) tiles[i] = (p.n[i] + HALF - 1) / HALF;
  if (SILU) tiles[1] = 0;
  const int all = tiles[0] + tiles[1] + tiles[2];
  const int steps = (p.k + KW * CH * 32 - 1) / (KW * CH * 32);

  // What is loaded next: tile and step.
  int load_tile = blockIdx.x, load_step = 0;
  const T* from[2 * MT];
  auto aim = [&]() {
    int t = load_tile, i = 0;
    if (t >= tiles[0]) { t -= tiles[0]; i = 1; if (t >= tiles[1]) { t -= tiles[1]; i = 2; } }
    const T* w = i == 0 ? p.w[0] : i == 1 ? p.w[1] : p.w[2];
    const int n = i == 0 ? p.n[0] : i == 1 ? p.n[1] : p.n[2];
    #pragma unroll
    for (int j = 0; j < 2 * MT; j++) {
      const int row = min(SILU ? t * HALF + (j >> 1) * 8 + group : t * HALF + j * 8 + group, n - 1);
      from[j] = (SILU && (j & 1) ? p.w[1] : w) + (long)row * p.k + quad * 8;
    }
  };
  auto load = [&](int stage) {
    if (load_tile < all) {
      const int k0 = (load_step * KW + warp) * CH * 32;
      #pragma unroll
      for (int c = 0; c < CH; c++) {
        const int k = k0 + c * 32, bytes = k + quad * 8 < p.k ? 16 : 0;
        #pragma unroll
        for (int j = 0; j < 2 * MT; j++) {
          const uint4* slot = ring + stage * STAGE + (c * 2 * MT + j) * 32;
          const unsigned to = (unsigned)__cvta_generic_to_shared(slot);
          asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                       :: "r"(to), "l"(from[j] + (bytes ? k : 0)), "r"(bytes));
        }
      }
      if (++load_step == steps) {
        load_step = 0;
        load_tile += gridDim.x;
        if (load_tile < all) aim();
      }
    }
    asm volatile("cp.async.commit_group;");
  };
  if (load_tile < all) aim();
  #pragma unroll
  for (int s = 0; s < ST - 1; s++) load(s);

  const T* x[NT];
  bool is_row[NT];
  float square[NT];
  #pragma unroll
  for (int t = 0; t < NT; t++) {
    is_row[t] = t * 8 + group < p.rows;
    x[t] = p.x + (long)(is_row[t] ? t * 8 + group : 0) * p.k + quad * 8;
    square[t] = 0.f;
  }
  int stage = 0, which = 0;
  for (int tile = blockIdx.x; tile < all; tile += gridDim.x) {
    float sum[MT][NT][4];
    #pragma unroll
    for (int m = 0; m < MT; m++)
      #pragma unroll
      for (int t = 0; t < NT; t++)
        #pragma unroll
        for (int e = 0; e < 4; e++) sum[m][t][e] = 0.f;
    for (int step = 0; step < steps; step++) {
      const int k0 = (step * KW + warp) * CH * 32;
      uint4 xs[CH][NT];
      #pragma unroll
      for (int c = 0; c < CH; c++) {
        const int k = k0 + c * 32;
        const bool is_k = k + quad * 8 < p.k;
        #pragma unroll
        for (int t = 0; t < NT; t++)
          xs[c][t] = is_k && is_row[t] ? __ldg(reinterpret_cast<const uint4*>(x[t] + k))
                                       : make_uint4(0, 0, 0, 0);
      }
      if (NORM) {
        #pragma unroll
        for (int c = 0; c < CH; c++) {
          const int k = k0 + c * 32;
          const uint4 g = k + quad * 8 < p.k ? __ldg(reinterpret_cast<const uint4*>(p.norm + k + quad * 8))
                                             : make_uint4(0, 0, 0, 0);
          const unsigned gs[4] = {g.x, g.y, g.z, g.w};
          #pragma unroll
          for (int t = 0; t < NT; t++) {
            unsigned ps[4] = {xs[c][t].x, xs[c][t].y, xs[c][t].z, xs[c][t].w};
            #pragma unroll
            for (int e = 0; e < 4; e++) {
              const float2 a = omlxd_floats<T>(ps[e]), b = omlxd_floats<T>(gs[e]);
              if (which == 0) square[t] = fmaf(a.y, a.y, fmaf(a.x, a.x, square[t]));
              ps[e] = omlxd_pair<T>(a.x * b.x, a.y * b.y);
            }
            xs[c][t] = make_uint4(ps[0], ps[1], ps[2], ps[3]);
          }
        }
      }
      asm volatile("cp.async.wait_group %0;" :: "n"(ST - 2) : "memory");
      #pragma unroll
      for (int c = 0; c < CH; c++)
        #pragma unroll
        for (int m = 0; m < MT; m++) {
          const uint4* at = ring + stage * STAGE + (c * MT + m) * 64;
          const uint4 a = at[0], b = at[32];
          #pragma unroll
          for (int t = 0; t < NT; t++) {
            omlxd_mma<T>(sum[m][t], a.x, b.x, a.y, b.y, xs[c][t].x, xs[c][t].y);
            omlxd_mma<T>(sum[m][t], a.z, b.z, a.w, b.w, xs[c][t].z, xs[c][t].w);
          }
        }
      load(stage == 0 ? ST - 1 : stage - 1);
      if (++stage == ST) stage = 0;
    }
    // The warps' sums, in order.
    float* mine = sums + ((which & 1) * KW + warp) * COLS * PAD;
    #pragma unroll
    for (int m = 0; m < MT; m++)
      #pragma unroll
      for (int t = 0; t < NT; t++)
        #pragma unroll
        for (int e = 0; e < 4; e++)
          mine[(t * 8 + quad * 2 + (e & 1)) * PAD + m * 16 + (e >> 1) * 8 + group] = sum[m][t][e];
    if (NORM && which == 0) {
      #pragma unroll
      for (int t = 0; t < NT; t++) {
        square[t] += __shfl_xor_sync(~0u, square[t], 1);
        square[t] += __shfl_xor_sync(~0u, square[t], 2);
        if (quad == 0) squares[warp * COLS + t * 8 + group] = square[t];
      }
    }
    __syncthreads();
    int t = tile, i = 0;
    if (t >= tiles[0]) { t -= tiles[0]; i = 1; if (t >= tiles[1]) { t -= tiles[1]; i = 2; } }
    const int n = i == 0 ? p.n[0] : i == 1 ? p.n[1] : p.n[2];
    T* y = i == 0 ? p.y[0] : i == 1 ? p.y[1] : p.y[2];
    const T* bias = i == 0 ? p.bias[0] : i == 1 ? p.bias[1] : p.bias[2];
    for (int j = threadIdx.x; j < HALF * p.rows; j += 32 * KW) {
      const int col = j / HALF, r = j % HALF, at = t * HALF + r;
      if (at >= n) continue;
      float scale = 1.f;
      if (NORM) {
        float mean = 0.f;
        #pragma unroll
        for (int w = 0; w < KW; w++) mean += squares[w * COLS + col];
        scale = rsqrtf(mean / p.k + p.eps);
      }
      const float* parts = sums + (which & 1) * KW * COLS * PAD + col * PAD;
      const int first = SILU ? (r >> 3) * 16 + (r & 7) : r;
      float value = 0.f;
      #pragma unroll
      for (int w = 0; w < KW; w++) value += parts[w * COLS * PAD + first];
      value *= scale;
      if (bias) value += omlxd_float<T>(bias[at]);
      if (SILU) {
        float up = 0.f;
        #pragma unroll
        for (int w = 0; w < KW; w++) up += parts[w * COLS * PAD + first + 8];
        up *= scale;
        if (p.bias[1]) up += omlxd_float<T>(p.bias[1][at]);
        value = value / (1.f + __expf(-value)) * up;
      }
      if (p.residual) value += omlxd_float<T>(p.residual[(long)col * n + at]);
      y[(long)col * n + at] = omlxd_round<T>(value);
    }
    which++;
  }
  asm volatile("cp.async.wait_all;");
}
"""


def _source(
    name: str,
    kind: str,
    eights: int,
    outputs: int,
    norm: bool,
    residual: bool,
    biases: tuple[bool, ...],
    silu: bool,
) -> str:
    sixteens, stages, blocks = FORMS[eights]
    count = len(biases)
    arguments, lines = ["const T* x"], ["p.x = x;"]
    for i in range(count):
        arguments.append(f"const T* w{i}")
        lines.append(f"p.w[{i}] = w{i}; p.n[{i}] = n{i};")
    for given, one in ((norm, "norm"), (residual, "residual")):
        if given:
            arguments.append(f"const T* {one}")
            lines.append(f"p.{one} = {one};")
    for i in range(count):
        if biases[i]:
            arguments.append(f"const T* bias{i}")
            lines.append(f"p.bias[{i}] = bias{i};")
    for i in range(outputs):
        arguments.append(f"T* y{i}")
        lines.append(f"p.y[{i}] = y{i};")
    arguments += [
        "const int rows",
        "const int k",
        *(f"const int n{i}" for i in range(count)),
        "const float eps",
    ]
    flags = f"{str(norm).lower()}, {str(silu).lower()}"
    return (
        f"{HEADER}using T = {kind};\n{_BODY}\n"
        f'extern "C" __global__ void __launch_bounds__({32 * WARPS}, {blocks})\n'
        f"{name}({', '.join(arguments)}) {{\n"
        f"  Products<T> p = {{}};\n  {' '.join(lines)}\n  p.rows = rows; p.k = k; p.eps = eps;\n"
        f"  omlxd_products<T, {eights}, {sixteens}, {WARPS}, {CHUNK}, {stages}, {flags}>(p);\n}}\n"
    )


@cache
def _code(*form: Any) -> tuple[str, bytes]:
    """(function, machine code)."""
    kind, eights, _, norm, residual, biases, silu = form
    flags = "".join(str(int(flag)) for flag in (norm, residual, silu, *biases))
    name = f"omlxd_products_{kind}_{eights}_{flags}"
    return name, nvrtc.machine_code(_source(name, *form))


def run(
    x: mx.array,
    weights: Sequence[mx.array],
    norm: mx.array | None,
    eps: float,
    residual: mx.array | None,
    silu: bool,
    biases: Sequence[mx.array | None],
) -> list[mx.array]:
    """`products` by the kernel."""
    width = x.shape[-1]
    rows = x.size // width
    eights = next(eights for eights in FORMS if rows <= 8 * eights)
    has_bias = tuple(bias is not None for bias in biases)
    outputs = 1 if silu else len(weights)
    function, code = _code(
        TYPES[x.dtype], eights, outputs, norm is not None, residual is not None, has_bias, silu
    )
    sixteens, stages, blocks = FORMS[eights]
    lengths = [weight.shape[0] for weight in weights]
    tile = 16 * sixteens
    tiles = -(-2 * lengths[0] // tile) if silu else sum(-(-length // tile) for length in lengths)
    columns = 8 * eights
    shared = WARPS * stages * CHUNK * sixteens * 1024 + WARPS * columns * (2 * (tile + 4) + 1) * 4
    given = [one for one in (norm, residual, *biases) if one is not None]
    return mx.fast.precompiled_cuda_kernel(
        name=function,
        compiled_source=code,
        inputs=[x, *weights, *given],
        scalars=[rows, width, *lengths, eps],
        output_shapes=[(*x.shape[:-1], length) for length in lengths[:outputs]],
        output_dtypes=[x.dtype] * outputs,
        grid=(min(tiles, blocks * cuda_driver.multiprocessors()) * 32 * WARPS, 1, 1),
        threadgroup=(32 * WARPS, 1, 1),
        shared_memory=shared,
        ensure_row_contiguous=True,
    )
