"""A CUDA kernel of attention of a prompt's passes, `omlxd_prompt`: many new tokens of one row.

MLX hands these to cuDNN, which plans each shape at its first call, and the end of nearly every prompt is a
new shape. Whole chunks, which are of few shapes, stay with cuDNN, whose kernels are faster, and so do passes
before a prompt's last, in shapes of prompt_shapes.py. Windows don't: cuDNN computes what their
masks hide, and its bits depend on where a pass begins. attention/hooks.py says when this one runs, once
`checked` has compared it with MLX's own.

Milliseconds a layer, 32 query heads on 8 of 128 in bfloat16, one H200 (tools/bench/gpu.py --only prompts):

| new, all tokens | MLX's first | MLX's then | this  | this, TFLOP/s |
|-----------------|-------------|------------|-------|---------------|
| 200, 16,200     | 37          | 0.132      | 0.303 | 174           |
| 448, 8,640      | 38          | 0.151      | 0.285 | 216           |
| 600, 17,000     | 36          | 0.308      | 0.737 | 223           |
| 1,000, 16,900   | 36          | 0.450      | 1.134 | 237           |
| 1,500, 10,000   | 36          | 0.392      | 0.954 | 238           |
| 650, 32,650     | 37          | 0.624      | 1.506 | 229           |

Whole chunks of 2,048 tokens over windows in bfloat16, one H100, milliseconds a layer (a script that is not
kept):

| query heads on KV heads, width | window | MLX's first | MLX's then | this |
|--------------------------------|--------|-------------|------------|------|
| 8 on 4, 256                    | 1,024  | 3           | 1.30       | 0.26 |
| 32 on 32, 128                  | 4,096  | 2,292       | 3.24       | 0.95 |
| 64 on 8, 64, sinks             | 128    | 1,385       | 1.98       | 0.13 |

A plan is for a capacity, too: a chunk of 2,048 whose KV lies in arrays of another length takes 57 ms again,
and 0.5 if its keys and values are copied together before.
"""

from __future__ import annotations

import logging
import time
from functools import cache
from typing import Any, cast

import mlx.core as mx

from ..compile import kernel_store
from ..compile.source import COPIES, HEADER, TYPES
from .attention_kernel import NO_WINDOW, constant

log = logging.getLogger(__name__)

WARPS = 4
"""Of a block of threads; each has 16 queries of a head."""

WIDE = 256
"""Of heads up to this width, queries and sums have room in registers."""

MOST_PAIRS = 1 << 24
"""New tokens times all tokens of a pass, at most. There it takes 24 ms longer than cuDNN in 36 layers of the
table's shape, and the plan 36."""

CLOSE = 0.03
"""As attention/hooks.py's."""

