"""CUDA kernel of attention over KV packed in 8 or 4 bits: `omlxd_packed`, for up to `MOST_NEW` tokens a row.

It reads words, scales and biases of a row's own KV as they are kept, in spans cut at fixed places, and
unpacks them in registers, once for 16 queries; attention_source.py's merge puts the spans together.
Numbers of 0 to 255 are exact in float16, so the tensor cores multiply those, and what belongs to a group is
added in float32:

    score of a token    sum over groups of  scale * (q . numbers) + bias * sum(q)
    share of a token    weight * scale  times its numbers, and  weight * bias

Queries are divided by a power of two, so that they fit into float16. `omlxd_packed_step` also puts the new
token's KV, packed, into its place, for compiled_step.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

from ..compile import kernel_store
from ..compile.source import HEADER, TYPES
from . import checks
from .attention_kernel import MOST_NEW, Tails, constant, constants_of, kept
from .attention_source import WARPS
from .attention_source import source_of as merge_source

if TYPE_CHECKING:
    from ...cache.packed import Parts, Quantisation

log = logging.getLogger(__name__)

SPAN = 1024
"""Tokens of a row that one block of threads reads.

Milliseconds a layer, 32 query heads on 8 of 128 in bfloat16, KV in 8 bits, one H200 (20 calls, by a script
that is not kept). MLX's own unpacks all and attends, with a mask where rows are unequal; of packed KV and one
token it has no product. 16 bits: attention_kernel.py's.

| rows                | new | 256  | 512  | 1024 | MLX's own | 16 bits | bytes at 4.8 TB/s |
|---------------------|-----|------|------|------|-----------|---------|-------------------|
| 1: 16,000           | 1   | 0.05 | 0.05 | 0.04 | -         | 0.05    | 0.01              |
|                     | 5   |      | 0.08 | 0.06 | 0.25      |         |                   |
|                     | 16  |      |      | 0.09 | 0.26      |         |                   |
| 1: 500              | 1   | 0.03 | 0.03 | 0.03 | -         | 0.02    | 0.00              |
|                     | 5   |      | 0.03 | 0.03 | 0.06      |         |                   |
|                     | 16  |      |      | 0.03 | 0.05      |         |                   |
| 4: 16,000 to 20,500 | 1   | 0.16 | 0.11 | 0.11 | -         | 0.09    | 0.03              |
|                     | 5   |      | 0.21 | 0.16 | 1.25      |         |                   |
|                     | 16  |      |      | 0.27 | 1.40      |         |                   |

A step of an 8B shape with spans of 512, in process, ms in two runs: 1 x 500 6.1 and 6.1, 1 x 16,000 6.8 and
6.7, 4 rows 9.9 and 9.0, 8 x 32,000 20.9 and 21.5, 32 short ones 9.0 and 8.9.

