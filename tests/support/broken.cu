// SPDX-License-Identifier: MIT OR Apache-2.0
// Kernels with one mistake each, which the emulation must find.
#include "prims.cuh"

/// out[i] = in[n - 1 - i] through shared memory, without the barrier in between.
extern "C" __global__ void missing_barrier(const float* in, float* out) {
  __shared__ float copy[64];
  copy[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = copy[63 - threadIdx.x];
}
/// out = in through an asynchronous copy that nobody waits for until it has been read.
extern "C" __global__ void missing_wait(const float* in, float* out) {
  __shared__ __align__(16) float copy[64];
  cp_async<4>(&copy[threadIdx.x], in + threadIdx.x);
  cp_async_commit();
  __syncthreads();
  out[threadIdx.x] = copy[threadIdx.x];
  cp_async_wait<0>();
}
/// Half of a warp waits for the other half at a barrier that it does not reach.
extern "C" __global__ void divergent_barrier(const float* in, float* out) {
  float v = in[threadIdx.x];
  if (threadIdx.x < 16) v = __shfl_sync(FULL_MASK, v, 0);
  else __syncthreads();
  out[threadIdx.x] = v;
}
/// One value past the end of dynamic shared memory.
extern "C" __global__ void shared_overrun(const float* in, float* out) {
  DYNAMIC_SHARED(float, copy);
  copy[threadIdx.x + 1] = in[threadIdx.x];
  out[threadIdx.x] = in[threadIdx.x];
}
/// One value past the end of the output.
extern "C" __global__ void output_overrun(const float* in, float* out) {
  out[threadIdx.x + 1] = in[threadIdx.x];
}
