"""CUDA source of the kernels of attention: spans, step, several, tiles, merge, put; attention_kernel.py runs
them.
"""

from __future__ import annotations

from typing import Any

from ..compile.source import HEADER, TYPES

WARPS = 4
"""Of a block of threads. 8 took as long."""

UNROLL = 4
"""Tokens that a lane has on their way from memory. 2 took a tenth longer for long rows, 8 as long."""

AT_ONCE = 8
"""Queries that a lane keeps, at most; half as many of heads over 256 wide, and of several tokens.

Microseconds a layer for one new token a row in bfloat16, one H200, medians of 5 of 24 layers in one compiled
call (a script that is not kept). A launch takes the host 12 to 20 of them here: a row of 500 took this kernel
44 where it had two.

| query heads on KV heads, width      | rows            | MLX, no mask | mask  | ours | bytes at 4.8 TB/s |
|-------------------------------------|-----------------|--------------|-------|------|-------------------|
| 64 on 8, 64, sinks, window 128      | 1               | 12           | 51    | 29   | 0                 |
|                                     | 8: 200 to 3,000 | 22           | 88    | 36   | 0                 |
| 64 on 8, 64, sinks                  | 1: 8,000        | 165          | 154   | 59   | 3                 |
|                                     | 4: 2,000 to     | 136          | 757   | 62   | 11                |
| 8 on 4, 256, window 1,024           | 1               | 52           | 55    | 25   | 1                 |
|                                     | 8: 200 to 3,000 | 48           | 49    | 61   | 5                 |
| 8 on 4, 256                         | 4: 2,000 to     | 166          | 165   | 39   | 22                |
| 32 on 16, 128, window 1,024         | 1               | 12           | 43    | 38   | 2                 |
|                                     | 8: 200 to 3,000 | 48           | 99    | 51   | 10                |
| 8 on 1, 512                         | 4: 2,000 to     | 187          | 189   | 49   | 11                |
| 32 on 32, 96                        | 1: 8,000        | 45           | 99    | 43   | 21                |
|                                     | 4: 2,000 to     | 134          | 463   | 95   | 67                |
| 32 on 32, 80                        | 4: 2,000 to     | 424          | 433   | 85   | 56                |
| 16 on 16, 128                       | 4: 2,000 to     | 113          | 220   | 66   | 44                |

"2,000 to": 12,000, in steps that grow. Rows of a batch have a mask with MLX's own. One short row alone takes
longer than without: it has the same kernel, so that its bits are the same in company.
"""

