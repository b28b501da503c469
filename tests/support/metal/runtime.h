// What a kernel's translation unit needs of runtime.cpp. No header of a library: each kernel would wait for it.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace msl {
struct Place { uint32_t x, y, z; };
struct Fiber;

// The running thread, and its launch.
struct Now {
  Place in_grid, in_group, group, group_size, grid_size, groups, full_group;
  uint32_t index, lane, simdgroup, simdgroups, width;
};
extern const Now* now;

enum Operation : int {
  SUM, PRODUCT, MAX, MIN, SHUFFLE, SHUFFLE_XOR, SHUFFLE_DOWN, SHUFFLE_UP, BROADCAST, PREFIX, PREFIX_EXCLUSIVE,
  ANY, ALL, BALLOT, SIMDGROUP_BARRIER, MATRIX, QUAD
};

// Waits until all lanes of the simdgroup are at this operation; gives what they put, a slot each.
struct alignas(16) Slot { unsigned char bytes[32]; };
// What the first lane makes of all lanes' values, for the others.
struct Joined { bool done; Slot value; };
extern Joined* joined;
const Slot* const* exchange(const void* mine, size_t size, Operation what, int line, int flags = 0);
void barrier(int flags, int line);
[[noreturn]] void fail(const char* what, int line);
// The threadgroup's array with this number, full of `fill` as a threadgroup begins.
void* shared(size_t size, int number, const char* name, int line);
}  // namespace msl
