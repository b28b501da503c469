extern "C" __global__ void __launch_bounds__(32 * WARPS, HELD ? 2 : 1) FUNCTION(
    const T* q, const T* keys, const T* values, const float* scale,
#if SINKS
    const T* sinks,
#endif
    T* out, const int capacity, const int start, const int count, const int fresh, const int window,
    const int skew) {
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
#if SINKS
    {
      const float sink = omlxd_float(sinks[head]) * 1.44269504f, top = fmaxf(best[h], sink);
      part = omlxd_exp2(best[h] - top);
      mass = part * mass + omlxd_exp2(sink - top);
    }
#endif
    if (token >= fresh) continue;
    T* to_place = out + ((long)head * fresh + token) * D + first_chunk * 8 + quad * 2;
    #pragma unroll
    for (int j = 0; j < DV / 8; j++)
      *reinterpret_cast<unsigned*>(to_place + j * 8) =
          omlxd_pair<T>(sum[j][2 * h] * part / mass, sum[j][2 * h + 1] * part / mass);
  }
}
