"""A CUDA kernel from a layer's q, k and v of new tokens to what attention gives for them.

`omlxd_fused_attention` normalises and rotates queries and keys where the model does, puts the new KV into
its place, reads each row's own KV alone, and its last block of a head puts the parts together: one launch
where MLX and attention_kernel.py take eight. What rows hold in segments is read by other blocks of the same
launch, each segment once for all rows that hold it. A row is cut into parts by its own length alone, and
each part's sums have a fixed order, so that a row's bits do not depend on the rows beside it. Of several new
tokens each is a row of its own, which ends where the token does: their bits are those of as many launches of
one. Rows that are held may have unequal numbers of new tokens.

KV goes by asynchronous copies into rings of shared memory, one for each warp, and from there into tensor
cores: tokens are the long side of a tile, the query heads of a KV head the short one. fused_step.py calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from ..compile import kernel_store
from ..compile.source import COPIES, HEADER, MOST_ROWS, TYPES
from .attention_kernel import Held, Tails
from .attention_source import most_heads
from .segment_kernel import read_source

if TYPE_CHECKING:
    from .segments import Shared

WIDTHS, MOST_GROUP = (64, 128, 256), 16

MOST_NEW = 16
"""Tokens of each row that are held in a launch."""

ARCHITECTURES = (90, 100, 103)
"""With 227 KB of shared memory. It has run on the first alone."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a kernel is cut. A part of a tail has at least `least` tokens; a tail has at most `most` parts, 32
    or fewer.

    A part has a multiple of 16 * `warps` tokens. `stages` of 16 tokens are on their way for each warp. Of a
    segment a block reads `span` tokens for 8 * `tiles` queries of rows that hold it at once: registers bound
    them, so that two blocks of narrow heads share a multiprocessor. With 4 warps a layer's launch has room
    for attention of 128-wide heads (layer_products.py); by itself it takes 0.02 ms longer a step than with 8,
    and 0.1 for four rows.

    Milliseconds of a decode step, 8B shape in bfloat16, one H100, no launch graphs; plain: no segments:

    | warps, tiles, span, least, most | 1 x 500 | 1 x 16,000 | plain | 4 x 16,000 up |
    |---------------------------------|---------|------------|-------|---------------|
    | 8, 4, 1024, 1024, 16            | 6.02    | 7.19       | 6.96  | 10.26         |
    | 8, 4, 1024, 512, 16             | 6.14    | 7.25       | 6.86  | 10.35         |
    | 8, 4, 512, 512, 16              | 6.12    | 7.86       | 6.92  | 11.55         |
    | 4, 2, 512, 512, 32              | 6.19    | 7.26       | 6.98  | 10.76         |
    | 4, 2, 256, 256, 32              | 6.25    | 7.79       | 6.98  | 13.03         |

    On another host 4, 2, 1024, 1024, 32 took 6.08, 7.32, 7.08 and 10.59, and the first row 6.02, 7.27, 6.93
    and 10.40. Two chains of sums, blocks of tails first, and no merge changed a step by less than 0.1 ms; nor
    did it help to ask for all parts of a head at once as they are put together. A kernel for eight queries of
    a segment or fewer took 7.13 in place of 7.27, and is in use since. Blocks that prefetch the next
    product's weights into L2 at their end, here and in products_kernel.py, cost 0.1 to 0.4 ms.
    """

    warps: int = 4
    stages: int = 3
    least: int = 1024
    most: int = 16
    tiles: int = 4
    span: int = 1024


def shape_of(width: int) -> Shape:
    """The shape whose rings fit into an H100's shared memory, 227 KB of a multiprocessor."""
    return Shape(warps=8 if width < 128 else 4, tiles=4 if width == 128 else 2)


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layer's attention is: the same for all layers of a model.

    turned       first dimensions of a head that are rotated; 0: none
    traditional  a rotation's pair are neighbours; else half of `turned` lies between them
    norm         queries and keys are normalised before
    """

    width: int
    heads: int
    kv_heads: int
    turned: int
    traditional: bool
    norm: bool
    scale: float
    eps: float
    dtype: Any


def fits(heads: Heads) -> bool:
    """Whether there is a kernel for these."""
    return (
        heads.width in WIDTHS
        and heads.heads // heads.kv_heads <= MOST_GROUP
        and heads.dtype == mx.bfloat16  # For products.py's norms.
    )


_TURN_QUERY = """
  constexpr int EACH = D / 64;
  int a[EACH], b[EACH];
  T x[EACH], y[EACH], x_weight[EACH], y_weight[EACH];
  float cosine[EACH], sine[EACH];
  auto ready = [&](int c) {
    const float* turn = turns + (c < columns ? place(c) : 0) / (kv_heads * GROUP) * D;
    #pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int pair = lane * EACH + j;
      const bool near = TRADITIONAL || 2 * pair >= TURNED;
      a[j] = near ? 2 * pair : pair;
      b[j] = near ? a[j] + 1 : pair + TURNED / 2;
      if (NORM) { x_weight[j] = q_norm[a[j]]; y_weight[j] = q_norm[b[j]]; }
      cosine[j] = turn[a[j]];
      sine[j] = turn[b[j]];
    }
  };
  auto take = [&](int c) {
    const T* source = q + (c < columns ? place(c) : 0) * D;
    #pragma unroll
    for (int j = 0; j < EACH; j++) {
      x[j].bits = __ldcg(&source[a[j]].bits);
      y[j].bits = __ldcg(&source[b[j]].bits);
    }
  };
  auto prepare = [&](int c) {
    float squares = 0.f;
    if (NORM) {
      #pragma unroll
      for (int j = 0; j < EACH; j++) {
        const float one = omlxd_float(x[j]), two = omlxd_float(y[j]);
        squares += one * one + two * two;
      }
      #pragma unroll
      for (int o = 16; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
      const float factor = rsqrtf(squares / D + eps);
      #pragma unroll
      for (int j = 0; j < EACH; j++) {
        const T one = omlxd_round<T>(omlxd_float(x[j]) * factor);
        const T two = omlxd_round<T>(omlxd_float(y[j]) * factor);
        x[j] = omlxd_round<T>(omlxd_float(one) * omlxd_float(x_weight[j]));
        y[j] = omlxd_round<T>(omlxd_float(two) * omlxd_float(y_weight[j]));
      }
    }
    #pragma unroll
    for (int j = 0; j < EACH; j++) {
      if (2 * (lane * EACH + j) < TURNED) {
        const float one = omlxd_float(x[j]), two = omlxd_float(y[j]);
        x[j] = omlxd_round<T>(one * cosine[j] - two * sine[j]);
        y[j] = omlxd_round<T>(one * sine[j] + two * cosine[j]);
      }
      queries[c * D + a[j]] = x[j];
      queries[c * D + b[j]] = y[j];
    }
  };
"""

_PARTS = """
__device__ inline int omlxd_span(int length) {
  const int longest = (length + MOST - 1) / MOST;
  return max(LEAST, (longest + 16 * WARPS - 1) / (16 * WARPS) * 16 * WARPS);
}
__device__ inline int omlxd_spans(int length) {
  const int span = omlxd_span(length);
  return (length + span - 1) / span;
}
// The last block of a query head merges the parts of that head. Thread i < `heads` of a block names one
// `head` that the block has read a part for, and how many `parts` this head has in all.
__device__ inline void omlxd_put_together(
    int heads, long head, int parts, int* due, long* whose, int* counters, int most, const float* sums,
    const float* weights, T* out) {
  __syncthreads();
  if (threadIdx.x < heads) {
    __threadfence();
    const bool is_last = atomicAdd(counters + head, 1) == parts - 1;
    if (is_last) counters[head] = 0;
    due[threadIdx.x] = is_last ? parts : 0;
    whose[threadIdx.x] = head;
    __threadfence();
  }
  __syncthreads();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (int i = warp; i < heads; i += WARPS) {
    const int count = due[i];
    if (!count) continue;
    const float* pairs = weights + whose[i] * most * 2;
    const float* vectors = sums + whose[i] * most * D + lane;
    float top = -1e30f, mass = 0.f, x[D / 32];
    #pragma unroll
    for (int e = 0; e < D / 32; e++) x[e] = 0.f;
    for (int s = lane; s < count; s += 32) top = fmaxf(top, omlxd_fresh(pairs + s * 2));
    #pragma unroll
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    #pragma unroll 1
    for (int begin = 0; begin < count; begin += 32) {
      const int here = min(32, count - begin);
      float own = 0.f;
      if (lane < here) {
        own = omlxd_exp2(omlxd_fresh(pairs + (begin + lane) * 2) - top);
        mass += own * omlxd_fresh(pairs + (begin + lane) * 2 + 1);
      }
      #pragma unroll 1
      for (int first = 0; first < here; first += 8) {
        float part[8][D / 32];
        #pragma unroll
        for (int s = 0; s < 8; s++)
          #pragma unroll
          for (int e = 0; e < D / 32; e++)
            part[s][e] = first + s < here ? omlxd_fresh(vectors + (begin + first + s) * D + e * 32) : 0.f;
        #pragma unroll
        for (int s = 0; s < 8; s++) {
          const float weight = __shfl_sync(~0u, own, first + s);
          #pragma unroll
          for (int e = 0; e < D / 32; e++) x[e] += weight * part[s][e];
        }
      }
    }
    #pragma unroll
    for (int o = 16; o; o >>= 1) mass += __shfl_xor_sync(~0u, mass, o);
    #pragma unroll
    for (int e = 0; e < D / 32; e++) out[whose[i] * D + e * 32 + lane] = omlxd_round<T>(x[e] / mass);
  }
}
"""

_BODY = """
  // grid (parts of segments x tiles of columns, then parts of tails x rows; KV heads x PARTS). Row `row` is
  // new token `token` of row `held_row`, whose tokens follow each other: blocks that read the same KV run at
  // the same time.
  constexpr int CHUNKS = D / 8, TILE = 16, STAGE = 2 * TILE * CHUNKS, EACH = D / 64;
  T* queries = reinterpret_cast<T*>(rings + RING);
  T* fresh = queries + 8 * MOST_TILES * D;  // Key, value: the own, those of earlier new tokens.
  float* tops = reinterpret_cast<float*>(fresh + 2 * D * MOST_NEW);
  float* masses = tops + WARPS * 8 * MOST_TILES;
  long* whose = reinterpret_cast<long*>(masses + WARPS * 8 * MOST_TILES);
  int* due = reinterpret_cast<int*>(whose + 8 * MOST_TILES);
  const int parts = (length + SPAN - 1) / SPAN, of_segments = segments * parts * across;
  int* counter = const_cast<int*>(counters);
  const float factor = scale * 1.44269504f;
  if (block_x < of_segments) {
    const int tile = block_x % across, part = block_x / across % parts;
    const int slot = block_x / across / parts, kv_head = block_y / PARTS;
    const int* own = table + slot * (1 + 2 * rows);
    const unsigned long long k_at = addresses[slot * 2], v_at = addresses[slot * 2 + 1];
    const int first = tile * 8 * MOST_TILES, columns = min(own[0] * GROUP - first, 8 * MOST_TILES);
    if (columns <= 0 || block_y % PARTS) return;
    const int from = part * SPAN, to = min(from + SPAN, length);
    const long before = (long)kv_head * length * CHUNKS;
    // For the end, asked for now.
    const int c = first + min((int)threadIdx.x, columns - 1), row = own[1 + 2 * (c / GROUP)];
    const int all_parts = counts[row] * parts + omlxd_spans(ends[row] - starts[row]);
    #define RUN(N) \\
      omlxd_segment<N>(q, q_norm, turns, k_at, v_at, before, own + 1, columns, first, from, to, factor, \\
                       parts, part, most, 1, KV_HEADS, kv_head, rings, queries, tops, masses, sums, \\
                       weights, done, awaited)
    if (MOST_TILES == 1 || columns <= 8) RUN(1);
    else if (MOST_TILES == 2 || columns <= 16) RUN(2);
    else RUN(MOST_TILES);
    omlxd_put_together(columns, ((long)row * KV_HEADS + kv_head) * GROUP + c % GROUP, all_parts, due, whose,
                       counter, most, sums, weights, out);
    return;
  }
  const int row = (block_x - of_segments) % rows, own_part = (block_x - of_segments) / rows;
  const int owner = several ? owners[row] : row * MOST_NEW, kv_head = block_y / PARTS;
  if (owner < 0) return;
  const int held_row = owner / MOST_NEW, token = owner % MOST_NEW;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quad = lane & 3;
  const int begin = starts[row], end = ends[row];
  // A warp prepares a vector: one of H queries, the new key, the new value, those of earlier new tokens. All
  // that it reads is asked for at once: weights of other layers have driven it out of the second cache.
  int a[EACH], b[EACH];
  T x[EACH], y[EACH], x_weight[EACH], y_weight[EACH];
  float cosine[EACH], sine[EACH];
  auto is_value = [&](int h) { return h > H && (h - H) % 2; };
  auto ready = [&](int h, int row) {
    const T* weight = h < H ? q_norm : k_norm;
    #pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int pair = lane * EACH + j;
      const bool near = TRADITIONAL || 2 * pair >= TURNED;
      a[j] = near ? 2 * pair : pair;
      b[j] = near ? a[j] + 1 : pair + TURNED / 2;
      if (NORM) { x_weight[j] = weight[a[j]]; y_weight[j] = weight[b[j]]; }
      cosine[j] = turns[row * D + a[j]];
      sine[j] = turns[row * D + b[j]];
    }
  };
  auto take = [&](int h, int row) {
    const T* source = h < H ? q + ((long)row * KV_HEADS * GROUP + block_y * H + h) * D
                            : (is_value(h) ? v : k) + ((long)row * KV_HEADS + kv_head) * D;
    #pragma unroll
    for (int j = 0; j < EACH; j++) {
      x[j].bits = __ldcg(&source[a[j]].bits);
      y[j].bits = __ldcg(&source[b[j]].bits);
    }
  };
  auto prepare = [&](int h) {
    T* target = h < H ? queries + h * D : fresh + (h - H) * D;
    if (NORM && !is_value(h)) {
      float squares = 0.f;
      #pragma unroll
      for (int j = 0; j < EACH; j++) {
        const float one = omlxd_float(x[j]), two = omlxd_float(y[j]);
        squares += one * one + two * two;
      }
      #pragma unroll
      for (int o = 16; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
      const float factor = rsqrtf(squares / D + eps);
      #pragma unroll
      for (int j = 0; j < EACH; j++) {
        const T one = omlxd_round<T>(omlxd_float(x[j]) * factor);
        const T two = omlxd_round<T>(omlxd_float(y[j]) * factor);
        x[j] = omlxd_round<T>(omlxd_float(one) * omlxd_float(x_weight[j]));
        y[j] = omlxd_round<T>(omlxd_float(two) * omlxd_float(y_weight[j]));
      }
    }
    #pragma unroll
    for (int j = 0; j < EACH; j++) {
      if (!is_value(h) && 2 * (lane * EACH + j) < TURNED) {
        const float one = omlxd_float(x[j]), two = omlxd_float(y[j]);
        x[j] = omlxd_round<T>(one * cosine[j] - two * sine[j]);
        y[j] = omlxd_round<T>(one * sine[j] + two * cosine[j]);
      }
      target[a[j]] = x[j];
      target[b[j]] = y[j];
    }
  };
  if (warp < H + 2) ready(warp, row);
  if (!LATE && warp < H + 2) take(warp, row);
  if (NORM && LATE && H + 2 > WARPS)
    asm volatile("prefetch.global.L1 [%0];" :: "l"(k_norm + lane * (D / 32)));

  const int span = omlxd_span(end - begin), spans = omlxd_spans(end - begin);
  if (own_part >= spans) return;
  const int from = begin + own_part * span, to = min(from + span, end);
  const bool newest = to == end;
  const int kept = min(to, max(from, end - 1 - token)), tiles = (to - from + TILE - 1) / TILE;
  const int vectors_here = H + 2 + 2 * (min(to, end - 1) - kept);
  // Without a `capacity` each row has arrays of its own.
  const unsigned long long* tail = tails + (capacity ? 0 : 3 * held_row);
  const long head = capacity ? ((long)held_row * KV_HEADS + kv_head) * capacity : kv_head * (long)tail[2];
  auto of_head = [&](const T* all, int i) {
    return reinterpret_cast<uint4*>(capacity ? (unsigned long long)all : tail[i]) + head * CHUNKS;
  };
  uint4 *K = of_head(keys, 0), *V = of_head(values, 1);
  uint4* ring = rings + warp * STAGES * STAGE;
  const unsigned ring_at = omlxd_shared(ring);
  auto fetch = [&](int tile, int stage) {
    if (tile < tiles) {
      #pragma unroll
      for (int i = 0; i < TILE * CHUNKS / 32; i++) {
        const int at = i * 32 + lane, token = at / CHUNKS, chunk = at % CHUNKS;
        const int column = from + tile * TILE + token, bytes = column < kept ? 16 : 0;
        const long place = (long)(bytes ? column : from) * CHUNKS + chunk;
        const unsigned put = ring_at + (stage * STAGE + token * CHUNKS + (chunk ^ (token & 7))) * 16;
        OMLXD_COPY(put, K + place, bytes);
        OMLXD_COPY(put + TILE * CHUNKS * 16, V + place, bytes);
      }
    }
    asm volatile("cp.async.commit_group;");
  };
  #pragma unroll 1
  for (int s = 0; s < STAGES - 1; s++) fetch(warp + s * WARPS, s);

  if (LATE) omlxd_await(done, awaited);
  if (LATE && warp < H + 2) take(warp, row);
  if (warp < H + 2) prepare(warp);
  #pragma unroll 1
  for (int h = warp < H + 2 ? warp + WARPS : warp; h < vectors_here; h += WARPS) {
    const int before = end - 1 - kept - (h - H - 2) / 2;  // Of an earlier token: how much earlier.
    ready(h, h < H + 2 ? row : row - before);
    take(h, h < H + 2 ? row : row - before);
    prepare(h);
  }
  for (int i = H * D / 2 + threadIdx.x; i < 8 * D / 2; i += 32 * WARPS)
    reinterpret_cast<unsigned*>(queries)[i] = 0;
  __syncthreads();
  if (newest && block_y % PARTS == 0 && threadIdx.x < 2 * CHUNKS)
    (threadIdx.x < CHUNKS ? K : V)[(long)(end - 1) * CHUNKS + threadIdx.x % CHUNKS] =
        reinterpret_cast<const uint4*>(fresh)[threadIdx.x];

  unsigned query[D / 16][2];
  #pragma unroll
  for (int c = 0; c < D / 16; c++)
    #pragma unroll
    for (int i = 0; i < 2; i++)
      query[c][i] = *reinterpret_cast<const unsigned*>(queries + group * D + c * 16 + i * 8 + quad * 2);
  float best[2] = {-1e30f, -1e30f}, total[2] = {0.f, 0.f}, sum[D / 16][4];
  #pragma unroll
  for (int j = 0; j < D / 16; j++)
    #pragma unroll
    for (int e = 0; e < 4; e++) sum[j][e] = 0.f;
  const int low = lane & 7, second = (lane >> 3) & 1, third = lane >> 4;
  int stage = 0;
  #pragma unroll 1
  for (int tile = warp; tile < tiles; tile += WARPS) {
    fetch(tile + (STAGES - 1) * WARPS, stage ? stage - 1 : STAGES - 1);
    asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1));
    const int base = from + tile * TILE, first_fresh = max(kept - base, 0);
    __syncwarp();
    for (int i = lane; i < (min(to - base, TILE) - first_fresh) * 2 * CHUNKS; i += 32) {
      const int at = first_fresh + i / (2 * CHUNKS), x = i % (2 * CHUNKS), column = base + at;
      const int slot = column == end - 1 ? 0 : 1 + column - kept;
      ring[stage * STAGE + (x / CHUNKS) * TILE * CHUNKS + at * CHUNKS + (x % CHUNKS ^ (at & 7))] =
          reinterpret_cast<const uint4*>(fresh)[slot * 2 * CHUNKS + x];
    }
    __syncwarp();
    const unsigned stage_at = ring_at + stage * STAGE * 16;
    float score[4] = {0.f, 0.f, 0.f, 0.f}, odd[4] = {0.f, 0.f, 0.f, 0.f};  // Half as long a chain of sums.
    #pragma unroll
    for (int c = 0; c < D / 16; c++) {
      unsigned x[4];
      omlxd_matrices(x, stage_at + ((low + second * 8) * CHUNKS + ((2 * c + third) ^ low)) * 16);
      omlxd_mma<T>(c & 1 ? odd : score, x[0], x[1], x[2], x[3], query[c][0], query[c][1]);
    }
    #pragma unroll
    for (int e = 0; e < 4; e++) score[e] += odd[e];
    const int column = from + tile * TILE + group;
    float shrink[2];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      score[h] = column < to ? score[h] * factor : -INFINITY;
      score[2 + h] = column + 8 < to ? score[2 + h] * factor : -INFINITY;
      float now = fmaxf(score[h], score[2 + h]);
      #pragma unroll
      for (int o = 4; o < 32; o <<= 1) now = fmaxf(now, __shfl_xor_sync(~0u, now, o));
      now = fmaxf(now, best[h]);
      shrink[h] = omlxd_exp2(best[h] - now);
      best[h] = now;
      score[h] = omlxd_exp2(score[h] - now);
      score[2 + h] = omlxd_exp2(score[2 + h] - now);
      total[h] = total[h] * shrink[h] + (score[h] + score[2 + h]);
    }
    const unsigned early = omlxd_turned(omlxd_pair<T>(score[0], score[1]));
    const unsigned late = omlxd_turned(omlxd_pair<T>(score[2], score[3]));
    #pragma unroll
    for (int j = 0; j < D / 16; j++) {
      unsigned x[4];
      omlxd_turned_matrices(
          x, stage_at + (TILE * CHUNKS + (low + third * 8) * CHUNKS + ((2 * j + second) ^ low)) * 16);
      sum[j][0] *= shrink[0]; sum[j][1] *= shrink[1]; sum[j][2] *= shrink[0]; sum[j][3] *= shrink[1];
      omlxd_mma<T>(sum[j], x[0], x[1], x[2], x[3], early, late);
    }
    __syncwarp();
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  asm volatile("cp.async.wait_all;");
  __syncthreads();
  float* vectors = reinterpret_cast<float*>(rings);  // (warps, 8, D + 4)
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    #pragma unroll
    for (int o = 4; o < 32; o <<= 1) total[h] += __shfl_xor_sync(~0u, total[h], o);
    if (group == 0) { tops[warp * 8 + quad * 2 + h] = best[h]; masses[warp * 8 + quad * 2 + h] = total[h]; }
    #pragma unroll
    for (int j = 0; j < D / 16; j++)
      #pragma unroll
      for (int e = 0; e < 2; e++)
        vectors[(warp * 8 + quad * 2 + h) * (D + 4) + j * 16 + e * 8 + group] = sum[j][2 * e + h];
  }
  __syncthreads();
  const long query_head = (long)row * KV_HEADS * GROUP + block_y * H;
  const int before = segments ? counts[row] * parts : 0;
  for (int i = threadIdx.x; i < H * D; i += 32 * WARPS) {
    const int h = i / D, d = i % D;
    float top = -1e30f, mass = 0.f, x = 0.f;
    #pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w * 8 + h]);
    #pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float weight = omlxd_exp2(tops[w * 8 + h] - top);
      mass += weight * masses[w * 8 + h];
      x += weight * vectors[(w * 8 + h) * (D + 4) + d];
    }
    if (before + spans == 1) out[(query_head + h) * D + d] = omlxd_round<T>(x / mass);
    else {
      const long put = (query_head + h) * most + before + own_part;
      sums[put * D + d] = x;
      if (d == 0) { weights[put * 2] = top; weights[put * 2 + 1] = mass; }
    }
  }
  if (before + spans > 1)
    omlxd_put_together(H, query_head + threadIdx.x, before + spans, due, whose, counter, most, sums, weights,
                       out);