_BODY = """
  // grid (tiles of queries, query heads, parts of values). Keys and values of COLUMNS tokens come through
  // shared memory; those of the next ones are on their way meanwhile. The first token that is held is in
  // place `skew`: so sums are cut at the same tokens wherever a window begins. Heads over 256 wide have no
  // room in registers for queries, which are in shared memory too, nor for sums of more than half of a value.
  constexpr int CHUNKS = D / 8, STRIDE = (CHUNKS + 7) / 8 * 8, ROWS = 16 * WARPS;
  constexpr int DV = D / PARTS, V_CHUNKS = DV / 8, V_STRIDE = (V_CHUNKS + 7) / 8 * 8;
  constexpr int K_TILE = COLUMNS * STRIDE, STAGE = K_TILE + COLUMNS * V_STRIDE;
  extern __shared__ uint4 pool[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quad = lane & 3;
  const int low = lane & 7, second = (lane >> 3) & 1, third = lane >> 4;
  const int head = blockIdx.y, first = (gridDim.x - 1 - blockIdx.x) * ROWS;
  const int tokens = skew + count, before = tokens - fresh, end = min(tokens, before + first + ROWS);
  const int mine = first + warp * 16;
  const long held = ((long)(head / GROUP) * capacity + start - skew) * CHUNKS;
  const uint4* K = reinterpret_cast<const uint4*>(keys) + held;
  const uint4* V = reinterpret_cast<const uint4*>(values) + held;
  const int first_chunk = blockIdx.z * V_CHUNKS;
  const int from = max(0, before + first - window + 1) / COLUMNS, to = (end + COLUMNS - 1) / COLUMNS;
  const unsigned pool_at = omlxd_shared(pool);
  auto fetch = [&](int tile) {
    if (tile < to) {
      const unsigned put = pool_at + (tile & 1) * STAGE * 16;
      #pragma unroll
      for (int i = threadIdx.x; i < COLUMNS * CHUNKS; i += 32 * WARPS) {
        const int token = i / CHUNKS, chunk = i % CHUNKS, at = tile * COLUMNS + token;
        const int own = chunk - first_chunk;
        const long source = (long)max(skew, min(at, tokens - 1)) * CHUNKS + chunk;
        const int bytes = skew <= at && at < tokens ? 16 : 0;  // Zeros else.
        OMLXD_COPY(put + (token * STRIDE + (chunk ^ (token & 7))) * 16, K + source, bytes);
        if (PARTS == 1 || (own >= 0 && own < V_CHUNKS))
          OMLXD_COPY(put + (K_TILE + token * V_STRIDE + (own ^ (token & 7))) * 16, V + source, bytes);
      }
    }
    asm volatile("cp.async.commit_group;");
  };
  const unsigned q_at = pool_at + 2 * STAGE * 16;
  unsigned query[HELD ? D / 16 : 1][4];
  if constexpr (HELD) {
    #pragma unroll
    for (int c = 0; c < D / 16; c++)
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        const int token = min(mine + group + (i & 1) * 8, fresh - 1);
        const T* x = q + ((long)head * fresh + token) * D + c * 16 + (i >> 1) * 8 + quad * 2;
        query[c][i] = *reinterpret_cast<const unsigned*>(x);
      }
  } else {
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += 32 * WARPS) {
      const int one = i / CHUNKS, chunk = i % CHUNKS, token = min(first + one, fresh - 1);
      const uint4* x = reinterpret_cast<const uint4*>(q) + ((long)head * fresh + token) * CHUNKS + chunk;
      OMLXD_COPY(q_at + (one * STRIDE + (chunk ^ (one & 7))) * 16, x, 16);
    }
  }
  fetch(from);
  const float factor = scale[0] * 1.44269504f;
  float best[2] = {-1e30f, -1e30f}, total[2] = {0.f, 0.f}, sum[DV / 8][4];
  #pragma unroll
  for (int j = 0; j < DV / 8; j++)
    #pragma unroll
    for (int e = 0; e < 4; e++) sum[j][e] = 0.f;
  #pragma unroll 1
  for (int tile = from; tile < to; tile++) {
    fetch(tile + 1);
    asm volatile("cp.async.wait_group 1;");
    __syncthreads();
    const int base = tile * COLUMNS, own = before + mine;
    if (base <= own + 15 && base + COLUMNS > own - window + 1) {
      const unsigned k_at = pool_at + (tile & 1) * STAGE * 16, v_at = k_at + K_TILE * 16;
      float score[COLUMNS / 8][4];
      #pragma unroll
      for (int j = 0; j < COLUMNS / 8; j++)
        #pragma unroll
        for (int e = 0; e < 4; e++) score[j][e] = 0.f;
      #pragma unroll
      for (int c = 0; c < D / 16; c++) {
        unsigned* a = query[HELD ? c : 0];
        if constexpr (!HELD)
          omlxd_matrices(a, q_at + ((warp * 16 + second * 8 + low) * STRIDE + ((2 * c + third) ^ low)) * 16);
        #pragma unroll
        for (int j = 0; j < COLUMNS / 16; j++) {
          unsigned x[4];
          omlxd_matrices(x, k_at + ((j * 16 + third * 8 + low) * STRIDE + ((2 * c + second) ^ low)) * 16);
          omlxd_mma<T>(score[2 * j], a[0], a[1], a[2], a[3], x[0], x[1]);
          omlxd_mma<T>(score[2 * j + 1], a[0], a[1], a[2], a[3], x[2], x[3]);
        }
      }
      const bool all = base + COLUMNS - 1 <= own && base > own + 15 - window;
      #pragma unroll
      for (int j = 0; j < COLUMNS / 8; j++)
        #pragma unroll
        for (int e = 0; e < 4; e++) {
          const int token = base + j * 8 + quad * 2 + (e & 1), last = own + group + (e >> 1) * 8;
          score[j][e] = all || (token <= last && token > last - window) ? score[j][e] * factor : -INFINITY;
        }
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        float now = best[h];
        #pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++) now = fmaxf(now, fmaxf(score[j][2 * h], score[j][2 * h + 1]));
        now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
        now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
        const float shrink = omlxd_exp2(best[h] - now);
        best[h] = now;
        total[h] *= shrink;
        #pragma unroll
        for (int j = 0; j < DV / 8; j++) { sum[j][2 * h] *= shrink; sum[j][2 * h + 1] *= shrink; }
        #pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++)
          #pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; e++) {
            score[j][e] = omlxd_exp2(score[j][e] - now);
            total[h] += score[j][e];
          }
      }
      #pragma unroll
      for (int s = 0; s < COLUMNS / 16; s++) {
        const unsigned a0 = omlxd_pair<T>(score[2 * s][0], score[2 * s][1]);
        const unsigned a1 = omlxd_pair<T>(score[2 * s][2], score[2 * s][3]);
        const unsigned a2 = omlxd_pair<T>(score[2 * s + 1][0], score[2 * s + 1][1]);
        const unsigned a3 = omlxd_pair<T>(score[2 * s + 1][2], score[2 * s + 1][3]);
        #pragma unroll
        for (int j = 0; j < DV / 16; j++) {
          unsigned x[4];
          omlxd_turned_matrices(
              x, v_at + ((s * 16 + second * 8 + low) * V_STRIDE + ((2 * j + third) ^ low)) * 16);
          omlxd_mma<T>(sum[2 * j], a0, a1, a2, a3, x[0], x[1]);
          omlxd_mma<T>(sum[2 * j + 1], a0, a1, a2, a3, x[2], x[3]);
        }
      }
    }
    __syncthreads();
  }
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    const int token = mine + group + 8 * h;
    float mass = total[h], part = 1.f;
    mass += __shfl_xor_sync(~0u, mass, 1);
    mass += __shfl_xor_sync(~0u, mass, 2);
    if (SINKS) {
      const float sink = SINK(head) * 1.44269504f, top = fmaxf(best[h], sink);
      part = omlxd_exp2(best[h] - top);
      mass = part * mass + omlxd_exp2(sink - top);
    }
    if (token >= fresh) continue;
    T* to_place = out + ((long)head * fresh + token) * D + first_chunk * 8 + quad * 2;
    #pragma unroll
    for (int j = 0; j < DV / 8; j++)
      *reinterpret_cast<unsigned*>(to_place + j * 8) =
          omlxd_pair<T>(sum[j][2 * h] * part / mass, sum[j][2 * h + 1] * part / mass);
  }
"""