_SPANS = """
  // grid (spans, KV heads x parts of H queries, rows); a warp reads EACH tokens at once, LANES lanes a token,
  // each EIGHTS times 8 of its numbers. Query m of a KV head: new token m / GROUP, head m % GROUP.
  constexpr int CHUNKS = D / 8, EACH = 32 / LANES, EIGHTS = (CHUNKS + LANES - 1) / LANES;
  constexpr bool LIVE = CHUNKS == LANES * EIGHTS;
  const int fresh = SEVERAL ? new_tokens : 1, queries = GROUP * fresh, parts = (queries + H - 1) / H;
  const int span = blockIdx.x, row = blockIdx.z, kv_head = blockIdx.y / parts, first = blockIdx.y % parts * H;
  const int begin = starts[row], from = begin + span * SPAN, end = ends[row], to = min(from + SPAN, end);
  if (from >= end) return;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, slot = lane / LANES, part = lane % LANES;
  HEAD
  const uint4* K = reinterpret_cast<const uint4*>(keys) + head * CHUNKS;
  const uint4* V = reinterpret_cast<const uint4*>(values) + head * CHUNKS;
  const uint4 none = make_uint4(0, 0, 0, 0);
  auto place = [&](int m) {
    return (((long)row * KV_HEADS + kv_head) * GROUP + m % GROUP) * fresh + m / GROUP;
  };
  COLUMN
  READ
  float qs[H][8 * EIGHTS], best[H], total[H], sum[H][8 * EIGHTS];
  int low[H], high[H];
  #pragma unroll
  for (int h = 0; h < H; h++) {
    const int m = first + h, own = end - fresh + m / GROUP;
    const bool live = (!SEVERAL && GROUP % H == 0) || m < queries;
    low[h] = SEVERAL ? own - window + 1 : from;
    high[h] = live ? SEVERAL ? min(to, own + 1) : to : 0;
    #pragma unroll
    for (int c = 0; c < EIGHTS; c++) {
      const int chunk = c * LANES + part;
      const bool has = live && (LIVE || chunk < CHUNKS);
      const uint4* from = reinterpret_cast<const uint4*>(q) + place(m) * CHUNKS + chunk;
      omlxd_eight<T>(has ? *from : none, qs[h] + 8 * c);
    }
    best[h] = -1e30f; total[h] = 0.f;
    #pragma unroll
    for (int e = 0; e < 8 * EIGHTS; e++) { qs[h][e] *= scale[0] * 1.44269504f; sum[h][e] = 0.f; }
  }
  for (int base = from + warp * EACH + slot; base - slot < to; base += WARPS * EACH * UNROLL) {
    uint4 k[UNROLL][EIGHTS], v[UNROLL][EIGHTS];
    #pragma unroll
    for (int u = 0; u < UNROLL; u++)
      #pragma unroll
      for (int c = 0; c < EIGHTS; c++) {
        const int token = base + u * WARPS * EACH, chunk = c * LANES + part;
        const bool has = token < to && (LIVE || chunk < CHUNKS);
        k[u][c] = has ? read(K, fresh_k, token, chunk) : none;
        v[u][c] = has ? read(V, fresh_v, token, chunk) : none;
      }
    float score[UNROLL][H];
    #pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int token = base + u * WARPS * EACH;
      float x[8 * EIGHTS];
      #pragma unroll
      for (int c = 0; c < EIGHTS; c++) omlxd_eight<T>(k[u][c], x + 8 * c);
      #pragma unroll
      for (int h = 0; h < H; h++) {
        float dot = 0.f;
        #pragma unroll
        for (int e = 0; e < 8 * EIGHTS; e++) dot += x[e] * qs[h][e];
        #pragma unroll
        for (int o = LANES / 2; o; o >>= 1) dot += __shfl_xor_sync(~0u, dot, o);
        score[u][h] = token < high[h] && (!SEVERAL || token >= low[h]) ? dot : -INFINITY;
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
      for (int e = 0; e < 8 * EIGHTS; e++) sum[h][e] *= shrink;
      #pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        score[u][h] = omlxd_exp2(score[u][h] - now);
        total[h] += score[u][h];
      }
    }
    #pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      float x[8 * EIGHTS];
      #pragma unroll
      for (int c = 0; c < EIGHTS; c++) omlxd_eight<T>(v[u][c], x + 8 * c);
      #pragma unroll
      for (int h = 0; h < H; h++)
        #pragma unroll
        for (int e = 0; e < 8 * EIGHTS; e++) sum[h][e] += score[u][h] * x[e];
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
    for (int e = 0; e < 8 * EIGHTS; e++) {
      float x = sum[h][e] * shrink;
      #pragma unroll
      for (int o = LANES; o < 32; o <<= 1) x += __shfl_xor_sync(~0u, x, o);
      const int chunk = e / 8 * LANES + part;
      if (slot == 0 && (LIVE || chunk < CHUNKS)) vectors[warp][h][chunk * 8 + e % 8] = x;
    }
    if (lane == 0) { tops[warp][h] = top; masses[warp][h] = mass; }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < H * D; i += 32 * WARPS) {
    const int h = i / D, d = i % D, m = first + h;
    if (m >= queries) break;
    float top = -1e30f, mass = 0.f, x = 0.f;
    #pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w][h]);
    #pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float weight = omlxd_exp2(tops[w][h] - top);
      mass += weight * masses[w][h];
      x += weight * vectors[w][h][d];
    }
    PUT
  }
"""

