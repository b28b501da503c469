__device__ inline int omlxd_span(int length) {
  const int longest = (length + MOST - 1) / MOST;
  return max(LEAST, (longest + 16 * WARPS - 1) / (16 * WARPS) * 16 * WARPS);
}
__device__ inline int omlxd_spans(int length) {
  const int span = omlxd_span(length);
  return (length + span - 1) / span;
}
// The last block of a query head merges the parts of that head. Thread i < `heads` of a block names one
// `head` that the block has read a part for, and how many `parts` this head has in all.
__device__ inline void omlxd_put_together(
    int heads, long head, int parts, int* due, long* whose, int* counters, int most, const float* sums,
    const float* weights, T* out) {
  __syncthreads();
  if (threadIdx.x < heads) {
    __threadfence();
    const bool is_last = atomicAdd(counters + head, 1) == parts - 1;
    if (is_last) counters[head] = 0;
    due[threadIdx.x] = is_last ? parts : 0;
    whose[threadIdx.x] = head;
    __threadfence();
  }
  __syncthreads();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (int i = warp; i < heads; i += WARPS) {
    const int count = due[i];
    if (!count) continue;
    const float* pairs = weights + whose[i] * most * 2;
    const float* vectors = sums + whose[i] * most * D + lane;
    float top = -1e30f, mass = 0.f, x[D / 32];
    #pragma unroll
    for (int e = 0; e < D / 32; e++) x[e] = 0.f;
    for (int s = lane; s < count; s += 32) top = fmaxf(top, omlxd_fresh(pairs + s * 2));
    #pragma unroll
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    #pragma unroll 1
    for (int begin = 0; begin < count; begin += 32) {
      const int here = min(32, count - begin);
      float own = 0.f;
      if (lane < here) {
        own = omlxd_exp2(omlxd_fresh(pairs + (begin + lane) * 2) - top);
        mass += own * omlxd_fresh(pairs + (begin + lane) * 2 + 1);
      }
      #pragma unroll 1
      for (int first = 0; first < here; first += 8) {
        float part[8][D / 32];
        #pragma unroll
        for (int s = 0; s < 8; s++)
          #pragma unroll
          for (int e = 0; e < D / 32; e++)
            part[s][e] = first + s < here ? omlxd_fresh(vectors + (begin + first + s) * D + e * 32) : 0.f;
        #pragma unroll
        for (int s = 0; s < 8; s++) {
          const float weight = __shfl_sync(~0u, own, first + s);
          #pragma unroll
          for (int e = 0; e < D / 32; e++) x[e] += weight * part[s][e];
        }
      }
    }
    #pragma unroll
    for (int o = 16; o; o >>= 1) mass += __shfl_xor_sync(~0u, mass, o);
    #pragma unroll
    for (int e = 0; e < D / 32; e++) out[whose[i] * D + e * 32 + lane] = omlxd_round<T>(x[e] / mass);
  }
}
__device__ __forceinline__ void omlxd_attend(
    const int block_x, const int block_y, uint4* rings, const int* done, const int awaited, ARGUMENTS) {
  // grid (parts of segments x tiles of columns, then parts of tails x rows; KV heads x PARTS). Row `row` is
  // new token `token` of row `held_row`, whose tokens follow each other: blocks that read the same KV run at
  // the same time.
  constexpr int CHUNKS = D / 8, TILE = 16, STAGE = 2 * TILE * CHUNKS, EACH = D / 64;
  T* queries = reinterpret_cast<T*>(rings + RING);
  T* fresh = queries + 8 * MOST_TILES * D;  // Key, value: the own, those of earlier new tokens.
  float* tops = reinterpret_cast<float*>(fresh + 2 * D * MOST_NEW);
  float* masses = tops + WARPS * 8 * MOST_TILES;
  long* whose = reinterpret_cast<long*>(masses + WARPS * 8 * MOST_TILES);
  int* due = reinterpret_cast<int*>(whose + 8 * MOST_TILES);
  const int parts = (length + SPAN - 1) / SPAN, of_segments = segments * parts * across;
  int* counter = const_cast<int*>(counters);
  const float factor = scale * 1.44269504f;
  if (block_x < of_segments) {
    const int tile = block_x % across, part = block_x / across % parts;
    const int slot = block_x / across / parts, kv_head = block_y / PARTS;
    const int* own = table + slot * (1 + 2 * rows);
    const unsigned long long k_at = addresses[slot * 2], v_at = addresses[slot * 2 + 1];
    const int first = tile * 8 * MOST_TILES, columns = min(own[0] * GROUP - first, 8 * MOST_TILES);
    if (columns <= 0 || block_y % PARTS) return;
    const int from = part * SPAN, to = min(from + SPAN, length);
    const long before = (long)kv_head * length * CHUNKS;
    // For the end, asked for now.
    const int c = first + min((int)threadIdx.x, columns - 1), row = own[1 + 2 * (c / GROUP)];
    const int all_parts = counts[row] * parts + omlxd_spans(ends[row] - starts[row]);
    #define RUN(N) \
      omlxd_segment<N>(q, q_norm, turns, k_at, v_at, before, own + 1, columns, first, from, to, factor, \
                       parts, part, most, 1, KV_HEADS, kv_head, rings, queries, tops, masses, sums, \
                       weights, done, awaited)
    if (MOST_TILES == 1 || columns <= 8) RUN(1);
    else if (MOST_TILES == 2 || columns <= 16) RUN(2);
    else RUN(MOST_TILES);
    omlxd_put_together(columns, ((long)row * KV_HEADS + kv_head) * GROUP + c % GROUP, all_parts, due, whose,
                       counter, most, sums, weights, out);
    return;
  }
  const int row = (block_x - of_segments) % rows, own_part = (block_x - of_segments) / rows;
  const int owner = several ? owners[row] : row * MOST_NEW, kv_head = block_y / PARTS;
  if (owner < 0) return;
  const int held_row = owner / MOST_NEW, token = owner % MOST_NEW;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quad = lane & 3;
  const int begin = starts[row], end = ends[row];
  // A warp prepares a vector: one of H queries, the new key, the new value, those of earlier new tokens. All
  // that it reads is asked for at once: weights of other layers have driven it out of the second cache.
  int a[EACH], b[EACH];
  T x[EACH], y[EACH], x_weight[EACH], y_weight[EACH];
  float cosine[EACH], sine[EACH];
  auto is_value = [&](int h) { return h > H && (h - H) % 2; };
  auto ready = [&](int h, int row) {
    const T* weight = h < H ? q_norm : k_norm;
    #pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int pair = lane * EACH + j;
      const bool near = TRADITIONAL || 2 * pair >= TURNED;
      a[j] = near ? 2 * pair : pair;
      b[j] = near ? a[j] + 1 : pair + TURNED / 2;
      if (NORM) { x_weight[j] = weight[a[j]]; y_weight[j] = weight[b[j]]; }
      cosine[j] = turns[row * D + a[j]];
      sine[j] = turns[row * D + b[j]];
    }
  };
  auto take = [&](int h, int row) {
    const T* source = h < H ? q + ((long)row * KV_HEADS * GROUP + block_y * H + h) * D
                            : (is_value(h) ? v : k) + ((long)row * KV_HEADS + kv_head) * D;
    #pragma unroll
    for (int j = 0; j < EACH; j++) {
      x[j].bits = __ldcg(&source[a[j]].bits);
      y[j].bits = __ldcg(&source[b[j]].bits);
    }
  };
  auto prepare = [&](int h) {
    T* target = h < H ? queries + h * D : fresh + (h - H) * D;
    if (NORM && !is_value(h)) {
      float squares = 0.f;
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
      if (!is_value(h) && 2 * (lane * EACH + j) < TURNED) {
        const float one = omlxd_float(x[j]), two = omlxd_float(y[j]);
        x[j] = omlxd_round<T>(one * cosine[j] - two * sine[j]);
        y[j] = omlxd_round<T>(one * sine[j] + two * cosine[j]);
      }
      target[a[j]] = x[j];
      target[b[j]] = y[j];
    }
  };
  if (warp < H + 2) ready(warp, row);
  if (!LATE && warp < H + 2) take(warp, row);
  if (NORM && LATE && H + 2 > WARPS)
    asm volatile("prefetch.global.L1 [%0];" :: "l"(k_norm + lane * (D / 32)));

  const int span = omlxd_span(end - begin), spans = omlxd_spans(end - begin);
  if (own_part >= spans) return;
  const int from = begin + own_part * span, to = min(from + span, end);
  const bool newest = to == end;
  const int kept = min(to, max(from, end - 1 - token)), tiles = (to - from + TILE - 1) / TILE;
  const int vectors_here = H + 2 + 2 * (min(to, end - 1) - kept);
  // Without a `capacity` each row has arrays of its own.
  const unsigned long long* tail = tails + (capacity ? 0 : 3 * held_row);
  const long head = capacity ? ((long)held_row * KV_HEADS + kv_head) * capacity : kv_head * (long)tail[2];
  auto of_head = [&](const T* all, int i) {
    return reinterpret_cast<uint4*>(capacity ? (unsigned long long)all : tail[i]) + head * CHUNKS;
  };
  uint4 *K = of_head(keys, 0), *V = of_head(values, 1);
  uint4* ring = rings + warp * STAGES * STAGE;
  const unsigned ring_at = omlxd_shared(ring);
  auto fetch = [&](int tile, int stage) {
    if (tile < tiles) {
      #pragma unroll
      for (int i = 0; i < TILE * CHUNKS / 32; i++) {
        const int at = i * 32 + lane, token = at / CHUNKS, chunk = at % CHUNKS;
        const int column = from + tile * TILE + token, bytes = column < kept ? 16 : 0;
        const long place = (long)(bytes ? column : from) * CHUNKS + chunk;
        const unsigned put = ring_at + (stage * STAGE + token * CHUNKS + (chunk ^ (token & 7))) * 16;
        OMLXD_COPY(put, K + place, bytes);
        OMLXD_COPY(put + TILE * CHUNKS * 16, V + place, bytes);
      }
    }
    asm volatile("cp.async.commit_group;");
  };
  #pragma unroll 1
  for (int s = 0; s < STAGES - 1; s++) fetch(warp + s * WARPS, s);

  if (LATE) omlxd_await(done, awaited);
  if (LATE && warp < H + 2) take(warp, row);
  if (warp < H + 2) prepare(warp);
  #pragma unroll 1
  for (int h = warp < H + 2 ? warp + WARPS : warp; h < vectors_here; h += WARPS) {
    const int before = end - 1 - kept - (h - H - 2) / 2;  // Of an earlier token: how much earlier.
    ready(h, h < H + 2 ? row : row - before);
    take(h, h < H + 2 ? row : row - before);
    prepare(h);
  }
  for (int i = H * D / 2 + threadIdx.x; i < 8 * D / 2; i += 32 * WARPS)
    reinterpret_cast<unsigned*>(queries)[i] = 0;
  __syncthreads();
  if (newest && block_y % PARTS == 0 && threadIdx.x < 2 * CHUNKS)
    (threadIdx.x < CHUNKS ? K : V)[(long)(end - 1) * CHUNKS + threadIdx.x % CHUNKS] =
        reinterpret_cast<const uint4*>(fresh)[threadIdx.x];

  unsigned query[D / 16][2];
  #pragma unroll
  for (int c = 0; c < D / 16; c++)
    #pragma unroll
    for (int i = 0; i < 2; i++)
      query[c][i] = *reinterpret_cast<const unsigned*>(queries + group * D + c * 16 + i * 8 + quad * 2);
  float best[2] = {-1e30f, -1e30f}, total[2] = {0.f, 0.f}, sum[D / 16][4];
  #pragma unroll
  for (int j = 0; j < D / 16; j++)
    #pragma unroll
    for (int e = 0; e < 4; e++) sum[j][e] = 0.f;
  const int low = lane & 7, second = (lane >> 3) & 1, third = lane >> 4;
  int stage = 0;
  #pragma unroll 1
  for (int tile = warp; tile < tiles; tile += WARPS) {
    fetch(tile + (STAGES - 1) * WARPS, stage ? stage - 1 : STAGES - 1);
    asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1));
    const int base = from + tile * TILE, first_fresh = max(kept - base, 0);
    __syncwarp();
    for (int i = lane; i < (min(to - base, TILE) - first_fresh) * 2 * CHUNKS; i += 32) {
      const int at = first_fresh + i / (2 * CHUNKS), x = i % (2 * CHUNKS), column = base + at;
      const int slot = column == end - 1 ? 0 : 1 + column - kept;
      ring[stage * STAGE + (x / CHUNKS) * TILE * CHUNKS + at * CHUNKS + (x % CHUNKS ^ (at & 7))] =
          reinterpret_cast<const uint4*>(fresh)[slot * 2 * CHUNKS + x];
    }
    __syncwarp();
    const unsigned stage_at = ring_at + stage * STAGE * 16;
    float score[4] = {0.f, 0.f, 0.f, 0.f}, odd[4] = {0.f, 0.f, 0.f, 0.f};  // Half as long a chain of sums.
    #pragma unroll
    for (int c = 0; c < D / 16; c++) {
      unsigned x[4];
      omlxd_matrices(x, stage_at + ((low + second * 8) * CHUNKS + ((2 * c + third) ^ low)) * 16);
      omlxd_mma<T>(c & 1 ? odd : score, x[0], x[1], x[2], x[3], query[c][0], query[c][1]);
    }
    #pragma unroll
    for (int e = 0; e < 4; e++) score[e] += odd[e];
    const int column = from + tile * TILE + group;
    float shrink[2];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      score[h] = column < to ? score[h] * factor : -INFINITY;
      score[2 + h] = column + 8 < to ? score[2 + h] * factor : -INFINITY;
      float now = fmaxf(score[h], score[2 + h]);
      #pragma unroll
      for (int o = 4; o < 32; o <<= 1) now = fmaxf(now, __shfl_xor_sync(~0u, now, o));
      now = fmaxf(now, best[h]);
      shrink[h] = omlxd_exp2(best[h] - now);
      best[h] = now;
      score[h] = omlxd_exp2(score[h] - now);
      score[2 + h] = omlxd_exp2(score[2 + h] - now);
      total[h] = total[h] * shrink[h] + (score[h] + score[2 + h]);
    }
    const unsigned early = omlxd_turned(omlxd_pair<T>(score[0], score[1]));
    const unsigned late = omlxd_turned(omlxd_pair<T>(score[2], score[3]));
    #pragma unroll
    for (int j = 0; j < D / 16; j++) {
      unsigned x[4];
      omlxd_turned_matrices(
          x, stage_at + (TILE * CHUNKS + (low + third * 8) * CHUNKS + ((2 * j + second) ^ low)) * 16);
      sum[j][0] *= shrink[0]; sum[j][1] *= shrink[1]; sum[j][2] *= shrink[0]; sum[j][3] *= shrink[1];
      omlxd_mma<T>(sum[j], x[0], x[1], x[2], x[3], early, late);
    }
    __syncwarp();
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  asm volatile("cp.async.wait_all;");
  __syncthreads();
  float* vectors = reinterpret_cast<float*>(rings);  // (warps, 8, D + 4)
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    #pragma unroll
    for (int o = 4; o < 32; o <<= 1) total[h] += __shfl_xor_sync(~0u, total[h], o);
    if (group == 0) { tops[warp * 8 + quad * 2 + h] = best[h]; masses[warp * 8 + quad * 2 + h] = total[h]; }
    #pragma unroll
    for (int j = 0; j < D / 16; j++)
      #pragma unroll
      for (int e = 0; e < 2; e++)
        vectors[(warp * 8 + quad * 2 + h) * (D + 4) + j * 16 + e * 8 + group] = sum[j][2 * e + h];
  }
  __syncthreads();
  const long query_head = (long)row * KV_HEADS * GROUP + block_y * H;
  const int before = segments ? counts[row] * parts : 0;
  for (int i = threadIdx.x; i < H * D; i += 32 * WARPS) {
    const int h = i / D, d = i % D;
    float top = -1e30f, mass = 0.f, x = 0.f;
    #pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w * 8 + h]);
    #pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float weight = omlxd_exp2(tops[w * 8 + h] - top);
      mass += weight * masses[w * 8 + h];
      x += weight * vectors[(w * 8 + h) * (D + 4) + d];
    }
    if (before + spans == 1) out[(query_head + h) * D + d] = omlxd_round<T>(x / mass);
    else {
      const long put = (query_head + h) * most + before + own_part;
      sums[put * D + d] = x;
      if (d == 0) { weights[put * 2] = top; weights[put * 2 + 1] = mass; }
    }
  }
  if (before + spans > 1)
    omlxd_put_together(H, query_head + threadIdx.x, before + spans, due, whose, counter, most, sums, weights,
                       out);
}

#if ALONE  // In a launch of its own.
extern "C" __global__ void __launch_bounds__(32 * WARPS) FUNCTION(ARGUMENTS) {
  extern __shared__ uint4 rings[];
  omlxd_attend(blockIdx.x, blockIdx.y, rings, nullptr, 0, GIVEN);
}
#endif
