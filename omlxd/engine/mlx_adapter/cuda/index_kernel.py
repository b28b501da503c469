"""CUDA kernels of DeepSeek V3.2's index, for one token a row: `omlxd_index`, its scores for all tokens of the
row, and `omlxd_index_best`, the places of the largest.

A score is the sum over heads of the head's weight times its product with a token's key, if that is over 0.
Blocks of threads read a row's own keys by address, once for all heads, and multiply them on the tensor cores;
sums are in float32 and in a fixed order. One block looks for the largest of a token's scores, eight bits of
the least of them at a time. Several tokens of a row are as many rows (cache/dsa_rows.py).

Microseconds a layer in bfloat16, 64 heads of 128, 2,048 tokens chosen, one H100 on a slow host, medians of 20
calls, each with some 40 for its launch (a script that is not kept): scores, the largest of them, what attends
to these (16 heads, latents of 512), and all of it by MLX's own over one array with a mask; for comparison,
the largest ones by its `argpartition` and `sort`.

| rows                | scores | largest | attention | MLX's own | its largest |
|---------------------|--------|---------|-----------|-----------|-------------|
| 1: 16,000           | 116    | 136     | 183       | 734       | 210         |
| 4: 16,000 to 20,500 | 98     | 166     | 209       | 2,442     | 297         |
| 8: 32,000           | 184    | 173     | 246       | 5,252     | 312         |
| 1: 128,000          | 131    | 278     | 184       | 851       | 337         |
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import mlx.core as mx
import numpy as np

from . import segment_attention
from .attention_kernel import Tails, constant, put
from .attention_source import COPIES, HEADER, TYPES
from .latent_kernel import tails_behind

log = logging.getLogger(__name__)

TILE = 128
"""Tokens of a row that one block of threads reads."""

WARPS = 8
"""Of a block. Each makes the scores of `TILE` / 8 tokens."""

CLOSE = 0.001
"""Largest difference from MLX's own in float32, as a share of the largest score. Both get the same numbers,
and products of 16 bits are exact in float32: sums are rounded, 1e-5."""

_BODY = """
  // grid (tiles of TILE tokens, tokens of all rows)
  constexpr int CHUNKS = D / 8, STRIDE = CHUNKS + 1, STEPS = D / 16;
  extern __shared__ uint4 keys[];
  uint4* queries = keys + TILE * STRIDE;
  const int from = blockIdx.x * TILE, row = blockIdx.y, end = ends[row];
  float* out = scores + (long)row * gridDim.x * TILE + from;
  if (from >= end) {
    for (int i = threadIdx.x; i < TILE; i += 32 * WARPS) out[i] = -INFINITY;
    return;
  }
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, line = lane >> 2, quad = lane & 3;
  const int low = lane & 7, second = lane >> 3 & 1, third = lane >> 4;
  const unsigned long long* own = tails + (long)(row / new_tokens) * columns;
  const int before = own[3];  // Tokens in segments.
  const uint4* asked = reinterpret_cast<const uint4*>(q) + (long)row * HEADS * CHUNKS;
  for (int i = threadIdx.x; i < HEADS * CHUNKS; i += 32 * WARPS)
    OMLXD_COPY(omlxd_shared(queries + i / CHUNKS * STRIDE + i % CHUNKS), asked + i, 16);
  for (int i = threadIdx.x; i < TILE * CHUNKS; i += 32 * WARPS) {
    const int token = i / CHUNKS, chunk = i % CHUNKS, place = from + token;
    const int segment = place < before ? place / each : -1;
    const unsigned long long* at = segment < 0 ? own : own + 4 + segment * 2;
    const int first = segment < 0 ? place - before : place - segment * each;
    const bool has = place < end;
    const uint4* x = reinterpret_cast<const uint4*>(at[0]) + (long)first * CHUNKS + chunk;
    OMLXD_COPY(omlxd_shared(keys + token * STRIDE + chunk), has ? x : asked, has ? 16 : 0);
  }
  asm volatile("cp.async.commit_group;");
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  unsigned held[2][STEPS][2];
  #pragma unroll
  for (int n = 0; n < 2; n++) {
    const unsigned at = omlxd_shared(keys + (warp * 16 + n * 8 + low) * STRIDE + (lane >> 3));
    #pragma unroll
    for (int s = 0; s < STEPS; s += 2) omlxd_matrices(held[n][s], at + s * 32);  // Of two steps.
  }
  float total[2][2] = {{0.f, 0.f}, {0.f, 0.f}};
  for (int tile = 0; tile < HEADS; tile += 16) {
    float dot[2][4];
    #pragma unroll
    for (int e = 0; e < 4; e++) dot[0][e] = dot[1][e] = 0.f;
    const unsigned at = omlxd_shared(queries + (tile + low + second * 8) * STRIDE + third);
    #pragma unroll
    for (int s = 0; s < STEPS; s++) {
      unsigned a[4];
      omlxd_matrices(a, at + s * 32);
      #pragma unroll
      for (int n = 0; n < 2; n++)
        omlxd_mma<T>(dot[n], a[0], a[1], a[2], a[3], held[n][s][0], held[n][s][1]);
    }
    const T* w = weights + (long)row * HEADS + tile + line;
    const float one = omlxd_float<T>(w[0]), two = omlxd_float<T>(w[8]);
    #pragma unroll
    for (int n = 0; n < 2; n++)
      #pragma unroll
      for (int e = 0; e < 2; e++)
        total[n][e] += fmaxf(dot[n][e], 0.f) * one + fmaxf(dot[n][2 + e], 0.f) * two;
  }
  #pragma unroll
  for (int n = 0; n < 2; n++)
    #pragma unroll
    for (int e = 0; e < 2; e++) {
      float x = total[n][e];
      x += __shfl_xor_sync(~0u, x, 4);
      x += __shfl_xor_sync(~0u, x, 8);
      x += __shfl_xor_sync(~0u, x, 16);
      const int token = warp * 16 + n * 8 + quad * 2 + e;
      if (line == 0) out[token] = from + token < end ? x : -INFINITY;
    }
