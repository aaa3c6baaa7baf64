// SPDX-License-Identifier: MIT OR Apache-2.0
// Stage `so2_stack`: the pointwise parts of the gated stack between its matrix products (SPEC 8.2 step
// 5, 8.3).
//
// linear[k][focus][row][channel]; gate[k][focus][l - 1][channel] before (forward) or after (adjoint) the
// sigmoid.
#include "message.cuh"

/// y += act(linear); the gates become their sigmoids in place. One thread a (edge, focus, channel).
extern "C" __global__ void stack_gate_forward(const real* __restrict__ linear, real* __restrict__ gate,
                                              real* __restrict__ y, i64 count) {
  for (i64 i = grid_thread(); i < count * WIDTH; i += grid_threads()) {
    const i64 edge_focus = i / CHANNELS;
    const int c = static_cast<int>(i % CHANNELS);
    const real* z = linear + edge_focus * ROWS * CHANNELS + c;
    real* to = y + edge_focus * ROWS * CHANNELS + c;
    real* g = gate + edge_focus * LMAX * CHANNELS + c;
    real open[LMAX + 1];
    UNROLL for (int l = 1; l <= LMAX; ++l) {
      open[l] = sigmoid(g[(l - 1) * CHANNELS]);
      g[(l - 1) * CHANNELS] = open[l];
    }
    each_row([&](int row, int l, int) {
      const real v = z[row * CHANNELS];
      to[row * CHANNELS] += l == 0 ? activate<ACTIVATION>(v) : v * open[l];
    });
  }
}

/// y += linear for the last layer.
extern "C" __global__ void stack_add(const real* __restrict__ linear, real* __restrict__ y, i64 values) {
  for (i64 i = grid_thread(); i < values; i += grid_threads()) y[i] += linear[i];
}

/// grad_linear and the gradient of the gates before their sigmoid, from the gradient of y.
extern "C" __global__ void stack_gate_adjoint(const real* __restrict__ linear, const real* __restrict__ gate,
                                              const real* __restrict__ grad, real* __restrict__ grad_linear,
                                              real* __restrict__ grad_gate, i64 count) {
  for (i64 i = grid_thread(); i < count * WIDTH; i += grid_threads()) {
    const i64 edge_focus = i / CHANNELS;
    const int c = static_cast<int>(i % CHANNELS);
    const i64 at = edge_focus * ROWS * CHANNELS + c;
    const real* g = gate + edge_focus * LMAX * CHANNELS + c;
    real open[LMAX + 1], sum[LMAX + 1];
    UNROLL for (int l = 1; l <= LMAX; ++l) {
      open[l] = g[(l - 1) * CHANNELS];
      sum[l] = real(0);
    }
    each_row([&](int row, int l, int) {
      const real v = linear[at + row * CHANNELS], d = grad[at + row * CHANNELS];
      if (l == 0) {
        grad_linear[at + row * CHANNELS] = d * activate_slope<ACTIVATION>(v);
      } else {
        grad_linear[at + row * CHANNELS] = d * open[l];
        sum[l] = real_fma(d, v, sum[l]);
      }
    });
    UNROLL for (int l = 1; l <= LMAX; ++l) {
      grad_gate[edge_focus * LMAX * CHANNELS + (l - 1) * CHANNELS + c] =
          sum[l] * open[l] * (real(1) - open[l]);
    }
  }
}
