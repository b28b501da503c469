/* cblas_sgemm with the bits of the reference BLAS, but in vectors. See exact_blas.py.

An element is a sum in the order of k, each product rounded before it is added, as in the Fortran that
MLX's wheel links. Only which elements are computed side by side differs. Compile without contraction.
*/

#include <stdlib.h>
#include <string.h>

enum { ROW_MAJOR = 101, NO_TRANSPOSE = 111, LANES = 8, WIDTH = 2 * LANES, ROWS = 4, ON_STACK = 1024 };

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int order __attribute__((vector_size(4 * LANES)));

/* Elements [0, rows) x [0, columns) of C, of `panel`: K rows of WIDTH elements each. */
static inline __attribute__((always_inline)) void tile(
    const int rows, int columns, int K, int axpy, float alpha, const float *A, long row, long column,
    const float *panel, long stride, float beta, float *C, long ldc) {
  lanes left[ROWS], right[ROWS];
  float part[WIDTH];
#pragma GCC unroll 4
  for (int m = 0; m < rows; m++) {
    memset(part, 0, sizeof part);
    if (axpy && beta != 0)
      for (int j = 0; j < columns; j++) part[j] = beta == 1 ? C[m * ldc + j] : beta * C[m * ldc + j];
    left[m] = *(lanes *)part;
    right[m] = *(lanes *)(part + LANES);
  }
  const float scale = axpy ? alpha : 1;
  for (int k = 0; k < K; k++, panel += stride) {
    const lanes b = *(const lanes *)panel, c = *(const lanes *)(panel + LANES);
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++) {
      const float a = scale * A[m * row + k * column];
      left[m] += a * b;
      right[m] += a * c;
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < rows; m++) {
    *(lanes *)part = left[m];
    *(lanes *)(part + LANES) = right[m];
    if (!axpy && alpha != 1)
      for (int j = 0; j < columns; j++) part[j] *= alpha;
    if (!axpy && beta != 0)
      for (int j = 0; j < columns; j++) part[j] += beta * C[m * ldc + j];
    memcpy(C + m * ldc, part, sizeof(float) * columns);
  }
}

/* Eight rows of eight elements of `from`, `stride` apart, as eight columns of `to`. */
static inline void transpose(const float *from, long stride, float *to) {
  static const order low = {0, 8, 1, 9, 4, 12, 5, 13}, high = {2, 10, 3, 11, 6, 14, 7, 15};
  static const order even = {0, 1, 8, 9, 4, 5, 12, 13}, odd = {2, 3, 10, 11, 6, 7, 14, 15};
  static const order front = {0, 1, 2, 3, 8, 9, 10, 11}, back = {4, 5, 6, 7, 12, 13, 14, 15};
  lanes a[8], b[8];
  for (int i = 0; i < 8; i++) a[i] = *(const lanes *)(from + i * stride);
  for (int i = 0; i < 8; i += 2) {
    b[i] = __builtin_shuffle(a[i], a[i + 1], low);
    b[i + 1] = __builtin_shuffle(a[i], a[i + 1], high);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = __builtin_shuffle(b[i], b[i + 2], even);
    a[i + 1] = __builtin_shuffle(b[i], b[i + 2], odd);
    a[i + 2] = __builtin_shuffle(b[i + 1], b[i + 3], even);
    a[i + 3] = __builtin_shuffle(b[i + 1], b[i + 3], odd);
  }
  for (int i = 0; i < 4; i++) {
    *(lanes *)(to + i * WIDTH) = __builtin_shuffle(a[i], a[i + 4], front);
    *(lanes *)(to + (i + 4) * WIDTH) = __builtin_shuffle(a[i], a[i + 4], back);
  }
}

/* Rows [n, n + columns) of B's transpose, as K rows of WIDTH; what B lacks is 0. */
static void pack(const float *B, long ldb, int transposed, int columns, int K, float *packed) {
  int k = 0;
  if (transposed && columns == WIDTH)
    for (; k + 8 <= K; k += 8) {
      transpose(B + k, ldb, packed + k * WIDTH);
      transpose(B + k + LANES * ldb, ldb, packed + k * WIDTH + LANES);
    }
  for (; k < K; k++)
    for (int j = 0; j < WIDTH; j++)
      packed[k * WIDTH + j] = j >= columns ? 0 : transposed ? B[j * ldb + k] : B[k * ldb + j];
}

void cblas_sgemm(int layout, int ta, int tb, int M, int N, int K, float alpha, const float *A, int lda,
                 const float *B, int ldb, float beta, float *C, int ldc) {
  if (layout != ROW_MAJOR) { /* The same product, transposed. */
    cblas_sgemm(ROW_MAJOR, tb, ta, N, M, K, alpha, B, ldb, A, lda, beta, C, ldc);
    return;
  }
  if (M <= 0 || N <= 0 || ((alpha == 0 || K <= 0) && beta == 1)) return;
  if (alpha == 0) K = 0;
  const int axpy = tb == NO_TRANSPOSE;
  const long row = ta == NO_TRANSPOSE ? lda : 1, column = ta == NO_TRANSPOSE ? 1 : lda;
  float stack[ON_STACK * WIDTH], *packed = stack;
  if (K > ON_STACK) packed = malloc(sizeof(float) * WIDTH * K);
  for (int n = 0; n < N; n += WIDTH) {
    const int columns = N - n < WIDTH ? N - n : WIDTH;
    const int as_is = axpy && columns == WIDTH;
    const float *from = axpy ? B + n : B + (long)n * ldb;
    if (!as_is) pack(from, ldb, !axpy, columns, K, packed);
    const float *panel = as_is ? from : packed;
    const long stride = as_is ? ldb : WIDTH;
    int m = 0;
    for (; m + ROWS <= M; m += ROWS)
      tile(ROWS, columns, K, axpy, alpha, A + m * row, row, column, panel, stride, beta, C + (long)m * ldc + n, ldc);
    for (; m < M; m++)
      tile(1, columns, K, axpy, alpha, A + m * row, row, column, panel, stride, beta, C + (long)m * ldc + n, ldc);
  }
  if (packed != stack) free(packed);
}
