"""CUDA kernel of attention over latents of MLA: `omlxd_latents`, for one token a row.

A latent is the value of all heads, and their key beside the part that RoPE turns. Blocks of threads read a
row's own latents and parts by address, in spans cut at fixed places, once for 16 heads, and multiply them on
the tensor cores; attention_source.py's merge puts the spans together. Several tokens of a row are as many
rows here (cache/mla_rows.py), so a pass with guesses has the bits of steps. `omlxd_latents_chosen` reads the
tokens alone that an index chose (cache/dsa_rows.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import Any, cast

import mlx.core as mx

from ...runtime.arrays import rows_at
from ..compile import launch
from ..compile.launch import Code
from ..compile.source import COPIES, HEADER, TYPES
from .attention_kernel import Tails, constant, put
from .attention_source import source_of as merge_source

log = logging.getLogger(__name__)

SPAN = 512
"""Tokens of a row that one block of threads reads.

Microseconds a layer in bfloat16, latents of 512 and parts of 64, one H100 (20 calls, by a script that is not
kept): MLX's own reads one array of all rows with scores of parts, which a mask hides where rows are unequal.
A launch takes the host 20 to 30 of them.

| heads | rows                | new | MLX's own | ours  | bytes at 3.35 TB/s |
|-------|---------------------|-----|-----------|-------|--------------------|
| 16    | 1: 500              | 1   | 127       | 57    | 0                  |
|       | 1: 16,000           | 1   | 142       | 58    | 6                  |
|       |                     | 5   |           | 106   |                    |
|       | 4: 16,000 to 20,500 | 1   | 1,182     | 89    | 25                 |
|       |                     | 5   |           | 235   |                    |
|       | 8: 32,000           | 1   | 2,740     | 204   | 88                 |
| 64    | 1: 16,000           | 1   | 133       | 93    | 6                  |
|       | 4: 16,000 to 20,500 | 1   | 4,141     | 196   | 25                 |
| 128   | 1: 500              | 1   | 102       | 61    | 0                  |
|       | 1: 16,000           | 1   | 127       | 125   | 6                  |
|       | 4: 16,000 to 20,500 | 1   | 7,820     | 331   | 25                 |
|       | 8: 32,000           | 1   | 19,975    | 958   | 88                 |
|       | 32: 500 to 1,647    | 1   | 4,706     | 219   | 12                 |
"""

TILE = 64
"""Tokens that it has in shared memory at once, twice: the next ones are on their way."""

WARPS = 8
"""Of a block. Each makes the scores of `TILE` / 8 tokens, then the sums of an eighth of the width."""

CLOSE = 0.02
"""Largest difference from MLX's own in float32, for values of a normal distribution: bfloat16's rounding."""

_BODY = """
  // grid (spans, tiles of 16 heads, tokens of all rows)
  constexpr int WIDTH = D + E, CHUNKS = WIDTH / 8, STRIDE = CHUNKS + 1, STEPS = WIDTH / 16, OWN = D / WARPS;
  extern __shared__ uint4 ring[];
  __shared__ float tops[WARPS][16], masses[WARPS][16];
  __shared__ __align__(16) T shares[16][TILE + 8];
  // `chosen`, where CHOSEN: (tokens of all rows, picks), of which each reads the first `ends`.
  const int span = blockIdx.x, tile = blockIdx.y, row = blockIdx.z;
  const int from = span * SPAN, end = ends[row], to = min(from + SPAN, end);
  if (from >= end) return;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, line = lane >> 2, quad = lane & 3;
  const int low = lane & 7, second = lane >> 3 & 1, third = lane >> 4;
  const unsigned long long* own = tails + (long)(row / new_tokens) * columns;
  const int before = own[3];  // Tokens in segments, which tiles divide.
  const uint4 *latents, *parts;
  auto turn_to = [&](int token) {  // Token `token` of the row, and what follows it in its array.
    const int segment = token < before ? token / each : -1;
    const unsigned long long* at = segment < 0 ? own : own + 4 + segment * 2;
    const int first = segment < 0 ? token - before : token - segment * each;
    latents = reinterpret_cast<const uint4*>(at[0]) + (long)first * (D / 8);
    parts = reinterpret_cast<const uint4*>(at[1]) + (long)first * (E / 8);
  };
  auto fetch = [&](int base, int stage) {
    if constexpr (!CHOSEN) turn_to(base);
    for (int i = threadIdx.x; i < TILE * CHUNKS; i += 32 * WARPS) {
      const int token = i / CHUNKS, chunk = i % CHUNKS;
      const bool has = base + token < to;
      const int place = (stage * TILE + token) * STRIDE + chunk, part = chunk - D / 8;
      if constexpr (CHOSEN) turn_to(has ? chosen[(long)row * picks + base + token] : 0);
      const int at = CHOSEN ? 0 : token;
      const uint4* x = part < 0 ? latents + at * (D / 8) + chunk : parts + at * (E / 8) + part;
      OMLXD_COPY(omlxd_shared(ring + place), has ? x : latents, has ? 16 : 0);
    }
    asm volatile("cp.async.commit_group;");
  };
  fetch(from, 0);
  unsigned qs[STEPS][4];
  #pragma unroll
  for (int i = 0; i < 4; i++) {
    const int head = tile * 16 + line + 8 * (i & 1);
    const long place = (long)row * heads + head;
    #pragma unroll
    for (int s = 0; s < STEPS; s++) {
      const int k = s * 16 + quad * 2 + 8 * (i >> 1);
      const T* x = s < D / 16 ? q + place * D + k : rope_q + place * E + k - D;
      qs[s][i] = head < heads ? *reinterpret_cast<const unsigned*>(x) : 0;
    }
  }
  float best[2] = {-1e30f, -1e30f}, total[2] = {0.f, 0.f}, sum[OWN / 8][4];
  #pragma unroll
  for (int t = 0; t < OWN / 8; t++)
    #pragma unroll
    for (int e = 0; e < 4; e++) sum[t][e] = 0.f;
  for (int base = from, stage = 0; base < to; base += TILE, stage ^= 1) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    if (base + TILE < to) fetch(base + TILE, stage ^ 1);
    const uint4* held = ring + stage * TILE * STRIDE;
    float dot[2][4], part[4];
    #pragma unroll
    for (int e = 0; e < 4; e++) dot[0][e] = dot[1][e] = part[e] = 0.f;
    const unsigned keys = omlxd_shared(held + (warp * 8 + low) * STRIDE + (lane >> 3));
    #pragma unroll
    for (int s = 0; s < STEPS; s += 2) {
      unsigned x[4];
      omlxd_matrices(x, keys + s * 32);
      const unsigned *a = qs[s], *b = qs[s + 1];
      omlxd_mma<T>(s < D / 16 ? dot[0] : part, a[0], a[1], a[2], a[3], x[0], x[1]);
      omlxd_mma<T>(s < D / 16 ? dot[1] : part, b[0], b[1], b[2], b[3], x[2], x[3]);
    }
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      #pragma unroll
      for (int e = 0; e < 2; e++) {
        const int i = 2 * h + e, token = base + warp * 8 + quad * 2 + e;
        const float x = (dot[0][i] + dot[1][i]) * scale[0] + part[i];
        part[i] = token < to ? x * 1.44269504f : -INFINITY;
      }
      float top = fmaxf(part[2 * h], part[2 * h + 1]);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      if (quad == 0) tops[warp][line + 8 * h] = top;
    }
    __syncthreads();
    float shrink[2];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      float now = best[h];
      #pragma unroll
      for (int w = 0; w < WARPS; w++) now = fmaxf(now, tops[w][line + 8 * h]);
      shrink[h] = omlxd_exp2(best[h] - now);
      best[h] = now;
      const float a = omlxd_exp2(part[2 * h] - now), b = omlxd_exp2(part[2 * h + 1] - now);
      total[h] = total[h] * shrink[h] + a + b;
      *reinterpret_cast<unsigned*>(&shares[line + 8 * h][warp * 8 + quad * 2]) = omlxd_pair<T>(a, b);
    }
    #pragma unroll
    for (int t = 0; t < OWN / 8; t++) {
      sum[t][0] *= shrink[0]; sum[t][1] *= shrink[0]; sum[t][2] *= shrink[1]; sum[t][3] *= shrink[1];
    }
    __syncthreads();
    #pragma unroll
    for (int k = 0; k < TILE; k += 16) {
      unsigned a[4];
      omlxd_matrices(a, omlxd_shared(&shares[low + second * 8][k + third * 8]));
      const unsigned values = omlxd_shared(held + (k + second * 8 + low) * STRIDE + warp * (OWN / 8) + third);
      #pragma unroll
      for (int t = 0; t < OWN / 8; t += 2) {
        unsigned x[4];
        omlxd_turned_matrices(x, values + t * 16);
        omlxd_mma<T>(sum[t], a[0], a[1], a[2], a[3], x[0], x[1]);
        omlxd_mma<T>(sum[t + 1], a[0], a[1], a[2], a[3], x[2], x[3]);
      }
    }
  }
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    float mass = total[h];
    mass += __shfl_xor_sync(~0u, mass, 1);
    mass += __shfl_xor_sync(~0u, mass, 2);
    if (quad == 0) masses[warp][line + 8 * h] = mass;
  }
  __syncthreads();
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    const int head = tile * 16 + line + 8 * h;
    if (head >= heads) continue;
    const long at = ((long)row * heads + head) * gridDim.x + span;
    #pragma unroll
    for (int t = 0; t < OWN / 8; t++)
      *reinterpret_cast<float2*>(sums + at * D + warp * OWN + t * 8 + quad * 2) =
          make_float2(sum[t][2 * h], sum[t][2 * h + 1]);
    if (warp == 0 && quad == 0) {
      float mass = 0.f;
      #pragma unroll
      for (int w = 0; w < WARPS; w++) mass += masses[w][line + 8 * h];
      weights[at * 2] = best[h];
      weights[at * 2 + 1] = mass;
    }
  }
