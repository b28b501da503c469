"""A CUDA kernel from a layer's q, k and v of new tokens to what attention gives for them.

`omlxd_fused_attention` normalises and rotates queries and keys where the model does, puts the new KV into
its place, reads each row's own KV alone, and its last block of a head puts the parts together: one launch
where MLX and attention_kernel.py take eight. A row is cut into parts by its own length alone, and each part's
sums have a fixed order, so that a row's bits do not depend on the rows beside it. Of several new tokens each
is a row of its own, which ends where the token does: their bits are those of as many launches of one. Rows
that are held may have unequal numbers of new tokens.

KV goes by asynchronous copies into rings of shared memory, one for each warp, and from there into tensor
cores: tokens are the long side of a tile, the query heads of a KV head the short one. fused_step.py calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from . import nvrtc
from .attention_source import HEADER, TYPES, most_heads

WIDTHS, MOST_GROUP = (64, 128, 256), 16

MOST_NEW = 16
"""Tokens of each row that are held in a launch."""

ARCHITECTURES = (90, 100, 103)
"""With 227 KB of shared memory. It has run on the first alone."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a kernel is cut. `least`, `most`: tokens of a part at least, parts of a row at most (32).

    A part has a multiple of 16 * `warps` tokens. `stages` of 16 tokens are on their way for each warp.

    Microseconds a layer, 32 query heads on 8 of 128 in bfloat16, one H100, 36 launches in one graph:

    | warps, stages, least, most | 1 x 500 | 1 x 4,000 | 1 x 16,000 | 4 x 16,000 up | 8 x 32,000 | 32 short |
    |----------------------------|---------|-----------|------------|---------------|------------|----------|
    | 8, 3, 512, 16              | 7.8     | 12.3      | 29.8       | 115           | 374        | 67       |
    | 8, 3, 256, 16              | 8.0     | 12.1      | 29.8       | 115           | 374        | 68       |
    | 8, 3, 1024, 16             | 7.8     | 15.3      | 29.8       | 115           | 372        | 59       |
    | 4, 3, 512, 16              | 9.8     | 14.6      | 33.0       | 118           | 382        | 64       |
    | bytes at 3.35 TB/s         | 0.6     | 4.9       | 19.6       | 89            | 313        | 42       |
    """

    warps: int = 8
    stages: int = 3
    least: int = 512
    most: int = 16


def shape_of(width: int) -> Shape:
    """The shape whose rings fit into an H100's shared memory, 227 KB of a multiprocessor."""
    return Shape(warps=4 if width > 128 else 8)


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


COPIES = """
#define OMLXD_COPY(to, from, bytes) \\
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(bytes))
__device__ inline void omlxd_matrices(unsigned* x, unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from));
}
__device__ inline void omlxd_turned_matrices(unsigned* x, unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from));
}
__device__ inline unsigned omlxd_turned(unsigned x) {
  unsigned y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
__device__ inline unsigned omlxd_shared(const void* x) {
  unsigned y;
  asm("{.reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a;}" : "=r"(y) : "l"(x));
  return y;
}
__device__ inline float omlxd_fresh(const float* from) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from));
  return x;
}
template <typename T> __device__ inline float omlxd_float(T x) { return omlxd_floats<T>(x.bits).x; }
"""