"""

ARGUMENTS = [
    *(f"const T* {name}" for name in ("q", "k", "v", "q_norm", "k_norm")),
    *("const float* turns", "const T* keys", "const T* values", "const unsigned long long* tails"),
    *(f"const int* {name}" for name in ("starts", "ends", "owners")),
    *("const unsigned long long* addresses", "const int* table", "const int* counts", "const int* counters"),
    *("T* out", "float* sums", "float* weights"),
    *(f"const int {name}" for name in ("capacity", "several", "rows")),
    *(f"const int {name}" for name in ("segments", "length", "across", "most")),
]
"""Of `omlxd_attend`, behind the block's place, the shared memory and whom it awaits."""

OWN = ("q_norm", "k_norm", "keys", "values", "tails", "addresses")
"""Arguments that are a layer's own; the other arrays that it is given are the same for all layers."""


def bits_of(x: float) -> str:
    """A name of the number, for that of a function."""
    return x.hex().replace(".", "").replace("-", "m").replace("+", "")


def device_source(heads: Heads, shape: Shape, *, late: bool) -> tuple[str, str]:
    """(what tells it from others, CUDA source) of `omlxd_attend`, without `HEADER`. `late`: other blocks of
    its launch compute the new tokens' queries, keys and values."""
    group, width = heads.heads // heads.kv_heads, heads.width
    numbers = {"D": width, "GROUP": group, "H": most_heads(group), "KV_HEADS": heads.kv_heads}
    numbers |= {"TURNED": heads.turned, "TRADITIONAL": int(heads.traditional), "NORM": int(heads.norm)}
    numbers |= {"WARPS": shape.warps, "STAGES": shape.stages, "LEAST": shape.least, "MOST": shape.most}
    numbers |= {"PARTS": group // numbers["H"], "MOST_NEW": MOST_NEW, "SPAN": shape.span}
    numbers |= {"MOST_TILES": shape.tiles, "LATE": int(late)}
    floats = [float(heads.scale), float(heads.eps)]  # MLX takes no float for an argument.
    name = "_".join([*map(str, numbers.values()), *map(bits_of, floats)])
    constants = ", ".join(f"{word} = {number}" for word, number in numbers.items())
    source = f"{COPIES}using T = {TYPES[heads.dtype]};\nconstexpr int {constants};\n"
    source += f"constexpr int RING = {ring_bytes(width, shape) // 16};\n"
    source += f"constexpr float scale = {floats[0]!r}f, eps = {floats[1]!r}f;\n"
    source += read_source(_TURN_QUERY) + _PARTS
    place = "const int block_x, const int block_y, uint4* rings, const int* done, const int awaited"
    arguments = ", ".join([place, *ARGUMENTS])
    return name, f"{source}__device__ __forceinline__ void omlxd_attend({arguments}) {{\n{_BODY}\n}}\n"


def ring_bytes(width: int, shape: Shape) -> int:
    """Of shared memory that hold KV on its way, and then the warps' sums."""
    return max(
        shape.warps * shape.stages * 2 * 16 * width * 2, shape.warps * 8 * shape.tiles * (width + 4) * 4
    )


def shared_bytes(width: int, shape: Shape) -> int:
    """Of a block: as `_BODY` divides them."""
    columns = 8 * shape.tiles
    vectors = 2 * width * (columns + 2 * MOST_NEW)
    return ring_bytes(width, shape) + vectors + 8 * shape.warps * columns + (8 + 4) * columns


def source_of(heads: Heads, shape: Shape) -> tuple[str, str]:
    """(function, CUDA source)."""
    name, source = device_source(heads, shape, late=False)
    function = f"omlxd_fused_attention_{TYPES[heads.dtype]}_{name}"
    given = ", ".join(argument.split()[-1] for argument in ARGUMENTS)
    bounds = f"__launch_bounds__({32 * shape.warps})"
    return function, (
        f'{HEADER}{source}extern "C" __global__ void {bounds} {function}({", ".join(ARGUMENTS)}) {{\n'
        f"  extern __shared__ uint4 rings[];\n"
        f"  omlxd_attend(blockIdx.x, blockIdx.y, rings, nullptr, 0, {given});\n}}\n"
    )


@cache
def compiled(heads: Heads, shape: Shape) -> tuple[str, bytes]:
    function, source = source_of(heads, shape)
    return function, kernel_store.machine_code(source)


def owners_of(counts: Sequence[int], size: int) -> mx.array:
    """(size,) in int32: of new tokens of rows, of which each has as many as `counts` says, one row's behind
    the other's, `MOST_NEW` times the row plus the token's place among its own; -1: nobody's."""
    owners = [row * MOST_NEW + token for row, count in enumerate(counts) for token in range(count)]
    return mx.array(owners + [-1] * (size - len(owners)), mx.int32)


class Launch(NamedTuple):
    """A launch of the kernel, or what a layer's launch ends with.

    norms    of queries and keys, or none
    inputs   of `ARGUMENTS`, those behind the norms
    outputs  shapes and types of what attention gives and of what it keeps meanwhile
    """

    heads: Heads
    shape: Shape
    norms: Sequence[mx.array]
    inputs: Sequence[mx.array]
    scalars: Sequence[int]
    blocks: tuple[int, int]
    outputs: Sequence[tuple[tuple[int, ...], Any]]

    @property
    def own(self) -> list[mx.array]:
        """Those of `OWN`."""
        return [*self.norms, *(array for name, array in self._named() if name in OWN)]

    @property
    def common(self) -> list[mx.array]:
        """`inputs` that are the same for all layers."""
        return [array for name, array in self._named() if name not in OWN]

    def _named(self) -> Iterable[tuple[str, mx.array]]:
        behind_norms = (argument.split()[-1] for argument in ARGUMENTS[5:])
        return zip(behind_norms, self.inputs, strict=False)

    def run(self, new: Sequence[mx.array]) -> mx.array:
        """(rows, heads * width). `new`: q (rows, heads * width), k and v (rows, KV heads * width) as the
        projections give them."""
        function, code = compiled(self.heads, self.shape)
        across, down = self.blocks
        threads = 32 * self.shape.warps
        return mx.fast.precompiled_cuda_kernel(
            name=function,
            compiled_source=code,
            inputs=[*new, *(self.norms or new[:2]), *self.inputs],
            scalars=list(self.scalars),
            grid=(threads * across, down, 1),
            threadgroup=(threads, 1, 1),
            shared_memory=shared_bytes(self.heads.width, self.shape),
            output_shapes=[shape for shape, _ in self.outputs],
            output_dtypes=[dtype for _, dtype in self.outputs],
            ensure_row_contiguous=True,
        )[0]


class FusedAttention:
    """The kernel for a model's heads. Raises what NVRTC, the driver and MLX raise.

    Microseconds a layer, 32 query heads on 8 of 128, one H100, 36 launches each behind the other, ten times
    over. Before, segments and the merge had launches of their own; a launch costs the host 20 to 50 of them
    there:

    | rows                               | one launch | three |
    |------------------------------------|------------|-------|
    | 1 x 16,000 in segments             | 64         | 89    |
    | 1 x 32,000                         | 92         | 98    |
    | 4 x 16,000 to 20,500               | 115        | 124   |
    | 4 that share 14,336 tokens         | 56         | 82    |
    | 16 that share them                 | 76         | 102   |
    | 8 x 32,000                         | 374        | 375   |

    Of several new tokens each has its blocks. A grid with `MOST_NEW` places for each row that is held, most
    of them empty, took longer; milliseconds of a pass so and now, 8B shape, another H100:

    | rows, tokens of a pass   | so   | now  |
    |--------------------------|------|------|
    | 1 x 16,000, 8            | 10.3 | 9.1  |
    | 4 x 16,000 to 20,500, 8  | 11.7 | 10.8 |
    | 4 x 16,000 to 20,500, 32 | 26.6 | 23.7 |
    | 16 x 500 to 1,055, 32    | 11.7 | 9.3  |
    """

    def __init__(self, heads: Heads, shape: Shape | None = None):
        self.heads, self._shape = heads, shape or shape_of(heads.width)
        self._counters: mx.array | None = None

    @property
    def narrow(self) -> Shape:
        """Of launches without segments, or of few queries."""
        return replace(self._shape, tiles=1)

    def launch(
        self,
        norms: tuple[mx.array, mx.array] | None,
        turns: mx.array,
        held: Held,
        starts: mx.array,
        ends: mx.array,
        owners: mx.array | None = None,
        shared: Shared | None = None,
    ) -> Launch:
        """Several new tokens of a row that is held are rows, one behind the other.

        norms  weights of the queries' and the keys' norm, (width,)
        turns  (rows, width) in float32: cosine and sine of each pair's turn, at its two dimensions
        held   (rows held, KV heads, capacity, width), in one piece, or arrays of each row, for up to
               `MOST_NEW` of the rows; column `ends[row] - 1` is written in place
        starts, ends  (rows,): columns of a row; each token of one ends a column behind the token before
        owners        (rows,): `owners_of` the rows; None: each is held by itself
        shared        what rows have in segments, of a multiple of 16 tokens, before `held`
        """
        heads, shape, width = self.heads, self._shape, self.heads.width
        group = heads.heads // heads.kv_heads
        rows = turns.shape[0]
        if isinstance(held, Tails):
            kv, capacity, longest = [held.table] * 3, 0, held.most
        else:
            kv, capacity = [*held, held[0]], held[0].shape[2]
            longest = capacity
        if shared is None or shared.widest * group <= 8:
            shape = self.narrow
        places = min(shape.most, -(-longest // shape.least)) * rows
        if self._counters is None:
            self._counters = mx.zeros((MOST_ROWS * heads.heads,), mx.int32)
            mx.eval(self._counters)
        segments, length, across, most = 0, 0, 0, shape.most
        its: tuple[mx.array, ...] = (ends, ends, ends)
        if shared is not None:
            segments, length = shared.table.shape[0], shared.tokens
            across = -(-shared.widest * group // (8 * shape.tiles))
            most += shared.most * -(-length // shape.span)
            its = shared.addresses, shared.table, shared.counts
        return Launch(
            heads=heads,
            shape=shape,
            norms=norms or (),
            inputs=[
                turns,
                *kv,
                starts,
                ends,
                ends if owners is None else owners,
                *its,
                self._counters,
            ],
            scalars=[capacity, int(owners is not None), rows, segments, length, across, most],
            blocks=(
                segments * -(-length // shape.span) * across + places,
                heads.heads // most_heads(group),
            ),
            outputs=[
                ((rows, heads.heads * width), heads.dtype),
                *(((rows, heads.heads, most, size), mx.float32) for size in (width, 2)),
            ],
        )

    def __call__(self, new: Sequence[mx.array], *given: Any) -> mx.array:
        """As `Launch.run`, of what `launch` takes."""
        return self.launch(*given).run(new)
