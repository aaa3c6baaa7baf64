// SPDX-License-Identifier: MIT OR Apache-2.0
// Runs CUDA C++ device code on the CPU: the same .cu text, one block at a time, one fibre for each thread.
//
// What it checks while running:
//  * Shared memory starts as NaN in every block, and threads run in an order set by a seed (0 ascending,
//    1 descending, others shuffled at every step): a missing barrier shows as a wrong or NaN result.
//  * cp.async is deferred to its wait: a missing wait shows as NaN.
//  * A barrier or warp exchange that not all of its threads reach is an error (deadlock), not a hang.
//  * Dynamic shared memory ends in a canary; static shared memory is checked when built with
//    -fsanitize=address -fsanitize-sections=emu_shared.
// What it cannot see: two threads racing on one word inside one step, and anything about speed.
//
// Rule for kernels: __shared__ arrays are declared in extern "C" kernels or non-template functions only.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define SEZM_EMULATION 1

// ---- built-in vector types
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
static inline float2 make_float2(float a, float b) { return {a, b}; }
static inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
static inline double2 make_double2(double a, double b) { return {a, b}; }
static inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }

namespace emu {

/// Why a fibre gave up the processor.
enum Wait { RUNNABLE, BLOCK_BARRIER, WARP_BARRIER, FINISHED, FAILED };

struct Copy {
  void* to;
  const void* from;
  int bytes;
};

struct Fibre {
  uint3 thread;
  unsigned linear = 0;
  Wait wait = RUNNABLE;
  unsigned mask = 0;  // lanes that a warp barrier waits for
  char* stack = nullptr;
  void* stack_pointer = nullptr;
  ucontext_t context;
  std::vector<std::vector<Copy>> groups;  // committed cp.async groups, oldest first
  std::vector<Copy> open;                 // cp.async since the last commit
};

/// One 64-byte mailbox for each lane: shuffles and matrix instructions exchange operands through it.
struct Warp {
  alignas(16) unsigned char slot[32][64];
};

struct NamedBarrier {
  unsigned arrived = 0, generation = 0;
};

constexpr size_t STACK_BYTES = 256 << 10;
constexpr size_t CANARY_BYTES = 64;

inline Fibre* current = nullptr;
inline uint3 block_index{};
inline dim3 block_size, grid_size;
inline std::vector<Fibre> fibres;
inline std::vector<Warp> warps;
inline std::vector<char*> stacks;
inline char* dynamic_shared = nullptr;
inline size_t dynamic_bytes = 0;
inline NamedBarrier named_barriers[16];
inline std::function<void()> body;
inline ucontext_t scheduler_context;
inline void* scheduler_pointer = nullptr;
inline std::string failure;
/// How tensor cores add: 0 = f32 chain, rounded to nearest; 1 = as Hopper was measured to: the products of
/// one instruction and the accumulator aligned to the largest, 25 fraction bits kept by truncation.
inline int tensor_model = 1;

#if defined(__x86_64__) && !defined(EMU_UCONTEXT)
#define EMU_ASM 1
// Saves the callee-saved registers on the old stack and takes up the new one: ten times faster than
// swapcontext.
extern "C" void emu_switch(void** from, void* to);
asm(R"(
.text
.weak emu_switch
.type emu_switch,@function
emu_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp,(%rdi)
  mov %rsi,%rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
#endif

#if defined(__SANITIZE_ADDRESS__)
inline const void* main_stack = nullptr;
inline size_t main_stack_bytes = 0;
#endif

inline void to_scheduler(Fibre* f) {
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(f->wait == FINISHED ? nullptr : &fake, main_stack, main_stack_bytes);
#endif
#ifdef EMU_ASM
  emu_switch(&f->stack_pointer, scheduler_pointer);
#else
  swapcontext(&f->context, &scheduler_context);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

inline void yield(Wait why, unsigned mask = 0) {
  current->wait = why;
  current->mask = mask;
  to_scheduler(current);
}

/// Ends the launch with a message, from inside a kernel: the fibre is never resumed.
[[noreturn]] inline void fail(const std::string& message) {
  failure = message;
  yield(FAILED);
  abort();
}

inline void entry() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &main_stack, &main_stack_bytes);
#endif
  body();
  bool in_flight = !current->open.empty();
  for (auto& group : current->groups) in_flight |= !group.empty();
  if (in_flight) fail("a thread ended with cp.async in flight");
  yield(FINISHED);
  abort();
}

inline void resume(Fibre& f) {
  current = &f;
  f.wait = RUNNABLE;
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, f.stack, STACK_BYTES);
#endif
#ifdef EMU_ASM
  emu_switch(&scheduler_pointer, f.stack_pointer);
#else
  swapcontext(&scheduler_context, &f.context);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

inline void prepare(Fibre& f, unsigned i, dim3 block) {
  f.thread = {i % block.x, i / block.x % block.y, i / block.x / block.y};
  f.linear = i;
  f.wait = RUNNABLE;
  f.stack = stacks[i];
  f.groups.clear();
  f.open.clear();
#ifdef EMU_ASM
  void** sp = reinterpret_cast<void**>(f.stack + STACK_BYTES - 64);
  *--sp = nullptr;  // the return address of entry(), which never returns
  *--sp = reinterpret_cast<void*>(&entry);
  for (int r = 0; r < 6; ++r) *--sp = nullptr;
  f.stack_pointer = sp;
#else
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack;
  f.context.uc_stack.ss_size = STACK_BYTES;
  f.context.uc_link = nullptr;
  makecontext(&f.context, entry, 0);
#endif
}

extern "C" {
extern char __start_emu_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_emu_shared[] __attribute__((weak, visibility("hidden")));
}

/// NaN in every float and double. By volatile stores, since a sanitizer forbids memset over its red zones.
__attribute__((no_sanitize("address"), noinline)) inline void poison_shared() {
  for (volatile char* p = __start_emu_shared; p != __stop_emu_shared; ++p) *p = static_cast<char>(0xff);
  memset(dynamic_shared, 0xff, dynamic_bytes);
}

inline std::string where() {
  return " (block " + std::to_string(block_index.x) + "," + std::to_string(block_index.y) + "," +
         std::to_string(block_index.z) + ")";
}

/// Lets the lanes go on whose whole mask waits; true if any did.
inline bool release_warps(unsigned threads) {
  bool released = false;
  for (unsigned low = 0; low < threads; low += 32) {
    unsigned high = std::min(threads, low + 32), live = 0;
    for (unsigned i = low; i < high; ++i)
      if (fibres[i].wait != FINISHED) live |= 1u << (i - low);
    for (unsigned i = low; i < high; ++i) {
      if (fibres[i].wait != WARP_BARRIER) continue;
      unsigned wanted = fibres[i].mask & live, ready = 0;
      for (unsigned j = low; j < high; ++j)
        if (fibres[j].wait == WARP_BARRIER && fibres[j].mask == fibres[i].mask) ready |= 1u << (j - low);
      if ((wanted & ~ready) != 0) continue;
      for (unsigned j = low; j < high; ++j)
        if (wanted >> (j - low) & 1) fibres[j].wait = RUNNABLE;
      released = true;
    }
  }
  return released;
}

inline void run_block(unsigned threads, unsigned seed, std::mt19937& random, std::vector<unsigned>& order) {
  constexpr unsigned long SPIN_LIMIT = 20'000'000;
  unsigned long idle_passes = 0;
  for (;;) {
    if (seed == 1) std::reverse(order.begin(), order.end());
    if (seed > 1) std::shuffle(order.begin(), order.end(), random);
    for (unsigned i : order) {
      if (fibres[i].wait == RUNNABLE) resume(fibres[i]);
      if (!failure.empty()) return;
    }
    bool progress = release_warps(threads);
    unsigned finished = 0, at_barrier = 0, runnable = 0;
    for (auto& f : fibres) {
      finished += f.wait == FINISHED;
      at_barrier += f.wait == BLOCK_BARRIER;
      runnable += f.wait == RUNNABLE;
    }
    if (finished == threads) return;
    if (at_barrier != 0 &&
        at_barrier + finished == threads) {  // exited threads do not count, as on the device
      for (auto& f : fibres)
        if (f.wait == BLOCK_BARRIER) f.wait = RUNNABLE;
      continue;
    }
    if (runnable == 0) {
      failure = "deadlock: a barrier or warp exchange that not all of its threads reach";
      return;
    }
    idle_passes = progress ? 0 : idle_passes + 1;
    if (idle_passes > SPIN_LIMIT / threads) {
      failure = "threads wait for ever on a memory or named barrier";
      return;
    }
  }
}

struct Geometry {
  unsigned grid[3], block[3];
  unsigned long long shared_bytes;
  unsigned seed;
  int tensor_model;
};

/// Runs `kernel` for every thread of the grid. Returns null, or what went wrong (valid until the next
/// launch).
inline const char* launch(const Geometry& g, std::function<void()> kernel) {
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> lock(one_at_a_time);
  static std::string message;
  const unsigned threads = g.block[0] * g.block[1] * g.block[2];
  if (threads == 0 || threads > 1024) return "a block has 1 to 1024 threads";
  if (g.grid[0] == 0 || g.grid[1] == 0 || g.grid[2] == 0) return "the grid is empty";
  if (g.grid[1] > 65535 || g.grid[2] > 65535) return "grid y and z end at 65535";
  if (g.shared_bytes > 227 * 1024) return "a block has at most 227 KB of shared memory";
  grid_size = dim3(g.grid[0], g.grid[1], g.grid[2]);
  block_size = dim3(g.block[0], g.block[1], g.block[2]);
  tensor_model = g.tensor_model;
  body = std::move(kernel);
  failure.clear();
  fibres.assign(threads, Fibre());
  warps.assign((threads + 31) / 32, Warp());
  while (stacks.size() < threads) stacks.push_back(static_cast<char*>(aligned_alloc(64, STACK_BYTES)));
  dynamic_bytes = g.shared_bytes;
  const size_t canary = dynamic_bytes;
  dynamic_shared =
      static_cast<char*>(aligned_alloc(1024, (dynamic_bytes + CANARY_BYTES + 1023) / 1024 * 1024));
  memset(dynamic_shared + canary, 0x5a, CANARY_BYTES);
  std::mt19937 random(g.seed);
  std::vector<unsigned> order(threads);
  const unsigned long long blocks = 1ull * g.grid[0] * g.grid[1] * g.grid[2];
  for (unsigned long long b = 0; b < blocks && failure.empty(); ++b) {
    block_index = {unsigned(b % g.grid[0]), unsigned(b / g.grid[0] % g.grid[1]),
                   unsigned(b / g.grid[0] / g.grid[1])};
    poison_shared();
    for (auto& barrier : named_barriers) barrier = NamedBarrier();
    for (unsigned i = 0; i < threads; ++i) {
      prepare(fibres[i], i, block_size);
      order[i] = i;
    }
    run_block(threads, g.seed, random, order);
    for (size_t i = 0; i < CANARY_BYTES && failure.empty(); ++i)
      if (dynamic_shared[canary + i] != 0x5a) failure = "write past the end of dynamic shared memory";
  }
  free(dynamic_shared);
  dynamic_shared = nullptr;
  body = nullptr;
  if (failure.empty()) return nullptr;
  message = failure + where();
  return message.c_str();
}

/// Calls a kernel with arguments by address, as cuLaunchKernel does.
template <class... A, size_t... I>
const char* launch_packed(const Geometry& g, void (*kernel)(A...), void** args, std::index_sequence<I...>) {
  return launch(g, [=] { kernel(*static_cast<A*>(args[I])...); });
}
template <class... A>
const char* launch_packed(const Geometry& g, void (*kernel)(A...), void** args) {
  return launch_packed(g, kernel, args, std::index_sequence_for<A...>());
}
template <class... A>
size_t argument_sizes(void (*)(A...), size_t* sizes, size_t room) {
  const size_t own[] = {sizeof(A)..., 0};
  for (size_t i = 0; i < std::min(room, sizeof...(A)); ++i) sizes[i] = own[i];
  return sizeof...(A);
}

inline unsigned lane() { return current->linear & 31; }
inline void* slot(unsigned lane) { return warps[current->linear / 32].slot[lane & 31]; }

/// Every lane of `mask` gives `value` and receives that of lane `source`.
template <class T>
T exchange(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= sizeof(Warp::slot[0]), "too large for a mailbox");
  memcpy(slot(lane()), &value, sizeof value);
  yield(WARP_BARRIER, mask);
  T received;
  memcpy(&received, slot(source), sizeof received);
  yield(WARP_BARRIER, mask);
  return received;
}

