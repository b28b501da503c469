// A subset of the Metal Shading Language as C++20. It includes no library: a kernel is to compile in a moment.
#pragma once
#include "runtime.h"

using uint = unsigned int;
using ushort = unsigned short;
using uchar = unsigned char;
using ulong = unsigned long;

// ---- types
namespace metal {
template <bool B, typename T = void> struct enable_if {};
template <typename T> struct enable_if<true, T> { using type = T; };
template <bool B, typename T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, typename T, typename F> struct conditional { using type = T; };
template <typename T, typename F> struct conditional<false, T, F> { using type = F; };
template <bool B, typename T, typename F> using conditional_t = typename conditional<B, T, F>::type;
template <typename A, typename B> struct is_same { static constexpr bool value = false; };
template <typename A> struct is_same<A, A> { static constexpr bool value = true; };
template <typename A, typename B> constexpr bool is_same_v = is_same<A, B>::value;
template <typename T> struct remove_cv { using type = T; };
template <typename T> struct remove_cv<const T> { using type = T; };
template <typename T> using remove_cv_t = typename remove_cv<T>::type;
template <typename T> constexpr bool is_integral_v =
    is_same_v<T, bool> || is_same_v<T, char> || is_same_v<T, signed char> || is_same_v<T, uchar> ||
    is_same_v<T, short> || is_same_v<T, ushort> || is_same_v<T, int> || is_same_v<T, uint> ||
    is_same_v<T, long> || is_same_v<T, ulong> || is_same_v<T, long long> || is_same_v<T, unsigned long long>;
}  // namespace metal

namespace msl {
template <typename To, typename From> To bits_as(const From& x) {
  static_assert(sizeof(To) == sizeof(From), "as_type: sizes differ");
  To to;
  __builtin_memcpy((void*)&to, (const void*)&x, sizeof(To));
  return to;
}
// Numbers of 16 bits: each operation rounds, as on a GPU, and not at the end of an expression.
struct Brain;
struct Half {
  _Float16 x;
  Half() = default;
  explicit Half(Brain v);
  template <typename T> requires(__is_class(T) == false) constexpr Half(T v) : x(_Float16(v)) {}
  constexpr operator float() const { return float(x); }
};
struct Brain {
  uint16_t bits;
  Brain() = default;
  static uint16_t rounded(float v) {
    const uint32_t b = bits_as<uint32_t>(v);
    return v != v ? 0x7fc0 : uint16_t((b + 0x7fff + ((b >> 16) & 1)) >> 16);
  }
  // Metal converts nothing to bfloat unasked.
  template <typename T> requires(__is_class(T) == false || metal::is_same_v<T, Half>) explicit Brain(T v) : bits(rounded(float(v))) {}
  operator float() const { return bits_as<float>(uint32_t(bits) << 16); }
};
inline Half::Half(Brain v) : x(_Float16(float(v))) {}
template <typename T> constexpr bool is_small = metal::is_same_v<T, Half> || metal::is_same_v<T, Brain>;
template <typename A, typename B> struct Both { using type = void; };
template <typename A, typename B> requires(is_small<A> && (metal::is_same_v<A, B> || metal::is_integral_v<B>))
struct Both<A, B> { using type = A; };
template <typename A, typename B> requires(is_small<B> && metal::is_integral_v<A>)
struct Both<A, B> { using type = B; };
template <typename A, typename B> concept Small = !metal::is_same_v<typename Both<A, B>::type, void>;
template <typename A, typename B> concept Mixed = is_small<A> && is_small<B> && !metal::is_same_v<A, B>;
}  // namespace msl
#define MSL_SMALL(OP)                                                                             \
  template <typename A, typename B> requires msl::Small<A, B>                                     \
  inline typename msl::Both<A, B>::type operator OP(A a, B b) {                                   \
    return typename msl::Both<A, B>::type(float(typename msl::Both<A, B>::type(a)) OP             \
                                          float(typename msl::Both<A, B>::type(b)));              \
  }                                                                                               \
  template <typename A, typename B> requires msl::Mixed<A, B> void operator OP(A, B) = delete;    \
  template <typename A, typename B> requires(msl::Small<A, B> || metal::is_same_v<A, msl::Half>) \
  inline A& operator OP##=(A& a, B b) { return a = A(a OP b); }