_HEAD = "const long head = ((long)row * KV_HEADS + kv_head) * capacity;"

_HEAD_BY_ADDRESS = """const T* keys = reinterpret_cast<const T*>(tails[row * 3]);
  const T* values = reinterpret_cast<const T*>(tails[row * 3 + 1]);
  const int capacity = tails[row * 3 + 2];
  const long head = (long)kv_head * capacity;"""
"""Rows with arrays of their own: `Tails` of attention_kernel.py."""

_COLUMN = """auto column = [&](int token) {
    return (long)(RING && token >= capacity ? token - capacity : token);
  };"""

_PUT = """const long at = place(m) * gridDim.x + span;
    sums[at * D + d] = x;
    if (d == 0) { weights[at * 2] = top; weights[at * 2 + 1] = mass; }
"""

_PUT_OUT = """if (SINKS) {  // As omlxd_decode_merge rounds.
      const float sink = omlxd_floats<T>(SINK(kv_head * GROUP + m % GROUP)).x * 1.44269504f;
      const float both = fmaxf(top, sink), own = omlxd_exp2(top - both);
      mass = __fadd_rn(__fmul_rn(own, mass), omlxd_exp2(sink - both));
      x = __fmul_rn(own, x);
    }
    out[place(m) * D + d] = omlxd_round<T>(x / mass);
"""
"""A row of one span needs no other kernel."""

_READ = """const uint4 *fresh_k = nullptr, *fresh_v = nullptr;
  auto read = [&](const uint4* from, const uint4*, int token, int chunk) {
    return from[column(token) * CHUNKS + chunk];
  };
"""

_READ_AND_PUT = """const long newest = ((long)row * KV_HEADS + kv_head) * CHUNKS;
  const uint4* fresh_k = reinterpret_cast<const uint4*>(new_keys) + newest;
  const uint4* fresh_v = reinterpret_cast<const uint4*>(new_values) + newest;
  auto read = [&](const uint4* from, const uint4* newest, int token, int chunk) {
    const uint4* held = from + column(token) * CHUNKS + chunk;
    if (token + 1 < end) return *held;
    const uint4 x = newest[chunk];
    if (first == 0) *const_cast<uint4*>(held) = x;
    return x;
  };
"""
"""The newest token is read from where the projections left it, by all blocks; one of those that read the same
KV head puts it into the cache, which nothing else reads there in this step."""

