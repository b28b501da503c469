// Metal's types and functions for clang, with address spaces as types of their own. Nothing of it is compiled:
// limits.py asks what clang says of spaces. g++ and msl_on_cpu.h judge the rest.
#pragma once
using uint = unsigned int; using ushort = unsigned short; using uchar = unsigned char; using ulong = unsigned long;
using uint8_t = uchar; using uint16_t = ushort; using uint32_t = uint; using uint64_t = ulong; using size_t = ulong;
using int8_t = signed char; using int16_t = short; using int32_t = int; using int64_t = long;
using half = _Float16; using float16_t = half; using bfloat = __bf16; using bfloat16_t = bfloat;
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT __FLT_MAX__
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX half(65504.0f)
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define INT_MAX __INT_MAX__
#define UINT_MAX (__INT_MAX__ * 2u + 1u)

namespace metal {
template <typename T, int N> using vec = T __attribute__((ext_vector_type(N)));
template <typename T, int N> struct packed_vec {
  T e[N];
  T operator[](int) const;
};
template <bool B, typename T = void> struct enable_if {};
template <typename T> struct enable_if<true, T> { using type = T; };
template <bool B, typename T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, typename T, typename F> struct conditional { using type = T; };
template <typename T, typename F> struct conditional<false, T, F> { using type = F; };
template <bool B, typename T, typename F> using conditional_t = typename conditional<B, T, F>::type;
template <typename A, typename B> struct is_same { static constexpr bool value = false; };
template <typename A> struct is_same<A, A> { static constexpr bool value = true; };
template <typename A, typename B> constexpr bool is_same_v = is_same<A, B>::value;
template <typename T> struct numeric_limits {
  static constexpr T max() { return T(0); }
  static constexpr T min() { return T(0); }
  static constexpr T lowest() { return T(0); }
  static constexpr T infinity() { return T(0); }
  static constexpr T epsilon() { return T(0); }
  static constexpr T quiet_NaN() { return T(0); }
};
}  // namespace metal
#define MSL_NAMES(T, NAME)                                                                              \
  using NAME##2 = metal::vec<T, 2>; using NAME##3 = metal::vec<T, 3>; using NAME##4 = metal::vec<T, 4>; \
  using packed_##NAME##2 = metal::packed_vec<T, 2>; using packed_##NAME##3 = metal::packed_vec<T, 3>;   \
  using packed_##NAME##4 = metal::packed_vec<T, 4>;
MSL_NAMES(float, float) MSL_NAMES(half, half) MSL_NAMES(bfloat, bfloat) MSL_NAMES(int, int) MSL_NAMES(uint, uint)
MSL_NAMES(short, short) MSL_NAMES(ushort, ushort) MSL_NAMES(signed char, char) MSL_NAMES(uchar, uchar) MSL_NAMES(ulong, ulong)
template <typename To, typename From> To as_type(From);

// Types of results do not matter to spaces: of numbers they are the argument's.
#define MSL_ONE(NAME) template <typename T> T NAME(T);
#define MSL_MATH                                                                                                \
  MSL_ONE(exp) MSL_ONE(exp2) MSL_ONE(exp10) MSL_ONE(log) MSL_ONE(log2) MSL_ONE(log10) MSL_ONE(sqrt) MSL_ONE(rsqrt) \
  MSL_ONE(sin) MSL_ONE(cos) MSL_ONE(tan) MSL_ONE(sinh) MSL_ONE(cosh) MSL_ONE(tanh) MSL_ONE(asin) MSL_ONE(acos)  \
  MSL_ONE(atan) MSL_ONE(floor) MSL_ONE(ceil) MSL_ONE(trunc) MSL_ONE(round) MSL_ONE(rint) MSL_ONE(fabs)          \
  MSL_ONE(fract) MSL_ONE(sign) MSL_ONE(abs) MSL_ONE(popcount) MSL_ONE(clz) MSL_ONE(ctz)                         \
  template <typename T, typename U> T max(T, U); template <typename T, typename U> T min(T, U);                 \
  template <typename T, typename U> T fmax(T, U); template <typename T, typename U> T fmin(T, U);               \
  template <typename T, typename U> T pow(T, U); template <typename T, typename U> T fmod(T, U);                \
  template <typename T, typename U> T divide(T, U); template <typename T, typename U> T ldexp(T, U);            \
  template <typename T, typename U> T copysign(T, U); template <typename T, typename U> T mulhi(T, U);          \
  template <typename T, typename U, typename V> T fma(T, U, V);                                                 \
  template <typename T, typename U, typename V> T clamp(T, U, V);                                               \
  template <typename T, typename U, typename V> T select(T, U, V);                                              \
  template <typename T, typename U, typename V> T mix(T, U, V);                                                 \
  template <typename T> T extract_bits(T, uint, uint);                                                          \
  template <typename T> bool isnan(T); template <typename T> bool isinf(T); template <typename T> bool isfinite(T);
namespace metal {
MSL_MATH MSL_ONE(log1p)
namespace fast { MSL_MATH }
namespace precise { MSL_MATH }
template <typename T, int N> T dot(vec<T, N>, vec<T, N>);
template <typename T> bool any(T); template <typename T> bool all(T);
enum class mem_flags { mem_none, mem_device, mem_threadgroup, mem_texture };
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
MSL_ONE(simd_sum) MSL_ONE(simd_product) MSL_ONE(simd_max) MSL_ONE(simd_min) MSL_ONE(simd_and) MSL_ONE(simd_or) MSL_ONE(simd_xor)
MSL_ONE(simd_prefix_inclusive_sum) MSL_ONE(simd_prefix_exclusive_sum) MSL_ONE(simd_broadcast_first) MSL_ONE(quad_sum)
template <typename T> T simd_shuffle(T, ushort); template <typename T> T simd_shuffle_xor(T, ushort);
template <typename T> T simd_shuffle_down(T, ushort); template <typename T> T simd_shuffle_up(T, ushort);
template <typename T> T simd_broadcast(T, ushort); template <typename T> T quad_shuffle_xor(T, ushort);
template <typename T> T quad_broadcast(T, ushort);
bool simd_any(bool); bool simd_all(bool); bool simd_is_first();
}  // namespace metal
namespace msl {
template <typename T, int N, typename... From> metal::vec<T, N> made(From...);
}
using namespace metal;

// ---- address spaces. A thread's own is clang's own.
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define METAL_FUNC inline

namespace metal {
template <typename T, int R, int C> struct simdgroup_matrix {
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;
template <typename T, int R, int C> simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T);
#define MSL_MOVES(SPACE)                                                                                                        \
  template <typename T> void simdgroup_load(thread simdgroup_matrix<T, 8, 8>&, const SPACE T*, ulong = 8, ulong2 = 0, bool = false); \
  template <typename T> void simdgroup_store(thread const simdgroup_matrix<T, 8, 8>&, SPACE T*, ulong = 8, ulong2 = 0, bool = false);
MSL_MOVES(device) MSL_MOVES(threadgroup)
template <typename D, typename A, typename B> void simdgroup_multiply(thread D&, thread const A&, thread const B&);
template <typename D, typename A, typename B, typename C> void simdgroup_multiply_accumulate(thread D&, thread const A&, thread const B&, thread const C&);
}  // namespace metal
