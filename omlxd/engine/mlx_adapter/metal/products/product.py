"""`few_row_product`: up to 16 rows times quantised weights; a row's bits are its own in any company.

MLX reads the weights once a row (`qmv`) or once for some rows (`qmv_wide`, which adds in another order):
how many rows share the pass decides, and so the bits of each. Here a simdgroup has four outputs: each lane
unpacks 8 or 16 neighbours of four rows of weights into registers, once for up to 8 rows of x, and adds in
the order of MLX's kernel for one row (`qmv_fast`: 4 and 8 bits where 512 divides K; in other bits MLX
splits a number in two products).

By arithmetic, for 4 bits, 4,096 × 4,096 and 8 rows: 9.4 MB of weights take 47 µs at 200 GB/s (M2 Pro), and
134 million fma 39 µs on its 19 cores of 128 lanes at 1.4 GHz; on an M4 Max (546 GB/s, 40 cores, 1.6 GHz) 17
and 16 µs. Sums of x and unpacking make that some 1.7 times as much, so the weights are the limit up to some
5 rows; 16 rows read them twice, by threadgroups that are neighbours in x and start together: from a cache
the second time. A lane holds 64 numbers of weights, as halves (exact up to 255, and read for nothing where
a float is due), 32 sums and 16 of x: 80 of 128 registers, 112 if the numbers were floats. It has not run on
a Mac.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from ..kernel import Kernel

MOST = 16
"""Rows."""
ROWS = (1, 2, 4, 8)
"""Rows of x that a simdgroup has in registers: the kernels that are compiled."""
GATHERED_ROWS = 4
"""Pairs of an expert that a simdgroup takes: with 4 tokens and 8 of 128 experts each, 1.1 share one."""
MOST_PAIRS = 256
OUTPUTS = 4
"""Of a simdgroup."""
SIMDGROUPS = 2
"""Of a threadgroup."""
BITS = (3, 4, 5, 6, 8)

HEADER = """
// Unpacks a lane's neighbours: a stream of bits, from the lowest on.
template <int BITS, int VALUES>
inline void unpack(const device uchar* from, thread half* numbers) {
  constexpr uint MASK = (1u << BITS) - 1;
  if (BITS == 4 || BITS == 8) {
    const device uint* words = (const device uint*)from;
    constexpr int EACH = 32 / BITS;
    for (int i = 0; i < VALUES; i++) numbers[i] = half((words[i / EACH] >> (i % EACH * BITS)) & MASK);
  } else {
    const device ushort* words = (const device ushort*)from;
    for (int i = 0; i < VALUES; i++) {
      const int word = i * BITS / 16, shift = i * BITS % 16;
      uint bits = uint(words[word]) >> shift;
      if (shift + BITS > 16) bits |= uint(words[word + 1]) << (16 - shift);
      numbers[i] = half(bits & MASK);
    }
  }
}

// Adds what a lane has of `count` rows of x times four rows of weights, from `first` on.
template <typename T, int BITS, int GROUP, int ROWS>
inline void add_products(const device uchar* words, const device T* scales, const device T* biases,
                         const device T* x, const thread int* rows, int count, int first, int k, int n,
                         uint lane, thread float* sums) {
  constexpr int VALUES = BITS == 6 || BITS == 8 ? 8 : 16;
  const int row_bytes = k / 8 * BITS, row_groups = k / GROUP, last = n - 1 - first;
  words += size_t(first) * row_bytes;
  scales += size_t(first) * row_groups;
  biases += size_t(first) * row_groups;
  for (int at = int(lane) * VALUES; at < k; at += 32 * VALUES) {
    half numbers[4 * VALUES];
    float scale[4], bias[4];
    for (int out = 0; out < 4; out++) {
      const int row = min(out, last), group = row * row_groups + at / GROUP;
      unpack<BITS, VALUES>(words + row * row_bytes + at / 8 * BITS, numbers + out * VALUES);
      scale[out] = float(scales[group]);
      bias[out] = float(biases[group]);
    }
    for (int m = 0; m < ROWS; m++) {
      if (m < count) {
        const device T* from = x + rows[m] * k + at;
        float own[VALUES], total = 0;
        for (int i = 0; i < VALUES; i++) own[i] = float(from[i]);
        if (BITS == 4) {
          for (int i = 0; i < VALUES; i += 4) total += own[i] + own[i + 1] + own[i + 2] + own[i + 3];
        } else {
          for (int i = 0; i < VALUES; i++) total += own[i];
        }
        for (int out = 0; out < 4; out++) {
          const thread half* number = numbers + out * VALUES;
          float dot = 0;
          if (BITS == 4) {
            for (int i = 0; i < VALUES; i += 4)
              dot += own[i] * float(number[i]) + own[i + 1] * float(number[i + 1]) +
                     own[i + 2] * float(number[i + 2]) + own[i + 3] * float(number[i + 3]);
          } else {
            for (int i = 0; i < VALUES; i++) dot += own[i] * float(number[i]);
          }
          sums[m * 4 + out] += scale[out] * dot + total * bias[out];
        }
      }
    }
  }
}
"""

_BODY = """
  const uint lane = thread_index_in_simdgroup;
  const int k = sizes[0], n = sizes[1];
  const int first = (int(threadgroup_position_in_grid.y) * 2 + int(simdgroup_index_in_threadgroup)) * 4;
  if (first >= n) return;
  float sums[ROWS * 4];
  for (int i = 0; i < ROWS * 4; i++) sums[i] = 0;
  int rows[ROWS], outs[ROWS], count = 0;
  const device uchar* words = (const device uchar*)w;