So several long rows are faster in 16 bits. With the next tokens not on their way while a warp computes: 0.04,
0.03 and 0.12 for one token; with 8 warps a block and spans of 512 besides 0.06, 0.03 and 0.19.
"""

WIDTHS = (64, 96, 128, 256, 512)

CLOSE = 0.03
"""Largest difference from MLX's own in float32, for values of a normal distribution: bfloat16's rounding."""

_kernels: dict[tuple[int, int, Any, Quantisation], PackedKernel | None] = {}

_HEADER = """
// Numbers of the low half of x, each beside that of the high half, as float16; exact.
template <int BITS> __device__ inline void omlxd_unpack(unsigned x, unsigned* out);
template <> __device__ inline void omlxd_unpack<8>(unsigned x, unsigned* out) {
  #pragma unroll
  for (int j = 0; j < 2; j++)
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out[j])
        : "r"(__byte_perm(x, 0x64646464, j ? 0x4341 : 0x4240)), "r"(0x64006400));
}
template <> __device__ inline void omlxd_unpack<4>(unsigned x, unsigned* out) {
  #pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const unsigned y = x >> (4 * j);
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out[j]) : "r"(y & 0x000f000f | 0x64006400), "r"(0x64006400));
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out[j + 1])
        : "r"(y & 0x00f000f0 | 0x64006400), "r"(0x2c002c00), "r"(0xd400d400));
  }
}
template <int BYTES> __device__ inline void omlxd_load(const void* from, unsigned* out) {
  if constexpr (BYTES == 2) {
    *out = *reinterpret_cast<const unsigned short*>(from);
  } else if constexpr (BYTES == 4) {
    *out = *reinterpret_cast<const unsigned*>(from);
  } else if constexpr (BYTES == 6) {
    const unsigned short* x = reinterpret_cast<const unsigned short*>(from);
    out[0] = x[0] | (unsigned)x[1] << 16; out[1] = x[2];
  } else if constexpr (BYTES == 8) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    out[0] = x.x; out[1] = x.y;
  } else {
    #pragma unroll
    for (int i = 0; i < BYTES / 16; i++) {
      const uint4 x = reinterpret_cast<const uint4*>(from)[i];
      out[4 * i] = x.x; out[4 * i + 1] = x.y; out[4 * i + 2] = x.z; out[4 * i + 3] = x.w;
    }
  }
}
template <typename T> __device__ inline float omlxd_number(const unsigned* pairs, int index) {
  const float2 x = omlxd_floats<T>(pairs[index / 2]);
  return index % 2 ? x.y : x.x;
}
"""

_BODY = """
  // grid (spans, KV heads x tiles of 16 queries x parts, rows). A part has the sums of GV groups of values:
  // registers have no room for all of heads over 256 wide. A warp reads 16 tokens at once for 16 queries:
  // fragments of mma.m16n8k16, whose k and n are dealt out so that a product is of one group of numbers.
  constexpr int E = 32 / BITS, WORDS = D / E, GROUPS = D / G;  // numbers of a word; of a token
  constexpr int KW = G / (4 * E) < 4 ? G / (4 * E) : 4, KC = WORDS / (4 * KW);
  // Of values a lane has VN numbers of a group: those of VW words, or of half a word, which two lanes read.
  constexpr int VN = G / 8, VW = VN < E ? 1 : VN / E, HALVES = VN < E ? 1 : 2;
  constexpr int PARTS = D > 256 ? 2 : 1, GV = GROUPS / PARTS;
  constexpr bool HELD = D <= 128;  // Queries have room in registers, and so have all values of 16 tokens.
  constexpr float UP = 64.f;  // Weights times scales are far from what float16 can't hold.
  const int fresh = new_tokens, queries = GROUP * fresh, tiles = (queries + 15) / 16;
  const int span = blockIdx.x, row = blockIdx.z, part = blockIdx.y % PARTS, own_group = part * GV;
  const int tile = blockIdx.y / PARTS % tiles, kv_head = blockIdx.y / PARTS / tiles;
  const int from = starts[row] + span * SPAN, end = ends[row], to = min(from + SPAN, end);
  if (from >= end) return;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, line = lane >> 2, quad = lane & 3;
  const long of_row = (long)row * KV_HEADS + kv_head;
  HEAD
  PUT
  // Query m of a head's group: new token m / GROUP, head m % GROUP.
  long place[2];
  int limit[2];
  float factor[2], q_sum[2][GROUPS];
  uint4 qs[D / 16];
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    const int m = tile * 16 + line + 8 * h, token = m / GROUP;
    place[h] = m < queries ? (of_row * GROUP + m % GROUP) * fresh + token : -1;
    limit[h] = m < queries ? min(to, end - fresh + token + 1) : 0;
    float x[D / 4], most = 0.f;
    #pragma unroll
    for (int w = 0; w < WORDS / 4; w++) {
      const int first = ((w / KW * 4 + quad) * KW + w % KW) * E;
      unsigned raw[E / 2];
      #pragma unroll
      for (int e = 0; e < E / 2; e++) raw[e] = 0;
      if (place[h] >= 0) omlxd_load<E * 2>(q + place[h] * D + first, raw);
      #pragma unroll
      for (int e = 0; e < E; e++) most = fmaxf(most, fabsf(x[w * E + e] = omlxd_number<T>(raw, e)));
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const unsigned power = __float_as_uint(most) & 0x7f800000;
    const float down = __uint_as_float(0x7f000000 - power);
    factor[h] = __uint_as_float(power) * scale[0] * 1.44269504f;
    #pragma unroll
    for (int g = 0; g < GROUPS; g++) q_sum[h][g] = 0.f;
    #pragma unroll
    for (int w = 0; w < WORDS / 4; w++) {
      #pragma unroll
      for (int e = 0; e < E; e++) q_sum[h][w / KW * 4 * KW * E / G] += x[w * E + e] *= down;
      #pragma unroll
      for (int s = 0; s < E / 4; s++) {
        const float* y = x + w * E + 2 * s;
        const unsigned one = omlxd_pair<float16>(y[0], y[E / 2]);
        const unsigned two = omlxd_pair<float16>(y[1], y[E / 2 + 1]);
        uint4& into = qs[w * (E / 4) + s];
        if (h) { into.y = one; into.w = two; } else { into.x = one; into.z = two; }
      }
    }
    #pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      q_sum[h][g] += __shfl_xor_sync(~0u, q_sum[h][g], 1);
      q_sum[h][g] += __shfl_xor_sync(~0u, q_sum[h][g], 2);
    }
  }
  __shared__ uint4 shared_qs[HELD ? 1 : D / 16][32];
  if constexpr (!HELD) {
    if (warp == 0)
      #pragma unroll
      for (int f = 0; f < D / 16; f++) shared_qs[f][lane] = qs[f];
    __syncthreads();
  }
  constexpr int PAIRS = (GROUPS + 1) / 2, PV = (GV + 1) / 2;
  struct Tile { unsigned k[2][KC * KW], v[4][GV * VW], ks[4][PAIRS], kb[4][PAIRS], vs[4][PV], vb[4][PV]; };
  auto load_values = [&](unsigned* v, int token, int g) {
    #pragma unroll
    for (int w = 0; w < VW; w++) v[w] = 0;
    const int word = ((own_group + g) * 8 + line) * VN / E;
    if (token < to) omlxd_load<VW * 4>(values + (column + token) * WORDS + word, v);
  };
  auto load = [&](int base, Tile& x) {
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const int token = base + 8 * i + line;
      #pragma unroll
      for (int c = 0; c < KC; c++) {
        #pragma unroll
        for (int w = 0; w < KW; w++) x.k[i][c * KW + w] = 0;
        if (token < to)
          omlxd_load<KW * 4>(keys + (column + token) * WORDS + (c * 4 + quad) * KW, x.k[i] + c * KW);
      }
    }
    #pragma unroll
    for (int n = 0; n < 4; n++) {
      const int token = base + quad * 2 + (n & 1) + (n >> 1) * 8;
      #pragma unroll
      for (int p = 0; p < PAIRS; p++) x.ks[n][p] = x.kb[n][p] = 0;
      #pragma unroll
      for (int p = 0; p < PV; p++) x.vs[n][p] = x.vb[n][p] = 0;
      if (token < to) {
        omlxd_load<GROUPS * 2>(key_scales + (column + token) * GROUPS, x.ks[n]);
        omlxd_load<GROUPS * 2>(key_biases + (column + token) * GROUPS, x.kb[n]);
        omlxd_load<GV * 2>(value_scales + (column + token) * GROUPS + own_group, x.vs[n]);
        omlxd_load<GV * 2>(value_biases + (column + token) * GROUPS + own_group, x.vb[n]);
      }
      if constexpr (HELD)
        #pragma unroll
        for (int g = 0; g < GV; g++) load_values(x.v[n] + g * VW, token, g);
    }
  };
  float best[2] = {-1e30f, -1e30f}, total[2] = {0.f, 0.f}, shift[2][GV], sum[GV * VN][4];
  #pragma unroll
  for (int g = 0; g < GV; g++) shift[0][g] = shift[1][g] = 0.f;
  #pragma unroll
  for (int t = 0; t < GV * VN; t++)
    #pragma unroll
    for (int e = 0; e < 4; e++) sum[t][e] = 0.f;
  Tile now, next;
  if constexpr (AHEAD) load(from + warp * 16, next);
  for (int base = from + warp * 16; base < to; base += 16 * WARPS) {
    if constexpr (AHEAD) {
      now = next;
      load(base + 16 * WARPS, next);
    } else {
      load(base, now);
    }
    float score[2][4];
    #pragma unroll
    for (int i = 0; i < 2; i++)
      #pragma unroll
      for (int e = 0; e < 4; e++) score[i][e] = 0.f;
    #pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      float dot[2][4];
      #pragma unroll
      for (int i = 0; i < 2; i++)
        #pragma unroll
        for (int e = 0; e < 4; e++) dot[i][e] = 0.f;
      #pragma unroll
      for (int w = g * (WORDS / 4 / GROUPS); w < (g + 1) * (WORDS / 4 / GROUPS); w++) {
        unsigned k[2][E / 2];
        #pragma unroll
        for (int i = 0; i < 2; i++) omlxd_unpack<BITS>(now.k[i][w], k[i]);
        #pragma unroll
        for (int s = 0; s < E / 4; s++) {
          const int f = w * (E / 4) + s;
          const uint4 a = HELD ? qs[f] : shared_qs[HELD ? 0 : f][lane];
          #pragma unroll
          for (int i = 0; i < 2; i++)
            omlxd_mma<float16>(dot[i], a.x, a.y, a.z, a.w, k[i][2 * s], k[i][2 * s + 1]);
        }
      }
      #pragma unroll
      for (int n = 0; n < 4; n++) {
        const float times = omlxd_number<T>(now.ks[n], g), plus = omlxd_number<T>(now.kb[n], g);
        #pragma unroll
        for (int h = 0; h < 2; h++)
          score[n >> 1][2 * h + (n & 1)] += times * dot[n >> 1][2 * h + (n & 1)] + plus * q_sum[h][g];
      }
    }
    float weight[2][4], shrink[2];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = best[h];
      #pragma unroll
      for (int n = 0; n < 4; n++) {
        const int token = base + 8 * (n >> 1) + quad * 2 + (n & 1);
        float& x = score[n >> 1][2 * h + (n & 1)];
        x = token < limit[h] ? x * factor[h] : -INFINITY;
        top = fmaxf(top, x);
      }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      shrink[h] = omlxd_exp2(best[h] - top);
      best[h] = top;
      total[h] *= shrink[h];
      #pragma unroll
      for (int g = 0; g < GV; g++) shift[h][g] *= shrink[h];
      #pragma unroll
      for (int n = 0; n < 4; n++) {
        weight[h][n] = omlxd_exp2(score[n >> 1][2 * h + (n & 1)] - top);
        total[h] += weight[h][n];
        #pragma unroll
        for (int g = 0; g < GV; g++) shift[h][g] += weight[h][n] * omlxd_number<T>(now.vb[n], g);
      }
    }
    if (__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f)) {
      #pragma unroll
      for (int t = 0; t < GV * VN; t++) {
        sum[t][0] *= shrink[0]; sum[t][1] *= shrink[0]; sum[t][2] *= shrink[1]; sum[t][3] *= shrink[1];
      }
    }
    #pragma unroll
    for (int g = 0; g < GV; g++) {
      unsigned share[2][2], v[4][VW];
      #pragma unroll
      for (int n = 0; n < 4; n++) {
        if constexpr (!HELD) load_values(v[n], base + quad * 2 + (n & 1) + (n >> 1) * 8, g);
        else
          #pragma unroll
          for (int w = 0; w < VW; w++) v[n][w] = now.v[n][g * VW + w];
      }
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        const float one = omlxd_number<T>(now.vs[2 * i], g) * UP;
        const float two = omlxd_number<T>(now.vs[2 * i + 1], g) * UP;
        #pragma unroll
        for (int h = 0; h < 2; h++)
          share[h][i] = omlxd_pair<float16>(weight[h][2 * i] * one, weight[h][2 * i + 1] * two);
      }
      #pragma unroll
      for (int w = 0; w < VW; w++)
        #pragma unroll
        for (int half = 0; half < HALVES; half++) {
          const unsigned pick = (HALVES == 1 ? line & 1 : half) ? 0x7632 : 0x5410;
          unsigned x[2][E / 2];
          #pragma unroll
          for (int i = 0; i < 2; i++)
            omlxd_unpack<BITS>(__byte_perm(v[2 * i][w], v[2 * i + 1][w], pick), x[i]);
          #pragma unroll
          for (int j = 0; j < E / 2; j++)
            omlxd_mma<float16>(sum[g * VN + w * E + half * (E / 2) + j], share[0][0], share[1][0],
                               share[0][1], share[1][1], x[0][j], x[1][j]);
        }
    }
  }
  __shared__ float tops[WARPS][16], masses[WARPS][16], shifts[WARPS][16][GV], vectors[WARPS][16][G];
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    float mass = total[h];
    mass += __shfl_xor_sync(~0u, mass, 1);
    mass += __shfl_xor_sync(~0u, mass, 2);
    if (quad == 0) { tops[warp][line + 8 * h] = best[h]; masses[warp][line + 8 * h] = mass; }
    #pragma unroll
    for (int g = 0; g < GV; g++) {
      float x = shift[h][g];
      x += __shfl_xor_sync(~0u, x, 1);
      x += __shfl_xor_sync(~0u, x, 2);
      if (quad == 0) shifts[warp][line + 8 * h][g] = x;
    }
  }
  #pragma unroll
  for (int g = 0; g < GV; g++) {
    if (g) __syncthreads();
    #pragma unroll
    for (int t = 0; t < VN; t++)
      #pragma unroll
      for (int e = 0; e < 4; e++) {
        const int column = quad * 2 + (e & 1);  // Of tile t.
        vectors[warp][line + 8 * (e >> 1)][column * VN + t] = sum[g * VN + t][e] * (1.f / UP);
      }
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * G; i += 32 * WARPS) {
      const int h = i / G, d = i % G, m = tile * 16 + h;
      if (m >= queries) break;
      float top = -1e30f, mass = 0.f, x = 0.f;
      #pragma unroll
      for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w][h]);
      #pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float part = omlxd_exp2(tops[w][h] - top);
        mass += part * masses[w][h];
        x += part * (vectors[w][h][d] + shifts[w][h][g]);
      }
      const long to_place = ((of_row * GROUP + m % GROUP) * fresh + m / GROUP) * gridDim.x + span;
      sums[to_place * D + (own_group + g) * G + d] = x;
      if (part + g + d == 0) { weights[to_place * 2] = top; weights[to_place * 2 + 1] = mass; }
    }
  }
