extern "C" __global__ void FUNCTION(
    const float* sums, const float* weights, const int* counts, const float* tail_sums,
    const float* tail_weights, const int* starts, const int* ends,
#if SINKS
    const T* sinks,
#endif
    T* out, const int parts, const int most, const int tail_most, const int queries, const int new_tokens) {
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
    // As decode_merge.cu merges them, to the bit: for rows that hold no segment.
    const int spans = (ends[row] - starts[row] + TAIL_SPAN - 1) / TAIL_SPAN;
    const float* own = tail_weights + head * tail_most * 2;
    float best = -1e30f, total = 0.f;
    for (int s = 0; s < spans; s++) best = fmaxf(best, own[s * 2]);
#if SINKS
    const float sink = omlxd_float<T>(sinks[head % queries / new_tokens]) * 1.44269504f;
    best = fmaxf(best, sink);
#endif
    #pragma unroll 4
    for (int s = 0; s < spans; s++) {
      const float weight = omlxd_exp2(own[s * 2] - best);
      total += weight * own[s * 2 + 1];
      x += weight * tail_sums[(head * tail_most + s) * D + d];
    }
#if SINKS
    total = __fadd_rn(total, omlxd_exp2(sink - best));
#endif
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
}
