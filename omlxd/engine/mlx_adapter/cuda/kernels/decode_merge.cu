extern "C" __global__ void FUNCTION(
    const float* sums, const float* weights, const int* starts, const int* ends,
#if SINKS
    const T* sinks,
#endif
    T* out, const int span_count, const int queries, const int new_tokens) {
  // grid (queries of all rows); a thread for each dimension
  const long head = blockIdx.x;
  const int most = span_count, row = head / queries;
  const int spans = (ends[row] - starts[row] + SPAN - 1) / SPAN;
  const float* pairs = weights + head * most * 2;
  float best = -1e30f, total = 0.f, x = 0.f;
  for (int s = 0; s < spans; s++) best = fmaxf(best, pairs[s * 2]);
#if SINKS
  const float sink = omlxd_floats<T>(sinks[head % queries / new_tokens].bits).x * 1.44269504f;
#else
  const float sink = -INFINITY;
#endif
  best = fmaxf(best, sink);
  #pragma unroll 4
  for (int s = 0; s < spans; s++) {
    const float weight = omlxd_exp2(pairs[s * 2] - best);
    total += weight * pairs[s * 2 + 1];
    x += weight * sums[(head * most + s) * D + threadIdx.x];
  }
#if SINKS
  total = __fadd_rn(total, omlxd_exp2(sink - best));
#endif
  out[head * D + threadIdx.x] = omlxd_round<T>(x / total);
}
