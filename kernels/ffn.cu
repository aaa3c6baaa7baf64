// SPDX-License-Identifier: MIT OR Apache-2.0
// Stage `ffn` without a grid: the gated activation on packed rows (SPEC 8.3, 9), and the gated linear unit of
// the fitting net (SPEC 16). -DLMAX, -DHIDDEN_WIDTH (H), -DGLU, -DACTIVATION.
#include "common.cuh"

constexpr int PACKED = (LMAX + 1) * (LMAX + 1);
constexpr int IN = GLU ? 2 * HIDDEN_WIDTH : HIDDEN_WIDTH;

/// hidden[(l,m)][node][IN], gate[node][l - 1][H] (becomes its sigmoid) -> out[(l,m)][node][H].
extern "C" __global__ void gated_forward(const real* __restrict__ hidden, real* __restrict__ gate,
                                         real* __restrict__ out, i64 nodes) {
  for (i64 i = grid_thread(); i < nodes * HIDDEN_WIDTH; i += grid_threads()) {
    const i64 node = i / HIDDEN_WIDTH;
    const int c = static_cast<int>(i % HIDDEN_WIDTH);
    const real* x = hidden + node * IN + c;
    out[i] = GLU ? x[0] * activate<ACTIVATION>(x[HIDDEN_WIDTH * (GLU ? 1 : 0)]) : activate<ACTIVATION>(x[0]);
    for (int l = 1; l <= LMAX; ++l) {
      real* g = gate + (node * LMAX + l - 1) * HIDDEN_WIDTH + c;
      const real open = sigmoid(*g);
      *g = open;
      for (int row = l * l; row < (l + 1) * (l + 1); ++row) {
        out[row * nodes * HIDDEN_WIDTH + i] = x[row * nodes * IN] * open;
      }
    }
  }
}
/// grad_hidden[(l,m)][node][IN] and the gradient of the gates before their sigmoid.
extern "C" __global__ void gated_adjoint(const real* __restrict__ hidden, const real* __restrict__ gate,
                                         const real* __restrict__ grad, real* __restrict__ grad_hidden,
                                         real* __restrict__ grad_gate, i64 nodes) {
  for (i64 i = grid_thread(); i < nodes * HIDDEN_WIDTH; i += grid_threads()) {
    const i64 node = i / HIDDEN_WIDTH;
    const int c = static_cast<int>(i % HIDDEN_WIDTH);
    const real* x = hidden + node * IN + c;
    real* to = grad_hidden + node * IN + c;
    const real g = grad[i];
    if (GLU) {
      const real v = x[HIDDEN_WIDTH * (GLU ? 1 : 0)];
      to[0] = g * activate<ACTIVATION>(v);
      to[HIDDEN_WIDTH * (GLU ? 1 : 0)] = g * x[0] * activate_slope<ACTIVATION>(v);
    } else {
      to[0] = g * activate_slope<ACTIVATION>(x[0]);
    }
    for (int l = 1; l <= LMAX; ++l) {
      const i64 at = (node * LMAX + l - 1) * HIDDEN_WIDTH + c;
      const real open = gate[at];
      real sum = real(0);
      for (int row = l * l; row < (l + 1) * (l + 1); ++row) {
        const real d = grad[row * nodes * HIDDEN_WIDTH + i];
        sum = real_fma(d, x[row * nodes * IN], sum);
        to[row * nodes * IN] = d * open;
        if (GLU) to[row * nodes * IN + HIDDEN_WIDTH * (GLU ? 1 : 0)] = real(0);
      }
      grad_gate[at] = sum * open * (real(1) - open);
    }
  }
}
