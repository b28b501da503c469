extern "C" __global__ void FUNCTION(
    const T* q,
#if OWN
    const unsigned long long* tails,
#else
    const T* keys, const T* values,
#endif
    const int* starts, const int* ends, const float* scale,
#if OWN
    const int* behind, float* sums, float* weights,
#else
    float* sums, float* weights, const int capacity,
#endif
    const int new_tokens, const int KV_HEADS, const int window) {
  // grid (spans, KV heads x tiles of 16 queries, rows). A warp reads 16 tokens at once for all 16 queries:
  // fragments of mma.m16n8k16, whose k and n are dealt out so that a lane reads 16 bytes at a time.
  constexpr int CHUNKS = D / 8, TILES = (CHUNKS + 7) / 8, TURNS = (CHUNKS + 3) / 4;
  const uint4 none = make_uint4(0, 0, 0, 0);
  const int fresh = new_tokens, queries = GROUP * fresh, tiles = (queries + 15) / 16;
  const int span = blockIdx.x, row = blockIdx.z, kv_head = blockIdx.y / tiles, tile = blockIdx.y % tiles;
  const int from = starts[row] + span * SPAN, end = ends[row], to = min(from + SPAN, end);
  if (from >= end) return;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quad = lane & 3;
  FIND_ROW
  const uint4* K = reinterpret_cast<const uint4*>(keys) + head * CHUNKS;
  const uint4* V = reinterpret_cast<const uint4*>(values) + head * CHUNKS;
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
}
