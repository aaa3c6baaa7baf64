// SPDX-License-Identifier: MIT OR Apache-2.0
// Stage `fitting`: descriptor to atomic energies (SPEC 16). -DACTIVATION.
#include "common.cuh"

/// hidden[node][2n] += bias; out[node][n] = value act(gate).
extern "C" __global__ void fitting_gate(real* __restrict__ hidden, const real* __restrict__ bias,
                                        real* __restrict__ out, int n, i64 nodes) {
  for (i64 i = grid_thread(); i < nodes * n; i += grid_threads()) {
    const i64 at = (i / n) * 2 * n + i % n;
    const real value = hidden[at] + bias[i % n], gate = hidden[at + n] + bias[n + i % n];
    hidden[at] = value;
    hidden[at + n] = gate;
    out[i] = value * activate<ACTIVATION>(gate);
  }
}
extern "C" __global__ void fitting_gate_adjoint(const real* __restrict__ hidden,
                                                const real* __restrict__ grad, real* __restrict__ grad_hidden,
                                                int n, i64 nodes) {
  for (i64 i = grid_thread(); i < nodes * n; i += grid_threads()) {
    const i64 at = (i / n) * 2 * n + i % n;
    const real value = hidden[at], gate = hidden[at + n];
    grad_hidden[at] = grad[i] * activate<ACTIVATION>(gate);
    grad_hidden[at + n] = grad[i] * value * activate_slope<ACTIVATION>(gate);
  }
}

/// energy[node] in eV, f64, and grad[node][n] = dE/dh; type -1 has neither. One warp a node.
extern "C" __global__ void fitting_energy(const real* __restrict__ h, const real* __restrict__ output,
                                          const double* __restrict__ shift, const int* __restrict__ node_type,
                                          double* __restrict__ energy, real* __restrict__ grad, int n,
                                          i64 nodes) {
  const i64 step = grid_threads() / 32;
  for (i64 node = grid_thread() / 32; node < nodes; node += step) {
    const int kind = node_type[node];
    real sum = real(0);
    for (int c = lane_index(); c < n; c += 32) {
      sum = real_fma(h[node * n + c], output[c], sum);
      grad[node * n + c] = kind < 0 ? real(0) : output[c];
    }
    sum = warp_sum(sum);
    if (lane_index() == 0) energy[node] = kind < 0 ? 0.0 : static_cast<double>(sum) + shift[kind];
  }
}