"""

_NAMES = [f"{kv}{part}" for kv in ("key", "value") for part in ("s", "_scales", "_biases")]

_HEAD = "const long column = of_row * capacity;"

_HEAD_BY_ADDRESS = """const unsigned long long* own = tails + (long)row * columns;
  const long before = own[7];  // Tokens in segments, which spans divide.
  const int segment = from < before ? from / each : -1;
  const unsigned long long* at = segment < 0 ? own : own + 8 + segment * 6;
  const unsigned *keys = reinterpret_cast<const unsigned*>(at[0]);
  const T* key_scales = reinterpret_cast<const T*>(at[1]);
  const T* key_biases = reinterpret_cast<const T*>(at[2]);
  const unsigned *values = reinterpret_cast<const unsigned*>(at[3]);
  const T* value_scales = reinterpret_cast<const T*>(at[4]);
  const T* value_biases = reinterpret_cast<const T*>(at[5]);
  const long column =
      segment < 0 ? (long)kv_head * (long)own[6] - before : ((long)kv_head - segment) * each;"""

_PUT = """if (to == end) {  // Nobody else reads the newest token.
    const long last = column + end - 1;
    for (int i = threadIdx.x; i < WORDS; i += 32 * WARPS) {
      const_cast<unsigned*>(keys)[last * WORDS + i] = put_keys[of_row * WORDS + i];
      const_cast<unsigned*>(values)[last * WORDS + i] = put_values[of_row * WORDS + i];
    }
    for (int i = threadIdx.x; i < GROUPS; i += 32 * WARPS) {
      const_cast<T*>(key_scales)[last * GROUPS + i] = put_key_scales[of_row * GROUPS + i];
      const_cast<T*>(key_biases)[last * GROUPS + i] = put_key_biases[of_row * GROUPS + i];
      const_cast<T*>(value_scales)[last * GROUPS + i] = put_value_scales[of_row * GROUPS + i];
      const_cast<T*>(value_biases)[last * GROUPS + i] = put_value_biases[of_row * GROUPS + i];
    }
    __syncthreads();
  }
