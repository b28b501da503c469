  // A unit of work: a span of a part, of one KV head, and a block of the queries that see the part.
  typedef Tile<T, WIDTH, BITS, GROUP> Own;
  constexpr int EACH = Own::EACH, QUERIES = EACH * SIMDGROUPS, PIECES = Own::PIECES, CHUNK = Own::CHUNK;
  threadgroup vec<T, 4> tile[TOKENS * Own::STRIDE / 4];
  threadgroup vec<T, 4> asked[QUERIES * WIDTH / 4];
  const int lane = thread_index_in_simdgroup;
  const int mine = simdgroup_index_in_threadgroup;
  const int thread_at = thread_index_in_threadgroup;
  const int kv_head = threadgroup_position_in_grid.y;
  const int unit = threadgroup_position_in_grid.z;
  const int heads = table[HEADS], kv_heads = table[KV_HEADS], news = table[NEW], fresh = table[FRESH];
  const int each = heads / kv_heads * news;  // Queries of a row.
  int which = 0;
  while (which + 1 < table[PARTS] && unit >= table[HEADER + (which + 1) * FIELDS + FIRST_UNIT]) which++;
  const auto part = table + HEADER + which * FIELDS;
  const int blocks = part[BLOCKS], all = part[MEMBERS] * each;
  const int number = (unit - part[FIRST_UNIT]) / blocks, block = (unit - part[FIRST_UNIT]) % blocks;
  const int span = part[FIRST_SPAN] + number, fine = part[FINE];
  const int begin = span < fine ? span * SMALL : fine * SMALL + (span - fine) * LARGE;
  const int first = max(begin, part[FIRST] / TOKENS * TOKENS);
  const int end = min(part[END], begin + (span < fine ? SMALL : LARGE));
  const bool is_own = part[ROW] >= 0;
  const Place place = {part[FIRST],
                       end,
                       part[START],
                       part[CAPACITY],
                       kv_head * part[CAPACITY],
                       is_own ? part[END] - fresh : part[END],
                       (part[ROW] * kv_heads + kv_head) * fresh,
                       block == 0};
  typename Own::Array keys = {@keys0@}, values = {@values0@};
  switch (part[ARRAY]) {
@arrays@
  }
  const typename Own::Array fresh_keys = {@new_keys@}, fresh_values = {@new_values@};

  for (int at = thread_at; at < QUERIES * (WIDTH / 4); at += THREADS) {
    const int query = min(block * QUERIES + at / (WIDTH / 4), all - 1);
    const size_t from = (size_t(table[part[MEMBERS_AT] + query / each]) * kv_heads + kv_head) * each + query % each;
    asked[at] = ((const device vec<T, 4>*)q)[from * (WIDTH / 4) + at % (WIDTH / 4)];
  }
  const int left = min(QUERIES, all - block * QUERIES);
  const int count = (left - mine + SIMDGROUPS - 1) / SIMDGROUPS;  // Queries of this simdgroup, 0 to EACH.
  const float scale = as_type<float>(table[SCALE]);
  const int window = table[WINDOW];
  float most[EACH], total[EACH], sum[EACH][Own::SUMS];
  int last[EACH];  // The last token that a query sees.
  UNROLL
  for (int s = 0; s < EACH; s++) {
    most[s] = -INFINITY;
    total[s] = 0;
    UNROLL
    for (int e = 0; e < Own::SUMS; e++) sum[s][e] = 0;
    last[s] = is_own ? part[END] - news + (block * QUERIES + s * SIMDGROUPS + mine) % news : part[END];
  }

  Eight<T, BITS> ahead[Own::LOADS];  // What the next stage needs is on its way while this one computes.
  Own::fetch(ahead, keys, fresh_keys, place, thread_at, first, 0);
  for (int token = first; token < end; token += TOKENS) {
    float dots[EACH][4], weight[EACH];
    UNROLL
    for (int s = 0; s < EACH; s++) {
      UNROLL
      for (int i = 0; i < 4; i++) dots[s][i] = 0;
    }
    UNROLL
    for (int piece = 0; piece < PIECES; piece++) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      Own::spread(ahead, tile, keys, place, thread_at, token, piece);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (piece + 1 < PIECES)
        Own::fetch(ahead, keys, fresh_keys, place, thread_at, token, piece + 1);
      else
        Own::fetch(ahead, values, fresh_values, place, thread_at, token, 0);
      const threadgroup vec<T, 4>* key = tile + lane * (Own::STRIDE / 4);
      const threadgroup vec<T, 4>* query = asked + mine * (WIDTH / 4) + piece * (CHUNK / 4);
      if (count > 2)
        Own::template score<EACH>(dots, key, query);
      else if (count == 2)
        Own::template score<2>(dots, key, query);
      else if (count == 1)
        Own::template score<1>(dots, key, query);
    }
    UNROLL
    for (int s = 0; s < EACH; s++) {
      weight[s] = 0;
      if (s >= count) continue;
      const int own = token + lane;
      const bool sees = place.has(own) && own <= last[s] && (window == 0 || own > last[s] - window);
      const float x = sees ? ((dots[s][0] + dots[s][1]) + (dots[s][2] + dots[s][3])) * scale : -INFINITY;
      const float next = max(most[s], simd_max(x));
      const bool none = next == -INFINITY;  // It has seen nothing yet.
      const float kept = none ? 1.0f : exp(most[s] - next);
      weight[s] = none ? 0.0f : exp(x - next);
      total[s] = fma(total[s], kept, simd_sum(weight[s]));
      most[s] = next;
      UNROLL
      for (int e = 0; e < Own::SUMS; e++) sum[s][e] *= kept;
    }
    const int from = max(0, part[FIRST] - token), to = min(TOKENS, end - token);
    UNROLL
    for (int piece = 0; piece < PIECES; piece++) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      Own::spread(ahead, tile, values, place, thread_at, token, piece);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (piece + 1 < PIECES)
        Own::fetch(ahead, values, fresh_values, place, thread_at, token, piece + 1);
      else if (token + TOKENS < end)
        Own::fetch(ahead, keys, fresh_keys, place, thread_at, token + TOKENS, 0);
      const threadgroup T* numbers = (const threadgroup T*)tile;
      if (count > 2)
        Own::template add<EACH>(sum, weight, numbers, piece, lane, from, to);
      else if (count == 2)
        Own::template add<2>(sum, weight, numbers, piece, lane, from, to);
      else if (count == 1)
        Own::template add<1>(sum, weight, numbers, piece, lane, from, to);
    }
  }

  UNROLL
  for (int s = 0; s < EACH; s++) {
    if (s >= count) continue;
    const int query = block * QUERIES + s * SIMDGROUPS + mine;
    const size_t slot = part[SLOT] + number * part[MEMBERS] + query / each;
    const size_t at = ((slot * kv_heads + kv_head) * each + query % each) * (WIDTH + 2);
    UNROLL
    for (int e = 0; e < Own::SUMS; e++) {
      const int column = e % Own::COLUMNS * 32 + lane;
      if (column < CHUNK) partials[at + e / Own::COLUMNS * CHUNK + column] = sum[s][e];
    }
    if (lane == 0) {
      partials[at + WIDTH] = most[s];
      partials[at + WIDTH + 1] = total[s];
    }
  }