_BODY = """
  // grid (parts of a row x new tokens, KV heads x PARTS, rows that are held). Row `row` is token `token` of
  // row `blockIdx.z`, whose tokens follow each other: blocks that read the same KV run at the same time.
  constexpr int CHUNKS = D / 8, TILE = 16, STAGE = 2 * TILE * CHUNKS, EACH = D / 64;
  extern __shared__ uint4 rings[];
  __shared__ T queries[8 * D];
  __shared__ T fresh[2 * D * MOST_NEW];  // Key and value: the own ones, then those of earlier new tokens.
  __shared__ float tops[WARPS][8], masses[WARPS][8];
  __shared__ int is_last;
  const int token = blockIdx.x % tokens, own_part = blockIdx.x / tokens;
  const int first = tokens > 1 ? firsts[blockIdx.z] : blockIdx.z;
  if (tokens > 1 && token >= firsts[blockIdx.z + 1] - first) return;
  const int row = first + token, kv_head = blockIdx.y / PARTS;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quad = lane & 3;
  const int begin = starts[row], end = ends[row];
  // A warp prepares a vector: one of H queries, the new key, the new value, those of earlier new tokens. All
  // that it reads is asked for at once: weights of other layers have driven it out of the second cache.
  int a[EACH], b[EACH];
  T x[EACH], y[EACH], x_weight[EACH], y_weight[EACH];
  float cosine[EACH], sine[EACH];
  auto is_value = [&](int h) { return h > H && (h - H) % 2; };
  auto read = [&](int h, int row) {
    const T* source = h < H ? q + ((long)row * KV_HEADS * GROUP + blockIdx.y * H + h) * D
                            : (is_value(h) ? v : k) + ((long)row * KV_HEADS + kv_head) * D;
    const T* weight = h < H ? q_norm : k_norm;
    #pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int pair = lane * EACH + j;
      const bool near = TRADITIONAL || 2 * pair >= TURNED;
      a[j] = near ? 2 * pair : pair;
      b[j] = near ? a[j] + 1 : pair + TURNED / 2;
      x[j] = source[a[j]];
      y[j] = source[b[j]];
      if (NORM) { x_weight[j] = weight[a[j]]; y_weight[j] = weight[b[j]]; }
      cosine[j] = turns[row * D + a[j]];
      sine[j] = turns[row * D + b[j]];
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
  if (warp < H + 2) read(warp, row);

  const int length = end - begin, most = (length + MOST - 1) / MOST;
  const int span = max(LEAST, (most + 16 * WARPS - 1) / (16 * WARPS) * 16 * WARPS);
  const int spans = (length + span - 1) / span;
  if (own_part >= spans) return;
  const int from = begin + own_part * span, to = min(from + span, end);
  const bool newest = to == end;
  const int kept = min(to, max(from, end - 1 - token)), tiles = (to - from + TILE - 1) / TILE;
  const int vectors_here = H + 2 + 2 * (min(to, end - 1) - kept);
  const long head = ((long)blockIdx.z * KV_HEADS + kv_head) * capacity;
  uint4* K = const_cast<uint4*>(reinterpret_cast<const uint4*>(keys)) + head * CHUNKS;
  uint4* V = const_cast<uint4*>(reinterpret_cast<const uint4*>(values)) + head * CHUNKS;
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

  if (warp < H + 2) prepare(warp);
  #pragma unroll 1
  for (int h = warp < H + 2 ? warp + WARPS : warp; h < vectors_here; h += WARPS) {
    const int before = end - 1 - kept - (h - H - 2) / 2;  // Of an earlier token: how much earlier.
    read(h, h < H + 2 ? row : row - before);
    prepare(h);
  }
  for (int i = H * D / 2 + threadIdx.x; i < 8 * D / 2; i += 32 * WARPS)
    reinterpret_cast<unsigned*>(queries)[i] = 0;
  __syncthreads();
  if (newest && blockIdx.y % PARTS == 0 && threadIdx.x < 2 * CHUNKS)
    (threadIdx.x < CHUNKS ? K : V)[(long)(end - 1) * CHUNKS + threadIdx.x % CHUNKS] =
        reinterpret_cast<const uint4*>(fresh)[threadIdx.x];

  unsigned query[D / 16][2];
  #pragma unroll
  for (int c = 0; c < D / 16; c++)
    #pragma unroll
    for (int i = 0; i < 2; i++)
      query[c][i] = *reinterpret_cast<const unsigned*>(queries + group * D + c * 16 + i * 8 + quad * 2);
  const float factor = scale * 1.44269504f;
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
    if (group == 0) { tops[warp][quad * 2 + h] = best[h]; masses[warp][quad * 2 + h] = total[h]; }
    #pragma unroll
    for (int j = 0; j < D / 16; j++)
      #pragma unroll
      for (int e = 0; e < 2; e++)
        vectors[(warp * 8 + quad * 2 + h) * (D + 4) + j * 16 + e * 8 + group] = sum[j][2 * e + h];
  }
  __syncthreads();
  const long query_head = (long)row * KV_HEADS * GROUP + blockIdx.y * H;
  for (int i = threadIdx.x; i < H * D; i += 32 * WARPS) {
    const int h = i / D, d = i % D;
    float top = -1e30f, mass = 0.f, x = 0.f;
    #pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w][h]);
    #pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float weight = omlxd_exp2(tops[w][h] - top);
      mass += weight * masses[w][h];
      x += weight * vectors[(w * 8 + h) * (D + 4) + d];
    }
    if (spans == 1 && !PARTS_ALONE) out[(query_head + h) * D + d] = omlxd_round<T>(x / mass);
    else {
      const long place = (query_head + h) * MOST + own_part;
      sums[place * D + d] = x;
      if (d == 0) { weights[place * 2] = top; weights[place * 2 + 1] = mass; }
    }
  }
  if (spans == 1 || PARTS_ALONE) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    int* counter = const_cast<int*>(counters) + row * gridDim.y + blockIdx.y;
    is_last = atomicAdd(counter, 1) == spans - 1;
    if (is_last) *counter = 0;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  for (int i = threadIdx.x; i < H * D; i += 32 * WARPS) {  // A warp is within one head.
    const long place = (query_head + i / D) * MOST;
    const bool has = lane < spans;
    const float own_top = has ? omlxd_fresh(weights + (place + lane) * 2) : -1e30f;
    const float own_mass = has ? omlxd_fresh(weights + (place + lane) * 2 + 1) : 0.f;
    float top = own_top, mass, x = 0.f;
    #pragma unroll
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    const float own = omlxd_exp2(own_top - top);
    mass = own * own_mass;
    #pragma unroll
    for (int o = 16; o; o >>= 1) mass += __shfl_xor_sync(~0u, mass, o);
    #pragma unroll
    for (int first = 0; first < MOST; first += 8) {
      if (first >= spans) break;
      float part[8];
      #pragma unroll
      for (int s = 0; s < 8; s++)
        part[s] = first + s < spans ? omlxd_fresh(sums + (place + first + s) * D + i % D) : 0.f;
      #pragma unroll
      for (int s = 0; s < 8; s++) x += __shfl_sync(~0u, own, first + s) * part[s];
    }
    out[query_head * D + i] = omlxd_round<T>(x / mass);
  }
"""

