// SPDX-License-Identifier: MIT OR Apache-2.0
// Hopper's asynchronous machinery (sm_90a): memory barriers, bulk copies into shared memory, named barriers
// and warpgroup matrix products with A in registers and B in shared memory. emu/emu_wgmma.hpp is the CPU
// twin. Include it under `#if SEZM_WGMMA`, which the host defines for devices that have these.
//
// Addresses are 32-bit offsets into the shared window (`shared_address` of dynamic shared memory).
//
// B of one instruction (16 x N fp16, K = 16) lies in shared memory as N/8 groups of two 8 x 8 core matrices:
// element (k, n) is half number ((n / 8 * 2 + k / 8) * 8 + n % 8) * 8 + k % 8. `wgmma_b` describes it.
// The accumulator of a thread is d[N/8][4], each d[j] laid out as by mma_f16 for columns 8j .. 8j+7 and the
// 16 rows of the thread's warp: an accumulator is the A fragment of the next product after `pack_half2`.
#pragma once
#include "prims.cuh"

constexpr u32 WGMMA_K_STRIDE = 128, WGMMA_N_STRIDE = 256;  // bytes between core matrices

/// The descriptor of a B tile at a shared-memory address that is a multiple of 16.
DEVFN u64 wgmma_b(u32 address) {
  return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(WGMMA_K_STRIDE >> 4) << 16 |
         static_cast<u64>(WGMMA_N_STRIDE >> 4) << 32;
}

#ifdef SEZM_EMULATION
#include "emu/emu_wgmma.hpp"
#else

DEVFN u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// ---- shared memory by address

DEVFN uint4 shared_load4(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}
DEVFN void shared_store4(u32 address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
DEVFN u32 shared_load(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
/// Adds to a counter with acquire and release order among the block's threads; returns the old value.
DEVFN u32 shared_add(u32 address, u32 value) {
  u32 old;
  asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "r"(address), "r"(value)
               : "memory");
  return old;
}

// ---- memory barriers (8 bytes each) and bulk copies

DEVFN void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// Makes initialised barriers visible to the copy engine; a block barrier must follow.
DEVFN void mbarrier_publish() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/// Arrives and announces `bytes` of a coming bulk copy.
DEVFN void mbarrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
/// Waits until the phase of this parity (0 for the first) is complete.
DEVFN void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE%=;\nbra WAIT%=;\nDONE%=:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
/// Copies `bytes` (a multiple of 16) from global to shared memory by the copy engine, completing on
/// `barrier`.
DEVFN void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// ---- named barriers among THREADS of the block, numbers 1 to 15 (0 is __syncthreads)

template <int THREADS>
DEVFN void named_sync(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
template <int THREADS>
DEVFN void named_arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// ---- warpgroup products

DEVFN void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVFN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVFN void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
/// Keeps the compiler from moving accumulator reads and writes across this point.
template <int N>
DEVFN void wgmma_hold(float (&d)[N][4]) {
  UNROLL for (int i = 0; i < N; ++i)
      UNROLL for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(d[i][j])::"memory");
}

// Operand lists: 16 accumulator registers a line.
#define WGMMA_D0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_D1 WGMMA_D0 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_D2 WGMMA_D1 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_D3 WGMMA_D2 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_ROW(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define WGMMA_ROWS(i) WGMMA_ROW(i), WGMMA_ROW(i + 1), WGMMA_ROW(i + 2), WGMMA_ROW(i + 3)

// N columns; A, SCALE, DESC, SIGN: the operand numbers after the accumulators.
#define WGMMA_DEFINE(N, REGISTERS, A0, A1, A2, A3, DESC, SCALE, SIGN_, ...)                                \
  template <int SIGN>                                                                                      \
  DEVFN void wgmma_accumulate(float(&d)[N / 8][4], const u32(&a)[4], u64 b, int keep) {                    \
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" #SCALE                                         \
                 ", 0;\n"                                                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" REGISTERS "}, {%" #A0 ",%" #A1 \
                 ",%" #A2 ",%" #A3 "}, %" #DESC ", keep, 1, %" #SIGN_ ", 0;\n}"                            \
                 : __VA_ARGS__                                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(SIGN));              \
  }
WGMMA_DEFINE(32, WGMMA_D0, 16, 17, 18, 19, 20, 21, 22, WGMMA_ROWS(0))
WGMMA_DEFINE(64, WGMMA_D1, 32, 33, 34, 35, 36, 37, 38, WGMMA_ROWS(0), WGMMA_ROWS(4))
WGMMA_DEFINE(96, WGMMA_D2, 48, 49, 50, 51, 52, 53, 54, WGMMA_ROWS(0), WGMMA_ROWS(4), WGMMA_ROWS(8))
WGMMA_DEFINE(128, WGMMA_D3, 64, 65, 66, 67, 68, 69, 70, WGMMA_ROWS(0), WGMMA_ROWS(4), WGMMA_ROWS(8),
             WGMMA_ROWS(12))
#undef WGMMA_DEFINE
#undef WGMMA_ROWS
#undef WGMMA_ROW
#undef WGMMA_D0
#undef WGMMA_D1
#undef WGMMA_D2
#undef WGMMA_D3

#endif  // SEZM_EMULATION

/// d (+)= SIGN (a_hi + a_lo)(b_hi + b_lo), the small products first. `keep` = 0 starts from zero.
template <int SIGN, int N>
DEVFN void wgmma_f16x3(float (&d)[N][4], const u32 (&a_hi)[4], const u32 (&a_lo)[4], u64 b_hi, u64 b_lo,
                       int keep) {
  wgmma_accumulate<SIGN>(d, a_lo, b_hi, keep);
  wgmma_accumulate<SIGN>(d, a_hi, b_lo, 1);
  wgmma_accumulate<SIGN>(d, a_hi, b_hi, 1);
}