"""

THREADS = 1024
"""Of a block that looks for the largest scores."""

_BEST = """
  // grid (1, tokens of all rows). In order of place; of equal scores the first ones. A thread looks at four
  // scores at once; there are as many behind the last one that counts.
  __shared__ int counts[256], ahead[THREADS / 32][2], wanted;
  __shared__ unsigned known;
  const int row = blockIdx.y, end = ends[row], lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const float4* own = reinterpret_cast<const float4*>(scores + (long)row * columns);
  int* out = chosen + (long)row * most;
  if (end <= most) {
    for (int i = threadIdx.x; i < most; i += THREADS) out[i] = i;
    return;
  }
  struct Keys { unsigned x[4]; };
  auto keys = [&](int first) {  // As integers that are larger where scores are; 0 for those behind the end.
    const float4 four = first < end ? own[first / 4] : make_float4(0.f, 0.f, 0.f, 0.f);
    const float each[4] = {four.x, four.y, four.z, four.w};
    Keys k;
    #pragma unroll
    for (int e = 0; e < 4; e++) {
      const unsigned bits = __float_as_uint(each[e]);
      k.x[e] = first + e >= end ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
    }
    return k;
  };
  if (threadIdx.x == 0) { known = 0; wanted = most; }
  unsigned mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    if (threadIdx.x < 256) counts[threadIdx.x] = 0;
    __syncthreads();
    const unsigned so_far = known;
    for (int base = 0; base < end; base += 4 * THREADS) {
      const int first = base + 4 * threadIdx.x;
      const Keys k = keys(first);
      #pragma unroll
      for (int e = 0; e < 4; e++) {
        const bool has = first + e < end && (k.x[e] & mask) == so_far;
        const unsigned those = __ballot_sync(~0u, has), part = k.x[e] >> shift & 255;
        if (has) {
          const unsigned same = __match_any_sync(those, part);
          if (lane == __ffs(same) - 1) atomicAdd(&counts[part], __popc(same));
        }
      }
    }
    __syncthreads();
    if (warp == 0) {  // Lane 0 has the eight largest parts.
      int sum = 0;
      for (int i = 0; i < 8; i++) sum += counts[255 - 8 * lane - i];
      int upto = sum;
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, upto, step);
        if (lane >= step) upto += other;
      }
      const int left = wanted;
      int before = upto - sum;
      __syncwarp();
      if (before < left && left <= upto)
        for (int i = 0; i < 8; i++) {
          const int part = 255 - 8 * lane - i;
          if (before < left && left <= before + counts[part]) {
            known = so_far | (unsigned)part << shift;
            wanted = left - before;
          }
          before += counts[part];
        }
    }
    mask |= 255u << shift;
    __syncthreads();
  }
  const unsigned least = known, lower = (1u << lane) - 1;
  const int equals = wanted, share = (end + 4 * THREADS - 1) / (4 * THREADS) * 128;  // Tokens of a warp.
  const int from = warp * share, to = min(from + share, end);
  int larger = 0, level = 0;
  for (int base = from; base < to; base += 128) {
    const Keys k = keys(base + 4 * lane);
    #pragma unroll
    for (int e = 0; e < 4; e++) {
      larger += __popc(__ballot_sync(~0u, k.x[e] > least));
      level += __popc(__ballot_sync(~0u, k.x[e] == least));
    }
  }
  if (lane == 0) { ahead[warp][0] = larger; ahead[warp][1] = level; }
  __syncthreads();
  larger = level = 0;
  for (int w = 0; w < warp; w++) { larger += ahead[w][0]; level += ahead[w][1]; }
  for (int base = from; base < to; base += 128) {
    const int first = base + 4 * lane;
    const Keys k = keys(first);
    int over = larger, same = level;  // Before this thread's.
    #pragma unroll
    for (int e = 0; e < 4; e++) {
      const unsigned overs = __ballot_sync(~0u, k.x[e] > least), levels = __ballot_sync(~0u, k.x[e] == least);
      over += __popc(overs & lower);
      same += __popc(levels & lower);
      larger += __popc(overs);
      level += __popc(levels);
    }
    #pragma unroll
    for (int e = 0; e < 4; e++) {
      if (k.x[e] > least || (k.x[e] == least && same < equals)) out[over + min(same, equals)] = first + e;
      over += k.x[e] > least;
      same += k.x[e] == least;
    }
  }
