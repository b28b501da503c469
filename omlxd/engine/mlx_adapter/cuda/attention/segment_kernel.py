"""CUDA kernels of attention over segments: `omlxd_segments` reads one once for all rows that hold it,
`omlxd_segments_merge` puts its parts and those of each row's tail together by log-sum-exp.

A segment is cut into spans at fixed places. Queries of all rows that hold it are columns of products, each
added by itself and in one order, so that a row's bits do not depend on the rows beside it. The tail's parts
come from attention_kernel.py; segment_attention.py launches all of them. fused_attention.py's kernel reads
segments by `read_source`, too.
"""

from __future__ import annotations

from typing import Any

from ..compile.source import COPIES, HEADER, TYPES

SPAN = 512
"""Tokens of a segment that one block of threads reads. Others were not told apart: the host was slower."""

WARPS, STAGES = 4, 3
"""Of a block; two blocks share a multiprocessor. A warp has `STAGES` tiles of 16 tokens on their way."""

MERGE_WARPS = 8

_READ = """
template <int NT> __device__ inline void omlxd_segment(
    const T* q, const T* q_norm, const float* turns, unsigned long long k_at, unsigned long long v_at,
    long before, const int* holders, int columns, int first, int from, int to, float factor, int parts,
    int part, int most, int fresh, int kv_heads, int kv_head, uint4* rings, T* queries, float* tops,
    float* masses, float* sums, float* weights, const int* done, int awaited) {
  constexpr int CHUNKS = D / 8, TILE = 16, STAGE = 2 * TILE * CHUNKS, COLUMNS = 8 * NT;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quad = lane & 3;
  const int tiles = (to - from) / TILE;
  // Column c: the holder, the head of its group, the new token.
  auto place = [&](int c) {
    const int each = GROUP * fresh, row = holders[2 * ((first + c) / each)];
    const long head = ((long)row * kv_heads + kv_head) * GROUP + (first + c) % each / fresh;
    return head * fresh + (first + c) % fresh;
  };
  // `ready(c)` and `take(c)` ask for what `prepare(c)` puts into column c: before the KV, behind which it
  // would wait. LATE: other blocks of the launch make what `take` asks for; the KV is on its way meanwhile.
  QUERY
  ready(warp);
  if (!LATE) take(warp);
  const uint4* K = reinterpret_cast<const uint4*>(k_at) + before;
  const uint4* V = reinterpret_cast<const uint4*>(v_at) + before;
  uint4* ring = rings + warp * STAGES * STAGE;
  const unsigned ring_at = omlxd_shared(ring);
  auto fetch = [&](int tile, int stage) {
    if (tile < tiles) {
      #pragma unroll
      for (int i = 0; i < TILE * CHUNKS / 32; i++) {
        const int at = i * 32 + lane, token = at / CHUNKS, chunk = at % CHUNKS;
        const long place = (long)(from + tile * TILE + token) * CHUNKS + chunk;
        const unsigned put = ring_at + (stage * STAGE + token * CHUNKS + (chunk ^ (token & 7))) * 16;
        OMLXD_COPY(put, K + place, 16);
        OMLXD_COPY(put + TILE * CHUNKS * 16, V + place, 16);
      }
    }
    asm volatile("cp.async.commit_group;");
  };
  #pragma unroll 1
  for (int s = 0; s < STAGES - 1; s++) fetch(warp + s * WARPS, s);
  if (LATE) {
    omlxd_await(done, awaited);
    take(warp);
  }
  prepare(warp);
  #pragma unroll 1
  for (int c = warp + WARPS; c < COLUMNS; c += WARPS) {
    ready(c);
    take(c);
    prepare(c);
  }
  __syncthreads();
  unsigned query[NT][D / 16][2];
  #pragma unroll
  for (int t = 0; t < NT; t++)
    #pragma unroll
    for (int c = 0; c < D / 16; c++)
      #pragma unroll
      for (int i = 0; i < 2; i++)
        query[t][c][i] =
            *reinterpret_cast<const unsigned*>(queries + (t * 8 + group) * D + c * 16 + i * 8 + quad * 2);
  float best[NT][2], total[NT][2], sum[NT][D / 16][4];
  #pragma unroll
  for (int t = 0; t < NT; t++) {
    best[t][0] = best[t][1] = -1e30f;
    total[t][0] = total[t][1] = 0.f;
    #pragma unroll
    for (int j = 0; j < D / 16; j++)
      #pragma unroll
      for (int e = 0; e < 4; e++) sum[t][j][e] = 0.f;
  }
  const int low = lane & 7, second = (lane >> 3) & 1, third = lane >> 4;
  int stage = 0;
  #pragma unroll 1
  for (int tile = warp; tile < tiles; tile += WARPS) {
    fetch(tile + (STAGES - 1) * WARPS, stage ? stage - 1 : STAGES - 1);
    asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1));
    __syncwarp();
    const unsigned stage_at = ring_at + stage * STAGE * 16;
    float score[NT][4];
    #pragma unroll
    for (int t = 0; t < NT; t++)
      #pragma unroll
      for (int e = 0; e < 4; e++) score[t][e] = 0.f;
    #pragma unroll
    for (int c = 0; c < D / 16; c++) {
      unsigned x[4];
      omlxd_matrices(x, stage_at + ((low + second * 8) * CHUNKS + ((2 * c + third) ^ low)) * 16);
      #pragma unroll
      for (int t = 0; t < NT; t++)
        omlxd_mma<T>(score[t], x[0], x[1], x[2], x[3], query[t][c][0], query[t][c][1]);
    }
    unsigned early[NT], late[NT];
    #pragma unroll
    for (int t = 0; t < NT; t++) {
      float shrink[2];
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        score[t][h] = __fmul_rn(score[t][h], factor);
        score[t][2 + h] = __fmul_rn(score[t][2 + h], factor);
        float now = fmaxf(score[t][h], score[t][2 + h]);
        #pragma unroll
        for (int o = 4; o < 32; o <<= 1) now = fmaxf(now, __shfl_xor_sync(~0u, now, o));
        now = fmaxf(now, best[t][h]);
        shrink[h] = omlxd_exp2(__fsub_rn(best[t][h], now));
        best[t][h] = now;
        score[t][h] = omlxd_exp2(__fsub_rn(score[t][h], now));
        score[t][2 + h] = omlxd_exp2(__fsub_rn(score[t][2 + h], now));
        total[t][h] = __fmaf_rn(total[t][h], shrink[h], __fadd_rn(score[t][h], score[t][2 + h]));
      }
      early[t] = omlxd_turned(omlxd_pair<T>(score[t][0], score[t][1]));
      late[t] = omlxd_turned(omlxd_pair<T>(score[t][2], score[t][3]));
      #pragma unroll
      for (int j = 0; j < D / 16; j++)
        #pragma unroll
        for (int e = 0; e < 4; e++) sum[t][j][e] = __fmul_rn(sum[t][j][e], shrink[e & 1]);
    }
    #pragma unroll
    for (int j = 0; j < D / 16; j++) {
      unsigned x[4];
      omlxd_turned_matrices(
          x, stage_at + (TILE * CHUNKS + (low + third * 8) * CHUNKS + ((2 * j + second) ^ low)) * 16);
      #pragma unroll
      for (int t = 0; t < NT; t++) omlxd_mma<T>(sum[t][j], x[0], x[1], x[2], x[3], early[t], late[t]);
    }
    __syncwarp();
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  asm volatile("cp.async.wait_all;");
  __syncthreads();
  float* vectors = reinterpret_cast<float*>(rings);  // (warps, columns, D + 4)
  #pragma unroll
  for (int t = 0; t < NT; t++)
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      const int c = t * 8 + quad * 2 + h;
      #pragma unroll
      for (int o = 4; o < 32; o <<= 1)
        total[t][h] = __fadd_rn(total[t][h], __shfl_xor_sync(~0u, total[t][h], o));
      if (group == 0) { tops[warp * COLUMNS + c] = best[t][h]; masses[warp * COLUMNS + c] = total[t][h]; }
      #pragma unroll
      for (int j = 0; j < D / 16; j++)
        #pragma unroll
        for (int e = 0; e < 2; e++)
          vectors[(warp * COLUMNS + c) * (D + 4) + j * 16 + e * 8 + group] = sum[t][j][2 * e + h];
    }
  __syncthreads();
  for (int i = threadIdx.x; i < columns * D; i += 32 * WARPS) {
    const int c = i / D, d = i % D;
    float top = -1e30f, mass = 0.f, x = 0.f;
    #pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w * COLUMNS + c]);
    #pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float weight = omlxd_exp2(__fsub_rn(tops[w * COLUMNS + c], top));
      mass = __fmaf_rn(weight, masses[w * COLUMNS + c], mass);
      x = __fmaf_rn(weight, vectors[(w * COLUMNS + c) * (D + 4) + d], x);
    }
    const int index = holders[2 * ((first + c) / (GROUP * fresh)) + 1];
    const long put = place(c) * most + index * parts + part;
    sums[put * D + d] = x;
    if (d == 0) { weights[put * 2] = top; weights[put * 2 + 1] = mass; }
  }
}
"""

