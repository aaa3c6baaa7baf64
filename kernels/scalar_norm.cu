// SPDX-License-Identifier: MIT OR Apache-2.0
// Scalar RMS norm of each group of `width` neighbouring values (SPEC 8.1): rows of the attention and of FiLM.
// One warp a group; group g uses row g % groups of the scale.
#include "common.cuh"

extern "C" __global__ void scalar_norm(const real* __restrict__ x, const real* __restrict__ scale,
                                       real* __restrict__ out, int width, int groups, real eps, i64 count) {
  const i64 step = grid_threads() / 32;
  for (i64 g = grid_thread() / 32; g < count; g += step) {
    const real* in = x + g * width;
    const real* s = scale + (g % groups) * width;
    real square = real(0);
    for (int c = lane_index(); c < width; c += 32) square += in[c] * in[c];
    const real inverse = real(1) / real_sqrt(warp_sum(square) / real(width) + eps);
    for (int c = lane_index(); c < width; c += 32) out[g * width + c] = in[c] * inverse * s[c];
  }
}

/// grad_x += adjoint(grad).
extern "C" __global__ void scalar_norm_adjoint(const real* __restrict__ x, const real* __restrict__ scale,
                                               const real* __restrict__ grad, real* __restrict__ grad_x,
                                               int width, int groups, real eps, i64 count) {
  const i64 step = grid_threads() / 32;
  for (i64 g = grid_thread() / 32; g < count; g += step) {
    const real* in = x + g * width;
    const real* s = scale + (g % groups) * width;
    const real* d = grad + g * width;
    real square = real(0), along = real(0);
    for (int c = lane_index(); c < width; c += 32) {
      square += in[c] * in[c];
      along += in[c] * d[c] * s[c];
    }
    const real inverse = real(1) / real_sqrt(warp_sum(square) / real(width) + eps);
    const real pull = warp_sum(along) * inverse * inverse * inverse / real(width);
    for (int c = lane_index(); c < width; c += 32)
      grad_x[g * width + c] += d[c] * s[c] * inverse - pull * in[c];
  }
}
