// What all kernels begin with: types of 16 bits, and the instructions that CUDA has no function for.
#define INFINITY __int_as_float(0x7f800000)
struct bfloat16 { unsigned short bits; };
struct float16 { unsigned short bits; };
template <typename T> __device__ float2 omlxd_floats(unsigned pair);
template <> __device__ inline float2 omlxd_floats<bfloat16>(unsigned pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <> __device__ inline float2 omlxd_floats<float16>(unsigned pair) {
  float2 x;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
      : "=f"(x.x), "=f"(x.y) : "r"(pair));
  return x;
}
template <typename T> __device__ inline float omlxd_float(T x) { return omlxd_floats<T>(x.bits).x; }
// Until `count` blocks of this launch have counted themselves in `done`.
__device__ inline void omlxd_await(const int* done, int count) {
  if (threadIdx.x == 0) {
    int now;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(done) : "memory");
    while (now < count);
  }
  __syncthreads();
}
__device__ inline float omlxd_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
template <typename T> __device__ inline void omlxd_eight(uint4 bits, float* out) {
  const unsigned pairs[4] = {bits.x, bits.y, bits.z, bits.w};
  #pragma unroll
  for (int e = 0; e < 4; e++) {
    const float2 x = omlxd_floats<T>(pairs[e]);
    out[2 * e] = x.x;
    out[2 * e + 1] = x.y;
  }
}
#define OMLXD_MMA(T, NAME) \
  template <> __device__ inline void omlxd_mma<T>( \
      float* d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) { \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 " \
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)); \
  }
template <typename T> __device__ void omlxd_mma(
    float* d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1);
#define OMLXD_ROUND(T, NAME) \
  template <> __device__ inline unsigned omlxd_pair<T>(float a, float b) { \
    unsigned x; \
    asm("cvt.rn." NAME "x2.f32 %0, %1, %2;" : "=r"(x) : "f"(b), "f"(a)); \
    return x; \
  } \
  template <> __device__ inline T omlxd_round<T>(float x) { \
    T y; \
    asm("cvt.rn." NAME ".f32 %0, %1;" : "=h"(y.bits) : "f"(x)); \
    return y; \
  }
template <typename T> __device__ unsigned omlxd_pair(float a, float b);
template <typename T> __device__ T omlxd_round(float x);
OMLXD_MMA(bfloat16, "bf16")
OMLXD_MMA(float16, "f16")
OMLXD_ROUND(bfloat16, "bf16")
OMLXD_ROUND(float16, "f16")
