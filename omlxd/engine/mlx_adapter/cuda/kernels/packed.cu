// Numbers of the low half of x, each beside that of the high half, as float16; exact.
template <int BITS> __device__ inline void omlxd_unpack(unsigned x, unsigned* out);
template <> __device__ inline void omlxd_unpack<8>(unsigned x, unsigned* out) {
  #pragma unroll
  for (int j = 0; j < 2; j++)
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out[j])
        : "r"(__byte_perm(x, 0x64646464, j ? 0x4341 : 0x4240)), "r"(0x64006400));
}
template <> __device__ inline void omlxd_unpack<4>(unsigned x, unsigned* out) {
  #pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const unsigned y = x >> (4 * j);
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out[j]) : "r"(y & 0x000f000f | 0x64006400), "r"(0x64006400));
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out[j + 1])
        : "r"(y & 0x00f000f0 | 0x64006400), "r"(0x2c002c00), "r"(0xd400d400));
  }
}
template <int BYTES> __device__ inline void omlxd_load(const void* from, unsigned* out) {
  if constexpr (BYTES == 2) {
    *out = *reinterpret_cast<const unsigned short*>(from);
  } else if constexpr (BYTES == 4) {
    *out = *reinterpret_cast<const unsigned*>(from);
  } else if constexpr (BYTES == 6) {
    const unsigned short* x = reinterpret_cast<const unsigned short*>(from);
    out[0] = x[0] | (unsigned)x[1] << 16; out[1] = x[2];
  } else if constexpr (BYTES == 8) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    out[0] = x.x; out[1] = x.y;
  } else {
    #pragma unroll
    for (int i = 0; i < BYTES / 16; i++) {
      const uint4 x = reinterpret_cast<const uint4*>(from)[i];
      out[4 * i] = x.x; out[4 * i + 1] = x.y; out[4 * i + 2] = x.z; out[4 * i + 3] = x.w;
    }
  }
}
template <typename T> __device__ inline float omlxd_number(const unsigned* pairs, int index) {
  const float2 x = omlxd_floats<T>(pairs[index / 2]);
  return index % 2 ? x.y : x.x;
}
extern "C" __global__ void __launch_bounds__(32 * WARPS) FUNCTION(
    const T* q,
#if STEP
    const unsigned* put_keys, const T* put_key_scales, const T* put_key_biases,
    const unsigned* put_values, const T* put_value_scales, const T* put_value_biases,
#endif
#if OWN
    const unsigned long long* tails,
#else
    const unsigned* keys, const T* key_scales, const T* key_biases,
    const unsigned* values, const T* value_scales, const T* value_biases,
#endif
    const int* starts, const int* ends, const float* scale,
#if OWN && !STEP
    const int* behind,
#endif
    float* sums, float* weights,
#if OWN
    const int new_tokens, const int KV_HEADS, const int columns, const int each
#else
    const int capacity, const int new_tokens, const int KV_HEADS
#endif
) {
  // grid (spans, KV heads x tiles of 16 queries x parts, rows). A part has the sums of GV groups of values:
  // registers have no room for all of heads over 256 wide. A warp reads 16 tokens at once for 16 queries:
  // fragments of mma.m16n8k16, whose k and n are dealt out so that a product is of one group of numbers.
  constexpr int E = 32 / BITS, WORDS = D / E, GROUPS = D / G;  // numbers of a word; of a token
  constexpr int KW = G / (4 * E) < 4 ? G / (4 * E) : 4, KC = WORDS / (4 * KW);
  // Of values a lane has VN numbers of a group: those of VW words, or of half a word, which two lanes read.
  constexpr int VN = G / 8, VW = VN < E ? 1 : VN / E, HALVES = VN < E ? 1 : 2;
  constexpr int PARTS = D > 256 ? 2 : 1, GV = GROUPS / PARTS;
  constexpr bool HELD = D <= 128;  // Queries have room in registers, and so have all values of 16 tokens.
  constexpr float UP = 64.f;  // Weights times scales are far from what float16 can't hold.
  const int fresh = new_tokens, queries = GROUP * fresh, tiles = (queries + 15) / 16;
  const int span = blockIdx.x, row = blockIdx.z, part = blockIdx.y % PARTS, own_group = part * GV;
  const int tile = blockIdx.y / PARTS % tiles, kv_head = blockIdx.y / PARTS / tiles;
  const int from = starts[row] + span * SPAN, end = ends[row], to = min(from + SPAN, end);
  if (from >= end) return;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, line = lane >> 2, quad = lane & 3;
  const long of_row = (long)row * KV_HEADS + kv_head;
#if OWN
  const unsigned long long* own = tails + (long)row * columns;
  const long before = own[7];  // Tokens in segments, which spans divide.
  const int segment = from < before ? from / each : -1;
  const unsigned long long* at = segment < 0 ? own : own + 8 + segment * 6;
  const unsigned *keys = reinterpret_cast<const unsigned*>(at[0]);
  const T* key_scales = reinterpret_cast<const T*>(at[1]);
  const T* key_biases = reinterpret_cast<const T*>(at[2]);
  const unsigned *values = reinterpret_cast<const unsigned*>(at[3]);
  const T* value_scales = reinterpret_cast<const T*>(at[4]);
  const T* value_biases = reinterpret_cast<const T*>(at[5]);
  const long column =
      segment < 0 ? (long)kv_head * (long)own[6] - before : ((long)kv_head - segment) * each;
#else
  const long column = of_row * capacity;
#endif
#if STEP
  if (to == end) {  // Nobody else reads the newest token.
    const long last = column + end - 1;
    for (int i = threadIdx.x; i < WORDS; i += 32 * WARPS) {
      const_cast<unsigned*>(keys)[last * WORDS + i] = put_keys[of_row * WORDS + i];
      const_cast<unsigned*>(values)[last * WORDS + i] = put_values[of_row * WORDS + i];
    }
    for (int i = threadIdx.x; i < GROUPS; i += 32 * WARPS) {
      const_cast<T*>(key_scales)[last * GROUPS + i] = put_key_scales[of_row * GROUPS + i];
      const_cast<T*>(key_biases)[last * GROUPS + i] = put_key_biases[of_row * GROUPS + i];
      const_cast<T*>(value_scales)[last * GROUPS + i] = put_value_scales[of_row * GROUPS + i];
      const_cast<T*>(value_biases)[last * GROUPS + i] = put_value_biases[of_row * GROUPS + i];
    }
    __syncthreads();
  }
#endif
  // Query m of a head's group: new token m / GROUP, head m % GROUP.
  long place[2];
  int limit[2];
  float factor[2], q_sum[2][GROUPS];
  uint4 qs[D / 16];
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    const int m = tile * 16 + line + 8 * h, token = m / GROUP;
    place[h] = m < queries ? (of_row * GROUP + m % GROUP) * fresh + token : -1;
    limit[h] = m < queries ? min(to, end - fresh + token + 1) : 0;
    float x[D / 4], most = 0.f;
    #pragma unroll
    for (int w = 0; w < WORDS / 4; w++) {
      const int first = ((w / KW * 4 + quad) * KW + w % KW) * E;
      unsigned raw[E / 2];
      #pragma unroll
      for (int e = 0; e < E / 2; e++) raw[e] = 0;
      if (place[h] >= 0) omlxd_load<E * 2>(q + place[h] * D + first, raw);
      #pragma unroll
      for (int e = 0; e < E; e++) most = fmaxf(most, fabsf(x[w * E + e] = omlxd_number<T>(raw, e)));
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const unsigned power = __float_as_uint(most) & 0x7f800000;
    const float down = __uint_as_float(0x7f000000 - power);
    factor[h] = __uint_as_float(power) * scale[0] * 1.44269504f;
    #pragma unroll
    for (int g = 0; g < GROUPS; g++) q_sum[h][g] = 0.f;
    #pragma unroll
    for (int w = 0; w < WORDS / 4; w++) {
      #pragma unroll
      for (int e = 0; e < E; e++) q_sum[h][w / KW * 4 * KW * E / G] += x[w * E + e] *= down;
      #pragma unroll
      for (int s = 0; s < E / 4; s++) {
        const float* y = x + w * E + 2 * s;
        const unsigned one = omlxd_pair<float16>(y[0], y[E / 2]);
        const unsigned two = omlxd_pair<float16>(y[1], y[E / 2 + 1]);
        uint4& into = qs[w * (E / 4) + s];
        if (h) { into.y = one; into.w = two; } else { into.x = one; into.z = two; }
      }
    }
    #pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      q_sum[h][g] += __shfl_xor_sync(~0u, q_sum[h][g], 1);
      q_sum[h][g] += __shfl_xor_sync(~0u, q_sum[h][g], 2);
    }
  }
  __shared__ uint4 shared_qs[HELD ? 1 : D / 16][32];
  if constexpr (!HELD) {
    if (warp == 0)
      #pragma unroll
      for (int f = 0; f < D / 16; f++) shared_qs[f][lane] = qs[f];
    __syncthreads();
  }
  constexpr int PAIRS = (GROUPS + 1) / 2, PV = (GV + 1) / 2;
  struct Tile { unsigned k[2][KC * KW], v[4][GV * VW], ks[4][PAIRS], kb[4][PAIRS], vs[4][PV], vb[4][PV]; };
  auto load_values = [&](unsigned* v, int token, int g) {
    #pragma unroll
    for (int w = 0; w < VW; w++) v[w] = 0;
    const int word = ((own_group + g) * 8 + line) * VN / E;
    if (token < to) omlxd_load<VW * 4>(values + (column + token) * WORDS + word, v);
  };
  auto load = [&](int base, Tile& x) {
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const int token = base + 8 * i + line;
      #pragma unroll
      for (int c = 0; c < KC; c++) {
        #pragma unroll
        for (int w = 0; w < KW; w++) x.k[i][c * KW + w] = 0;
        if (token < to)
          omlxd_load<KW * 4>(keys + (column + token) * WORDS + (c * 4 + quad) * KW, x.k[i] + c * KW);
      }
    }
    #pragma unroll
    for (int n = 0; n < 4; n++) {
      const int token = base + quad * 2 + (n & 1) + (n >> 1) * 8;
      #pragma unroll
      for (int p = 0; p < PAIRS; p++) x.ks[n][p] = x.kb[n][p] = 0;
      #pragma unroll
      for (int p = 0; p < PV; p++) x.vs[n][p] = x.vb[n][p] = 0;
      if (token < to) {
        omlxd_load<GROUPS * 2>(key_scales + (column + token) * GROUPS, x.ks[n]);
        omlxd_load<GROUPS * 2>(key_biases + (column + token) * GROUPS, x.kb[n]);
        omlxd_load<GV * 2>(value_scales + (column + token) * GROUPS + own_group, x.vs[n]);
        omlxd_load<GV * 2>(value_biases + (column + token) * GROUPS + own_group, x.vb[n]);
      }
      if constexpr (HELD)
        #pragma unroll
        for (int g = 0; g < GV; g++) load_values(x.v[n] + g * VW, token, g);
    }
  };
  float best[2] = {-1e30f, -1e30f}, total[2] = {0.f, 0.f}, shift[2][GV], sum[GV * VN][4];
  #pragma unroll
  for (int g = 0; g < GV; g++) shift[0][g] = shift[1][g] = 0.f;
  #pragma unroll
  for (int t = 0; t < GV * VN; t++)
    #pragma unroll
    for (int e = 0; e < 4; e++) sum[t][e] = 0.f;
  Tile now, next;
  if constexpr (AHEAD) load(from + warp * 16, next);
  for (int base = from + warp * 16; base < to; base += 16 * WARPS) {
    if constexpr (AHEAD) {
      now = next;
      load(base + 16 * WARPS, next);
    } else {
      load(base, now);
    }
    float score[2][4];
    #pragma unroll
    for (int i = 0; i < 2; i++)
      #pragma unroll
      for (int e = 0; e < 4; e++) score[i][e] = 0.f;
    #pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      float dot[2][4];
      #pragma unroll
      for (int i = 0; i < 2; i++)
        #pragma unroll
        for (int e = 0; e < 4; e++) dot[i][e] = 0.f;
      #pragma unroll
      for (int w = g * (WORDS / 4 / GROUPS); w < (g + 1) * (WORDS / 4 / GROUPS); w++) {
        unsigned k[2][E / 2];
        #pragma unroll
        for (int i = 0; i < 2; i++) omlxd_unpack<BITS>(now.k[i][w], k[i]);
        #pragma unroll
        for (int s = 0; s < E / 4; s++) {
          const int f = w * (E / 4) + s;
          const uint4 a = HELD ? qs[f] : shared_qs[HELD ? 0 : f][lane];
          #pragma unroll
          for (int i = 0; i < 2; i++)
            omlxd_mma<float16>(dot[i], a.x, a.y, a.z, a.w, k[i][2 * s], k[i][2 * s + 1]);
        }
      }
      #pragma unroll
      for (int n = 0; n < 4; n++) {
        const float times = omlxd_number<T>(now.ks[n], g), plus = omlxd_number<T>(now.kb[n], g);
        #pragma unroll
        for (int h = 0; h < 2; h++)
          score[n >> 1][2 * h + (n & 1)] += times * dot[n >> 1][2 * h + (n & 1)] + plus * q_sum[h][g];
      }
    }
    float weight[2][4], shrink[2];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = best[h];
      #pragma unroll
      for (int n = 0; n < 4; n++) {
        const int token = base + 8 * (n >> 1) + quad * 2 + (n & 1);
        float& x = score[n >> 1][2 * h + (n & 1)];
        x = token < limit[h] ? x * factor[h] : -INFINITY;
        top = fmaxf(top, x);
      }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      shrink[h] = omlxd_exp2(best[h] - top);
      best[h] = top;
      total[h] *= shrink[h];
      #pragma unroll
      for (int g = 0; g < GV; g++) shift[h][g] *= shrink[h];
      #pragma unroll
      for (int n = 0; n < 4; n++) {
        weight[h][n] = omlxd_exp2(score[n >> 1][2 * h + (n & 1)] - top);
        total[h] += weight[h][n];
        #pragma unroll
        for (int g = 0; g < GV; g++) shift[h][g] += weight[h][n] * omlxd_number<T>(now.vb[n], g);
      }
    }
    if (__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f)) {
      #pragma unroll
      for (int t = 0; t < GV * VN; t++) {
        sum[t][0] *= shrink[0]; sum[t][1] *= shrink[0]; sum[t][2] *= shrink[1]; sum[t][3] *= shrink[1];
      }
    }
    #pragma unroll
    for (int g = 0; g < GV; g++) {
      unsigned share[2][2], v[4][VW];
      #pragma unroll
      for (int n = 0; n < 4; n++) {
        if constexpr (!HELD) load_values(v[n], base + quad * 2 + (n & 1) + (n >> 1) * 8, g);
        else
          #pragma unroll
          for (int w = 0; w < VW; w++) v[n][w] = now.v[n][g * VW + w];
      }
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        const float one = omlxd_number<T>(now.vs[2 * i], g) * UP;
        const float two = omlxd_number<T>(now.vs[2 * i + 1], g) * UP;
        #pragma unroll
        for (int h = 0; h < 2; h++)
          share[h][i] = omlxd_pair<float16>(weight[h][2 * i] * one, weight[h][2 * i + 1] * two);
      }
      #pragma unroll
      for (int w = 0; w < VW; w++)
        #pragma unroll
        for (int half = 0; half < HALVES; half++) {
          const unsigned pick = (HALVES == 1 ? line & 1 : half) ? 0x7632 : 0x5410;
          unsigned x[2][E / 2];
          #pragma unroll
          for (int i = 0; i < 2; i++)
            omlxd_unpack<BITS>(__byte_perm(v[2 * i][w], v[2 * i + 1][w], pick), x[i]);
          #pragma unroll
          for (int j = 0; j < E / 2; j++)
            omlxd_mma<float16>(sum[g * VN + w * E + half * (E / 2) + j], share[0][0], share[1][0],
                               share[0][1], share[1][1], x[0][j], x[1][j]);
        }
    }
  }
  __shared__ float tops[WARPS][16], masses[WARPS][16], shifts[WARPS][16][GV], vectors[WARPS][16][G];
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    float mass = total[h];
    mass += __shfl_xor_sync(~0u, mass, 1);
    mass += __shfl_xor_sync(~0u, mass, 2);
    if (quad == 0) { tops[warp][line + 8 * h] = best[h]; masses[warp][line + 8 * h] = mass; }
    #pragma unroll
    for (int g = 0; g < GV; g++) {
      float x = shift[h][g];
      x += __shfl_xor_sync(~0u, x, 1);
      x += __shfl_xor_sync(~0u, x, 2);
      if (quad == 0) shifts[warp][line + 8 * h][g] = x;
    }
  }
  #pragma unroll
  for (int g = 0; g < GV; g++) {
    if (g) __syncthreads();
    #pragma unroll
    for (int t = 0; t < VN; t++)
      #pragma unroll
      for (int e = 0; e < 4; e++) {
        const int column = quad * 2 + (e & 1);  // Of tile t.
        vectors[warp][line + 8 * (e >> 1)][column * VN + t] = sum[g * VN + t][e] * (1.f / UP);
      }
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * G; i += 32 * WARPS) {
      const int h = i / G, d = i % G, m = tile * 16 + h;
      if (m >= queries) break;
      float top = -1e30f, mass = 0.f, x = 0.f;
      #pragma unroll
      for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w][h]);
      #pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float part = omlxd_exp2(tops[w][h] - top);
        mass += part * masses[w][h];
        x += part * (vectors[w][h][d] + shifts[w][h][g]);
      }
      const long to_place = ((of_row * GROUP + m % GROUP) * fresh + m / GROUP) * gridDim.x + span;
      sums[to_place * D + (own_group + g) * G + d] = x;
      if (part + g + d == 0) { weights[to_place * 2] = top; weights[to_place * 2 + 1] = mass; }
    }
  }
}