"""


def fits(width: int, part: int, dtype: Any) -> bool:
    """Whether there is a kernel for latents so wide, beside parts so wide."""
    return dtype in TYPES and width % 128 == 0 and width <= 512 and part % 32 == 0 and 0 < part <= 128


def source_of(width: int, part: int, dtype: Any, chosen: bool = False) -> tuple[str, str]:
    """(function, CUDA source). `chosen`: it reads some tokens alone."""
    kind = TYPES[dtype]
    function = f"omlxd_latents{'_chosen' * chosen}_{kind}_{width}_{part}"
    numbers = {"D": width, "E": part, "SPAN": SPAN, "TILE": TILE, "WARPS": WARPS, "CHOSEN": int(chosen)}
    constants = ", ".join(f"{word} = {number}" for word, number in numbers.items())
    arguments = (
        "const T* q, const T* rope_q, const unsigned long long* tails, const int* ends, const float* scale, "
        "const int* behind, const int* chosen, float* sums, float* weights, const int heads, "
        "const int new_tokens, const int columns, const int each, const int picks"
    )
    head = f"{HEADER}{COPIES}using T = {kind};\nconstexpr int {constants};\n"
    bounds = f"__launch_bounds__({32 * WARPS}, 1)"
    return function, f'{head}extern "C" __global__ void {bounds} {function}({arguments}) {{\n{_BODY}\n}}\n'


class LatentKernel:
    """The kernels for latents of one width, parts of one, and a type. Compiles them now. Raises what NVRTC,
    the driver and MLX raise."""

    def __init__(self, width: int, part: int, dtype: Any):
        self._width, self._part, self._dtype = width, part, dtype
        sources = {name: source_of(width, part, dtype, name == "chosen") for name in ("spans", "chosen")}
        sources["merge"] = merge_source("merge", width, 1, dtype, SPAN)
        self._code = Code(sources)
        # As `Kernel`'s.
        self._compiled = lru_cache(64)(
            lambda queries, **how: cast(Any, mx.compile(partial(self._attend, **how)))
        )

    def over_tails(
        self,
        queries: mx.array,
        rope_queries: mx.array,
        tails: Tails,
        ends: Sequence[int],
        scale: float,
        behind: mx.array,
        chosen: mx.array | None = None,
    ) -> mx.array:
        """(tokens of all rows, heads, 1, width).

        queries       for latents, (tokens of all rows, heads, 1, width): as many tokens of one row as of
                      another, a row's one behind the other
        rope_queries  for parts, likewise, times `scale`
        tails         of each row: latents and parts
        ends          of each token of these: how many it sees of its row's, itself included
        behind        what `put` gave
        chosen        (tokens of all rows, picks) in int32: places of the tokens that each reads, in order;
                      those that it does not see come last. None: it reads all
        """
        new, most = len(queries) // len(tails.table), tails.most
        if chosen is not None:
            most = chosen.shape[1]
            ends = [min(end, most) for end in ends]
        how = {"most": most, "new": new, "each": tails.each, "picks": most if chosen is not None else 0}
        call = self._compiled(queries.shape, **how)
        places = constant(f"latents{new}", tuple(ends), mx.int32)
        scales = constant("scale", (scale,), mx.float32)
        picked = places if chosen is None else chosen
        return call(queries, rope_queries, tails.table, places, scales, behind, picked)

    def step(
        self,
        queries: mx.array,
        rope_queries: mx.array,
        tails: Tails,
        ends: mx.array,
        scale: float,
        behind: mx.array,
        chosen: mx.array | None = None,
    ) -> mx.array:
        """As `over_tails`, of one token a row, for a compiled step; `ends`: (rows,)."""
        how = {"most": tails.most, "new": 1, "each": tails.each, "picks": 0}
        if chosen is not None:
            how["most"] = how["picks"] = chosen.shape[1]
            ends = mx.minimum(ends, chosen.shape[1])
        scales, picked = constant("scale", (scale,), mx.float32), ends if chosen is None else chosen
        return self._attend(queries, rope_queries, tails.table, ends, scales, behind, picked, **how)

    def _attend(
        self,
        queries: mx.array,
        rope_queries: mx.array,
        table: mx.array,
        ends: mx.array,
        scale: mx.array,
        behind: mx.array,
        chosen: mx.array,
        *,
        most: int,
        new: int,
        each: int,
        picks: int,
    ) -> mx.array:
        tokens, heads = queries.shape[:2]
        spans = -(-most // SPAN)
        sums, weights = self._code.run(
            "chosen" if picks else "spans",
            [queries, rope_queries, table, ends, scale, behind, chosen],
            [heads, new, table.shape[1], each, picks],
            grid=(spans * 32 * WARPS, -(-heads // 16), tokens),
            threadgroup=(32 * WARPS, 1, 1),
            shared_memory=2 * TILE * (self._width + self._part + 8) * 2,
            output_shapes=[(tokens, heads, spans, self._width), (tokens, heads, spans, 2)],
            output_dtypes=[mx.float32, mx.float32],
        )
        starts = constant("latents' starts", (0,) * tokens, mx.int32)
        return self._code.run(
            "merge",
            [sums, weights, starts, ends],
            [spans, heads, 1],
            grid=(tokens * heads * self._width, 1, 1),
            threadgroup=(self._width, 1, 1),
            output_shapes=[queries.shape],
            output_dtypes=[self._dtype],
        )[0]


# --------------------------------------------------------------------------- the check


def kernel_for(queries: mx.array, rope_queries: mx.array) -> LatentKernel | None:
    """Of attention by such queries, once a check beside MLX's own passed."""
    return checked(queries.shape[3], rope_queries.shape[3], queries.dtype)


