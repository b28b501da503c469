// Reads `from` to `to` of a segment once for all queries of the rows that hold it, NT eights of them.
// TURNS: these are normalised and rotated first.
template <int NT> __device__ inline void omlxd_segment(
    const T* q, const T* q_norm, const float* turns, unsigned long long k_at, unsigned long long v_at,
    long before, const int* holders, int columns, int first, int from, int to, float factor, int parts,
    int part, int most, int fresh, int kv_heads, int kv_head, uint4* rings, T* queries, float* tops,
    float* masses, float* sums, float* weights, const int* done, int awaited) {
  constexpr int CHUNKS = D / 8, TILE = 16, STAGE = 2 * TILE * CHUNKS, COLUMNS = 8 * NT;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quad = lane & 3;
  const int tiles = (to - from) / TILE;
  // Column c: the holder, the head of its group, the new token.
  auto place = [&](int c) {
    const int each = GROUP * fresh, row = holders[2 * ((first + c) / each)];
    const long head = ((long)row * kv_heads + kv_head) * GROUP + (first + c) % each / fresh;
    return head * fresh + (first + c) % fresh;
  };
  // `ready(c)` and `take(c)` ask for what `prepare(c)` puts into column c: before the KV, behind which it
  // would wait. LATE: other blocks of the launch make what `take` asks for; the KV is on its way meanwhile.
#if TURNS
  constexpr int EACH = D / 64;
  int a[EACH], b[EACH];
  T x[EACH], y[EACH], x_weight[EACH], y_weight[EACH];
  float cosine[EACH], sine[EACH];
  auto ready = [&](int c) {
    const float* turn = turns + (c < columns ? place(c) : 0) / (kv_heads * GROUP) * D;
    #pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int pair = lane * EACH + j;
      const bool near = TRADITIONAL || 2 * pair >= TURNED;
      a[j] = near ? 2 * pair : pair;
      b[j] = near ? a[j] + 1 : pair + TURNED / 2;
      if (NORM) { x_weight[j] = q_norm[a[j]]; y_weight[j] = q_norm[b[j]]; }
      cosine[j] = turn[a[j]];
      sine[j] = turn[b[j]];
    }
  };
  auto take = [&](int c) {
    const T* source = q + (c < columns ? place(c) : 0) * D;
    #pragma unroll
    for (int j = 0; j < EACH; j++) {
      x[j].bits = __ldcg(&source[a[j]].bits);
      y[j].bits = __ldcg(&source[b[j]].bits);
    }
  };
  auto prepare = [&](int c) {
    float squares = 0.f;
    if (NORM) {
      #pragma unroll
      for (int j = 0; j < EACH; j++) {
        const float one = omlxd_float(x[j]), two = omlxd_float(y[j]);
        squares += one * one + two * two;
      }
      #pragma unroll
      for (int o = 16; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
      const float factor = rsqrtf(squares / D + eps);
      #pragma unroll
      for (int j = 0; j < EACH; j++) {
        const T one = omlxd_round<T>(omlxd_float(x[j]) * factor);
        const T two = omlxd_round<T>(omlxd_float(y[j]) * factor);
        x[j] = omlxd_round<T>(omlxd_float(one) * omlxd_float(x_weight[j]));
        y[j] = omlxd_round<T>(omlxd_float(two) * omlxd_float(y_weight[j]));
      }
    }
    #pragma unroll
    for (int j = 0; j < EACH; j++) {
      if (2 * (lane * EACH + j) < TURNED) {
        const float one = omlxd_float(x[j]), two = omlxd_float(y[j]);
        x[j] = omlxd_round<T>(one * cosine[j] - two * sine[j]);
        y[j] = omlxd_round<T>(one * sine[j] + two * cosine[j]);
      }
      queries[c * D + a[j]] = x[j];
      queries[c * D + b[j]] = y[j];
    }
  };
#else
  uint4 some[(CHUNKS + 31) / 32];
  auto ready = [&](int c) {};
  auto take = [&](int c) {
    const uint4* source = reinterpret_cast<const uint4*>(q) + (c < columns ? place(c) : 0) * CHUNKS;
    const uint4 none = make_uint4(0, 0, 0, 0);
    for (int i = lane, j = 0; i < CHUNKS; i += 32, j++) some[j] = c < columns ? source[i] : none;
  };
  auto prepare = [&](int c) {
    for (int i = lane, j = 0; i < CHUNKS; i += 32, j++)
      reinterpret_cast<uint4*>(queries)[c * CHUNKS + i] = some[j];
  };
#endif
  ready(warp);
  if (!LATE) take(warp);
  const uint4* K = reinterpret_cast<const uint4*>(k_at) + before;
  const uint4* V = reinterpret_cast<const uint4*>(v_at) + before;
  uint4* ring = rings + warp * STAGES * STAGE;
  const unsigned ring_at = omlxd_shared(ring);
  auto fetch = [&](int tile, int stage) {
    if (tile < tiles) {
      #pragma unroll
      for (int i = 0; i < TILE * CHUNKS / 32; i++) {
        const int at = i * 32 + lane, token = at / CHUNKS, chunk = at % CHUNKS;
        const long place = (long)(from + tile * TILE + token) * CHUNKS + chunk;
        const unsigned put = ring_at + (stage * STAGE + token * CHUNKS + (chunk ^ (token & 7))) * 16;
        OMLXD_COPY(put, K + place, 16);
        OMLXD_COPY(put + TILE * CHUNKS * 16, V + place, 16);
      }
    }
    asm volatile("cp.async.commit_group;");
  };
  #pragma unroll 1
  for (int s = 0; s < STAGES - 1; s++) fetch(warp + s * WARPS, s);
  if (LATE) {
    omlxd_await(done, awaited);
    take(warp);
  }
  prepare(warp);
  #pragma unroll 1
  for (int c = warp + WARPS; c < COLUMNS; c += WARPS) {
    ready(c);
    take(c);
    prepare(c);
  }
  __syncthreads();
  unsigned query[NT][D / 16][2];
  #pragma unroll
  for (int t = 0; t < NT; t++)
    #pragma unroll
    for (int c = 0; c < D / 16; c++)
      #pragma unroll
      for (int i = 0; i < 2; i++)
        query[t][c][i] =
            *reinterpret_cast<const unsigned*>(queries + (t * 8 + group) * D + c * 16 + i * 8 + quad * 2);
  float best[NT][2], total[NT][2], sum[NT][D / 16][4];
  #pragma unroll
  for (int t = 0; t < NT; t++) {
    best[t][0] = best[t][1] = -1e30f;
    total[t][0] = total[t][1] = 0.f;
    #pragma unroll
    for (int j = 0; j < D / 16; j++)
      #pragma unroll
      for (int e = 0; e < 4; e++) sum[t][j][e] = 0.f;
  }
  const int low = lane & 7, second = (lane >> 3) & 1, third = lane >> 4;
  int stage = 0;
  #pragma unroll 1
  for (int tile = warp; tile < tiles; tile += WARPS) {
    fetch(tile + (STAGES - 1) * WARPS, stage ? stage - 1 : STAGES - 1);
    asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1));
    __syncwarp();
    const unsigned stage_at = ring_at + stage * STAGE * 16;
    float score[NT][4];
    #pragma unroll
    for (int t = 0; t < NT; t++)
      #pragma unroll
      for (int e = 0; e < 4; e++) score[t][e] = 0.f;
    #pragma unroll
    for (int c = 0; c < D / 16; c++) {
      unsigned x[4];
      omlxd_matrices(x, stage_at + ((low + second * 8) * CHUNKS + ((2 * c + third) ^ low)) * 16);
      #pragma unroll
      for (int t = 0; t < NT; t++)
        omlxd_mma<T>(score[t], x[0], x[1], x[2], x[3], query[t][c][0], query[t][c][1]);
    }
    unsigned early[NT], late[NT];
    #pragma unroll
    for (int t = 0; t < NT; t++) {
      float shrink[2];
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        score[t][h] = __fmul_rn(score[t][h], factor);
        score[t][2 + h] = __fmul_rn(score[t][2 + h], factor);
        float now = fmaxf(score[t][h], score[t][2 + h]);
        #pragma unroll
        for (int o = 4; o < 32; o <<= 1) now = fmaxf(now, __shfl_xor_sync(~0u, now, o));
        now = fmaxf(now, best[t][h]);
        shrink[h] = omlxd_exp2(__fsub_rn(best[t][h], now));
        best[t][h] = now;
        score[t][h] = omlxd_exp2(__fsub_rn(score[t][h], now));
        score[t][2 + h] = omlxd_exp2(__fsub_rn(score[t][2 + h], now));
        total[t][h] = __fmaf_rn(total[t][h], shrink[h], __fadd_rn(score[t][h], score[t][2 + h]));
      }
      early[t] = omlxd_turned(omlxd_pair<T>(score[t][0], score[t][1]));
      late[t] = omlxd_turned(omlxd_pair<T>(score[t][2], score[t][3]));
      #pragma unroll
      for (int j = 0; j < D / 16; j++)
        #pragma unroll
        for (int e = 0; e < 4; e++) sum[t][j][e] = __fmul_rn(sum[t][j][e], shrink[e & 1]);
    }
    #pragma unroll
    for (int j = 0; j < D / 16; j++) {
      unsigned x[4];
      omlxd_turned_matrices(
          x, stage_at + (TILE * CHUNKS + (low + third * 8) * CHUNKS + ((2 * j + second) ^ low)) * 16);
      #pragma unroll
      for (int t = 0; t < NT; t++) omlxd_mma<T>(sum[t][j], x[0], x[1], x[2], x[3], early[t], late[t]);
    }
    __syncwarp();
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  asm volatile("cp.async.wait_all;");
  __syncthreads();
  float* vectors = reinterpret_cast<float*>(rings);  // (warps, columns, D + 4)
  #pragma unroll
  for (int t = 0; t < NT; t++)
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      const int c = t * 8 + quad * 2 + h;
      #pragma unroll
      for (int o = 4; o < 32; o <<= 1)
        total[t][h] = __fadd_rn(total[t][h], __shfl_xor_sync(~0u, total[t][h], o));
      if (group == 0) { tops[warp * COLUMNS + c] = best[t][h]; masses[warp * COLUMNS + c] = total[t][h]; }
      #pragma unroll
      for (int j = 0; j < D / 16; j++)
        #pragma unroll
        for (int e = 0; e < 2; e++)
          vectors[(warp * COLUMNS + c) * (D + 4) + j * 16 + e * 8 + group] = sum[t][j][2 * e + h];
    }
  __syncthreads();
  for (int i = threadIdx.x; i < columns * D; i += 32 * WARPS) {
    const int c = i / D, d = i % D;
    float top = -1e30f, mass = 0.f, x = 0.f;
    #pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w * COLUMNS + c]);
    #pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float weight = omlxd_exp2(__fsub_rn(tops[w * COLUMNS + c], top));
      mass = __fmaf_rn(weight, masses[w * COLUMNS + c], mass);
      x = __fmaf_rn(weight, vectors[(w * COLUMNS + c) * (D + 4) + d], x);
    }
    const int index = holders[2 * ((first + c) / (GROUP * fresh)) + 1];
    const long put = place(c) * most + index * parts + part;
    sums[put * D + d] = x;
    if (d == 0) { weights[put * 2] = top; weights[put * 2 + 1] = mass; }
  }
}
