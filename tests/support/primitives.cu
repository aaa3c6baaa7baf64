// SPDX-License-Identifier: MIT OR Apache-2.0
// One small kernel for each thing that common.cuh and prims.cuh promise.
#include "prims.cuh"

/// out[block][thread] = the sum over the block's values, by every thread; then the largest of each 8 lanes.
extern "C" __global__ void reductions(const real* __restrict__ values, real* __restrict__ sums,
                                      real* __restrict__ largest) {
  __shared__ real scratch[32];
  const i64 i = grid_thread();
  sums[i] = block_sum(values[i], scratch) + block_sum(real(1), scratch);
  largest[i] = warp_max<8>(values[i]);
}

/// Number of the block and thread in three dimensions, and integer atomics.
extern "C" __global__ void geometry(u32* __restrict__ seen, u32* __restrict__ count) {
  const u32 block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const u32 thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  seen[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 1000 + thread;
  atomicAdd(count, thread);
  atomicMax(count + 1, block * 1000 + thread);
}

/// value[k][i] and slope[k][i] of activation k at x[i].
template <int KIND>
DEVFN void one_activation(const real* x, real* value, real* slope, int n) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= n) return;
  value[KIND * n + i] = activate<KIND>(x[i]);
  slope[KIND * n + i] = activate_slope<KIND>(x[i]);
}
extern "C" __global__ void activations(const real* __restrict__ x, real* __restrict__ value,
                                       real* __restrict__ slope, int n) {
  one_activation<LINEAR>(x, value, slope, n);
  one_activation<SILU>(x, value, slope, n);
  one_activation<GELU>(x, value, slope, n);
  one_activation<TANH>(x, value, slope, n);
  one_activation<RELU>(x, value, slope, n);
  one_activation<RELU6>(x, value, slope, n);
  one_activation<SOFTPLUS>(x, value, slope, n);
  one_activation<SIGMOID>(x, value, slope, n);
}

/// Sums of the columns of x[rows][128], rows streamed through two buffers by asynchronous copies.
extern "C" __global__ void stream_columns(const float* __restrict__ x, float* __restrict__ sums, int rows) {
  __shared__ __align__(16) float row[2][128];
  const int t = static_cast<int>(threadIdx.x);
  const auto fetch = [&](int r) {
    if (r < rows && t < 32) cp_async<16>(&row[r & 1][4 * t], x + 128 * r + 4 * t);
    cp_async_commit();
  };
  float sum = 0;
  fetch(0);
  for (int r = 0; r < rows; ++r) {
    fetch(r + 1);
    cp_async_wait<1>();
    __syncthreads();
    sum += row[r & 1][127 - t];
    __syncthreads();
  }
  sums[127 - t] = sum;
}

/// c[16][8] = a[16][16] b[16][8] in split fp16: a's fragments by ldmatrix, b's by its transposed form.
extern "C" __global__ void product(const float* __restrict__ a, const float* __restrict__ b,
                                   float* __restrict__ c) {
  __shared__ __align__(16) u32 a_parts[2][16][8];  // pairs along k
  __shared__ __align__(16) u32 b_parts[2][16][4];  // pairs along n
  const int lane = lane_index();
  for (int i = lane; i < 128; i += 32)
    split_half2(a[2 * i], a[2 * i + 1], a_parts[0][i / 8][i % 8], a_parts[1][i / 8][i % 8]);
  for (int i = lane; i < 64; i += 32)
    split_half2(b[2 * i], b[2 * i + 1], b_parts[0][i / 4][i % 4], b_parts[1][i / 4][i % 4]);
  __syncwarp();
  u32 a_hi[4], a_lo[4], b_both[4];
  // Matrices 0 to 3 of a: rows 0-7 and 8-15 of k 0-7, then of k 8-15.
  const int row = lane % 16, half = lane / 16;
  ldmatrix_x4(a_hi, &a_parts[0][row][4 * half]);
  ldmatrix_x4(a_lo, &a_parts[1][row][4 * half]);
  // Of b: k 0-7 and 8-15 of the leading parts, then of what they leave.
  ldmatrix_x4_transposed(b_both, &b_parts[half][row][0]);
  float d[4] = {0, 0, 0, 0};
  const u32 b_hi[2] = {b_both[0], b_both[1]}, b_lo[2] = {b_both[2], b_both[3]};
  mma_f16x3(d, a_hi, a_lo, b_hi, b_lo);
  const int g = lane / 4, t = lane % 4;
  c[8 * g + 2 * t] = d[0];
  c[8 * g + 2 * t + 1] = d[1];
  c[8 * (g + 8) + 2 * t] = d[2];
  c[8 * (g + 8) + 2 * t + 1] = d[3];
}