_ARGUMENTS = (
    "const T* q, const T* k, const T* v, const T* q_norm, const T* k_norm, const float* turns, "
    "const T* keys, const T* values, const int* starts, const int* ends, const int* firsts, "
    "const int* counters, T* out, float* sums, float* weights, const int capacity, const int tokens"
)


def bits_of(x: float) -> str:
    """A name of the number, for that of a function."""
    return x.hex().replace(".", "").replace("-", "m").replace("+", "")


def source_of(heads: Heads, shape: Shape, *, parts_alone: bool = False) -> tuple[str, str]:
    """(function, CUDA source). `parts_alone`: nothing puts them together."""
    group = heads.heads // heads.kv_heads
    numbers = {"D": heads.width, "GROUP": group, "H": most_heads(group), "KV_HEADS": heads.kv_heads}
    numbers |= {"TURNED": heads.turned, "TRADITIONAL": int(heads.traditional), "NORM": int(heads.norm)}
    numbers |= {"WARPS": shape.warps, "STAGES": shape.stages, "LEAST": shape.least, "MOST": shape.most}
    numbers |= {"PARTS": group // numbers["H"], "PARTS_ALONE": int(parts_alone), "MOST_NEW": MOST_NEW}
    kind = TYPES[heads.dtype]
    floats = [float(heads.scale), float(heads.eps)]  # MLX takes no float for an argument.
    function = "_".join(["omlxd_fused_attention", kind, *map(str, numbers.values()), *map(bits_of, floats)])
    constants = ", ".join(f"{word} = {number}" for word, number in numbers.items())
    head = f"{HEADER}{COPIES}using T = {kind};\nconstexpr int {constants};\n"
    head += f"constexpr float scale = {floats[0]!r}f, eps = {floats[1]!r}f;\n"
    bounds = f"__launch_bounds__({32 * shape.warps})"
    return function, f'{head}extern "C" __global__ void {bounds} {function}({_ARGUMENTS}) {{\n{_BODY}\n}}\n'


@cache
def _compiled(heads: Heads, shape: Shape, parts_alone: bool) -> tuple[str, bytes]:
    function, source = source_of(heads, shape, parts_alone=parts_alone)
    return function, nvrtc.machine_code(source)


class FusedAttention:
    """The kernel for a model's heads. Raises what NVRTC, the driver and MLX raise."""

    def __init__(self, heads: Heads, shape: Shape | None = None):
        self.heads, self._shape = heads, shape or shape_of(heads.width)
        self._counters: dict[int, mx.array] = {}

    def __call__(
        self,
        new: tuple[mx.array, mx.array, mx.array],
        norms: tuple[mx.array, mx.array] | None,
        turns: mx.array,
        held: tuple[mx.array, mx.array],
        starts: mx.array,
        ends: mx.array,
        firsts: mx.array | None = None,
    ) -> mx.array:
        """(rows, heads * width). Several new tokens of a row that is held are rows, one behind the other.

        new    q (rows, heads * width), k and v (rows, KV heads * width) as the projections give them
        norms  weights of the queries' and the keys' norm, (width,)
        turns  (rows, width) in float32: cosine and sine of each pair's turn, at its two dimensions
        held   (rows held, KV heads, capacity, width), in one piece, each for up to `MOST_NEW` of the rows;
               column `ends[row] - 1` is written in place
        starts, ends  (rows,): columns of a row; each token of one ends a column behind the token before
        firsts        (rows held + 1,): the first row of each that is held, and what follows the last, behind
                      which rows are nobody's; None: each has one
        """
        return self._run(new, norms, turns, held, starts, ends, firsts, parts_alone=False)[0]

    def parts(self, *given: Any) -> tuple[mx.array, mx.array]:
        """(vectors (rows, heads, parts, width), their logarithms' largest and masses (…, 2)) in float32, of
        what `__call__` takes."""
        _, sums, weights = self._run(*given, parts_alone=True)
        return sums, weights

    @property
    def cut(self) -> tuple[int, int, int]:
        """Tokens of a part at least, parts of a row at most, and what tokens of a part are a multiple of."""
        return self._shape.least, self._shape.most, 16 * self._shape.warps

    def _run(
        self,
        new: Any,
        norms: Any,
        turns: Any,
        held: Any,
        starts: Any,
        ends: Any,
        firsts: Any = None,
        *,
        parts_alone: bool,
    ) -> list[mx.array]:
        heads, shape = self.heads, self._shape
        rows, (rows_held, _, capacity, width) = new[0].shape[0], held[0].shape
        parts = heads.heads // most_heads(heads.heads // heads.kv_heads)
        most = 1 if firsts is None else min(MOST_NEW, rows - rows_held + 1)
        if rows not in self._counters:
            self._counters[rows] = mx.zeros((rows * parts,), mx.int32)
            mx.eval(self._counters[rows])
        function, code = _compiled(heads, shape, parts_alone)
        parts_of = rows, heads.heads, shape.most
        ring = shape.warps * shape.stages * 2 * 16 * width * 2
        return mx.fast.precompiled_cuda_kernel(
            name=function,
            compiled_source=code,
            inputs=[
                *new,
                *(norms or new[:2]),
                turns,
                *held,
                starts,
                ends,
                ends if firsts is None else firsts,
                self._counters[rows],
            ],
            scalars=[capacity, most],
            grid=(
                32 * shape.warps * min(shape.most, -(-capacity // shape.least)) * most,
                parts,
                rows_held,
            ),
            threadgroup=(32 * shape.warps, 1, 1),
            shared_memory=max(ring, shape.warps * 8 * (width + 4) * 4),
            output_shapes=[(rows, heads.heads * width), *((*parts_of, size) for size in (width, 2))],
            output_dtypes=[heads.dtype, mx.float32, mx.float32],
            ensure_row_contiguous=True,
        )