def columns_of(width: int) -> int:
    """Tokens of keys and values at once: those of wider heads would have no room in registers."""
    return 64 if width <= 128 else 32


def parts_of(width: int) -> int:
    """Blocks of threads that share a query's values."""
    return 1 if width <= WIDE else 2


def _shared_bytes(width: int) -> int:
    keys, values = (-(-each // 64) * 64 for each in (width, width // parts_of(width)))
    return 2 * (2 * columns_of(width) * (keys + values) + (0 if width <= WIDE else 16 * WARPS * keys))


def source_of(width: int, group: int, dtype: Any, sinks: bool = False) -> tuple[str, str]:
    """(function, CUDA source)."""
    kind = TYPES[dtype]
    numbers = {"D": width, "GROUP": group, "WARPS": WARPS, "COLUMNS": columns_of(width), "SINKS": int(sinks)}
    name = "_".join(["omlxd_prompt", kind, *map(str, numbers.values())])
    numbers |= {"PARTS": parts_of(width), "HELD": int(width <= WIDE)}
    arguments = (
        f"const T* q, const T* keys, const T* values, const float* scale, {'const T* sinks, ' * sinks}"
        "T* out, const int capacity, const int start, const int count, const int fresh, const int window, "
        "const int skew"
    )
    head = f"{HEADER}{COPIES}using T = {kind};\nconstexpr int "
    head += ", ".join(f"{word} = {number}" for word, number in numbers.items()) + ";\n"
    head += f"#define SINK(head) {'omlxd_float(sinks[head])' if sinks else '0.f'}\n"
    bounds = f"__launch_bounds__({32 * WARPS}, {2 if width <= WIDE else 1})"
    return name, f'{head}extern "C" __global__ void {bounds} {name}({arguments}) {{\n{_BODY}\n}}\n'


class PromptKernel:
    """Of one width, group and type. Raises what NVRTC and the driver raise."""

    def __init__(self, width: int, group: int, dtype: Any, sinks: bool = False):
        self._width, self._dtype = width, dtype
        self._function, source = source_of(width, group, dtype, sinks)
        self._code = kernel_store.machine_code(source)

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        places: tuple[int, int],
        scale: float,
        *,
        window: int = 0,
        sinks: mx.array | None = None,
        before: int = 0,
    ) -> mx.array:
        """(1, heads, new tokens, width). `keys`, `values`: (1, KV heads, capacity, width); the row's KV lies
        in the columns from the first of `places` to before the second, its new tokens last.

        window  tokens that a new one sees, itself included; 0: all before it
        sinks   (heads,)
        before  tokens of the row before those columns: sums are cut at multiples of tokens of the row
        """
        heads, new = queries.shape[1:3]
        tiles, (start, end) = -(-new // (16 * WARPS)), places
        more = [] if sinks is None else [sinks]
        return mx.fast.precompiled_cuda_kernel(
            name=self._function,
            compiled_source=self._code,
            inputs=[queries, keys, values, constant("scale", (scale,), mx.float32), *more],
            scalars=[
                keys.shape[2],
                start,
                end - start,
                new,
                window or NO_WINDOW,
                before % columns_of(self._width),
            ],
            grid=(tiles * 32 * WARPS, heads, parts_of(self._width)),
            threadgroup=(32 * WARPS, 1, 1),
            shared_memory=_shared_bytes(self._width),
            output_shapes=[queries.shape],
            output_dtypes=[self._dtype],
            ensure_row_contiguous=True,
        )[0]


def fits(new: int, tokens: int, chunk: int) -> bool:
    """Whether a pass of `new` tokens, which see `tokens` in all, is of a shape that cuDNN would plan anew for
    more than that saves. `chunk`: tokens of a whole chunk."""
    return new < chunk and new * tokens <= MOST_PAIRS


@cache
def checked(width: int, group: int, dtype: Any, sinks: bool) -> PromptKernel | None:
    """A kernel that computes what MLX's own attention does; None, and a line in the log: there is none."""
    began, far = time.perf_counter(), 0.0
    if width % 16 or (width > WIDE and width != 512) or dtype not in TYPES:
        return None
    try:
        kernel = PromptKernel(width, group, dtype, sinks)
        kind = width, group, dtype, sinks
        far = kernel_store.remembered(
            "attention of prompts",
            kind,
            lambda: max(_difference(kernel, kind, *case) for case in _CASES),
            lambda far: far < CLOSE,
        )
    except Exception as error:
        log.warning("prompts attend by MLX's own kernels: ours does not run here (%s)", error)
        return None
    if not far < CLOSE:  # NaN too
        log.warning("prompts attend by MLX's own kernels: ours differs by %.3g", far)
        return None
    log.info(
        "ends of prompts attend by omlxd's kernel (%d wide): within %.4f of MLX's own, checked in %.1f s",
        width,
        far,
        time.perf_counter() - began,
    )
    return kernel


_CASES = (65, 65, 0), (130, 300, 0), (100, 400, 90)
"""New tokens, all tokens, window."""


def _difference(kernel: PromptKernel, kind: tuple[Any, ...], new: int, tokens: int, window: int) -> float:
    """The largest from MLX's own in float32; NaN is infinite."""
    width, group, dtype, has_sinks = kind

    def some(seed: int, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)

    start, scale = 5, 3 * width**-0.5  # Scores of a few tokens lead: as attention/hooks.py's check.
    queries = some(0, 1, 2 * group, new, width)
    keys, values = (some(seed, 1, 2, tokens + 20, width) for seed in (1, 2))
    sinks = some(3, 2 * group) + 10 if has_sinks else None
    places = start, start + tokens
    got = kernel(queries, keys, values, places, scale, window=window, sinks=sinks)
    own, seen = mx.arange(tokens - new, tokens)[:, None], mx.arange(tokens)
    mask = (seen <= own) & (seen > own - (window or tokens + 1))
    exact = [array[:, :, start : start + tokens].astype(mx.float32) for array in (keys, values)]
    want = mx.fast.scaled_dot_product_attention(
        queries.astype(mx.float32),
        *exact,
        scale=scale,
        mask=mask,
        sinks=None if sinks is None else sinks.astype(mx.float32),
    )
    far = cast(float, mx.abs(got.astype(mx.float32) - want).max().item())
    if window:  # Without what the last queries do not see.
        less = tokens - window - 20
        places = start + less, start + tokens
        how = {"window": window, "sinks": sinks, "before": less}
        alike = mx.array_equal(
            kernel(queries[:, :, -20:], keys, values, places, scale, **how), got[:, :, -20:]
        )
        far = far if alike.item() else float("inf")
    return far if far == far else float("inf")