namespace msl {
MSL_SMALL(+) MSL_SMALL(-) MSL_SMALL(*) MSL_SMALL(/)
inline Half operator-(Half a) { return Half(-float(a)); }
inline Brain operator-(Brain a) { return Brain(-float(a)); }
}  // namespace msl
using half = msl::Half;
inline half operator""h(long double x) { return half(float(x)); }
using float16_t = half;
using bfloat = msl::Brain;
using bfloat16_t = bfloat;

namespace msl {
template <typename T, int N> struct Members;
template <typename T> struct alignas(2 * sizeof(T)) Members<T, 2> {
  union { struct { T x, y; }; struct { T r, g; }; T e[2]; };
  Members() {}
};
template <typename T> struct alignas(4 * sizeof(T)) Members<T, 3> {
  union { struct { T x, y, z; }; struct { T r, g, b; }; T e[3]; };
  Members() {}
};
template <typename T> struct alignas(4 * sizeof(T)) Members<T, 4> {
  union { struct { T x, y, z, w; }; struct { T r, g, b, a; }; T e[4]; };
  Members() {}
};
template <typename T> constexpr bool is_number = metal::is_integral_v<T> || is_small<T> || metal::is_same_v<T, float>;
}  // namespace msl
namespace metal {
template <typename T, int N> struct vec : msl::Members<T, N> {
  using msl::Members<T, N>::e;
  vec() = default;
  vec(const vec& o) { *this = o; }
  vec& operator=(const vec& o) {
    for (int i = 0; i < N; i++) e[i] = o.e[i];
    return *this;
  }
  template <typename U> requires msl::is_number<U> vec(U v) {
    for (int i = 0; i < N; i++) e[i] = T(v);
  }
  template <typename U> explicit vec(const vec<U, N>& o) {
    for (int i = 0; i < N; i++) e[i] = T(o.e[i]);
  }
  template <typename... U> requires(sizeof...(U) == N && N > 1 && (msl::is_number<U> && ...)) vec(U... v) {
    int i = 0;
    ((e[i++] = T(v)), ...);
  }
  vec(const vec<T, 3>& a, T b) requires(N == 4) { e[0] = a.e[0], e[1] = a.e[1], e[2] = a.e[2], e[3] = b; }
  vec(const vec<T, 2>& a, const vec<T, 2>& b) requires(N == 4) { e[0] = a.e[0], e[1] = a.e[1], e[2] = b.e[0], e[3] = b.e[1]; }
  T& operator[](int i) { return e[i]; }
  const T& operator[](int i) const { return e[i]; }
};
template <typename T, int N> struct packed_vec {
  T e[N];
  T& operator[](int i) { return e[i]; }
  const T& operator[](int i) const { return e[i]; }
  operator vec<T, N>() const {
    vec<T, N> v;
    for (int i = 0; i < N; i++) v.e[i] = e[i];
    return v;
  }
};
}  // namespace metal
#define MSL_VEC(OP)                                                                              \
  template <typename T, int N> inline vec<T, N> operator OP(const vec<T, N>& a, const vec<T, N>& b) { \
    vec<T, N> out;                                                                               \
    for (int i = 0; i < N; i++) out.e[i] = T(a.e[i] OP b.e[i]);                                  \
    return out;                                                                                  \
  }                                                                                              \
  template <typename T, int N, typename U> requires msl::is_number<U>                            \
  inline vec<T, N> operator OP(const vec<T, N>& a, U b) { return a OP vec<T, N>(T(b)); }         \
  template <typename T, int N, typename U> requires msl::is_number<U>                            \
  inline vec<T, N> operator OP(U a, const vec<T, N>& b) { return vec<T, N>(T(a)) OP b; }         \
  template <typename T, int N, typename U> inline vec<T, N>& operator OP##=(vec<T, N>& a, const U& b) { return a = a OP b; }
#define MSL_COMPARE(OP)                                                                          \
  template <typename T, int N> inline vec<bool, N> operator OP(const vec<T, N>& a, const vec<T, N>& b) { \
    vec<bool, N> out;                                                                            \
    for (int i = 0; i < N; i++) out.e[i] = a.e[i] OP b.e[i];                                     \
    return out;                                                                                  \
  }                                                                                              \
  template <typename T, int N, typename U> requires msl::is_number<U>                            \
  inline vec<bool, N> operator OP(const vec<T, N>& a, U b) { return a OP vec<T, N>(T(b)); }