"""


def fits(width: int, how: Quantisation) -> bool:
    """Whether there is a kernel: for heads over 256 wide shared memory has no room for groups of 128."""
    return width in WIDTHS and width % how.group == 0 and (width <= 256 or how.group < 128)


def in_use() -> bool:
    """Whether some kernel is."""
    return any(_kernels.values())


def kernel_for(queries: mx.array, keys: Parts, values: Parts, how: Quantisation) -> PackedKernel | None:
    """Of attention over such KV, once a check beside MLX's own passed."""
    width, group = queries.shape[3], queries.shape[1] // keys[0].shape[1]
    key = width, group, queries.dtype, how
    if key not in _kernels:
        alike = keys[0].shape == values[0].shape and keys[1].dtype == values[1].dtype == queries.dtype
        has = alike and queries.dtype in TYPES and fits(width, how)
        if not has:
            log.info("packed KV is unpacked in each pass: no kernel for heads %d wide and %s", width, how)
        _kernels[key] = _checked(*key) if has else None
    return _kernels[key]


def _checked(width: int, group: int, dtype: Any, how: Quantisation) -> PackedKernel | None:
    """A kernel that computes what MLX's own does, on rows of unequal length; None, and a line in the log."""
    kernel, began, far = PackedKernel(width, group, dtype, how), time.perf_counter(), 0.0
    try:
        for new in (1, 5):
            far = max(far, difference(kernel, width, group, dtype, how, new))
    except Exception as error:
        log.warning("packed KV is unpacked in each pass: omlxd's kernel does not run here (%s)", error)
        return None
    if not far < CLOSE:  # NaN too
        log.warning("packed KV is unpacked in each pass: omlxd's kernel differs by %.3g", far)
        return None
    log.info(
        "decode attends to packed KV by omlxd's kernel (%s, %d wide, %d query heads a KV head, %d bits in "
        "groups of %d): within %.4f of MLX's own, checked in %.1f s",
        *(dtype, width, group, how.bits, how.group, far, time.perf_counter() - began),
    )
    return kernel


