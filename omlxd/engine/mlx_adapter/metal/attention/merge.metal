  // A simdgroup joins what spans gave one query, in the order of positions. A sink is a token without a value.
  constexpr int COLUMNS = (WIDTH + 31) / 32;
  const int lane = thread_index_in_simdgroup;
  const int query = threadgroup_position_in_grid.y;  // Of a row: a head's tokens one behind the other.
  const int row = threadgroup_position_in_grid.z;
  const int queries = threadgroups_per_grid.y;
  const int first = table[MERGE_HEADER + row], last = table[MERGE_HEADER + row + 1];
  const float sink = table[HAS_SINKS] ? float(sinks[query / table[MERGE_NEW]]) : -INFINITY;
  float most = sink;
  for (int entry = first; entry < last; entry += MERGE_FIELDS) {
    const device float* from = partials0;
@launches@
    for (int span = 0; span < table[entry + SPANS]; span++) {
      const size_t slot = table[entry + SPAN_SLOT] + span * table[entry + APART];
      most = max(most, from[(slot * queries + query) * (WIDTH + 2) + WIDTH]);
    }
  }
  float total = table[HAS_SINKS] ? exp(sink - most) : 0.0f, sum[COLUMNS];
  UNROLL
  for (int e = 0; e < COLUMNS; e++) sum[e] = 0;
  for (int entry = first; entry < last; entry += MERGE_FIELDS) {
    const device float* from = partials0;
@launches@
    for (int span = 0; span < table[entry + SPANS]; span++) {
      const size_t slot = table[entry + SPAN_SLOT] + span * table[entry + APART];
      const device float* own = from + (slot * queries + query) * (WIDTH + 2);
      const float share = exp(own[WIDTH] - most);
      total = fma(share, own[WIDTH + 1], total);
      UNROLL
      for (int e = 0; e < COLUMNS; e++)
        if (e * 32 + lane < WIDTH) sum[e] = fma(share, own[e * 32 + lane], sum[e]);
    }
  }
  const size_t at = (size_t(row) * queries + query) * WIDTH;
  UNROLL
  for (int e = 0; e < COLUMNS; e++)
    if (e * 32 + lane < WIDTH) out[at + e * 32 + lane] = T(sum[e] / total);
