extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) FUNCTION(
    const T* q, const T* rope_q, const unsigned long long* tails, const int* ends, const float* scale,
    const int* behind, float* sums, float* weights, const int heads, const int new_tokens, const int columns,
    const int each) {
  // grid (spans, tiles of 16 heads, tokens of all rows)
  constexpr int WIDTH = D + E, CHUNKS = WIDTH / 8, STRIDE = CHUNKS + 1, STEPS = WIDTH / 16, OWN = D / WARPS;
  extern __shared__ uint4 ring[];
  __shared__ float tops[WARPS][16], masses[WARPS][16];
  __shared__ __align__(16) T shares[16][TILE + 8];
  const int span = blockIdx.x, tile = blockIdx.y, row = blockIdx.z;
  const int from = span * SPAN, end = ends[row], to = min(from + SPAN, end);
  if (from >= end) return;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, line = lane >> 2, quad = lane & 3;
  const int low = lane & 7, second = lane >> 3 & 1, third = lane >> 4;
  const unsigned long long* own = tails + (long)(row / new_tokens) * columns;
  const int before = own[3];  // Tokens in segments, which tiles divide.
  const uint4 *latents, *parts;
  auto turn_to = [&](int token) {  // Token `token` of the row, and what follows it in its array.
    const int segment = token < before ? token / each : -1;
    const unsigned long long* at = segment < 0 ? own : own + 4 + segment * 2;
    const int first = segment < 0 ? token - before : token - segment * each;
    latents = reinterpret_cast<const uint4*>(at[0]) + (long)first * (D / 8);
    parts = reinterpret_cast<const uint4*>(at[1]) + (long)first * (E / 8);
  };
  auto fetch = [&](int base, int stage) {
    turn_to(base);
    for (int i = threadIdx.x; i < TILE * CHUNKS; i += 32 * WARPS) {
      const int token = i / CHUNKS, chunk = i % CHUNKS;
      const bool has = base + token < to;
      const int place = (stage * TILE + token) * STRIDE + chunk, part = chunk - D / 8;
      const uint4* x = part < 0 ? latents + token * (D / 8) + chunk : parts + token * (E / 8) + part;
      OMLXD_COPY(omlxd_shared(ring + place), has ? x : latents, has ? 16 : 0);
    }
    asm volatile("cp.async.commit_group;");
  };
  fetch(from, 0);
  unsigned qs[STEPS][4];
  #pragma unroll
  for (int i = 0; i < 4; i++) {
    const int head = tile * 16 + line + 8 * (i & 1);
    const long place = (long)row * heads + head;
    #pragma unroll
    for (int s = 0; s < STEPS; s++) {
      const int k = s * 16 + quad * 2 + 8 * (i >> 1);
      const T* x = s < D / 16 ? q + place * D + k : rope_q + place * E + k - D;
      qs[s][i] = head < heads ? *reinterpret_cast<const unsigned*>(x) : 0;
    }
  }
  float best[2] = {-1e30f, -1e30f}, total[2] = {0.f, 0.f}, sum[OWN / 8][4];
  #pragma unroll
  for (int t = 0; t < OWN / 8; t++)
    #pragma unroll
    for (int e = 0; e < 4; e++) sum[t][e] = 0.f;
  for (int base = from, stage = 0; base < to; base += TILE, stage ^= 1) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    if (base + TILE < to) fetch(base + TILE, stage ^ 1);
    const uint4* held = ring + stage * TILE * STRIDE;
    float dot[2][4], part[4];
    #pragma unroll
    for (int e = 0; e < 4; e++) dot[0][e] = dot[1][e] = part[e] = 0.f;
    const unsigned keys = omlxd_shared(held + (warp * 8 + low) * STRIDE + (lane >> 3));
    #pragma unroll
    for (int s = 0; s < STEPS; s += 2) {
      unsigned x[4];
      omlxd_matrices(x, keys + s * 32);
      const unsigned *a = qs[s], *b = qs[s + 1];
      omlxd_mma<T>(s < D / 16 ? dot[0] : part, a[0], a[1], a[2], a[3], x[0], x[1]);
      omlxd_mma<T>(s < D / 16 ? dot[1] : part, b[0], b[1], b[2], b[3], x[2], x[3]);
    }
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      #pragma unroll
      for (int e = 0; e < 2; e++) {
        const int i = 2 * h + e, token = base + warp * 8 + quad * 2 + e;
        const float x = (dot[0][i] + dot[1][i]) * scale[0] + part[i];
        part[i] = token < to ? x * 1.44269504f : -INFINITY;
      }
      float top = fmaxf(part[2 * h], part[2 * h + 1]);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      if (quad == 0) tops[warp][line + 8 * h] = top;
    }
    __syncthreads();
    float shrink[2];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      float now = best[h];
      #pragma unroll
      for (int w = 0; w < WARPS; w++) now = fmaxf(now, tops[w][line + 8 * h]);
      shrink[h] = omlxd_exp2(best[h] - now);
      best[h] = now;
      const float a = omlxd_exp2(part[2 * h] - now), b = omlxd_exp2(part[2 * h + 1] - now);
      total[h] = total[h] * shrink[h] + a + b;
      *reinterpret_cast<unsigned*>(&shares[line + 8 * h][warp * 8 + quad * 2]) = omlxd_pair<T>(a, b);
    }
    #pragma unroll
    for (int t = 0; t < OWN / 8; t++) {
      sum[t][0] *= shrink[0]; sum[t][1] *= shrink[0]; sum[t][2] *= shrink[1]; sum[t][3] *= shrink[1];
    }
    __syncthreads();
    #pragma unroll
    for (int k = 0; k < TILE; k += 16) {
      unsigned a[4];
      omlxd_matrices(a, omlxd_shared(&shares[low + second * 8][k + third * 8]));
      const unsigned values = omlxd_shared(held + (k + second * 8 + low) * STRIDE + warp * (OWN / 8) + third);
      #pragma unroll
      for (int t = 0; t < OWN / 8; t += 2) {
        unsigned x[4];
        omlxd_turned_matrices(x, values + t * 16);
        omlxd_mma<T>(sum[t], a[0], a[1], a[2], a[3], x[0], x[1]);
        omlxd_mma<T>(sum[t + 1], a[0], a[1], a[2], a[3], x[2], x[3]);
      }
    }
  }
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    float mass = total[h];
    mass += __shfl_xor_sync(~0u, mass, 1);
    mass += __shfl_xor_sync(~0u, mass, 2);
    if (quad == 0) masses[warp][line + 8 * h] = mass;
  }
  __syncthreads();
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    const int head = tile * 16 + line + 8 * h;
    if (head >= heads) continue;
    const long at = ((long)row * heads + head) * gridDim.x + span;
    #pragma unroll
    for (int t = 0; t < OWN / 8; t++)
      *reinterpret_cast<float2*>(sums + at * D + warp * OWN + t * 8 + quad * 2) =
          make_float2(sum[t][2 * h], sum[t][2 * h + 1]);
    if (warp == 0 && quad == 0) {
      float mass = 0.f;
      #pragma unroll
      for (int w = 0; w < WARPS; w++) mass += masses[w][line + 8 * h];
      weights[at * 2] = best[h];
      weights[at * 2 + 1] = mass;
    }
  }
}
