// SPDX-License-Identifier: MIT OR Apache-2.0
// Warpgroup products of every width that wgmma.cuh has.
#include "wgmma.cuh"

/// c[64][N] = sign * a[64][16 * steps] b, b as packed tiles (`wgmma_b`), leading parts and then the rest of
/// each step, through a ring of two slots filled by bulk copies.
template <int N, int SIGN>
DEVFN void warpgroup_product(const float* a, const unsigned char* b, float* c, int steps) {
  constexpr u32 tile = 32 * N, slot = 2 * tile;  // bytes of 16 x N halves; of both parts
  DYNAMIC_SHARED(unsigned char, memory);
  const u32 base = shared_address(memory), barriers = base + 2 * slot;
  const int thread = static_cast<int>(threadIdx.x), lane = lane_index();
  const auto fetch = [&](int step) {
    const u32 barrier = barriers + 8 * static_cast<u32>(step & 1);
    mbarrier_expect(barrier, slot);
    bulk_copy(base + slot * static_cast<u32>(step & 1), b + slot * static_cast<u32>(step), slot, barrier);
  };
  if (thread == 0) {
    mbarrier_init(barriers, 1);
    mbarrier_init(barriers + 8, 1);
    mbarrier_publish();
  }
  __syncthreads();
  if (thread == 0)
    for (int step = 0; step < 2 && step < steps; ++step) fetch(step);
  const int row = 16 * warp_index() + lane / 4, k = 2 * (lane % 4), width = 16 * steps;
  float d[N / 8][4] = {};
  for (int step = 0; step < steps; ++step) {
    u32 hi[4], lo[4];
    const float* p = a + row * width + 16 * step + k;
    split_half2(p[0], p[1], hi[0], lo[0]);
    split_half2(p[8 * width], p[8 * width + 1], hi[1], lo[1]);
    split_half2(p[8], p[9], hi[2], lo[2]);
    split_half2(p[8 * width + 8], p[8 * width + 9], hi[3], lo[3]);
    mbarrier_wait(barriers + 8 * static_cast<u32>(step & 1), static_cast<u32>(step / 2 & 1));
    const u32 where = base + slot * static_cast<u32>(step & 1);
    wgmma_hold(d);
    wgmma_fence();
    wgmma_f16x3<SIGN>(d, hi, lo, wgmma_b(where), wgmma_b(where + tile), step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(d);
    named_sync<128>(1);
    if (thread == 0 && step + 2 < steps) fetch(step + 2);
  }
  for (int j = 0; j < N / 8; ++j) {
    float* out = c + row * N + 8 * j + k;
    out[0] = d[j][0];
    out[1] = d[j][1];
    out[8 * N] = d[j][2];
    out[8 * N + 1] = d[j][3];
  }
}
#define WARPGROUP_PRODUCT(N, SIGN)                                                                          \
  extern "C" __global__ void __launch_bounds__(128) warpgroup_product_##N(                                  \
      const float* __restrict__ a, const unsigned char* __restrict__ b, float* __restrict__ c, int steps) { \
    warpgroup_product<N, SIGN>(a, b, c, steps);                                                             \
  }
WARPGROUP_PRODUCT(32, 1)
WARPGROUP_PRODUCT(64, -1)
WARPGROUP_PRODUCT(96, 1)
WARPGROUP_PRODUCT(128, -1)