def difference(kernel: Any, width: int, group: int, dtype: Any, how: Quantisation, new: int) -> float:
    """The largest from MLX's own in float32, for `new` tokens of each of two rows; NaN is infinite.

    Infinite too if `step` puts or gives anything else than `kernel` does where the token is in its place, or
    if rows with arrays of their own have other bits, by themselves or behind segments.
    """
    end = 2 * SPAN + 17
    shape, scale = (2, 2, end + 15, width), width**-0.5
    queries, keys, values = (
        mx.random.normal(size, key=mx.random.key(seed)).astype(dtype)
        for seed, size in enumerate([(2, 2 * group, new, width), shape, shape])
    )
    packed = how.pack(keys), how.pack(values)
    starts, ends = [0, SPAN + 5], [end - SPAN - 1, end]
    got = kernel(queries, *packed, (starts, ends), scale)
    exact = [
        how.unpack([parts[0], *(part.astype(mx.float32) for part in parts[1:])])[:, :, :end]
        for parts in packed
    ]
    own = mx.array(ends)[:, None, None, None] - new + mx.arange(new)[:, None]
    mask = (mx.arange(end) >= mx.array(starts)[:, None, None, None]) & (mx.arange(end) <= own)
    want = mx.fast.scaled_dot_product_attention(queries.astype(mx.float32), *exact, scale=scale, mask=mask)
    far = cast(float, mx.abs(got.astype(mx.float32) - want).max().item())
    if new == 1:
        rows, columns = mx.arange(2), mx.array(ends) - 1
        seen = (mx.arange(shape[2]) != columns[:, None])[:, None, :, None]
        fresh = tuple([part[rows, :, columns][:, :, None] for part in parts] for parts in packed)
        held = tuple([mx.where(seen, part, mx.zeros_like(part)) for part in parts] for parts in packed)
        mx.eval(got, fresh, held)
        put = kernel.step(queries, fresh, held, mx.array(starts), mx.array(ends), scale)
        mx.eval(put)
        pairs = zip((put[0], *put[1], *put[2]), (got, *packed[0], *packed[1]), strict=True)
        if not all(mx.array_equal(a, b).item() for a, b in pairs):
            return float("inf")
    newest = [
        [mx.stack([part[row, :, at - new : at] for row, at in enumerate(ends)]) for part in parts]
        for parts in packed
    ]
    held = [[part[row : row + 1] + 0 for part in (*packed[0], *packed[1])] for row in range(2)]
    by_address = checks.over_tails_of(kernel, queries, held, (starts, ends), newest, scale)
    if not mx.array_equal(by_address, got).item():
        return float("inf")
    at = [0, 0], ends
    before = [[part[row : row + 1, :, :SPAN] + 0 for part in (*packed[0], *packed[1])] for row in range(2)]
    held = [[part[row : row + 1, :, SPAN:] + 0 for part in (*packed[0], *packed[1])] for row in range(2)]
    shared = checks.over_tails_of(kernel, queries, held, at, newest, scale, before=before)
    if not mx.array_equal(shared, kernel(queries, *packed, at, scale)).item():
        return float("inf")
    return far if far == far else float("inf")