namespace metal {
MSL_VEC(+) MSL_VEC(-) MSL_VEC(*) MSL_VEC(/) MSL_VEC(%) MSL_VEC(&) MSL_VEC(|) MSL_VEC(^) MSL_VEC(<<) MSL_VEC(>>)
MSL_COMPARE(<) MSL_COMPARE(>) MSL_COMPARE(<=) MSL_COMPARE(>=) MSL_COMPARE(==) MSL_COMPARE(!=)
template <typename T, int N> inline vec<T, N> operator-(const vec<T, N>& a) { return vec<T, N>(T(0)) - a; }
template <int N> inline bool any(const vec<bool, N>& a) {
  for (int i = 0; i < N; i++) if (a.e[i]) return true;
  return false;
}
template <int N> inline bool all(const vec<bool, N>& a) {
  for (int i = 0; i < N; i++) if (!a.e[i]) return false;
  return true;
}
template <typename T, int N> inline T dot(const vec<T, N>& a, const vec<T, N>& b) {
  T sum = a.e[0] * b.e[0];
  for (int i = 1; i < N; i++) sum = T(sum + a.e[i] * b.e[i]);
  return sum;
}
}  // namespace metal
#define MSL_NAMES(T, NAME)                                                                      \
  using NAME##2 = metal::vec<T, 2>; using NAME##3 = metal::vec<T, 3>; using NAME##4 = metal::vec<T, 4>; \
  using packed_##NAME##2 = metal::packed_vec<T, 2>; using packed_##NAME##3 = metal::packed_vec<T, 3>;   \
  using packed_##NAME##4 = metal::packed_vec<T, 4>;
MSL_NAMES(float, float) MSL_NAMES(half, half) MSL_NAMES(bfloat, bfloat) MSL_NAMES(int, int) MSL_NAMES(uint, uint)
MSL_NAMES(short, short) MSL_NAMES(ushort, ushort) MSL_NAMES(signed char, char) MSL_NAMES(uchar, uchar) MSL_NAMES(bool, bool)

template <typename To, typename From> inline To as_type(const From& x) { return msl::bits_as<To>(x); }

// ---- numbers
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT __FLT_MAX__
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX half(65504.0f)
#define HUGE_VALF __builtin_inff()
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define INT_MAX __INT_MAX__
#define UINT_MAX (__INT_MAX__ * 2u + 1u)

