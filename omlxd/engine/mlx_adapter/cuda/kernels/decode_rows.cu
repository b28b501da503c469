// `FIND_ROW` finds a row's KV head: `head` is its first place in `keys` and `values`, `column` a token's
// behind that. OWN: rows have arrays of their own (`Tails` of attention_kernel.py).
#if OWN
#define FIND_HEAD \
  const T* keys = reinterpret_cast<const T*>(tails[row * 3]); \
  const T* values = reinterpret_cast<const T*>(tails[row * 3 + 1]); \
  const int capacity = tails[row * 3 + 2]; \
  const long head = (long)kv_head * capacity;
#else
#define FIND_HEAD \
  const long head = ((long)row * KV_HEADS + kv_head) * capacity;
#endif
#define FIND_ROW \
  FIND_HEAD \
  auto column = [&](int token) { \
    return (long)(RING && token >= capacity ? token - capacity : token); \
  };
