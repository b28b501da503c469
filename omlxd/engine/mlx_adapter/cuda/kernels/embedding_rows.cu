extern "C" __global__ void omlxd_rows(
    const unsigned* table, const int* which, unsigned* out, const int words, const int rows) {
  const int row = blockIdx.x, wanted = which[row];
  const int from = min(max(wanted < 0 ? wanted + rows : wanted, 0), rows - 1);
  const bool wide = words % 4 == 0;
  const long at = (long)from * words, to = (long)row * words;
  if (wide) {
    const uint4* source = reinterpret_cast<const uint4*>(table + at);
    uint4* target = reinterpret_cast<uint4*>(out + to);
    for (int i = threadIdx.x; i < words / 4; i += blockDim.x) target[i] = source[i];
  } else {
    for (int i = threadIdx.x; i < words; i += blockDim.x) out[to + i] = table[at + i];
  }
}