_COPY_QUERY = """
  uint4 some[(CHUNKS + 31) / 32];
  auto ready = [&](int c) {};
  auto take = [&](int c) {
    const uint4* source = reinterpret_cast<const uint4*>(q) + (c < columns ? place(c) : 0) * CHUNKS;
    const uint4 none = make_uint4(0, 0, 0, 0);
    for (int i = lane, j = 0; i < CHUNKS; i += 32, j++) some[j] = c < columns ? source[i] : none;
  };
  auto prepare = [&](int c) {
    for (int i = lane, j = 0; i < CHUNKS; i += 32, j++)
      reinterpret_cast<uint4*>(queries)[c * CHUNKS + i] = some[j];
  };
"""

_BODY = """
  // grid (tiles of columns, KV heads, segments x parts of one)
  extern __shared__ uint4 rings[];
  __shared__ __align__(16) T queries[8 * MOST_TILES * D];
  __shared__ float tops[WARPS * 8 * MOST_TILES], masses[WARPS * 8 * MOST_TILES];
  const int parts = (length + SPAN - 1) / SPAN, slot = blockIdx.z / parts, part = blockIdx.z % parts;
  const int* own = table + slot * (1 + 2 * rows);
  const int first = blockIdx.x * 8 * MOST_TILES;
  const int columns = min(own[0] * GROUP * fresh - first, 8 * MOST_TILES);
  if (columns <= 0) return;
  const unsigned long long* at = addresses + slot * 2;
  const int kv_head = blockIdx.y, from = part * SPAN, to = min(from + SPAN, length);
  const long before = (long)kv_head * length * (D / 8);
  const float factor = scale[0] * 1.44269504f;
  #define RUN(N) \\
    omlxd_segment<N>(q, nullptr, nullptr, at[0], at[1], before, own + 1, columns, first, from, to, factor, \\
                     parts, part, most, fresh, kv_heads, kv_head, rings, queries, tops, masses, sums, \\
                     weights, nullptr, 0)
  if (columns <= 8) RUN(1);
  else if (MOST_TILES == 2 || columns <= 16) RUN(2);
  else RUN(MOST_TILES);
"""

