extern "C" __global__ void __launch_bounds__(32 * WARPS, D > 128 || WARPS > 4 ? 1 : 2) FUNCTION(
    const T* q, const unsigned long long* addresses, const int* table, const float* scale, float* sums,
    float* weights, const int segments, const int length, const int rows, const int fresh, const int most,
    const int kv_heads) {
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
  #define RUN(N) \
    omlxd_segment<N>(q, nullptr, nullptr, at[0], at[1], before, own + 1, columns, first, from, to, factor, \
                     parts, part, most, fresh, kv_heads, kv_head, rings, queries, tops, masses, sums, \
                     weights, nullptr, 0)
  if (columns <= 8) RUN(1);
  else if (MOST_TILES == 2 || columns <= 16) RUN(2);
  else RUN(MOST_TILES);
}