template <class T>
T fetch_and(T* p, T next) {
  return std::exchange(*p, next);
}

}  // namespace emu

/// Gives a kernel its C entries: what the loader of the emulated program looks up by name.
#define EMU_EXPORT(kernel)                                                                            \
  extern "C" const char* emu_launch_##kernel(const emu::Geometry* emu_launch, void** emu_arguments) { \
    return emu::launch_packed(*emu_launch, &::kernel, emu_arguments);                                 \
  }                                                                                                   \
  extern "C" size_t emu_arguments_##kernel(size_t* emu_sizes, size_t emu_room) {                      \
    return emu::argument_sizes(&::kernel, emu_sizes, emu_room);                                       \
  }

// ---- the language
#define threadIdx (emu::current->thread)
#define blockIdx (emu::block_index)
#define blockDim (emu::block_size)
#define gridDim (emu::grid_size)
#define warpSize 32
#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static __attribute__((section("emu_shared")))
#define __align__(n) __attribute__((aligned(n)))

// ---- barriers, exchanges, votes
#define __syncthreads() emu::yield(emu::BLOCK_BARRIER)
static inline void __syncwarp(unsigned mask = 0xffffffffu) { emu::yield(emu::WARP_BARRIER, mask); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
template <class T>
T __shfl_sync(unsigned mask, T v, int source, int width = 32) {
  unsigned l = emu::lane();
  return emu::exchange(mask, v, (l & ~(width - 1u)) | (unsigned(source) & (width - 1u)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32) {
  unsigned l = emu::lane(), s = l ^ unsigned(bits);
  return emu::exchange(mask, v, s / width > l / width ? l : s);
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32) {
  unsigned l = emu::lane(), s = l + by;
  return emu::exchange(mask, v, s / width == l / width ? s : l);
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32) {
  unsigned l = emu::lane();
  return emu::exchange(mask, v, l % width >= by ? l - by : l);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) {
  unsigned votes = 0, mine = predicate != 0;
  for (unsigned i = 0; i < 32; ++i) {
    unsigned vote = emu::exchange(mask, mine, i);
    if (mask >> i & 1) votes |= vote << i;
  }
  return votes;
}
static inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
static inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, p) == mask; }

// ---- integer atomics (there are no floating-point ones here: sums have a fixed order)
#define EMU_ATOMIC(T)                                                                 \
  static inline T atomicAdd(T* p, T v) { return emu::fetch_and(p, T(*p + v)); }       \
  static inline T atomicSub(T* p, T v) { return emu::fetch_and(p, T(*p - v)); }       \
  static inline T atomicMax(T* p, T v) { return emu::fetch_and(p, std::max(*p, v)); } \
  static inline T atomicMin(T* p, T v) { return emu::fetch_and(p, std::min(*p, v)); } \
  static inline T atomicOr(T* p, T v) { return emu::fetch_and(p, T(*p | v)); }        \
  static inline T atomicAnd(T* p, T v) { return emu::fetch_and(p, T(*p & v)); }       \
  static inline T atomicExch(T* p, T v) { return emu::fetch_and(p, v); }              \
  static inline T atomicCAS(T* p, T expected, T v) { return emu::fetch_and(p, *p == expected ? v : *p); }
EMU_ATOMIC(int)
EMU_ATOMIC(unsigned)
typedef unsigned long long emu_u64;
EMU_ATOMIC(emu_u64)
#undef EMU_ATOMIC

// ---- intrinsics
template <class T>
T __ldg(const T* p) {
  return *p;
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
template <class To, class From>
To emu_bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &x, sizeof to);
  return to;
}
static inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
static inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
static inline int __float_as_int(float x) { return emu_bits<int>(x); }
static inline float __int_as_float(int x) { return emu_bits<float>(x); }
static inline long long __double_as_longlong(double x) { return emu_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return emu_bits<double>(x); }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline void sincospif(float x, float* s, float* c) {
  *s = float(sin(M_PI * double(x)));
  *c = float(cos(M_PI * double(x)));
}
using std::max;
using std::min;