_MERGE = """
  // grid (queries of all rows); WARPS warps for parts of segments, then a thread a dimension for the tail
  constexpr int EACH = D / 32;
  __shared__ float vectors[WARPS][D], masses[WARPS], tops[WARPS], tail_best, tail_total;
  const long head = blockIdx.x;
  const int row = head / queries, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int before = counts[row] * parts;
  const float* pairs = weights + head * most * 2;
  float x = 0.f;
  if (warp < WARPS) {
    float best = -1e30f, total = 0.f, sum[EACH];
    #pragma unroll
    for (int e = 0; e < EACH; e++) sum[e] = 0.f;
    for (int s = lane; s < before; s += 32) best = fmaxf(best, pairs[s * 2]);
    #pragma unroll
    for (int o = 16; o; o >>= 1) best = fmaxf(best, __shfl_xor_sync(~0u, best, o));
    #pragma unroll 4
    for (int s = warp; s < before; s += WARPS) {
      const float weight = omlxd_exp2(pairs[s * 2] - best);
      total += weight * pairs[s * 2 + 1];
      const float2* from = reinterpret_cast<const float2*>(sums + (head * most + s) * D) + lane;
      #pragma unroll
      for (int e = 0; e < EACH / 2; e++) {
        const float2 two = from[e * 32];
        sum[2 * e] += weight * two.x;
        sum[2 * e + 1] += weight * two.y;
      }
    }
    #pragma unroll
    for (int e = 0; e < EACH / 2; e++) {
      vectors[warp][e * 64 + lane * 2] = sum[2 * e];
      vectors[warp][e * 64 + lane * 2 + 1] = sum[2 * e + 1];
    }
    if (lane == 0) { masses[warp] = total; tops[warp] = best; }
  } else {
    const int d = threadIdx.x - 32 * WARPS;
    // As attention_source.py merges them, to the bit: for rows that hold no segment.
    const int spans = (ends[row] - starts[row] + TAIL_SPAN - 1) / TAIL_SPAN;
    const float* own = tail_weights + head * tail_most * 2;
    float best = -1e30f, total = 0.f;
    for (int s = 0; s < spans; s++) best = fmaxf(best, own[s * 2]);
    SINK
    #pragma unroll 4
    for (int s = 0; s < spans; s++) {
      const float weight = omlxd_exp2(own[s * 2] - best);
      total += weight * own[s * 2 + 1];
      x += weight * tail_sums[(head * tail_most + s) * D + d];
    }
    if (SINKS) total = __fadd_rn(total, omlxd_exp2(sink - best));
    if (d == 0) { tail_best = best; tail_total = total; }
  }
  __syncthreads();
  if (warp < WARPS) return;
  const int d = threadIdx.x - 32 * WARPS;
  float mass = tail_total;
  if (before) {
    const float best = fmaxf(tops[0], tail_best);
    const float own = omlxd_exp2(tail_best - best), others = omlxd_exp2(tops[0] - best);
    float all = 0.f, sum = 0.f;
    #pragma unroll
    for (int w = 0; w < WARPS; w++) { all += masses[w]; sum += vectors[w][d]; }
    mass = others * all + own * mass;
    x = others * sum + own * x;
  }
  out[head * D + d] = omlxd_round<T>(x / mass);
"""


