// SPDX-License-Identifier: MIT OR Apache-2.0
// Asynchronous copies, half-precision pairs and warp matrix products: inline PTX (sm_80 and later) on the
// device, emu/emu_prims.hpp on the CPU. No CUDA header is needed.
//
// A "pair" is two fp16 values in one u32, the first in the low half. `mixed` arithmetic stores x as the pair
// members hi = fp16(x) and lo = fp16(x - hi) and multiplies (hi + lo)(HI + LO) without the lo * LO term.
#pragma once
#include "common.cuh"

#ifdef SEZM_EMULATION
#include "emu/emu_prims.hpp"
#else

/// Copies BYTES (4, 8 or 16) from global to shared memory, asynchronously; both addresses multiples of BYTES.
template <int BYTES>
DEVFN void cp_async(void* to, const void* from) {
  const u32 address = static_cast<u32>(__cvta_generic_to_shared(to));
  if (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(BYTES)
                 : "memory");
}
/// Closes the group of copies made since the last commit.
DEVFN void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most PENDING of this thread's groups are in flight; a barrier must follow before others
/// read.
template <int PENDING>
DEVFN void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/// Two floats rounded to the nearest fp16, `low` in the low half.
DEVFN u32 pack_half2(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
DEVFN void unpack_half2(u32 pair, float& low, float& high) {
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
      : "=f"(low), "=f"(high)
      : "r"(pair));
}

/// d += a b on one warp: a is 16 x 16 (rows, four pairs a lane), b 16 x 8 (columns, two pairs), d 16 x 8 in
/// f32. With g = lane / 4 and t = lane % 4, d holds (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1).
DEVFN void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Four 8 x 8 fp16 matrices from shared memory in the fragment layout of mma: lane i gives the address
/// (16-byte aligned) of row i % 8 of matrix i / 8.
DEVFN void ldmatrix_x4(u32 (&r)[4], const void* row) {
  const u32 address = static_cast<u32>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
/// As `ldmatrix_x4`, each matrix transposed.
DEVFN void ldmatrix_x4_transposed(u32 (&r)[4], const void* row) {
  const u32 address = static_cast<u32>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

#endif  // SEZM_EMULATION

/// Splits two floats into pairs of their leading fp16 parts and of what those leave.
DEVFN void split_half2(float a, float b, u32& hi, u32& lo) {
  float x, y;
  hi = pack_half2(a, b);
  unpack_half2(hi, x, y);
  lo = pack_half2(a - x, b - y);
}
/// The two floats that `split_half2` took apart, to 22 bits.
DEVFN void join_half2(u32 hi, u32 lo, float& a, float& b) {
  float x, y;
  unpack_half2(hi, a, b);
  unpack_half2(lo, x, y);
  a += x;
  b += y;
}

/// d += a b with a and b given as hi and lo fragments: the small products first, then the large one.
DEVFN void mma_f16x3(float (&d)[4], const u32 (&a_hi)[4], const u32 (&a_lo)[4], const u32 (&b_hi)[2],
                     const u32 (&b_lo)[2]) {
  mma_f16(d, a_lo, b_hi[0], b_hi[1]);
  mma_f16(d, a_hi, b_lo[0], b_lo[1]);
  mma_f16(d, a_hi, b_hi[0], b_hi[1]);
}

/// A power of two that brings `largest` (>= 0, finite) into [2^8, 2^9), and its inverse: with seven binades
/// of headroom below fp16's end the split loses nothing to range. Exact for 2^-111 <= largest < 2^114;
/// clamped beyond.
DEVFN void half_scale(float largest, float& scale, float& inverse) {
  int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
  exponent = exponent < 16 ? 16 : (exponent > 240 ? 240 : exponent);
  scale = __uint_as_float(static_cast<u32>(262 - exponent) << 23);
  inverse = __uint_as_float(static_cast<u32>(exponent - 8) << 23);
}
