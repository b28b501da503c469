// A kernel's threads as fibers. What Metal leaves undefined is an error here: a simdgroup operation that some
// lanes of a simdgroup do not reach, a barrier that some threads do not reach, a touched fence.
#include "runtime.h"

#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "races.h"

extern "C" {
// What a launch tells its caller.
struct Report {
  char text[400];   // "": all went well. @: what lies at the address.
  char array[100];  // Of threadgroup memory, which lies there.
  int line, other;  // Of the source, 0: none.
  uint64_t address, code;  // Of a fault.
  uint64_t threadgroup_bytes;
};
// Memory that a kernel may write.
struct Written { char* start; uint64_t size; uint64_t is_output; };
}

namespace msl {
constexpr uint32_t LANES = 32;
constexpr size_t STACK = 1 << 17, PAGE = 4096;
constexpr size_t MOST_THREADGROUP_BYTES = 32768;
constexpr int64_t STEPS_OF_MEETING = 100;
constexpr int MOST_CALLS = 64;
enum State { RUNS, AT_SIMD, AT_BARRIER, ENDED };

using Jump = void* [5];  // Of the compiler's own, a tenth of the library's time.

struct Fiber {
  ucontext_t context;  // It starts by this, and goes on by `jump`, which asks the kernel for nothing.
  Jump jump;
  bool begun = false;
  State state;
  int line, what, flags;
  uintptr_t site;  // Where in the machine code it waits, and by which calls.
  void* calls[MOST_CALLS];
  int depth;
  char* stack = nullptr;
  Now now;
  Slot put[2];  // Two: a lane may be at the next operation while others still read this one's.
  races::Thread races;
  // Of the first lane: its simdgroup's.
  Joined joined[2];
  const Slot* slots[2][LANES];
};
struct Array {
  int number;
  const char* name;
  size_t size, room;
  char *at, *begin;  // Of the array, and of the pages between its fences.
};

const Now* now;
static std::vector<Fiber*> fibers;
static Fiber* self;
static Jump scheduler;
static sigjmp_buf outside;
static Report* report;
static void (*body)(void**);
static void** buffers;
static std::vector<Array> arrays;
static int fill;
static int64_t steps_left = INT64_MAX;
static bool watches;  // Whether races are looked for.
static bool at_start;  // Whether arrays lie at the fence before them, and not at the one behind.
static uint64_t random_state;
static pid_t runner;

static uint64_t draw() {
  random_state ^= random_state << 13, random_state ^= random_state >> 7;
  return random_state ^= random_state << 17;
}
static void shuffle(std::vector<uint32_t>& some) {
  for (size_t i = some.size(); i > 1; i--) std::swap(some[i - 1], some[draw() % i]);
}
static const char* name_of(int what) {
  static const char* names[] = {"simd_sum", "simd_product", "simd_max", "simd_min", "simd_shuffle",
                                "simd_shuffle_xor", "simd_shuffle_down", "simd_shuffle_up", "simd_broadcast",
                                "simd_prefix_inclusive_sum", "simd_prefix_exclusive_sum", "simd_any", "simd_all",
                                "simd_ballot", "simdgroup_barrier", "an operation of simdgroup_matrix", "a quad operation"};
  return names[what];
}

static void say(const char* text, int line, int other = 0) {
  if (report->text[0]) return;
  snprintf(report->text, sizeof report->text, "%s", text);
  report->line = line, report->other = other;
}
void fail(const char* what, int line) {
  say(what, line);
  siglongjmp(outside, 1);
}

static __attribute__((noinline, noreturn)) void jump_to(void** where) { __builtin_longjmp(where, 1); }
static __attribute__((noinline)) void leave() {
  if (!__builtin_setjmp(self->jump)) jump_to(scheduler);
}
Joined* joined;
static void wait(State state, int line, int flags, void* code) {
  uintptr_t site = uintptr_t(code);
  for (int i = 0; i < self->depth && i < MOST_CALLS; i++) site = site * 31 + uintptr_t(self->calls[i]);
  self->state = state, self->line = line, self->flags = flags, self->site = site;
  steps_left -= STEPS_OF_MEETING;
  leave();
}
const Slot* const* exchange(const void* mine, size_t size, Operation what, int line, int flags) {
  Fiber* me = self;
  const unsigned turn = me->races.turn++ & 1;
  memcpy(me->put[turn].bytes, mine, size);
  me->what = what;
  wait(AT_SIMD, line, flags, __builtin_return_address(0));
  for (int space = 0; space < 2; space++) me->races.fence[space] += flags >> space & 1;
  Fiber* first = fibers[me->now.index / LANES * LANES];
  joined = &first->joined[turn];
  return first->slots[turn];
}
void barrier(int flags, int line) { wait(AT_BARRIER, line, flags, __builtin_return_address(0)); }

static char* fenced(size_t room) {
  char* pages = (char*)mmap(nullptr, room + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  mprotect(pages + PAGE, room, PROT_READ | PROT_WRITE);
  return pages + PAGE;
}
void* shared(size_t size, int number, const char* name, int line) {
  size_t total = size;
  for (auto& array : arrays) {
    if (array.number == number) return array.at;
    total += (array.size + 15) / 16 * 16;
  }
  report->threadgroup_bytes = total;
  if (total > MOST_THREADGROUP_BYTES) {
    char text[120];
    snprintf(text, sizeof text, "threadgroup arrays take %zu bytes, and Apple's GPUs have 32,768", total);
    fail(text, line);
  }
  const size_t room = (size + PAGE - 1) / PAGE * PAGE;
  char* begin = fenced(room);
  memset(begin, fill, room);
  arrays.push_back({number, name, size, room, at_start ? begin : begin + (room - size) / 16 * 16, begin});
  races::watch(arrays.back().at, size, races::THREADGROUP, false);
  return arrays.back().at;
}

static void entry() {
  for (;;) {
    body(buffers);
    self->state = ENDED;
    leave();
  }
}
static __attribute__((noinline)) void resume(Fiber* fiber) {
  self = fiber;
  now = &fiber->now;
  if (__builtin_setjmp(scheduler)) return;
  if (fiber->begun) jump_to(fiber->jump);
  fiber->begun = true;
  setcontext(&fiber->context);
}
static void make(Fiber* fiber) {
  if (!fiber->stack) {
    fiber->stack = (char*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    mprotect(fiber->stack, PAGE, PROT_NONE);
  }
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack;
  fiber->context.uc_stack.ss_size = STACK;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, entry, 0);
  fiber->begun = false;
}

// Runs lanes [from, end) until none runs. Whether they were at a simdgroup operation and go on from there.
static bool run_lanes(uint32_t from, uint32_t end, const std::vector<uint32_t>& lanes) {
  for (uint32_t lane : lanes)
    if (from + lane < end && fibers[from + lane]->state == RUNS) resume(fibers[from + lane]);
  Fiber* at = nullptr;
  for (uint32_t i = from; i < end; i++)
    if (fibers[i]->state == AT_SIMD) at = fibers[i];
  if (!at) return false;
  char text[200];
  for (uint32_t i = from; i < end; i++) {
    Fiber* other = fibers[i];
    if (other->state == AT_SIMD && other->site == at->site && other->what == at->what) continue;
    if (other->state == AT_SIMD && other->what == at->what)
      snprintf(text, sizeof text, "lanes of a simdgroup are at different places of %s", name_of(at->what));
    else if (other->state == AT_SIMD)
      snprintf(text, sizeof text, "lanes of a simdgroup are at different operations: %s and %s", name_of(other->what), name_of(at->what));
    else if (other->state == ENDED)
      snprintf(text, sizeof text, "%s without the lanes that have returned", name_of(at->what));
    else
      snprintf(text, sizeof text, "%s while other lanes are at a barrier", name_of(at->what));
    say(text, at->line, other->state == ENDED ? 0 : other->line);
    siglongjmp(outside, 1);
  }
  for (uint32_t i = from; i < end; i++) fibers[i]->state = RUNS;
  fibers[from]->joined[(fibers[from]->races.turn - 1) & 1].done = false;
  return true;
}
static void reach_barrier(uint32_t threads) {
  Fiber* at = nullptr;
  for (uint32_t i = 0; i < threads; i++)
    if (fibers[i]->state == AT_BARRIER) at = fibers[i];
  for (uint32_t i = 0; i < threads; i++) {
    Fiber* other = fibers[i];
    if (other->state == AT_BARRIER && other->site == at->site) continue;
    if (other->state == AT_BARRIER) say("threads are at different barriers", at->line, other->line);
    else say("a barrier that not all threads reach", at->line);
    siglongjmp(outside, 1);
  }
  for (uint32_t i = 0; i < threads; i++) fibers[i]->state = RUNS;
  races::pass_barrier(at->flags);
}

// Orders. 0: each simdgroup goes as far as it can, the first one first. 1: the same from the last thread.
// Others: simdgroups and lanes by chance, a simdgroup's operation at a time.
static void run_group(uint32_t threads, unsigned seed) {
  const uint32_t count = (threads + LANES - 1) / LANES;
  std::vector<uint32_t> lanes(LANES), runnable;
  for (uint32_t i = 0; i < LANES; i++) lanes[i] = seed == 1 ? LANES - 1 - i : i;
  for (;;) {
    runnable.clear();
    for (uint32_t i = 0; i < count; i++) runnable.push_back(seed == 1 ? i : count - 1 - i);  // Taken from the end.
    while (!runnable.empty()) {
      if (seed > 1) {
        std::swap(runnable.back(), runnable[draw() % runnable.size()]);
        shuffle(lanes);
      }
      const uint32_t from = runnable.back() * LANES;
      if (!run_lanes(from, std::min(threads, from + LANES), lanes)) runnable.pop_back();
    }
    bool ended = true;
    for (uint32_t i = 0; i < threads; i++) ended &= fibers[i]->state == ENDED;
    if (ended) return;
    reach_barrier(threads);
  }
}

static void fault(int number, siginfo_t* info, void* context) {
  if (gettid() != runner) {  // Another thread's, and none of ours.
    signal(number, SIG_DFL);
    return;
  }
  const char* text = number == SIGSEGV || number == SIGBUS ? "fault"
                     : number == SIGILL ? "an index beyond an array, an address that is not aligned, or an integer divided by 0"
                                        : "an integer divided by 0";
  if (!report->text[0]) {
    snprintf(report->text, sizeof report->text, "%s", text);
    report->address = (uint64_t)info->si_addr;
#if defined(__x86_64__)
    report->code = ((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
    report->code = ((ucontext_t*)context)->uc_mcontext.pc;
#endif
  }
  siglongjmp(outside, 1);
}

static void run_grid(Place grid, Place full, unsigned seed) {
  const Place groups = {(grid.x + full.x - 1) / full.x, (grid.y + full.y - 1) / full.y, (grid.z + full.z - 1) / full.z};
  std::vector<uint32_t> order(size_t(groups.x) * groups.y * groups.z);
  for (size_t i = 0; i < order.size(); i++) order[i] = seed == 1 ? order.size() - 1 - i : i;
  if (seed > 1) shuffle(order);
  for (uint32_t at : order) {
    const Place group = {at % groups.x, at / groups.x % groups.y, at / groups.x / groups.y};
    const Place start = {group.x * full.x, group.y * full.y, group.z * full.z};
    const Place size = {std::min(full.x, grid.x - start.x), std::min(full.y, grid.y - start.y), std::min(full.z, grid.z - start.z)};
    const uint32_t threads = size.x * size.y * size.z;
    for (auto& array : arrays) memset(array.begin, fill, array.room);
    races::begin_group();
    for (uint32_t i = 0; i < threads; i++) {
      Fiber* fiber = fibers[i];
      const Place own = {i % size.x, i / size.x % size.y, i / size.x / size.y};
      fiber->now = {{start.x + own.x, start.y + own.y, start.z + own.z}, own, group, size, grid, groups, full,
                    i, i % LANES, i / LANES, (threads + LANES - 1) / LANES, std::min(LANES, threads - i / LANES * LANES)};
      fiber->state = RUNS, fiber->races = {i, 0, {0, 0}}, fiber->depth = 0;
      for (int turn = 0; turn < 2; turn++) fibers[i / LANES * LANES]->slots[turn][i % LANES] = &fiber->put[turn];
    }
    run_group(threads, seed);
    for (auto& array : arrays)
      for (size_t i = 0; i < array.room; i++)
        if ((array.begin + i < array.at || array.begin + i >= array.at + array.size) && array.begin[i] != char(fill)) {
          say("it writes outside of a threadgroup array", 0);
          return;
        }
  }
}
static void touched(races::Page* page, void* address, size_t size, bool is_write, void* code) {
  const uintptr_t first = uintptr_t(address) % PAGE;
  const size_t grain = (first | size | races::MOST_GRAIN) & -(first | size | races::MOST_GRAIN);
  races::Cell* cells = races::cells_of(page, grain);
  int other = 0;
  for (size_t i = 0; i < size && first + i < PAGE; i += page->grain) {
    const char* wrong = races::touched(page, cells[first + i], is_write, self->races, other);
    if (!wrong) continue;
    if (*wrong == 'i') say(wrong, 0);
    else if (other < 0)
      snprintf(report->text, sizeof report->text, "a race at @: a threadgroup %s what another one has %s", is_write ? "writes" : "reads", wrong);
    else
      snprintf(report->text, sizeof report->text, "a race at @: thread %u %s what thread %d has %s, and no barrier for this memory is between", self->now.index, is_write ? "writes" : "reads", other, wrong);
    report->address = uintptr_t(address) + i, report->code = uintptr_t(code) - 1;
    siglongjmp(outside, 1);
  }
}
// The array of threadgroup memory at this address, as text.
static void name_array(const char* address) {
  for (auto& array : arrays)
    if (address >= array.begin - PAGE && address < array.begin + array.room + PAGE)
      snprintf(report->array, sizeof report->array, "%s, byte %ld of %zu", array.name, long(address - array.at), array.size);
}
}  // namespace msl

#define MSL_TOUCHED(SIZE, IS_WRITE)                                                                       \
  if (!msl::watches) return;                                                                              \
  auto* page = msl::races::page_of(uintptr_t(at) / msl::PAGE);                                            \
  if (page->number) msl::touched(page, at, SIZE, IS_WRITE, __builtin_return_address(0));
#define MSL_ACCESS(KIND, IS_WRITE)                                                                                       \
  MSL_SIZE(KIND##1, 1, IS_WRITE) MSL_SIZE(KIND##2, 2, IS_WRITE) MSL_SIZE(KIND##4, 4, IS_WRITE) MSL_SIZE(KIND##8, 8, IS_WRITE) \
  MSL_SIZE(KIND##16, 16, IS_WRITE)                                                                                        \
  void __tsan_##KIND##_range(void* at, size_t size) { MSL_TOUCHED(size, IS_WRITE) }
#define MSL_SIZE(NAME, SIZE, IS_WRITE)                                                                        \
  void __tsan_##NAME(void* at) { MSL_TOUCHED(SIZE, IS_WRITE) }             \
  void __tsan_unaligned_##NAME(void* at) { MSL_TOUCHED(SIZE, IS_WRITE) }
extern "C" {
MSL_ACCESS(read, false) MSL_ACCESS(write, true)
void __tsan_init() {}
void __tsan_func_entry(void* from) {
  if (msl::self && msl::self->depth++ < msl::MOST_CALLS) msl::self->calls[msl::self->depth - 1] = from;
}
void __tsan_func_exit() {
  if (msl::self) msl::self->depth--;
}
void __sanitizer_cov_trace_pc() {
  if (--msl::steps_left >= 0) return;
  msl::say("it does not end", 0);
  msl::report->code = uintptr_t(__builtin_return_address(0)) - 1;
  siglongjmp(msl::outside, 1);
}
}

extern "C" void msl_run(void (*kernel)(void**), void** given, const uint32_t* grid, const uint32_t* group,
                        unsigned seed, int begin_with, int64_t most, const Written* written, uint32_t written_count,
                        bool looks_for_races, Report* out) {
  using namespace msl;
  *out = {};
  report = out, body = kernel, buffers = given, fill = begin_with, steps_left = most, watches = looks_for_races;
  at_start = seed & 1, random_state = 0x9e3779b97f4a7c15ull * (seed + 1), runner = gettid();
  const Place full = {std::min(group[0], grid[0]), std::min(group[1], grid[1]), std::min(group[2], grid[2])};
  while (fibers.size() < full.x * full.y * full.z) fibers.push_back(new Fiber), make(fibers.back());

  static char alternate[1 << 16];
  stack_t own_stack = {}, previous_stack;
  own_stack.ss_sp = alternate, own_stack.ss_size = sizeof alternate;
  sigaltstack(&own_stack, &previous_stack);
  const int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  struct sigaction ours = {}, previous[4];
  ours.sa_sigaction = fault, ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int i = 0; i < 4; i++) sigaction(signals[i], &ours, &previous[i]);
  for (uint32_t i = 0; i < written_count; i++) races::watch(written[i].start, written[i].size, races::DEVICE, written[i].is_output);

  if (!sigsetjmp(outside, 1)) run_grid({grid[0], grid[1], grid[2]}, full, seed);

  self = nullptr, steps_left = INT64_MAX;
  name_array((const char*)out->address);
  races::forget();
  for (int i = 0; i < 4; i++) sigaction(signals[i], &previous[i], nullptr);
  sigaltstack(&previous_stack, nullptr);
  if (out->text[0])
    for (auto* fiber : fibers) make(fiber);
  for (auto& array : arrays) munmap(array.begin - PAGE, array.room + 2 * PAGE);
  arrays.clear();
}