_SINK = """const float sink = omlxd_float<T>(sinks[head % queries / new_tokens]) * 1.44269504f;
    best = fmaxf(best, sink);"""


def _constants(**numbers: int) -> str:
    return f"constexpr int {', '.join(f'{name} = {number}' for name, number in numbers.items())};\n"


def most_tiles(width: int) -> int:
    """Eights of columns that a block's registers have room for."""
    return 2 if width > 128 else 4


def read_source(query: str = _COPY_QUERY) -> str:
    """`omlxd_segment`, for D, GROUP, SPAN, WARPS and STAGES. `query`: `ready`, `take` and `prepare`."""
    return _READ.replace("QUERY", query)


def segments_source(width: int, group: int, dtype: Any) -> tuple[str, str]:
    """(function, CUDA source)."""
    kind = TYPES[dtype]
    numbers = {"D": width, "GROUP": group, "SPAN": SPAN, "WARPS": WARPS, "STAGES": STAGES}
    numbers |= {"MOST_TILES": most_tiles(width), "LATE": 0}
    name = "_".join(["omlxd_segments", kind, *map(str, numbers.values())])
    arguments = (
        "const T* q, const unsigned long long* addresses, const int* table, const float* scale, "
        "float* sums, float* weights, const int segments, const int length, "
        "const int rows, const int fresh, const int most, const int kv_heads"
    )
    head = f"{HEADER}{COPIES}using T = {kind};\n{_constants(**numbers)}{read_source()}"
    bounds = f"__launch_bounds__({32 * WARPS}, {1 if width > 128 or WARPS > 4 else 2})"
    return name, f'{head}extern "C" __global__ void {bounds} {name}({arguments}) {{\n{_BODY}\n}}\n'


def merge_source(width: int, dtype: Any, span: int, sinks: bool = False) -> tuple[str, str]:
    """(function, CUDA source). `span`: tokens of a part of a tail. `sinks`: as attention_source.py's."""
    kind = TYPES[dtype]
    numbers = {"D": width, "WARPS": MERGE_WARPS, "TAIL_SPAN": span, "SINKS": int(sinks)}
    name = "_".join(["omlxd_segments_merge", kind, *map(str, numbers.values())])
    arguments = (
        "const float* sums, const float* weights, const int* counts, "
        f"const float* tail_sums, const float* tail_weights, const int* starts, const int* ends, "
        f"{'const T* sinks, ' * sinks}T* out, "
        "const int parts, const int most, const int tail_most, const int queries, const int new_tokens"
    )
    head = f"{HEADER}using T = {kind};\n{_constants(**numbers)}"
    body = _MERGE.replace("SINK\n", f"{_SINK if sinks else 'const float sink = 0.f;'}\n")
    return name, f'{head}extern "C" __global__ void {name}({arguments}) {{\n{body}\n}}\n'