@cache
def checked(width: int, part: int, dtype: Any) -> LatentKernel | None:
    """A kernel that computes what MLX's own does, on rows of unequal length; None, and a line in the log."""
    if not fits(width, part, dtype):
        log.info("no kernel for latents %d wide beside parts %d wide in %s", width, part, dtype)
        return None
    began = time.perf_counter()
    try:
        kernel = LatentKernel(width, part, dtype)
        far = difference(kernel, width, part, dtype)
    except Exception as error:
        log.warning("latents are read by MLX's own attention: omlxd's kernel does not run here (%s)", error)
        return None
    if not far < CLOSE:  # NaN too
        log.warning("latents are read by MLX's own attention: omlxd's kernel differs by %.3g", far)
        return None
    log.info(
        "decode attends to latents by omlxd's kernel (%s, %d wide, parts %d wide): within %.4f of MLX's own, "
        "checked in %.1f s",
        *(dtype, width, part, far, time.perf_counter() - began),
    )
    return kernel


def tails_behind(rows: Sequence[Sequence[mx.array]], cut: int) -> tuple[Tails, list[mx.array]]:
    """(tails of a check's `rows`, two arrays each, whose first `cut` tokens are in a segment; what must stay
    as long)."""
    parts = [part for row in rows for part in row]
    own, before = [part[:, :, cut:] + 0 for part in parts], [part[:, :, :cut] + 0 for part in parts if cut]
    found = [launch.addresses_of(arrays) for arrays in (own, before) if arrays]
    numbers = [addresses.reshape(len(rows), 2) for addresses in found]
    capacity = parts[0].shape[2]
    numbers.insert(1, mx.array([[capacity - cut, cut]] * len(rows), mx.uint64))
    return Tails(mx.concatenate(numbers, axis=1), capacity, max(cut, 1)), own + before


