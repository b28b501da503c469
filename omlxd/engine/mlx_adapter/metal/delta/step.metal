  // A threadgroup has a value head of a row, and all of the row's new tokens.
  constexpr int EACH = DK / 32, MINE = DV / SIMDGROUPS;  // Columns of a lane, and rows of a simdgroup.
  constexpr int BLOCK = MINE % 8 == 0 && EACH <= 4 ? 8 : MINE % 4 == 0 ? 4 : 2;
  threadgroup float queries[MOST_NEW * DK];
  threadgroup float keys[MOST_NEW * DK];
  threadgroup float values[MOST_NEW * DV];
  threadgroup float gates[MOST_NEW * 2];
  const int lane = thread_index_in_simdgroup;
  const int mine = simdgroup_index_in_threadgroup;
  const int thread_at = thread_index_in_threadgroup;
  const int head = threadgroup_position_in_grid.y, heads = threadgroups_per_grid.y;
  const int row = threadgroup_position_in_grid.z;
  const int news = table[NEW], sharing = table[SHARING], channels = table[CHANNELS];
  const int key_head = head / sharing, own = head % sharing, key_heads = heads / sharing;

  // The convolution: a thread has a channel, whose newest numbers it keeps.
  for (int at = thread_at; at < 2 * DK + DV; at += 32 * SIMDGROUPS) {
    const int column = at < 2 * DK ? at % DK : at - 2 * DK;
    int channel, from;
    if (at < 2 * DK) {
      channel = (at / DK * key_heads + key_head) * DK + column;
      from = at / DK * table[K_AT] + key_head * table[K_HEAD] + column;
    } else {
      channel = 2 * key_heads * DK + head * DV + column;
      from = table[V_AT] + key_head * table[V_GROUP] + own * DV + column;
    }
    float seen[TAPS], taps[TAPS];
    for (int i = 0; i < TAPS; i++) taps[i] = float(weight[channel * TAPS + i]);
    for (int i = 0; i < TAPS - 1; i++) seen[i] = float(conv[(row * (TAPS - 1) + i) * channels + channel]);
    for (int token = 0; token < news; token++) {
      seen[TAPS - 1] = float(qkv[(row * news + token) * table[TOKEN] + from]);
      float sum = 0;
      for (int i = 0; i < TAPS; i++) sum = fma(seen[i], taps[i], sum);
      for (int i = 0; i < TAPS - 1; i++) seen[i] = seen[i + 1];
      sum = sum / (1 + exp(-sum));
      if (at < DK)
        queries[token * DK + column] = sum;
      else if (at < 2 * DK)
        keys[token * DK + column] = sum;
      else
        values[token * DV + column] = sum;
    }
    if (at >= 2 * DK || own == 0)
      for (int i = 0; i < TAPS - 1; i++) conv_out[(row * (TAPS - 1) + i) * channels + channel] = T(seen[i]);
  }
  if (thread_at < news) {
    const int from = (row * news + thread_at) * table[G_TOKEN] + key_head * table[G_GROUP] + own;
    const float x = float(a[from + table[A_AT]]) + rates[heads + head];
    const float small = exp(-abs(x)), one = 1 + small;  // log(1 + small), where 1 + small is rounded
    const float log_one = one == 1 ? small : log(one) * (small / (one - 1));
    gates[thread_at * 2] = exp(-exp(rates[head]) * (max(x, 0.0f) + log_one));
    gates[thread_at * 2 + 1] = 1 / (1 + exp(-float(b[from])));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Queries and keys of length 1, queries by the width's root.
  for (int job = mine; job < 2 * news; job += SIMDGROUPS) {
    threadgroup float* vector = (job % 2 ? keys : queries) + job / 2 * DK;
    float sum = 0;
    for (int i = lane; i < DK; i += 32) sum = fma(vector[i], vector[i], sum);
    const float scale = rsqrt(simd_sum(sum) + 1e-6f) * (job % 2 ? 1.0f : rsqrt(float(DK)));
    for (int i = lane; i < DK; i += 32) vector[i] *= scale;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // The state: a simdgroup has some rows of it, a lane neighbours of each.
  const size_t first = (size_t(row) * heads + head) * DV + mine * MINE;
  for (int block = 0; block < MINE; block += BLOCK) {
    const size_t at = (first + block) * DK + lane * EACH;
    float held[BLOCK][EACH];
    UNROLL
    for (int r = 0; r < BLOCK; r++) {
      UNROLL
      for (int i = 0; i < EACH; i++) held[r][i] = state[at + r * DK + i];
    }
    for (int token = 0; token < news; token++) {
      const float decay = gates[token * 2], rate = gates[token * 2 + 1];
      float key[EACH], query[EACH];
      UNROLL
      for (int i = 0; i < EACH; i++) {
        key[i] = keys[token * DK + lane * EACH + i];
        query[i] = queries[token * DK + lane * EACH + i];
      }
      UNROLL
      for (int r = 0; r < BLOCK; r++) {
        const int place = token * DV + mine * MINE + block + r;
        float sum = 0;
        UNROLL
        for (int i = 0; i < EACH; i++) {
          held[r][i] *= decay;
          sum = fma(held[r][i], key[i], sum);
        }
        const float change = (values[place] - simd_sum(sum)) * rate;
        sum = 0;
        UNROLL
        for (int i = 0; i < EACH; i++) {
          held[r][i] = fma(key[i], change, held[r][i]);
          sum = fma(held[r][i], query[i], sum);
        }
        sum = simd_sum(sum);
        if (lane == 0) values[place] = sum;  // No other lane needs it any more: each gave its part of the sum.
      }
    }
    UNROLL
    for (int r = 0; r < BLOCK; r++) {
      UNROLL
      for (int i = 0; i < EACH; i++) state_out[at + r * DK + i] = held[r][i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // The gated norm.
  for (int token = mine; token < news; token += SIMDGROUPS) {
    const threadgroup float* vector = values + token * DV;
    float sum = 0;
    for (int i = lane; i < DV; i += 32) sum = fma(vector[i], vector[i], sum);
    const float scale = rsqrt(simd_sum(sum) / DV + as_type<float>(table[EPS]));
    const size_t from = (row * news + token) * table[Z_TOKEN] + table[Z_AT] + key_head * table[V_GROUP] + own * DV;
    const size_t to = ((size_t(row) * news + token) * heads + head) * DV;
    for (int i = lane; i < DV; i += 32) {
      const float gate = float(z[from + i]);
      out[to + i] = T(vector[i] * scale * float(norm[i]) * (gate / (1 + exp(-gate))));
    }
  }
