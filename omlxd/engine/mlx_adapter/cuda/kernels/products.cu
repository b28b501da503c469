template <typename T> struct Products {
  const T *x, *norm, *residual, *scaled, *w[3], *bias[3];
  const float* squares;
  T *y[3], *next;
  float* next_squares;
  int n[3];
  int rows, k, parts;
  float eps;
};

// A block computes 16 * MT rows of weights at once, for all rows of x (NT eights): fragments of mma.m16n8k16
// with the weights as its m, whose k is dealt out so that a lane copies 16 bytes at a time, into places of a
// ring of ST stages that it alone reads. Warp w adds the pieces w, w + KW ... of CHM * 32 of K; G such groups
// of warps are a block. With SILU a sixteen has 8 rows of the gate and 8 of what it lets through. Of x's rows
// those from `before` on are the block's. With LATE other blocks of the launch compute x and what comes with
// it: `awaited` of them count themselves in `done`. The first weights are on their way meanwhile.
template <typename T, int NT, int MT, int G, int KW, int CHM, int CH, int ST, int DB, bool NORM, bool SILU,
          bool SQUARES, bool SCALED, bool LATE>
__device__ __forceinline__ void omlxd_products(const Products<T>& p, const int block, const int blocks,
                                               const int before, const int* done, const int awaited) {
  constexpr int ROWS = 16 * MT * G, COLS = 8 * NT, PAD = ROWS + 4, SUBS = CHM / CH;
  constexpr int WP = CH * MT * 2, STAGE = (WP + CH * NT) * 32;
  constexpr int HALF = SILU ? ROWS / 2 : ROWS;
  const int rows = p.rows - before;
  extern __shared__ uint4 omlxd_ring[];
  const int warp = threadIdx.x >> 5, slice = warp % KW, part = warp / KW;
  const int lane = threadIdx.x & 31, group = lane >> 2, quad = lane & 3;
  uint4* ring = omlxd_ring + warp * ST * STAGE + lane;
  const unsigned place = (unsigned)__cvta_generic_to_shared(ring);
  float* sums = reinterpret_cast<float*>(omlxd_ring + KW * G * ST * STAGE);  // [DB][KW][COLS][PAD]
  float* squares = sums + DB * KW * COLS * PAD;  // [KW][COLS]; what a row is multiplied by where SQUARES
  int tiles[3];
  #pragma unroll
  for (int i = 0; i < 3; i++) tiles[i] = (p.n[i] + HALF - 1) / HALF;
  if (SILU) tiles[1] = 0;
  const int all = tiles[0] + tiles[1] + tiles[2];
  const int steps = (p.k + KW * CHM * 32 - 1) / (KW * CHM * 32) * SUBS;
  auto start = [&](int step) { return ((step / SUBS * KW + slice) * SUBS + step % SUBS) * CH * 32; };

  const T* x[NT];
  bool is_row[NT];
  #pragma unroll
  for (int t = 0; t < NT; t++) {
    is_row[t] = t * 8 + group < rows;
    x[t] = p.x + (long)(is_row[t] ? before + t * 8 + group : 0) * p.k + quad * 8;
  }
  int load_tile = block, load_step = 0;
  const T* from[2 * MT];
  auto aim = [&]() {
    int t = load_tile, i = 0;
    if (t >= tiles[0]) { t -= tiles[0]; i = 1; if (t >= tiles[1]) { t -= tiles[1]; i = 2; } }
    const T* w = i == 0 ? p.w[0] : i == 1 ? p.w[1] : p.w[2];
    const int n = i == 0 ? p.n[0] : i == 1 ? p.n[1] : p.n[2];
    #pragma unroll
    for (int j = 0; j < 2 * MT; j++) {
      const int r = t * HALF + part * (HALF / G) + (SILU ? j >> 1 : j) * 8 + group;
      from[j] = (SILU && (j & 1) ? p.w[1] : w) + (long)min(r, n - 1) * p.k + quad * 8;
    }
  };
  auto load_x = [&](int stage, int k0) {
    #pragma unroll
    for (int c = 0; c < CH; c++) {
      const int k = k0 + c * 32;
      #pragma unroll
      for (int t = 0; t < NT; t++) {
        const unsigned to = place + (stage * STAGE + (WP + c * NT + t) * 32) * 16;
        const int bytes = is_row[t] && k + quad * 8 < p.k ? 16 : 0;
        const T* at = x[t] + (bytes ? k : 0);
        if (LATE)  // Past the first cache, which does not follow what others write.
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(at), "r"(bytes));
        else
          asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(at), "r"(bytes));
      }
    }
  };
  auto load = [&](int stage, bool with_x) {
    if (load_tile < all) {
      const int k0 = start(load_step);
      #pragma unroll
      for (int c = 0; c < CH; c++) {
        const int k = k0 + c * 32, bytes = k + quad * 8 < p.k ? 16 : 0;
        #pragma unroll
        for (int j = 0; j < 2 * MT; j++) {
          const unsigned to = place + (stage * STAGE + (c * 2 * MT + j) * 32) * 16;
          const T* at = from[j] + (bytes ? k : 0);
          asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;"
                       :: "r"(to), "l"(at), "r"(bytes));
        }
      }
      if (with_x) load_x(stage, k0);
      if (++load_step == steps) {
        load_step = 0;
        load_tile += blocks;
        if (load_tile < all) aim();
      }
    }
    asm volatile("cp.async.commit_group;");
  };
  if (load_tile < all) aim();
  int late[ST - 1];
  #pragma unroll
  for (int s = 0; s < ST - 1; s++) {
    late[s] = load_tile < all ? start(load_step) : p.k;
    load(s, !LATE);
  }
  if (LATE) {
    omlxd_await(done, awaited);
    #pragma unroll
    for (int s = 0; s < ST - 1; s++) load_x(s, late[s]);
    asm volatile("cp.async.commit_group;");
  }

  if (SQUARES) {  // All of a lane's numbers are on their way together.
    constexpr int EACH = COLS / (KW * G) ? COLS / (KW * G) : 1;
    float of_row[EACH];
    #pragma unroll
    for (int c = 0; c < EACH; c++) of_row[c] = 0.f;
    for (int base = 0; base < p.parts; base += 32 * 8) {
      float some[EACH][8];
      #pragma unroll
      for (int c = 0; c < EACH; c++)
        #pragma unroll
        for (int u = 0; u < 8; u++) {
          const int col = warp + c * KW * G, i = base + u * 32 + lane;
          const float* from = p.squares + (long)(before + col) * p.parts + i;
          some[c][u] = col < rows && i < p.parts ? __ldcg(from) : 0.f;
        }
      #pragma unroll
      for (int c = 0; c < EACH; c++)
        #pragma unroll
        for (int u = 0; u < 8; u++) of_row[c] += some[c][u];
    }
    #pragma unroll
    for (int c = 0; c < EACH; c++) {
      #pragma unroll
      for (int o = 16; o; o >>= 1) of_row[c] += __shfl_xor_sync(~0u, of_row[c], o);
      const int col = warp + c * KW * G;
      if (lane == 0 && col < rows) squares[col] = rsqrtf(of_row[c] / p.k + p.eps);
    }
  }
  float square[NT];
  #pragma unroll
  for (int t = 0; t < NT; t++) square[t] = 0.f;
  int stage = 0, which = 0;
  for (int tile = block; tile < all; tile += blocks) {
    float sum[MT][NT][4];
    #pragma unroll
    for (int m = 0; m < MT; m++)
      #pragma unroll
      for (int t = 0; t < NT; t++)
        #pragma unroll
        for (int e = 0; e < 4; e++) sum[m][t][e] = 0.f;
    for (int step = 0; step < steps; step++) {
      const int k0 = start(step);
      if (LATE && which == 0 && step == 0) asm volatile("cp.async.wait_group 0;" ::: "memory");
      else asm volatile("cp.async.wait_group %0;" :: "n"(ST - 2) : "memory");
      #pragma unroll
      for (int c = 0; c < CH; c++) {
        uint4 xs[NT];
        #pragma unroll
        for (int t = 0; t < NT; t++) xs[t] = ring[stage * STAGE + (WP + c * NT + t) * 32];
        if (NORM) {
          const int k = k0 + c * 32 + quad * 8;
          const uint4 g =
              k < p.k ? __ldg(reinterpret_cast<const uint4*>(p.norm + k)) : make_uint4(0, 0, 0, 0);
          const unsigned gs[4] = {g.x, g.y, g.z, g.w};
          #pragma unroll
          for (int t = 0; t < NT; t++) {
            unsigned ps[4] = {xs[t].x, xs[t].y, xs[t].z, xs[t].w};
            #pragma unroll
            for (int e = 0; e < 4; e++) {
              const float2 a = omlxd_floats<T>(ps[e]), b = omlxd_floats<T>(gs[e]);
              if (which == 0) square[t] = fmaf(a.y, a.y, fmaf(a.x, a.x, square[t]));
              ps[e] = omlxd_pair<T>(a.x * b.x, a.y * b.y);
            }
            xs[t] = make_uint4(ps[0], ps[1], ps[2], ps[3]);
          }
        }
        #pragma unroll
        for (int m = 0; m < MT; m++) {
          const uint4* at = ring + stage * STAGE + (c * MT + m) * 64;
          const uint4 a = at[0], b = at[32];
          #pragma unroll
          for (int t = 0; t < NT; t++) {
            omlxd_mma<T>(sum[m][t], a.x, b.x, a.y, b.y, xs[t].x, xs[t].y);
            omlxd_mma<T>(sum[m][t], a.z, b.z, a.w, b.w, xs[t].z, xs[t].w);
          }
        }
      }
      load(stage == 0 ? ST - 1 : stage - 1, true);
      if (++stage == ST) stage = 0;
    }
    if (DB == 1) __syncthreads();
    float* mine = sums + ((DB == 1 ? 0 : which & 1) * KW + slice) * COLS * PAD + part * 16 * MT;
    #pragma unroll
    for (int m = 0; m < MT; m++)
      #pragma unroll
      for (int t = 0; t < NT; t++)
        #pragma unroll
        for (int e = 0; e < 4; e++)
          mine[(t * 8 + quad * 2 + (e & 1)) * PAD + m * 16 + (e >> 1) * 8 + group] = sum[m][t][e];
    if (NORM && which == 0 && part == 0) {
      #pragma unroll
      for (int t = 0; t < NT; t++) {
        square[t] += __shfl_xor_sync(~0u, square[t], 1);
        square[t] += __shfl_xor_sync(~0u, square[t], 2);
        if (quad == 0) squares[slice * COLS + t * 8 + group] = square[t];
      }
    }
    int t = tile, i = 0;
    if (t >= tiles[0]) { t -= tiles[0]; i = 1; if (t >= tiles[1]) { t -= tiles[1]; i = 2; } }
    const int n = i == 0 ? p.n[0] : i == 1 ? p.n[1] : p.n[2];
    T* y = i == 0 ? p.y[0] : i == 1 ? p.y[1] : p.y[2];
    const T* bias = i == 0 ? p.bias[0] : i == 1 ? p.bias[1] : p.bias[2];
    // What is added to a thread's results and what these are multiplied by comes while warps wait.
    constexpr int THREADS = 32 * KW * G, ROUNDS = (HALF * COLS + THREADS - 1) / THREADS;
    T more[ROUNDS], times[ROUNDS];
    #pragma unroll
    for (int q = 0; q < ROUNDS; q++) {
      const int j = q * THREADS + threadIdx.x, col = j / HALF, at = t * HALF + j % HALF;
      const bool is_result = j < HALF * rows && at < n;
      if (p.residual) {
        const T* from = p.residual + (long)(before + col) * n + at;
        more[q].bits = is_result ? __ldcg(&from->bits) : 0;
      }
      if (SCALED) times[q] = is_result ? p.scaled[at] : T{};
    }
    __syncthreads();
    #pragma unroll
    for (int q = 0; q < ROUNDS; q++) {
      const int j = q * THREADS + threadIdx.x, col = j / HALF, r = j % HALF, at = t * HALF + r;
      const bool is_result = j < HALF * rows && at < n;
      float value = 0.f;
      if (is_result) {
        float scale = SQUARES ? squares[col] : 1.f;
        if (NORM) {
          float mean = 0.f;
          #pragma unroll
          for (int w = 0; w < KW; w++) mean += squares[w * COLS + col];
          scale = rsqrtf(mean / p.k + p.eps);
        }
        const float* parts = sums + (DB == 1 ? 0 : which & 1) * KW * COLS * PAD + col * PAD;
        const int first = SILU ? (r >> 3) * 16 + (r & 7) : r;
        #pragma unroll
        for (int w = 0; w < KW; w++) value += parts[w * COLS * PAD + first];
        value *= scale;
        if (bias) value += omlxd_float<T>(bias[at]);
        if (SILU) {
          float up = 0.f;
          #pragma unroll
          for (int w = 0; w < KW; w++) up += parts[w * COLS * PAD + first + 8];
          up *= scale;
          if (p.bias[1]) up += omlxd_float<T>(p.bias[1][at]);
          value = value / (1.f + __expf(-value)) * up;
        }
        if (p.residual) value += omlxd_float<T>(more[q]);
        const T result = omlxd_round<T>(value);
        y[(long)(before + col) * n + at] = result;
        if (SCALED) {
          value = omlxd_float<T>(result);
          p.next[(long)(before + col) * n + at] = omlxd_round<T>(value * omlxd_float<T>(times[q]));
        }
      }
      if (SCALED) {  // The squares of 16 results, whatever the tile.
        value *= value;
        #pragma unroll
        for (int o = 8; o; o >>= 1) value += __shfl_xor_sync(~0u, value, o);
        if (is_result && (r & 15) == 0)
          p.next_squares[(long)(before + col) * ((n + 15) / 16) + at / 16] = value;
      }
    }
    which++;
  }
  asm volatile("cp.async.wait_all;");
}
