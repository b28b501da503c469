// One new token a row, or SEVERAL; STEP: the new one is put into its place. OUT: rows have one span.
extern "C" __global__ void FUNCTION(
    const T* q,
#if STEP
    const T* new_keys, const T* new_values,
#endif
#if OWN
    const unsigned long long* tails,
#else
    const T* keys, const T* values,
#endif
    const int* starts, const int* ends, const float* scale,
#if OWN && !STEP
    const int* behind,
#endif
#if OUT && SINKS
    const T* sinks,
#endif
#if OUT
    T* out,
#else
    float* sums, float* weights,
#endif
#if !OWN
    const int capacity,
#endif
    const int new_tokens, const int KV_HEADS, const int window) {
  // grid (spans, KV heads x parts of H queries, rows); a warp reads EACH tokens at once, LANES lanes a token,
  // each EIGHTS times 8 of its numbers. Query m of a KV head: new token m / GROUP, head m % GROUP.
  constexpr int CHUNKS = D / 8, EACH = 32 / LANES, EIGHTS = (CHUNKS + LANES - 1) / LANES;
  constexpr bool LIVE = CHUNKS == LANES * EIGHTS;
  const int fresh = SEVERAL ? new_tokens : 1, queries = GROUP * fresh, parts = (queries + H - 1) / H;
  const int span = blockIdx.x, row = blockIdx.z, kv_head = blockIdx.y / parts, first = blockIdx.y % parts * H;
  const int begin = starts[row], from = begin + span * SPAN, end = ends[row], to = min(from + SPAN, end);
  if (from >= end) return;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, slot = lane / LANES, part = lane % LANES;
  FIND_ROW
  const uint4* K = reinterpret_cast<const uint4*>(keys) + head * CHUNKS;
  const uint4* V = reinterpret_cast<const uint4*>(values) + head * CHUNKS;
  const uint4 none = make_uint4(0, 0, 0, 0);
  auto place = [&](int m) {
    return (((long)row * KV_HEADS + kv_head) * GROUP + m % GROUP) * fresh + m / GROUP;
  };
#if STEP
  // The newest token is read from where the projections left it, by all blocks; one of those that read the
  // same KV head puts it into the cache, which nothing else reads there in this step.
  const long newest = ((long)row * KV_HEADS + kv_head) * CHUNKS;
  const uint4* fresh_k = reinterpret_cast<const uint4*>(new_keys) + newest;
  const uint4* fresh_v = reinterpret_cast<const uint4*>(new_values) + newest;
  auto read = [&](const uint4* from, const uint4* newest, int token, int chunk) {
    const uint4* held = from + column(token) * CHUNKS + chunk;
    if (token + 1 < end) return *held;
    const uint4 x = newest[chunk];
    if (first == 0) *const_cast<uint4*>(held) = x;
    return x;
  };
#else
  const uint4 *fresh_k = nullptr, *fresh_v = nullptr;
  auto read = [&](const uint4* from, const uint4*, int token, int chunk) {
    return from[column(token) * CHUNKS + chunk];
  };
#endif
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
#if OUT  // A row of one span needs no other kernel.
#if SINKS
    {  // As omlxd_decode_merge rounds.
      const float sink = omlxd_floats<T>(sinks[kv_head * GROUP + m % GROUP].bits).x * 1.44269504f;
      const float both = fmaxf(top, sink), own = omlxd_exp2(top - both);
      mass = __fadd_rn(__fmul_rn(own, mass), omlxd_exp2(sink - both));
      x = __fmul_rn(own, x);
    }
#endif
    out[place(m) * D + d] = omlxd_round<T>(x / mass);
#else
    const long at = place(m) * gridDim.x + span;
    sums[at * D + d] = x;
    if (d == 0) { weights[at * 2] = top; weights[at * 2 + 1] = mass; }
#endif
  }
}
