// Keys or values as they lie, 8 numbers at a time, and a tile of them in threadgroup memory.
#define UNROLL _Pragma("clang loop unroll(full)")

template <typename T, int BITS>
struct Eight {  // Packed
  uint32_t words[BITS / 4];
  T scale, bias;
  void spread(threadgroup vec<T, 4>* to) const {
    UNROLL
    for (int i = 0; i < 8; i++) {
      const uint32_t number = words[i * BITS / 32] >> (i * BITS % 32) & ((1 << BITS) - 1);
      to[i / 4][i % 4] = T(fma(float(scale), float(number), float(bias)));
    }
  }
};

template <typename T>
struct Eight<T, 0> {
  vec<T, 4> low, high;
  void spread(threadgroup vec<T, 4>* to) const {
    to[0] = low;
    to[1] = high;
  }
};

template <typename T, int WIDTH, int BITS, int GROUP>
struct Held {  // Packed: tokens in a row, those of a KV head behind those of the one before
  const device uint32_t* words;
  const device T* scales;
  const device T* biases;
  Eight<T, BITS> at(size_t token, int column) const {
    Eight<T, BITS> eight;
    const auto from = words + token * (WIDTH * BITS / 32) + column * BITS / 32;
    for (int i = 0; i < BITS / 4; i++) eight.words[i] = from[i];
    const size_t group = token * (WIDTH / GROUP) + column / GROUP;
    eight.scale = scales[group];
    eight.bias = biases[group];
    return eight;
  }
  void put(size_t token, int column, Eight<T, BITS> eight) const {
    const auto to = (device uint32_t*)words + token * (WIDTH * BITS / 32) + column * BITS / 32;
    for (int i = 0; i < BITS / 4; i++) to[i] = eight.words[i];
    const size_t group = token * (WIDTH / GROUP) + column / GROUP;
    if (column % GROUP == 0) {
      ((device T*)scales)[group] = eight.scale;
      ((device T*)biases)[group] = eight.bias;
    }
  }
};

template <typename T, int WIDTH, int GROUP>
struct Held<T, WIDTH, 0, GROUP> {
  const device T* numbers;
  Eight<T, 0> at(size_t token, int column) const {
    const auto from = (const device vec<T, 4>*)(numbers + token * WIDTH + column);
    Eight<T, 0> eight;
    eight.low = from[0];
    eight.high = from[1];
    return eight;
  }
  void put(size_t token, int column, Eight<T, 0> eight) const {
    const auto to = (device vec<T, 4>*)((device T*)numbers + token * WIDTH + column);
    to[0] = eight.low;
    to[1] = eight.high;
  }
};

struct Place {     // Where tokens `first` to `end` of a part lie, of one KV head.
  int first, end;
  int start, capacity, base;   // Token `start` is the first one of the part's arrays, which begin anew at `capacity`.
  int fresh_from, fresh_base;  // Tokens from here on are in the arrays of new ones.
  bool writes;                 // Those are put into the part's own arrays, too.
  bool has(int token) const { return token >= first && token < end; }
  size_t of(int token) const {
    const int column = token - start;
    return size_t(base) + (column < capacity ? column : column % capacity);
  }
};

template <typename T, int WIDTH, int BITS, int GROUP>
struct Tile {
  // Threadgroup memory: 32 tokens of CHUNK numbers, 4 more against bank conflicts, take 8.4 KB of 16 bits and
  // 16.9 KB of 32; 16 queries of 128 take 4 and 8 KB, and 8 of 256 in float32 8 KB. 32 KB is all there is.
  static constexpr constant int CHUNK = WIDTH > 128 ? WIDTH / 2 : WIDTH;
  static constexpr constant int PIECES = WIDTH / CHUNK;
  static constexpr constant int STRIDE = CHUNK + 4;
  static constexpr constant int COLUMNS = (CHUNK + 31) / 32;  // Of a lane, in a piece.
  static constexpr constant int EIGHTS = TOKENS * CHUNK / 8;
  static constexpr constant int LOADS = (EIGHTS + THREADS - 1) / THREADS;
  static constexpr constant int EACH = QUERIES_OF(sizeof(T), WIDTH) / SIMDGROUPS;  // Queries of a simdgroup.
  static constexpr constant int SUMS = PIECES * COLUMNS;
  typedef Held<T, WIDTH, BITS, GROUP> Array;

  static void fetch(
      thread Eight<T, BITS>* ahead, Array held, Array fresh, Place place, int thread_at, int token, int piece) {
    UNROLL
    for (int i = 0; i < LOADS; i++) {
      const int at = thread_at + i * THREADS, own = token + at / (CHUNK / 8);
      const int column = piece * CHUNK + at % (CHUNK / 8) * 8;
      if (at >= EIGHTS || !place.has(own)) continue;
      ahead[i] = own < place.fresh_from ? held.at(place.of(own), column)
                                        : fresh.at(place.fresh_base + own - place.fresh_from, column);
    }
  }
  static void spread(
      const thread Eight<T, BITS>* ahead, threadgroup vec<T, 4>* tile, Array held, Place place, int thread_at,
      int token, int piece) {
    UNROLL
    for (int i = 0; i < LOADS; i++) {
      const int at = thread_at + i * THREADS, own = token + at / (CHUNK / 8);
      const int column = at % (CHUNK / 8) * 8;
      if (at >= EIGHTS || !place.has(own)) continue;
      ahead[i].spread(tile + at / (CHUNK / 8) * (STRIDE / 4) + column / 4);
      if (place.writes && own >= place.fresh_from) held.put(place.of(own), piece * CHUNK + column, ahead[i]);
    }
  }
  // Adds to the products of a lane's token with COUNT queries, which lie SIMDGROUPS apart.
  template <int COUNT>
  static void score(
      thread float (&dots)[EACH][4], const threadgroup vec<T, 4>* key, const threadgroup vec<T, 4>* asked) {
    for (int d = 0; d < CHUNK / 4; d++) {
      const vec<T, 4> k = key[d];
      UNROLL
      for (int s = 0; s < COUNT; s++) {
        const vec<T, 4> query = asked[s * SIMDGROUPS * (WIDTH / 4) + d];
        UNROLL
        for (int i = 0; i < 4; i++) dots[s][i] = fma(float(k[i]), float(query[i]), dots[s][i]);
      }
    }
  }
  // Adds the values of tokens `from` to `to`, by the weights that lanes have of their tokens.
  template <int COUNT>
  static void add(
      thread float (&sum)[EACH][SUMS], const thread float (&weight)[EACH], const threadgroup T* values, int piece,
      int lane, int from, int to) {
    for (int token = from; token < to; token++) {
      float value[COLUMNS];
      UNROLL
      for (int e = 0; e < COLUMNS; e++)
        value[e] = e * 32 + lane < CHUNK ? float(values[token * STRIDE + e * 32 + lane]) : 0.0f;
      UNROLL
      for (int s = 0; s < COUNT; s++) {
        const float share = simd_shuffle(weight[s], ushort(token));
        UNROLL
        for (int e = 0; e < COLUMNS; e++)
          sum[s][piece * COLUMNS + e] = fma(share, value[e], sum[s][piece * COLUMNS + e]);
      }
    }
  }
};
