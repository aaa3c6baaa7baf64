// SPDX-License-Identifier: MIT OR Apache-2.0
// Stage `equivariant_norm` (SPEC 8.1) and the scalar RMS norm. Nodes in `[row][node][channel]` order, `plane`
// values from row to row. -DLMAX, -DCHANNELS. One warp a node.
#include "common.cuh"

constexpr int ROWS = (LMAX + 1) * (LMAX + 1);

DEVFN constexpr int degree_of(int row) {
  int l = 0;
  while ((l + 1) * (l + 1) <= row) ++l;
  return l;
}

/// Channel mean of the scalars and 1 / sqrt(mean square + eps) of one node.
DEVFN void statistics(const real* __restrict__ x, i64 plane, real eps, real* mean, real* inverse) {
  const int lane = lane_index();
  real sum = real(0);
  for (int c = lane; c < CHANNELS; c += 32) sum += x[c];
  *mean = warp_sum(sum) / real(CHANNELS);
  real square = real(0);
  for (int row = 0; row < ROWS; ++row) {
    const int l = degree_of(row);
    real part = real(0);
    for (int c = lane; c < CHANNELS; c += 32) {
      const real v = x[row * plane + c] - (row == 0 ? *mean : real(0));
      part += v * v;
    }
    square += part * real(1.0 / ((2 * l + 1) * (LMAX + 1) * CHANNELS));
  }
  *inverse = real(1) / real_sqrt(warp_sum(square) + eps);
}

/// out <- norm(x), or out += norm(x). scale[LMAX + 1][CHANNELS], bias[CHANNELS].
extern "C" __global__ void equivariant_norm(const real* __restrict__ x, const real* __restrict__ scale,
                                            const real* __restrict__ bias, real* __restrict__ out,
                                            i64 x_plane, i64 out_plane, real eps, int add, i64 nodes) {
  const i64 step = grid_threads() / 32;
  for (i64 node = grid_thread() / 32; node < nodes; node += step) {
    const real* in = x + node * CHANNELS;
    real* to = out + node * CHANNELS;
    real mean, inverse;
    statistics(in, x_plane, eps, &mean, &inverse);
    for (int row = 0; row < ROWS; ++row) {
      const int l = degree_of(row);
      for (int c = lane_index(); c < CHANNELS; c += 32) {
        const real centred = in[row * x_plane + c] - (row == 0 ? mean : real(0));
        const real value = centred * inverse * scale[l * CHANNELS + c] + (row == 0 ? bias[c] : real(0));
        real* o = to + row * out_plane + c;
        *o = add ? *o + value : value;
      }
    }
  }
}

/// grad_x <- adjoint(grad), or grad_x += adjoint(grad); x as in the forward pass.
extern "C" __global__ void equivariant_norm_adjoint(const real* __restrict__ x,
                                                    const real* __restrict__ scale,
                                                    const real* __restrict__ grad, real* __restrict__ grad_x,
                                                    i64 x_plane, i64 grad_plane, i64 out_plane, real eps,
                                                    int add, i64 nodes) {
  const i64 step = grid_threads() / 32;
  for (i64 node = grid_thread() / 32; node < nodes; node += step) {
    const real* in = x + node * CHANNELS;
    const real* g = grad + node * CHANNELS;
    real* to = grad_x + node * CHANNELS;
    real mean, inverse;
    statistics(in, x_plane, eps, &mean, &inverse);
    real along = real(0), scalar = real(0);
    for (int row = 0; row < ROWS; ++row) {
      const int l = degree_of(row);
      for (int c = lane_index(); c < CHANNELS; c += 32) {
        const real centred = in[row * x_plane + c] - (row == 0 ? mean : real(0));
        along += g[row * grad_plane + c] * scale[l * CHANNELS + c] * centred;
      }
    }
    along = warp_sum(along);
    const real pull = along * inverse * inverse * inverse;
    for (int c = lane_index(); c < CHANNELS; c += 32) {
      scalar += g[c] * scale[c] * inverse - pull * real(1.0 / ((LMAX + 1) * CHANNELS)) * (in[c] - mean);
    }
    scalar = warp_sum(scalar) / real(CHANNELS);
    for (int row = 0; row < ROWS; ++row) {
      const int l = degree_of(row);
      const real weight = real(1.0 / ((2 * l + 1) * (LMAX + 1) * CHANNELS));
      for (int c = lane_index(); c < CHANNELS; c += 32) {
        const real centred = in[row * x_plane + c] - (row == 0 ? mean : real(0));
        const real value = g[row * grad_plane + c] * scale[l * CHANNELS + c] * inverse -
                           pull * weight * centred - (row == 0 ? scalar : real(0));
        real* o = to + row * out_plane + c;
        *o = add ? *o + value : value;
      }
    }
  }
}