_TILES = """
  // grid (spans, KV heads x tiles of 16 queries, rows). A warp reads 16 tokens at once for all 16 queries:
  // fragments of mma.m16n8k16, whose k and n are dealt out so that a lane reads 16 bytes at a time.
  constexpr int CHUNKS = D / 8, TILES = (CHUNKS + 7) / 8, TURNS = (CHUNKS + 3) / 4;
  const uint4 none = make_uint4(0, 0, 0, 0);
  const int fresh = new_tokens, queries = GROUP * fresh, tiles = (queries + 15) / 16;
  const int span = blockIdx.x, row = blockIdx.z, kv_head = blockIdx.y / tiles, tile = blockIdx.y % tiles;
  const int from = starts[row] + span * SPAN, end = ends[row], to = min(from + SPAN, end);
  if (from >= end) return;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quad = lane & 3;
  HEAD
  const uint4* K = reinterpret_cast<const uint4*>(keys) + head * CHUNKS;
  const uint4* V = reinterpret_cast<const uint4*>(values) + head * CHUNKS;
  COLUMN
  // Query m of a head's group: new token m / GROUP, head m % GROUP.
  long place[2];
  int low[2], high[2];
  uint4 qs[2][TURNS];
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    const int m = tile * 16 + group + 8 * i, token = m / GROUP;
    place[i] = m < queries ? (((long)row * KV_HEADS + kv_head) * GROUP + m % GROUP) * fresh + token : -1;
    low[i] = end - fresh + token + 1 - window;
    high[i] = m < queries ? min(to, end - fresh + token + 1) : 0;
    #pragma unroll
    for (int c = 0; c < TURNS; c++) {
      const bool has = place[i] >= 0 && (CHUNKS % 4 == 0 || c * 4 + quad < CHUNKS);
      qs[i][c] = has ? reinterpret_cast<const uint4*>(q)[place[i] * CHUNKS + c * 4 + quad] : none;
    }
  }
  const float factor = scale[0] * 1.44269504f;
  float best[2] = {-1e30f, -1e30f}, total[2] = {0.f, 0.f}, sum[8 * TILES][4];
  #pragma unroll
  for (int t = 0; t < 8 * TILES; t++)
    #pragma unroll
    for (int e = 0; e < 4; e++) sum[t][e] = 0.f;
  for (int base = from + warp * 16; base < to; base += 16 * WARPS) {
    uint4 k[2][TURNS], v[4][TILES];
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const int token = base + 8 * i + group;
      #pragma unroll
      for (int c = 0; c < TURNS; c++) {
        const bool has = token < to && (CHUNKS % 4 == 0 || c * 4 + quad < CHUNKS);
        k[i][c] = has ? K[column(token) * CHUNKS + c * 4 + quad] : none;
      }
    }
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = base + quad * 2 + (i & 1) + (i >> 1) * 8;
      #pragma unroll
      for (int c = 0; c < TILES; c++) {
        const bool has = token < to && (CHUNKS % 8 == 0 || c * 8 + group < CHUNKS);
        v[i][c] = has ? V[column(token) * CHUNKS + c * 8 + group] : none;
      }
    }
    float score[2][4];
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      #pragma unroll
      for (int e = 0; e < 4; e++) score[i][e] = 0.f;
      #pragma unroll
      for (int c = 0; c < TURNS; c++) {
        omlxd_mma<T>(score[i], qs[0][c].x, qs[1][c].x, qs[0][c].y, qs[1][c].y, k[i][c].x, k[i][c].y);
        omlxd_mma<T>(score[i], qs[0][c].z, qs[1][c].z, qs[0][c].w, qs[1][c].w, k[i][c].z, k[i][c].w);
      }
    }
    unsigned weight[2][2];
    float shrink[2];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      float now = best[h];
      #pragma unroll
      for (int i = 0; i < 2; i++)
        #pragma unroll
        for (int e = 0; e < 2; e++) {
          const int token = base + 8 * i + quad * 2 + e;
          float& x = score[i][2 * h + e];
          x = token < high[h] && (!RING || token >= low[h]) ? x * factor : -INFINITY;
          now = fmaxf(now, x);
        }
      now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
      now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
      shrink[h] = omlxd_exp2(best[h] - now);
      best[h] = now;
      total[h] *= shrink[h];
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        const float a = omlxd_exp2(score[i][2 * h] - now), b = omlxd_exp2(score[i][2 * h + 1] - now);
        total[h] += a + b;
        weight[h][i] = omlxd_pair<T>(a, b);
      }
    }
    #pragma unroll
    for (int c = 0; c < TILES; c++) {
      const unsigned* rows[4];
      #pragma unroll
      for (int i = 0; i < 4; i++) rows[i] = reinterpret_cast<const unsigned*>(&v[i][c]);
      #pragma unroll
      for (int w = 0; w < 4; w++)
        #pragma unroll
        for (int half = 0; half < 2; half++) {
          float* x = sum[c * 8 + w * 2 + half];
          x[0] *= shrink[0]; x[1] *= shrink[0]; x[2] *= shrink[1]; x[3] *= shrink[1];
          const unsigned pick = half ? 0x7632 : 0x5410;
          omlxd_mma<T>(x, weight[0][0], weight[1][0], weight[0][1], weight[1][1],
                       __byte_perm(rows[0][w], rows[1][w], pick), __byte_perm(rows[2][w], rows[3][w], pick));
        }
    }
  }
  __shared__ float tops[WARPS][16], masses[WARPS][16], vectors[WARPS][16][D];
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    float mass = total[h];
    mass += __shfl_xor_sync(~0u, mass, 1);
    mass += __shfl_xor_sync(~0u, mass, 2);
    if (quad == 0) { tops[warp][group + 8 * h] = best[h]; masses[warp][group + 8 * h] = mass; }
    #pragma unroll
    for (int t = 0; t < 8 * TILES; t++)
      #pragma unroll
      for (int e = 0; e < 2; e++) {  // column quad * 2 + e of tile t
        const int chunk = (t >> 3) * 8 + quad * 2 + e;
        if (CHUNKS % 8 == 0 || chunk < CHUNKS)
          vectors[warp][group + 8 * h][chunk * 8 + (t & 7)] = sum[t][2 * h + e];
      }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * D; i += 32 * WARPS) {
    const int h = i / D, d = i % D, m = tile * 16 + h;
    if (m >= queries) break;
    float top = -1e30f, mass = 0.f, x = 0.f;
    #pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w][h]);
    #pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float part = omlxd_exp2(tops[w][h] - top);
      mass += part * masses[w][h];
      x += part * vectors[w][h][d];
    }
    const long at = (((long)row * KV_HEADS + kv_head) * GROUP + m % GROUP) * fresh + m / GROUP;
    const long to_place = at * gridDim.x + span;
    sums[to_place * D + d] = x;
    if (d == 0) { weights[to_place * 2] = top; weights[to_place * 2 + 1] = mass; }
  }
"""