def source_of(name: str, width: int, group: int, dtype: Any, how: Quantisation) -> tuple[str, str]:
    """(function, CUDA source) of a kernel: spans or step; `own_` before it where rows have arrays of their
    own."""
    kind = TYPES[dtype]
    function = f"omlxd_packed_{name}_{kind}_{width}_{group}_{how.bits}_{how.group}"
    own, steps = name.startswith("own_"), name.endswith("step")
    numbers = {"D": width, "GROUP": group, "SPAN": SPAN, "WARPS": WARPS, "BITS": how.bits, "G": how.group}
    numbers["AHEAD"] = int(width <= 128)
    constants = ", ".join(f"{word} = {number}" for word, number in numbers.items())

    def pointers(prefix: str) -> str:
        types = ("const unsigned*", "const T*", "const T*") * 2
        return ", ".join(f"{kind} {prefix}{name}" for kind, name in zip(types, _NAMES, strict=True))

    arguments = "const T* q, " + (pointers("put_") + ", " if steps else "")
    arguments += "const unsigned long long* tails" if own else pointers("")
    arguments += ", const int* starts, const int* ends, const float* scale"
    arguments += ", const int* behind" if own and not steps else ""
    arguments += ", float* sums, float* weights" + ("" if own else ", const int capacity")
    arguments += ", const int new_tokens, const int KV_HEADS"
    arguments += ", const int columns, const int each" if own else ""
    body = _BODY.replace("HEAD\n", f"{_HEAD_BY_ADDRESS if own else _HEAD}\n", 1)
    body = body.replace("PUT\n", _PUT if steps else "", 1)
    head = f"{HEADER}{_HEADER}using T = {kind};\nconstexpr int {constants};\n"
    bounds = f"__launch_bounds__({32 * WARPS})"
    return function, f'{head}extern "C" __global__ void {bounds} {function}({arguments}) {{\n{body}\n}}\n'


