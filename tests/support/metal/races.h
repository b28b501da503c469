// Which thread read and wrote each byte that threads share. The compiler calls `__tsan_*` at each access
// (-fsanitize=thread); of its own library nothing is used.
//
// Two threads touch a byte and one of them writes: a barrier with that memory's flag is between them, or, of one
// simdgroup, a simdgroup_barrier with it. Between a read and a write any simdgroup operation will do: what the
// reader gives may depend on what it read. Threadgroups share no byte that one of them writes.
#pragma once
#include <sys/mman.h>

#include "runtime.h"

namespace msl::races {
enum Space { DEVICE, THREADGROUP };  // Flags of barriers are 1 << these.
enum Many : uint8_t { LANES_READ = 1, SIMDGROUPS_READ = 2, GROUPS_READ = 4 };
struct Cell {
  uint32_t written, read;  // When, 0: never.
  uint32_t written_fence, read_turn;
  uint16_t writer, reader;
  uint8_t many;  // Who has read beside the reader.
};
struct Thread { uint32_t index, turn, fence[2]; };
struct alignas(32) Page {
  uintptr_t number;
  Cell* cells;
  size_t grain;  // Bytes that have one cell, the first: no access was of fewer.
  Space space;
  bool is_output;
};
constexpr size_t PAGE_BYTES = 4096, SLOTS = 1 << 16, MOST_GRAIN = 16;

static uint32_t epoch[2], begun[2];  // Barriers so far; and when this threadgroup began.
static Page* pages = nullptr;        // By their numbers' last bits.
static uint32_t used[SLOTS], count = 0;

static Page* page_of(uintptr_t number) {
  uintptr_t at = number % SLOTS;
  while (pages[at].number && pages[at].number != number) at = (at + 1) % SLOTS;
  return &pages[at];
}
static Cell* cells_of(Page* page, size_t grain) {
  if (!page->cells)
    page->cells = (Cell*)mmap(nullptr, PAGE_BYTES * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (grain < page->grain) {
    for (size_t at = 0; at < PAGE_BYTES; at++) page->cells[at] = page->cells[at / page->grain * page->grain];
    page->grain = grain;
  }
  return page->cells;
}
// Watches what lies here. Not more than half of the slots are taken: what lies in further pages is not watched.
static void watch(const void* start, size_t size, Space space, bool is_output) {
  if (!pages) pages = new Page[SLOTS]();
  for (uintptr_t number = uintptr_t(start) / PAGE_BYTES; number <= (uintptr_t(start) + size - 1) / PAGE_BYTES; number++) {
    if (count == SLOTS / 2) return;
    Page* page = page_of(number);
    if (!page->number) used[count++] = page - pages;
    *page = {number, page->cells, MOST_GRAIN, space, is_output};
  }
}
static void forget() {
  for (uint32_t i = 0; i < count; i++) {
    if (pages[used[i]].cells) munmap(pages[used[i]].cells, PAGE_BYTES * sizeof(Cell));
    pages[used[i]] = {};
  }
  count = 0;
}
static void begin_group() {
  for (int space = 0; space < 2; space++) begun[space] = ++epoch[space];
}
static void pass_barrier(int flags) {
  for (int space = 0; space < 2; space++) epoch[space] += flags >> space & 1;
}

// What is wrong, or nullptr; `other` is the thread of the earlier access, or -1 of another threadgroup.
static const char* touched(Page* page, Cell& cell, bool is_write, const Thread& me, int& other) {
  const Space space = page->space;
  const uint32_t now = epoch[space], first = begun[space];
  if (page->is_output && !is_write && !cell.written) return "it reads @, of an output, before it is written";
  if (cell.written && cell.written < first) {
    if (space == DEVICE) return other = -1, is_write ? "written, too" : "written";
    cell = {};
  } else if (cell.written == now && cell.writer != me.index &&
             (cell.writer / 32 != me.index / 32 || cell.written_fence == me.fence[space])) {
    return other = cell.writer, is_write ? "written, too" : "written";
  }
  if (is_write) {
    if (space == DEVICE && ((cell.read && cell.read < first) || cell.many & GROUPS_READ)) return other = -1, "read";
    if (cell.read == now) {
      const bool apart = cell.many & SIMDGROUPS_READ || cell.reader / 32 != me.index / 32;
      const bool at_once = cell.read_turn == me.turn && (cell.many & LANES_READ || cell.reader != me.index);
      if (apart || at_once) return other = cell.reader, "read";
    }
    cell.written = now, cell.writer = me.index, cell.written_fence = me.fence[space];
    return nullptr;
  }
  if (cell.read == now) {
    if (cell.reader / 32 != me.index / 32) cell.many |= SIMDGROUPS_READ;
    else if (cell.read_turn != me.turn) cell.many &= ~LANES_READ;
    else if (cell.reader != me.index) cell.many |= LANES_READ;
  } else {
    cell.many = cell.read && (cell.read < first || cell.many & GROUPS_READ) ? GROUPS_READ : 0;
  }
  cell.read = now, cell.reader = me.index, cell.read_turn = me.turn;
  return nullptr;
}
}  // namespace msl::races