_MERGE = """
  // grid (queries of all rows); a thread for each dimension
  const long head = blockIdx.x;
  const int most = span_count, row = head / queries;
  const int spans = (ends[row] - starts[row] + SPAN - 1) / SPAN;
  const float* pairs = weights + head * most * 2;
  float best = -1e30f, total = 0.f, x = 0.f;
  for (int s = 0; s < spans; s++) best = fmaxf(best, pairs[s * 2]);
  const float sink = SINKS ? omlxd_floats<T>(SINK(head % queries / new_tokens)).x * 1.44269504f : -INFINITY;
  best = fmaxf(best, sink);
  #pragma unroll 4
  for (int s = 0; s < spans; s++) {
    const float weight = omlxd_exp2(pairs[s * 2] - best);
    total += weight * pairs[s * 2 + 1];
    x += weight * sums[(head * most + s) * D + threadIdx.x];
  }
  if (SINKS) total = __fadd_rn(total, omlxd_exp2(sink - best));
  out[head * D + threadIdx.x] = omlxd_round<T>(x / total);
"""


_ARGUMENTS = {
    "spans": "const T* q",
    "step": "const T* q, const T* new_keys, const T* new_values",
    "several": "const T* q",
    "tiles": "const T* q",
    "merge": "const float* sums, const float* weights",
}
_BODIES = {
    "spans": _SPANS.replace("READ", _READ),
    "step": _SPANS.replace("READ", _READ_AND_PUT),
    "several": _SPANS.replace("READ", _READ),
    "tiles": _TILES,
    "merge": _MERGE,
}


