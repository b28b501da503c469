// A block is done. True: all of `blocks` are, and this thread is the one to know.
__device__ inline bool omlxd_count(int* done, int blocks) {
  __syncthreads();
  if (threadIdx.x) return false;
  __threadfence();
  return atomicAdd(done, 1) == blocks - 1;
}
// The very last one of all makes the counters ready for the next launch.
__device__ inline void omlxd_begin_again(int* counters) {
  for (int i = 0; i < LAYERS * COUNTED; i++) counters[PLACES * i] = 0;
}

// TAKES, CHOOSE, OF_NEXTS: arguments, the layer's own among them, and the next layer's products of them. FIRST,
// GATE_UP, DOWN, NEXTS: `omlxd_products` of one kind each. ATTENDS: each layer ends with attention.
#if ATTENDS
#define ATTENDED its_out
#define OF_ATTENTION across_blocks * down_blocks
#else
#define ATTENDED x
#define OF_ATTENTION 0
#endif
extern "C" __global__ void __launch_bounds__(BOUNDS) FUNCTION(TAKES) {
  Products<T> p = {};
  p.rows = rows;
  p.parts = (hidden + 15) / 16;
  p.eps = __int_as_float(eps);
  const int sets = (rows + SET - 1) / SET, of_attention = OF_ATTENTION;
  const int each = (blocks0 + blocks1 + blocks2 + blocks3) * sets + of_attention;
  const int layer = LAYERS > 1 ? blockIdx.x / each : 0;
  int block = blockIdx.x - layer * each;
  int* done = const_cast<int*>(counters) + layer * COUNTED * PLACES;
  CHOOSE
  if (block < blocks0 * sets) {
    p.x = layer ? ATTENDED : x; p.k = wide; p.w[0] = w0; p.n[0] = hidden; p.bias[0] = bias0; p.y[0] = sum0;
    p.residual = layer ? sum1 : residual; p.scaled = norm0; p.next = scaled0; p.next_squares = squares0;
    FIRST(p, block / sets, blocks0, block % sets * SET, layer ? done - PLACES : done,
          layer ? of_attention : 0);
    omlxd_count(done, blocks0 * sets);
    return;
  }
  block -= blocks0 * sets;
  if (block < blocks1 * sets) {
    p.x = scaled0; p.k = hidden; p.w[0] = w1; p.w[1] = w2; p.n[0] = p.n[1] = ffn; p.bias[0] = bias1;
    p.bias[1] = bias2; p.y[0] = inner; p.squares = squares0;
    GATE_UP(p, block / sets, blocks1, block % sets * SET, done, blocks0 * sets);
    omlxd_count(done + PLACES, blocks1 * sets);
    return;
  }
  block -= blocks1 * sets;
  if (block < blocks2 * sets) {
    p.x = inner; p.k = ffn; p.w[0] = w3; p.n[0] = hidden; p.bias[0] = bias3; p.y[0] = sum1;
    p.residual = sum0; p.scaled = norm1; p.next = scaled1; p.next_squares = squares1;
    DOWN(p, block / sets, blocks2, block % sets * SET, done + PLACES, blocks1 * sets);
    omlxd_count(done + 2 * PLACES, blocks2 * sets);
    return;
  }
  block -= blocks2 * sets;
  if (block < blocks3 * sets) {
    p.x = scaled1; p.k = hidden; p.squares = squares1;
    OF_NEXTS
    NEXTS(p, block / sets, blocks3, block % sets * SET, done + 2 * PLACES, blocks2 * sets);
    const bool is_last = omlxd_count(done + 3 * PLACES, blocks3 * sets);
#if !ATTENDS
    if (is_last) omlxd_begin_again(const_cast<int*>(counters));
#endif
    return;
  }
#if ATTENDS
  block -= blocks3 * sets;
  if (threadIdx.x >= 32 * WARPS) return;
  extern __shared__ uint4 its_rings[];
  omlxd_attend(block % across_blocks, block / across_blocks, its_rings, done + 3 * PLACES, blocks3 * sets,
               GIVEN);
  if (omlxd_count(done + 4 * PLACES, of_attention) && layer == LAYERS - 1)
    omlxd_begin_again(const_cast<int*>(counters));
#endif
}