class PackedKernel:
    """The kernels for one width, group, type and quantisation. They compile at their first calls. Raises what
    NVRTC, the driver and MLX raise."""

    most_new = MOST_NEW

    def __init__(self, width: int, group: int, dtype: Any, how: Quantisation):
        self._width, self._group, self._dtype, self.how = width, group, dtype, how
        self._code: dict[str, tuple[str, bytes]] = {}
        self._compiled = lru_cache(64)(lambda queries, held: mx.compile(partial(self._attend)))

    def __call__(
        self,
        queries: mx.array,
        keys: Parts,
        values: Parts,
        places: Sequence[Sequence[int]],
        scale: float,
    ) -> mx.array:
        """As `Kernel`'s; keys and values in parts, each (rows, KV heads, capacity, its words or groups)."""
        call = self._compiled(queries.shape, keys[0].shape)
        return call(queries, (keys, values), *constants_of(places), constant("scale", (scale,), mx.float32))

    def over_tails(
        self,
        queries: mx.array,
        tails: Tails,
        places: Sequence[Sequence[int]],
        scale: float,
        *,
        fresh: Sequence[Parts] = (),
        behind: mx.array | None = None,
    ) -> mx.array:
        """As `Kernel.over_tails`."""
        call = self._compiled((queries.shape, bool(fresh)), tails.most)
        scales = constant("scale", (scale,), mx.float32)
        return call(queries, tails, *constants_of(places), scales, fresh, behind)

    def step(
        self,
        queries: mx.array,
        fresh: Sequence[Parts],
        held: tuple[Parts, Parts] | Tails,
        starts: mx.array,
        ends: mx.array,
        scale: float,
        sinks: None = None,
    ) -> tuple[mx.array, Any, Any]:
        """As `Kernel.step`; `fresh` is packed, or nothing where it is in its place."""
        scales = constant("scale", (scale,), mx.float32)
        return self._attend(queries, held, starts, ends, scales, fresh), *kept(held)

    def _attend(
        self,
        queries: mx.array,
        held: tuple[Parts, Parts] | Tails,
        starts: mx.array,
        ends: mx.array,
        scale: mx.array,
        fresh: Sequence[Parts] = (),
        behind: mx.array | None = None,
    ) -> mx.array:
        rows, heads, new = queries.shape[:3]
        kv_heads, own = heads // self._group, isinstance(held, Tails)
        capacity = held.most if isinstance(held, Tails) else held[0][0].shape[2]
        spans, tiles, parts = -(-capacity // SPAN), -(-self._group * new // 16), 1 + (self._width > 256)
        given = [part for parts in fresh for part in parts]
        given += [held.table] if isinstance(held, Tails) else [*held[0], *held[1]]
        last = [ends if behind is None else behind] if own and not fresh else []
        table = [held.table.shape[1], held.each] if isinstance(held, Tails) else []
        sums, weights = self._run(
            "own_" * own + ("step" if fresh else "spans"),
            [queries, *given, starts, ends, scale, *last],
            [*([] if own else [capacity]), new, kv_heads, *table],
            grid=(spans * 32 * WARPS, kv_heads * tiles * parts, rows),
            threadgroup=(32 * WARPS, 1, 1),
            output_shapes=[(rows, heads * new, spans, self._width), (rows, heads * new, spans, 2)],
            output_dtypes=[mx.float32, mx.float32],
        )
        return self._run(
            "merge",
            [sums, weights, starts, ends],
            [spans, heads * new, new],
            grid=(rows * heads * new * self._width, 1, 1),
            threadgroup=(self._width, 1, 1),
            output_shapes=[queries.shape],
            output_dtypes=[self._dtype],
        )[0]

    def _run(self, name: str, inputs: list[mx.array], scalars: list[int], **how: Any) -> list[mx.array]:
        """One kernel, compiled at its first call."""
        if name not in self._code:
            shape = self._width, self._group, self._dtype
            source = (
                merge_source(name, *shape, SPAN) if name == "merge" else source_of(name, *shape, self.how)
            )
            self._code[name] = source[0], kernel_store.machine_code(source[1])
        function, code = self._code[name]
        return mx.fast.precompiled_cuda_kernel(
            name=function,
            compiled_source=code,
            inputs=inputs,
            scalars=scalars,
            ensure_row_contiguous=True,
            **how,
        )