%s
  for (int m = 0; m < ROWS; m++) {
    if (m < count) {
      for (int out = 0; out < 4; out++) {
        const float sum = simd_sum(sums[m * 4 + out]);
        if (lane == 0 && first + out < n) {
          T number = T(sum);
          if (BIASED) number = T(float(number) + float(added[added_at + first + out]));
          y[size_t(outs[m]) * n + first + out] = number;
        }
      }
    }
  }
"""

_DENSE = """
  const int start = int(threadgroup_position_in_grid.x) * ROWS, added_at = 0;
  count = min(ROWS, sizes[2] - start);
  for (int m = 0; m < ROWS; m++) rows[m] = outs[m] = start + m;
  add_products<T, BITS, GROUP, ROWS>(words, scales, biases, x, rows, count, first, k, n, lane, sums);
"""

_GATHERED = """
  // Each pair has a threadgroup: that of the first of `ROWS` pairs of an expert computes them all.
  const int pairs = sizes[2], each = sizes[3], pair = int(threadgroup_position_in_grid.x);
  const int expert = int(indices[pair]);
  int before = 0;
  for (int i = int(lane); i < pair; i += 32) before += int(indices[i]) == expert ? 1 : 0;
  if (simd_sum(before) % ROWS != 0) return;
  for (int m = 0; m < ROWS; m++) outs[m] = pair;
  for (int from = pair; from < pairs && count < ROWS; from += 32) {
    const int i = from + int(lane);
    const int is_same = i < pairs && int(indices[i]) == expert ? 1 : 0;
    const int place = count + simd_prefix_exclusive_sum(is_same);
    for (int m = 0; m < ROWS; m++) outs[m] += simd_sum(is_same != 0 && place == m ? i - pair : 0);
    count += simd_sum(is_same);
  }
  for (int m = 0; m < ROWS; m++) rows[m] = outs[m] / each;
  const int added_at = expert * n;
  const size_t of_expert = size_t(expert) * n;
  add_products<T, BITS, GROUP, ROWS>(words + of_expert * k * BITS / 8, scales + of_expert * (k / GROUP),
                                     biases + of_expert * (k / GROUP), x, rows, count, first, k, n, lane,
                                     sums);
"""

_INPUTS = ("x", "w", "scales", "biases", "added", "sizes")
DENSE = Kernel("few_row_product", _INPUTS, ("y",), _BODY % _DENSE, HEADER)
GATHERED = Kernel("few_row_product_gathered", (*_INPUTS, "indices"), ("y",), _BODY % _GATHERED, HEADER)
FEW_GATHERED = Kernel(
    "few_row_product_few_gathered", (*_INPUTS, "indices"), ("y",), _BODY % _GATHERED, HEADER
)
"""The same for fewer than 8 pairs, whose indices MLX hands on in another address space."""


class Weights(NamedTuple):
    """Quantised weights, as `mx.quantize` makes them in the mode `affine`.

    words           (N, K * bits / 32), of experts (experts, N, …)
    scales, biases  (N, K / group), likewise
    added           (N,), likewise: a layer's bias; None: it has none
    """

    words: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group: int
    added: mx.array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return (N, K)."""
        return self.words.shape[-2], self.scales.shape[-1] * self.group


@lru_cache(maxsize=256)
def _sizes(*numbers: int) -> mx.array:
    return mx.array([*numbers, *[0] * (8 - len(numbers))], mx.int32)


def few_row_product(x: mx.array, weights: Weights) -> mx.array:
    """Return (..., N) of x of (..., K), of up to `MOST` rows. x has the type of the scales."""
    n, k = weights.shape
    count = x.size // k
    rows = next((rows for rows in ROWS if rows >= count), ROWS[-1])
    (out,) = DENSE(
        [*_arrays(x, weights), _sizes(k, n, count)],
        template=_template(x.dtype, weights.bits, weights.group, rows, weights.added is not None),
        grid=(32 * SIMDGROUPS * -(-count // rows), -(-n // (OUTPUTS * SIMDGROUPS)), 1),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=[(*x.shape[:-1], n)],
        output_dtypes=[x.dtype],
    )
    return out


def gathered_product(x: mx.array, weights: Weights, indices: mx.array) -> mx.array:
    """Return (*indices.shape, 1, N): x of each pair times the weights of its expert.

    x        (..., 1, K), of as many rows as `indices` has, or of one for all of a token's
    indices  (..., experts of a token), integers; up to `MOST_PAIRS` pairs
    """
    n, k = weights.shape
    pairs = indices.size
    kernel = GATHERED if pairs >= 8 else FEW_GATHERED
    (out,) = kernel(
        [*_arrays(x, weights), _sizes(k, n, pairs, pairs // (x.size // k)), indices],
        template=_template(x.dtype, weights.bits, weights.group, GATHERED_ROWS, weights.added is not None),
        grid=(32 * SIMDGROUPS * pairs, -(-n // (OUTPUTS * SIMDGROUPS)), 1),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=[(*indices.shape, 1, n)],
        output_dtypes=[x.dtype],
    )
    return out


def _arrays(x: mx.array, weights: Weights) -> list[mx.array]:
    added = weights.scales if weights.added is None else weights.added
    return [x, weights.words, weights.scales, weights.biases, added]


@lru_cache(maxsize=256)
def _template(dtype: Any, bits: int, group: int, rows: int, biased: bool) -> list[tuple[str, Any]]:
    return [("T", dtype), ("BITS", bits), ("GROUP", group), ("ROWS", rows), ("BIASED", biased)]