def difference(kernel: Any, width: int, part: int, dtype: Any) -> float:
    """The largest from MLX's own in float32, for rows of unequal length; NaN is infinite. So are other bits
    of a row alone, of one whose first tokens are in a segment, of one of several tokens in a pass, and of one
    whose tokens are all chosen; and if others are read than those that are."""
    ends, capacity, heads, scale = (SPAN - 100, 2 * SPAN + 17), 3 * SPAN, 20, (width + part) ** -0.5

    def some(seed: int, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)

    held = [[some(10 * row + i, 1, 1, capacity, of) for i, of in enumerate((width, part))] for row in (0, 1)]
    queries, turned = some(5, 2, 2, heads, 1, width), some(6, 2, 2, heads, 1, part)
    mx.eval(held, queries, turned)

    def attend(
        rows: Sequence[int], tokens: Sequence[int], cut: int = 0, chosen: mx.array | None = None
    ) -> mx.array:
        """`tokens` of the last two of each of `rows`, whose first `cut` tokens are in a segment."""
        count, at = len(tokens), [ends[row] - 2 + tokens[0] for row in rows]
        fresh = [
            [part[:, :, first : first + count] for part in held[row]]
            for row, first in zip(rows, at, strict=True)
        ]
        columns = mx.arange(capacity)
        apart = [
            [
                mx.where(((columns < first) | (columns >= first + count))[:, None], part, 0)
                for part in held[row]
            ]
            for row, first in zip(rows, at, strict=True)
        ]
        tails, _held = tails_behind(apart, cut)
        newest = [mx.concatenate(list(parts)) for parts in zip(*fresh, strict=True)]
        behind = put(newest, tails, mx.array([first + count - cut for first in at], mx.int32))
        asked = [
            rows_at(rows_at(array, rows).swapaxes(0, 1), tokens)
            .swapaxes(0, 1)
            .reshape(-1, heads, 1, array.shape[4])
            for array in (queries, turned)
        ]
        seen = [ends[row] - 1 + token for row in rows for token in tokens]
        out = kernel.over_tails(*asked, tails, seen, scale, behind, chosen)
        mx.eval(out)
        return out

    together, far = attend((0, 1), (0, 1)), 0.0
    same = [(attend((1,), (0, 1)), together[2:]), (attend((0, 1), (1,)), together[1::2])]
    same.append((attend((1,), (0, 1), SPAN), together[2:]))
    every = mx.broadcast_to(mx.arange(capacity), (2, capacity))
    same.append((attend((1,), (0, 1), chosen=every), together[2:]))
    if not all(mx.array_equal(a, b).item() for a, b in same):
        return float("inf")
    some_alone = attend((1,), (0, 1), SPAN, every[:, 1::2])
    for at, got in enumerate([*together, *some_alone]):
        row, token = divmod(at, 2) if at < 4 else (1, at - 4)
        read = slice(ends[row] - 1 + token) if at < 4 else slice(1, None, 2)
        latents, parts = (array[0, 0, read].astype(mx.float32) for array in held[row])
        query, rope = (array[row, token, :, 0].astype(mx.float32) for array in (queries, turned))
        want = mx.softmax(query @ latents.T * scale + rope @ parts.T, axis=-1) @ latents
        apart = cast(float, mx.abs(got[:, 0].astype(mx.float32) - want).max().item())
        far = max(far, apart if apart == apart else float("inf"))
    return far