namespace metal {
template <typename T> struct numeric_limits;
template <> struct numeric_limits<float> {
  static constexpr float max() { return __FLT_MAX__; }
  static constexpr float lowest() { return -__FLT_MAX__; }
  static constexpr float min() { return __FLT_MIN__; }
  static constexpr float epsilon() { return __FLT_EPSILON__; }
  static constexpr float infinity() { return INFINITY; }
  static constexpr float quiet_NaN() { return NAN; }
};
template <> struct numeric_limits<half> {
  static half max() { return 65504.0f; }
  static half lowest() { return -65504.0f; }
  static half infinity() { return INFINITY; }
};
template <> struct numeric_limits<bfloat> {
  static bfloat max() { return msl::bits_as<bfloat>(uint16_t(0x7f7f)); }
  static bfloat lowest() { return msl::bits_as<bfloat>(uint16_t(0xff7f)); }
  static bfloat infinity() { return bfloat(INFINITY); }
};
template <typename T> requires is_integral_v<T> struct numeric_limits<T> {
  static constexpr bool is_signed = T(-1) < T(0);
  static constexpr T max() { return is_signed ? T(~(T(1) << (8 * sizeof(T) - 1))) : T(~T(0)); }
  static constexpr T min() { return is_signed ? T(T(1) << (8 * sizeof(T) - 1)) : T(0); }
  static constexpr T lowest() { return min(); }
};

// Functions of one number: of a float, of 16 bits, which rounds, and of vectors.
template <typename F, typename T, int N> inline vec<T, N> each(F f, const vec<T, N>& a) {
  vec<T, N> out;
  for (int i = 0; i < N; i++) out.e[i] = T(f(float(a.e[i])));
  return out;
}
#define MSL_OF_ONE(NAME, RESULT)                                                         \
  inline float NAME(float x) { return RESULT; }                                          \
  template <typename T> requires msl::is_small<T> inline T NAME(T a) { const float x = a; return T(RESULT); } \
  template <typename T> requires is_integral_v<T> inline float NAME(T a) { const float x = a; return RESULT; } \
  template <typename T, int N> inline vec<T, N> NAME(const vec<T, N>& a) {               \
    return each([](float x) -> float { return RESULT; }, a);                             \
  }
#define MSL_FUNCTIONS                                                                    \
  MSL_OF_ONE(exp, __builtin_expf(x)) MSL_OF_ONE(exp2, __builtin_exp2f(x)) MSL_OF_ONE(exp10, __builtin_exp10f(x)) \
  MSL_OF_ONE(log, __builtin_logf(x)) MSL_OF_ONE(log2, __builtin_log2f(x)) MSL_OF_ONE(log10, __builtin_log10f(x)) \
  MSL_OF_ONE(sqrt, __builtin_sqrtf(x)) MSL_OF_ONE(rsqrt, 1.0f / __builtin_sqrtf(x))      \
  MSL_OF_ONE(sin, __builtin_sinf(x)) MSL_OF_ONE(cos, __builtin_cosf(x)) MSL_OF_ONE(tan, __builtin_tanf(x)) \
  MSL_OF_ONE(sinh, __builtin_sinhf(x)) MSL_OF_ONE(cosh, __builtin_coshf(x)) MSL_OF_ONE(tanh, __builtin_tanhf(x)) \
  MSL_OF_ONE(asin, __builtin_asinf(x)) MSL_OF_ONE(acos, __builtin_acosf(x)) MSL_OF_ONE(atan, __builtin_atanf(x))
MSL_FUNCTIONS
MSL_OF_ONE(floor, __builtin_floorf(x)) MSL_OF_ONE(ceil, __builtin_ceilf(x)) MSL_OF_ONE(trunc, __builtin_truncf(x))
MSL_OF_ONE(round, __builtin_roundf(x)) MSL_OF_ONE(rint, __builtin_rintf(x)) MSL_OF_ONE(fabs, __builtin_fabsf(x))
MSL_OF_ONE(fract, x - __builtin_floorf(x)) MSL_OF_ONE(sign, float((x > 0) - (x < 0)))
namespace fast { MSL_FUNCTIONS }
namespace precise { MSL_FUNCTIONS }
inline float log1p(float x) { return __builtin_log1pf(x); }  // No function of Metal: MLX's utilities have it.
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline float abs(float x) { return __builtin_fabsf(x); }
template <typename T> requires msl::is_small<T> inline T abs(T x) { return T(__builtin_fabsf(float(x))); }
template <typename T> requires is_integral_v<T> inline T abs(T x) { return x < T(0) ? T(-x) : x; }
template <typename T, int N> inline vec<T, N> abs(const vec<T, N>& a) { return each([](float x) { return __builtin_fabsf(x); }, a); }

// Of two and three. Of unlike types they are ambiguous in Metal, and an error here.
template <typename T> concept Number = msl::is_number<T>;
template <Number T> inline T max(T a, T b) {
  if constexpr (!is_integral_v<T>) return float(a) != float(a) ? b : float(b) != float(b) ? a : float(a) < float(b) ? b : a;
  else return a < b ? b : a;
}
template <Number T> inline T min(T a, T b) {
  if constexpr (!is_integral_v<T>) return float(a) != float(a) ? b : float(b) != float(b) ? a : float(b) < float(a) ? b : a;
  else return b < a ? b : a;
}
inline float fmax(float a, float b) { return max(a, b); }
inline float fmin(float a, float b) { return min(a, b); }
inline float pow(float a, float b) { return __builtin_powf(a, b); }
inline float powr(float a, float b) { return __builtin_powf(a, b); }
inline float fmod(float a, float b) { return __builtin_fmodf(a, b); }
inline float atan2(float a, float b) { return __builtin_atan2f(a, b); }
inline float copysign(float a, float b) { return __builtin_copysignf(a, b); }
inline float ldexp(float a, int b) { return __builtin_ldexpf(a, b); }
inline float divide(float a, float b) { return a / b; }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <typename T> requires msl::is_small<T> inline T fma(T a, T b, T c) { return T(__builtin_fmaf(a, b, c)); }
template <Number T> inline T clamp(T x, T least, T most) { return min(max(x, least), most); }
template <Number T> inline T select(T no, T yes, bool c) { return c ? yes : no; }
template <Number T> inline T mix(T a, T b, T t) { return T(a + (b - a) * t); }
#define MSL_OF_TWO(NAME)                                                                           \
  template <typename T, int N> inline vec<T, N> NAME(const vec<T, N>& a, const vec<T, N>& b) {     \
    vec<T, N> out;                                                                                 \
    for (int i = 0; i < N; i++) out.e[i] = NAME(a.e[i], b.e[i]);                                   \
    return out;                                                                                    \
  }
MSL_OF_TWO(max) MSL_OF_TWO(min) MSL_OF_TWO(pow)
template <typename T, int N> inline vec<T, N> fma(const vec<T, N>& a, const vec<T, N>& b, const vec<T, N>& c) {
  vec<T, N> out;
  for (int i = 0; i < N; i++) out.e[i] = fma(a.e[i], b.e[i], c.e[i]);
  return out;
}
template <typename T, int N> inline vec<T, N> clamp(const vec<T, N>& x, const vec<T, N>& a, const vec<T, N>& b) { return min(max(x, a), b); }
template <typename T, int N> inline vec<T, N> mix(const vec<T, N>& a, const vec<T, N>& b, const vec<T, N>& t) { return a + (b - a) * t; }
template <typename T, int N> inline vec<T, N> select(const vec<T, N>& no, const vec<T, N>& yes, const vec<bool, N>& c) {
  vec<T, N> out;
  for (int i = 0; i < N; i++) out.e[i] = c.e[i] ? yes.e[i] : no.e[i];
  return out;
}
namespace fast { using metal::max; using metal::min; using metal::fmax; using metal::fmin; using metal::clamp; using metal::pow; using metal::divide; using metal::fma; using metal::abs; }
namespace precise { using metal::max; using metal::min; using metal::fmax; using metal::fmin; using metal::clamp; using metal::pow; using metal::divide; using metal::fma; using metal::abs; }
inline int popcount(uint x) { return __builtin_popcount(x); }
inline int clz(uint x) { return x ? __builtin_clz(x) : 32; }
inline int ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
template <typename T> requires is_integral_v<T> inline T extract_bits(T x, uint offset, uint bits) {
  return bits ? T(T(x << (8 * sizeof(T) - offset - bits)) >> (8 * sizeof(T) - bits)) : T(0);
}
template <typename T> requires is_integral_v<T> inline T mulhi(T a, T b) { return T((int64_t(a) * int64_t(b)) >> 32); }

// ---- what threads do together
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_device_and_threadgroup = 3 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
inline void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) { msl::barrier(int(flags), line); }
inline void simdgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  const char nothing = 0;
  msl::exchange(&nothing, 1, msl::SIMDGROUP_BARRIER, line, int(flags));
}
}  // namespace metal
namespace msl {
template <typename T> struct Lanes {
  const Slot* const* slots;
  T operator[](uint32_t lane) const {
    T x;
    __builtin_memcpy((void*)&x, (const void*)slots[lane]->bytes, sizeof(T));
    return x;
  }
};
template <typename T> inline Lanes<T> all_lanes(const T& x, Operation what, int line) {
  static_assert(sizeof(T) <= 32);
  return {exchange((const void*)&x, sizeof(T), what, line)};
}
template <typename T> inline T from_lane(const T& x, uint32_t lane, Operation what, int line) {
  const auto lanes = all_lanes(x, what, line);
  if (lane >= now->width) fail("simd_shuffle of a lane that does not exist", line);
  return lanes[lane];
}
// What no lane gave: undefined in Metal. All bits are set, as in memory that nobody has written.
template <typename T> inline T nobodys() {
  T x;
  __builtin_memset((void*)&x, 0xff, sizeof(T));
  return x;
}
// In a tree of pairs, as hardware may: another order than a loop's, so that no test relies on one.
template <typename T, typename F> inline T in_a_tree(const T& x, Operation what, int line, F join) {
  const auto lanes = all_lanes(x, what, line);
  if (!joined->done) {
    T part[32];
    const uint32_t n = now->width;
    for (uint32_t i = 0; i < n; i++) part[i] = lanes[i];
    for (uint32_t step = 16; step; step /= 2)
      for (uint32_t i = 0; i < step; i++)
        if (i + step < n) part[i] = join(part[i], part[i + step]);
    __builtin_memcpy((void*)&joined->value, (const void*)part, sizeof(T));
    joined->done = true;
  }
  T all;
  __builtin_memcpy((void*)&all, (const void*)&joined->value, sizeof(T));
  return all;
}
}  // namespace msl
#define MSL_LINE int line = __builtin_LINE()
namespace metal {
template <typename T> inline T simd_sum(T x, MSL_LINE) { return msl::in_a_tree(x, msl::SUM, line, [](T a, T b) { return T(a + b); }); }
template <typename T> inline T simd_product(T x, MSL_LINE) { return msl::in_a_tree(x, msl::PRODUCT, line, [](T a, T b) { return T(a * b); }); }
template <typename T> inline T simd_max(T x, MSL_LINE) { return msl::in_a_tree(x, msl::MAX, line, [](T a, T b) { return max(a, b); }); }
template <typename T> inline T simd_min(T x, MSL_LINE) { return msl::in_a_tree(x, msl::MIN, line, [](T a, T b) { return min(a, b); }); }
template <typename T> inline T simd_and(T x, MSL_LINE) { return msl::in_a_tree(x, msl::SUM, line, [](T a, T b) { return T(a & b); }); }
template <typename T> inline T simd_or(T x, MSL_LINE) { return msl::in_a_tree(x, msl::SUM, line, [](T a, T b) { return T(a | b); }); }
template <typename T> inline T simd_xor(T x, MSL_LINE) { return msl::in_a_tree(x, msl::SUM, line, [](T a, T b) { return T(a ^ b); }); }
template <typename T> inline T simd_shuffle(T x, ushort lane, MSL_LINE) { return msl::from_lane(x, lane, msl::SHUFFLE, line); }
template <typename T> inline T simd_shuffle_xor(T x, ushort mask, MSL_LINE) { return msl::from_lane(x, msl::now->lane ^ mask, msl::SHUFFLE_XOR, line); }
template <typename T> inline T simd_broadcast(T x, ushort lane, MSL_LINE) { return msl::from_lane(x, lane, msl::BROADCAST, line); }
template <typename T> inline T simd_broadcast_first(T x, MSL_LINE) { return msl::from_lane(x, 0, msl::BROADCAST, line); }
template <typename T> inline T simd_shuffle_down(T x, ushort by, MSL_LINE) {
  const auto lanes = msl::all_lanes(x, msl::SHUFFLE_DOWN, line);
  const uint at = msl::now->lane + by;
  return at < msl::now->width ? lanes[at] : msl::nobodys<T>();
}
template <typename T> inline T simd_shuffle_up(T x, ushort by, MSL_LINE) {
  const auto lanes = msl::all_lanes(x, msl::SHUFFLE_UP, line);
  return by <= msl::now->lane ? lanes[msl::now->lane - by] : msl::nobodys<T>();
}
template <typename T> inline T simd_shuffle_rotate_down(T x, ushort by, MSL_LINE) { return msl::from_lane(x, (msl::now->lane + by) % 32, msl::SHUFFLE_DOWN, line); }
template <typename T> inline T simd_shuffle_rotate_up(T x, ushort by, MSL_LINE) { return msl::from_lane(x, (msl::now->lane + 32 - by % 32) % 32, msl::SHUFFLE_UP, line); }
template <typename T> inline T simd_prefix_inclusive_sum(T x, MSL_LINE) {
  const auto lanes = msl::all_lanes(x, msl::PREFIX, line);
  T sum = lanes[0];
  for (uint i = 1; i <= msl::now->lane; i++) sum = T(sum + lanes[i]);
  return sum;
}
template <typename T> inline T simd_prefix_exclusive_sum(T x, MSL_LINE) {
  const auto lanes = msl::all_lanes(x, msl::PREFIX_EXCLUSIVE, line);
  T sum = T(0);
  for (uint i = 0; i < msl::now->lane; i++) sum = T(sum + lanes[i]);
  return sum;
}
inline bool simd_any(bool x, MSL_LINE) { return msl::in_a_tree(x, msl::ANY, line, [](bool a, bool b) { return a || b; }); }
inline bool simd_all(bool x, MSL_LINE) { return msl::in_a_tree(x, msl::ALL, line, [](bool a, bool b) { return a && b; }); }
inline bool simd_is_first() { return msl::now->lane == 0; }
template <typename T> inline T quad_shuffle_xor(T x, ushort mask, MSL_LINE) { return msl::from_lane(x, msl::now->lane ^ (mask & 3), msl::QUAD, line); }
template <typename T> inline T quad_broadcast(T x, ushort lane, MSL_LINE) { return msl::from_lane(x, msl::now->lane / 4 * 4 + (lane & 3), msl::QUAD, line); }
template <typename T> inline T quad_sum(T x, MSL_LINE) {
  const auto lanes = msl::all_lanes(x, msl::QUAD, line);
  const uint at = msl::now->lane / 4 * 4;
  return T(T(lanes[at] + lanes[at + 2]) + T(lanes[at + 1] + lanes[at + 3]));
}

// Eight by eight numbers that a simdgroup holds, two in a lane: (lane / 4, lane % 4 * 2), and the next.
// Apple's own places are not documented; a kernel that relies on them, by thread_elements, is not tested here.
template <typename T, int R, int C> struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "simdgroup_matrix is 8 by 8");
  T own[2];
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T x) : own{x, x} {}
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;
template <typename T, int R, int C> inline simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T x) { return simdgroup_matrix<T, R, C>(x); }
template <typename T> inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const T* from, ulong stride = 8, vec<ulong, 2> origin = vec<ulong, 2>(0ul), bool transposed = false, MSL_LINE) {
  const char nothing = 0;
  msl::exchange(&nothing, 1, msl::MATRIX, line);
  for (int i = 0; i < 2; i++) {
    const ulong row = msl::now->lane / 4, column = msl::now->lane % 4 * 2 + i;
    const ulong y = origin.y + (transposed ? column : row), x = origin.x + (transposed ? row : column);
    m.own[i] = from[y * stride + x];
  }
}
template <typename T> inline void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, T* to, ulong stride = 8, vec<ulong, 2> origin = vec<ulong, 2>(0ul), bool transposed = false, MSL_LINE) {
  const char nothing = 0;
  msl::exchange(&nothing, 1, msl::MATRIX, line);
  for (int i = 0; i < 2; i++) {
    const ulong row = msl::now->lane / 4, column = msl::now->lane % 4 * 2 + i;
    const ulong y = origin.y + (transposed ? column : row), x = origin.x + (transposed ? row : column);
    to[y * stride + x] = m.own[i];
  }
}
template <typename D, typename A, typename B, typename C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c, MSL_LINE) {
  struct Pair { A a[2]; B b[2]; };
  const auto lanes = msl::all_lanes(Pair{{a.own[0], a.own[1]}, {b.own[0], b.own[1]}}, msl::MATRIX, line);
  for (int i = 0; i < 2; i++) {
    const uint row = msl::now->lane / 4, column = msl::now->lane % 4 * 2 + i;
    float sum = float(c.own[i]);
    for (uint k = 0; k < 8; k++) sum += float(lanes[row * 4 + k / 2].a[k % 2]) * float(lanes[k * 4 + column / 2].b[column % 2]);
    d.own[i] = D(sum);
  }
}
template <typename D, typename A, typename B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b, MSL_LINE) {
  simdgroup_multiply_accumulate(d, a, b, simdgroup_matrix<D, 8, 8>(D(0)), line);
}
}  // namespace metal
namespace msl {
template <typename T> inline metal::vec<T, 3> place(const Place& at) { return metal::vec<T, 3>(T(at.x), T(at.y), T(at.z)); }
}
using namespace metal;

// ---- address spaces: limits.py looks at them.
#define device
#define constant
#define thread
#define threadgroup
#define METAL_FUNC inline
