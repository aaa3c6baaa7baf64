// SPDX-License-Identifier: MIT OR Apache-2.0
// Stage `focus_competition`: softmax between the focuses of an edge, from the captured scalars (SPEC 8.2,
// step 6). -DNORM: 1 with an RMS norm. weight[CHANNELS][FOCUSES], scale[FOCUSES][CHANNELS].
#include "message.cuh"

/// Softmax of one edge in every lane, and the norms' inverse roots.
DEVFN void compete(const real* __restrict__ v, const real* __restrict__ scale,
                   const real* __restrict__ weight, real eps, real* soft, real* inverse) {
  real top = real(0);
  UNROLL for (int f = 0; f < FOCUSES; ++f) {
    real square = real(0), logit = real(0);
    for (int c = lane_index(); c < CHANNELS; c += 32) {
      const real x = v[f * CHANNELS + c];
      square += x * x;
      logit += x * (NORM ? scale[f * CHANNELS + c] : real(1)) * weight[c * FOCUSES + f];
    }
    inverse[f] = NORM ? real(1) / real_sqrt(warp_sum(square) / real(CHANNELS) + eps) : real(1);
    soft[f] = warp_sum(logit) * inverse[f];
    top = f == 0 ? soft[f] : real_max(top, soft[f]);
  }
  real sum = real(0);
  UNROLL for (int f = 0; f < FOCUSES; ++f) {
    soft[f] = real_exp(soft[f] - top);
    sum += soft[f];
  }
  UNROLL for (int f = 0; f < FOCUSES; ++f) soft[f] /= sum;
}

/// share[k][FOCUSES] from captured[k][W]. One warp an edge.
extern "C" __global__ void focus_competition_forward(const real* __restrict__ captured,
                                                     const real* __restrict__ scale,
                                                     const real* __restrict__ weight,
                                                     real* __restrict__ share, real eps, i64 count) {
  const i64 step = grid_threads() / 32;
  for (i64 k = grid_thread() / 32; k < count; k += step) {
    real soft[FOCUSES], inverse[FOCUSES];
    compete(captured + k * WIDTH, scale, weight, eps, soft, inverse);
    UNROLL for (int f = 0; f < FOCUSES; ++f) {
      if (lane_index() == f % 32) share[k * FOCUSES + f] = real(0.98) * soft[f] + real(0.02 / FOCUSES);
    }
  }
}

/// grad_captured[k][W] from grad_share[k][FOCUSES].
extern "C" __global__ void focus_competition_adjoint(const real* __restrict__ captured,
                                                     const real* __restrict__ scale,
                                                     const real* __restrict__ weight,
                                                     const real* __restrict__ grad_share,
                                                     real* __restrict__ grad_captured, real eps, i64 count) {
  const i64 step = grid_threads() / 32;
  for (i64 k = grid_thread() / 32; k < count; k += step) {
    real soft[FOCUSES], inverse[FOCUSES];
    const real* v = captured + k * WIDTH;
    compete(v, scale, weight, eps, soft, inverse);
    real mean = real(0);
    UNROLL for (int f = 0; f < FOCUSES; ++f) mean += soft[f] * grad_share[k * FOCUSES + f];
    UNROLL for (int f = 0; f < FOCUSES; ++f) {
      const real d = real(0.98) * soft[f] * (grad_share[k * FOCUSES + f] - mean);
      real along = real(0);
      if (NORM) {
        for (int c = lane_index(); c < CHANNELS; c += 32) {
          along += v[f * CHANNELS + c] * scale[f * CHANNELS + c] * weight[c * FOCUSES + f];
        }
        along = warp_sum(along) * d * inverse[f] * inverse[f] * inverse[f] / real(CHANNELS);
      }
      for (int c = lane_index(); c < CHANNELS; c += 32) {
        const real g = d * weight[c * FOCUSES + f];
        grad_captured[k * WIDTH + f * CHANNELS + c] =
            NORM ? g * scale[f * CHANNELS + c] * inverse[f] - along * v[f * CHANNELS + c] : g;
      }
    }
  }
}