"""


def fits(heads: int, width: int, dtype: Any) -> bool:
    """Whether there is a kernel for so many heads, so wide."""
    return dtype in TYPES and heads % 16 == 0 and 0 < heads <= 64 and width % 32 == 0 and 0 < width <= 128


def source_of(heads: int, width: int, dtype: Any) -> tuple[str, str]:
    """(function, CUDA source)."""
    kind = TYPES[dtype]
    function = f"omlxd_index_{kind}_{heads}_{width}"
    numbers = {"HEADS": heads, "D": width, "TILE": TILE, "WARPS": WARPS}
    constants = ", ".join(f"{word} = {number}" for word, number in numbers.items())
    arguments = (
        "const T* q, const T* weights, const unsigned long long* tails, const int* ends, "
        "const int* behind, float* scores, const int new_tokens, const int columns, const int each"
    )
    head = f"{HEADER}{COPIES}using T = {kind};\nconstexpr int {constants};\n"
    bounds = f"__launch_bounds__({32 * WARPS})"
    return function, f'{head}extern "C" __global__ void {bounds} {function}({arguments}) {{\n{_BODY}\n}}\n'


def best_source() -> tuple[str, str]:
    """As `source_of`, of what looks for the largest scores."""
    arguments = "const float* scores, const int* ends, int* chosen, const int columns, const int most"
    head = f"{HEADER}constexpr int THREADS = {THREADS};\n"
    function = "omlxd_index_best"
    bounds = f"__launch_bounds__({THREADS})"
    return function, f'{head}extern "C" __global__ void {bounds} {function}({arguments}) {{\n{_BEST}\n}}\n'


class IndexKernel:
    """The kernels for so many heads of one width, and a type. Compiles them now. Raises what NVRTC, the
    driver and MLX raise."""

    def __init__(self, heads: int, width: int, dtype: Any):
        self._heads, self._width = heads, width
        self._code = segment_attention.Code({"scores": source_of(heads, width, dtype), "best": best_source()})

    def over_tails(
        self,
        queries: mx.array,
        weights: mx.array,
        tails: Tails,
        ends: Sequence[int],
        behind: mx.array,
        most: int,
    ) -> mx.array:
        """(tokens of all rows, most): the places of the tokens with the largest scores, in order; of a token
        that sees no more than `most`, all of these first.

        queries  (tokens of all rows, heads, 1, width): as many tokens of one row as of another, a row's one
                 behind the other
        weights  (tokens of all rows, heads)
        tails    of each row: keys, and what is not read
        ends     of each token of these: how many it sees of its row's, itself included
        behind   what `put` gave
        """
        places = constant(f"index{len(queries) // len(tails.table)}", tuple(ends), mx.int32)
        return self.step(queries, weights, tails, places, behind, most)

    def step(
        self,
        queries: mx.array,
        weights: mx.array,
        tails: Tails,
        ends: mx.array,
        behind: mx.array,
        most: int,
    ) -> mx.array:
        """As `over_tails`; `ends`: (tokens of all rows,)."""
        return self.best(self.scores(queries, weights, tails, ends, behind), ends, most)

    def scores(
        self, queries: mx.array, weights: mx.array, tails: Tails, ends: mx.array, behind: mx.array
    ) -> mx.array:
        """(tokens of all rows, columns) in float32, -inf where a token sees none; `columns`: at least
        `tails.most`."""
        tokens, tiles = len(queries), -(-tails.most // TILE)
        return self._code.run(
            "scores",
            [queries, weights, tails.table, ends, behind],
            [tokens // len(tails.table), tails.table.shape[1], tails.each],
            grid=(tiles * 32 * WARPS, tokens, 1),
            threadgroup=(32 * WARPS, 1, 1),
            shared_memory=(TILE + self._heads) * (self._width + 8) * 2,
            output_shapes=[(tokens, tiles * TILE)],
            output_dtypes=[mx.float32],
        )[0]

    def best(self, scores: mx.array, ends: mx.array, most: int) -> mx.array:
        """As `over_tails`, of `scores` (tokens, columns), the first `ends[token]` of each."""
        tokens, columns = scores.shape
        return self._code.run(
            "best",
            [scores, ends],
            [columns, most],
            grid=(THREADS, tokens, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(tokens, most)],
            output_dtypes=[mx.int32],
        )[0]


# --------------------------------------------------------------------------- the check


def kernel_for(queries: mx.array) -> IndexKernel | None:
    """For such queries, once a check passed."""
    return checked(queries.shape[1], queries.shape[3], queries.dtype)


@cache
def checked(heads: int, width: int, dtype: Any) -> IndexKernel | None:
    """A kernel that computes what MLX does, on rows of unequal length; None, and a line in the log."""
    if not fits(heads, width, dtype):
        log.info("no kernel for an index of %d heads, %d wide in %s", heads, width, dtype)
        return None
    began = time.perf_counter()
    try:
        kernel = IndexKernel(heads, width, dtype)
        far = difference(kernel, heads, width, dtype)
    except Exception as error:
        log.warning("the index of latents is MLX's own: omlxd's kernel does not run here (%s)", error)
        return None
    if not far < CLOSE:  # NaN too
        log.warning("the index of latents is MLX's own: omlxd's kernel differs by %.3g", far)
        return None
    log.info(
        "latents are chosen by omlxd's kernel (%s, %d heads, %d wide): within %.4f of MLX's own, checked in "
        "%.1f s",
        *(dtype, heads, width, far, time.perf_counter() - began),
    )
    return kernel


def difference(kernel: Any, heads: int, width: int, dtype: Any) -> float:
    """The largest from MLX's own in float32, as a share of the largest score, for rows of unequal length; NaN
    is infinite. So are other bits of a row alone, and of one whose first tokens are in a segment, and other
    places than those of the largest."""
    ends, capacity = (TILE - 30, 2 * TILE + 17), 3 * TILE

    def some(seed: int, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)

    held = [[some(row, 1, 1, capacity, width), mx.zeros((1, 1, capacity, width), dtype)] for row in (0, 1)]
    queries, weights = some(5, 2, heads, 1, width), some(6, 2, heads)
    mx.eval(held, queries, weights)

    def scores(rows: Sequence[int], cut: int = 0) -> mx.array:
        """Of the last token of each of `rows`, whose first `cut` tokens are in a segment."""
        tails, _held = tails_behind([held[row] for row in rows], cut)
        seen = [ends[row] for row in rows]
        newest = [
            mx.concatenate([part[:, :, end - 1 : end] for part, end in zip(parts, seen, strict=True)])
            for parts in zip(*(held[row] for row in rows), strict=True)
        ]
        behind = put(newest, tails, mx.array([end - cut for end in seen], mx.int32))
        at = mx.array(list(rows))
        out = kernel.scores(queries[at], weights[at], tails, mx.array(seen, mx.int32), behind)
        mx.eval(out)
        return out

    together, far = scores((0, 1)), 0.0
    alone = scores((1,)), scores((1,), TILE)
    if not all(mx.array_equal(row[0], together[1]).item() for row in alone):
        return float("inf")
    most = ends[0] + 20
    places = kernel.best(mx.round(together), mx.array(ends, mx.int32), most).tolist()
    for row, got in enumerate(together):
        rounded = np.array(mx.round(got))[: ends[row]]
        largest = sorted(np.argsort(-rounded, kind="stable")[:most].tolist())
        if places[row][: len(largest)] != largest:
            return float("inf")
        keys = held[row][0][0, 0, : ends[row]].astype(mx.float32)
        each = mx.maximum(queries[row, :, 0].astype(mx.float32) @ keys.T, 0)
        want = (each * weights[row].astype(mx.float32)[:, None]).sum(axis=0)
        apart = mx.abs(got[: ends[row]] - want).max() / mx.abs(want).max()
        hidden = mx.all(got[ends[row] :] == -mx.inf)
        share = cast(float, apart.item()) if hidden.item() else float("inf")
        far = max(far, share if share == share else float("inf"))
    return far