def source_of(
    name: str, width: int, group: int, dtype: Any, span: int, *, ring: bool = False, sinks: bool = False
) -> tuple[str, str]:
    """(function, CUDA source) of a kernel: spans, step, several, tiles or merge.

    name   of the first three, `_out` behind it where a row has no more than one span; of the first four,
           `own_` before it where rows have arrays of their own
    ring   a row that comes to the arrays' end goes on at their beginning; a token sees `window` tokens
    sinks  a logit of each head joins the sum that weights are divided by
    """
    own = name.startswith("own_")
    name, _, out = name.removeprefix("own_").partition("_")
    kind = TYPES[dtype]
    function = "_".join(
        ["omlxd_decode", name, kind, *map(str, (width, group, span))]
        + [word for word, is_so in (("ring", ring), ("sinks", sinks), ("out", out), ("own", own)) if is_so]
    )
    numbers = {"D": width, "GROUP": group, "SPAN": span, "WARPS": WARPS, "UNROLL": UNROLL}
    numbers |= {"H": heads_at_once(width, group, name == "several"), "LANES": lanes_of(width)}
    numbers |= {"RING": int(ring), "SINKS": int(sinks), "SEVERAL": int(name == "several")}
    constants = ", ".join(f"{word} = {number}" for word, number in numbers.items())
    takes_sinks = sinks and (name == "merge" or out)
    arguments = _ARGUMENTS[name]
    if name != "merge":
        arguments += ", const unsigned long long* tails" if own else ", const T* keys, const T* values"
    arguments += ", const int* starts, const int* ends"
    if name != "merge":
        arguments += ", const float* scale"
    if own and name != "step":
        arguments += ", const int* behind"
    arguments += ", const T* sinks" if takes_sinks else ""
    arguments += ", T* out" if out or name == "merge" else ", float* sums, float* weights"
    if name == "merge":
        arguments += ", const int span_count, const int queries, const int new_tokens"
    else:
        arguments += "" if own else ", const int capacity"
        arguments += ", const int new_tokens, const int KV_HEADS, const int window"
    head = f"{HEADER}using T = {kind};\nconstexpr int {constants};\n"
    head += f"#define SINK(head) {'sinks[head].bits' if takes_sinks else '0'}\n"
    body = _BODIES[name].replace("PUT", _PUT_OUT if out else _PUT).replace("COLUMN\n", f"{_COLUMN}\n")
    body = body.replace("HEAD\n", f"{_HEAD_BY_ADDRESS if own else _HEAD}\n")
    return function, f'{head}extern "C" __global__ void {function}({arguments}) {{\n{body}\n}}\n'


def put_source(parts: int) -> tuple[str, str]:
    """(function, CUDA source) of a launch that puts new tokens into rows' own arrays.

    Part p of a token's KV has `bytes_p` bytes a KV head, an even number. The tokens of a row end at column
    `ends[row]`, and go on at the arrays' beginning where those end.
    """
    name = f"omlxd_put_{parts}"
    pointers = ", ".join(f"const unsigned short* new_{p}" for p in range(parts))
    sizes = ", ".join(f"const int bytes_{p}" for p in range(parts))
    copies = "\n".join(
        f"""  {{
    unsigned short* to = reinterpret_cast<unsigned short*>(own[{p}]);
    const int size = bytes_{p} / 2;
    for (int i = threadIdx.x; i < new_tokens * size; i += blockDim.x) {{
      const long column = (first + i / size) % capacity;
      to[(kv_head * capacity + column) * size + i % size] = new_{p}[(long)blockIdx.x * new_tokens * size + i];
    }}
  }}"""
        for p in range(parts)
    )
    return name, (
        f'extern "C" __global__ void {name}({pointers}, const unsigned long long* tails, const int* ends, '
        f"int* done, const int new_tokens, const int KV_HEADS, const int columns, {sizes}) {{\n"
        f"  const int row = blockIdx.x / KV_HEADS, kv_head = blockIdx.x % KV_HEADS;\n"
        f"  const unsigned long long* own = tails + (long)row * columns;\n"
        f"  const long capacity = own[{parts}], first = ends[row] - new_tokens + capacity;\n"
        f"{copies}\n  if (blockIdx.x == 0 && threadIdx.x == 0) *done = 1;\n}}\n"
    )


def most_heads(group: int) -> int:
    """Query heads of a group that a lane keeps."""
    return max(heads for heads in range(1, 9) if group % heads == 0)


def lanes_of(width: int) -> int:
    """Lanes that read a token together, a power of two."""
    return min(32, 1 << (width // 8 - 1).bit_length())


def heads_at_once(width: int, group: int, several: bool = False) -> int:
    """Queries of a KV head that a lane keeps; for several tokens those of a group are many times as many."""
    most = AT_ONCE if width <= 256 else AT_ONCE // 2
    if several:
        return most // 2
    return -(-group // -(-group // most))
