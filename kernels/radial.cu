// SPDX-License-Identifier: MIT OR Apache-2.0
// Stage `radial`: the merged radial kernel of a block for a chunk of edges, and its adjoint (SPEC sections
// 5, 8.2).
//
// kernel_e = f (hidden_e edge) + types[src] + types[dst], f = w_e or 1 (-DWEIGHTED). -DCOLUMNS values an
// edge.
#include "radial.cuh"

constexpr int WARPS = 4;

/// kernel[k][COLUMNS] of the chunk's edges. Any grid of blocks of 128 threads.
extern "C" __global__ void __launch_bounds__(128)
    radial_forward(const u32* __restrict__ list, i64 first, i64 count, const double* __restrict__ distance,
                   const double* __restrict__ weight, const u32* __restrict__ src,
                   const u32* __restrict__ dst, const int* __restrict__ node_type,
                   const double* __restrict__ frequencies, const real* __restrict__ hidden_weights,
                   const real* __restrict__ edge_weights, const real* __restrict__ type_table,
                   real* __restrict__ kernel, double rcut, int exponent) {
  __shared__ RadialScratch scratch[WARPS];
  RadialScratch& s = scratch[warp_index()];
  const i64 step = grid_threads() / 32;
  for (i64 k = grid_thread() / 32; k < count; k += step) {
    const i64 e = edge_at(list, first, k);
    radial_basis(s, frequencies, distance[e], {rcut, exponent});
    const real* hidden = radial_hidden(s, hidden_weights);
    const real factor = WEIGHTED ? static_cast<real>(weight[e]) : real(1);
    const real* of_src = type_table + static_cast<i64>(max(node_type[src[e]], 0)) * COLUMNS;
    const real* of_dst = type_table + static_cast<i64>(max(node_type[dst[e]], 0)) * COLUMNS;
    for (int p = lane_index(); p < COLUMNS; p += 32) {
      real sum = real(0);
      for (int j = 0; j < HIDDEN; ++j) sum = real_fma(hidden[j], edge_weights[j * COLUMNS + p], sum);
      kernel[k * COLUMNS + p] = factor * sum + (of_src[p] + of_dst[p]);
    }
    __syncwarp();
  }
}

/// radial[first + k] += dE/dr from grad_kernel[k][COLUMNS] and grad_weight[k] = dE/dw found elsewhere.
/// edge_weights_t: the transpose of edge_weights.
extern "C" __global__ void __launch_bounds__(128)
    radial_adjoint(const u32* __restrict__ list, i64 first, i64 count, const double* __restrict__ distance,
                   const double* __restrict__ weight, const double* __restrict__ weight_slope,
                   const double* __restrict__ frequencies, const real* __restrict__ hidden_weights,
                   const real* __restrict__ edge_weights, const real* __restrict__ edge_weights_t,
                   const real* __restrict__ grad_kernel, const double* __restrict__ grad_weight,
                   double* __restrict__ radial, double rcut, int exponent) {
  __shared__ RadialScratch scratch[WARPS];
  __shared__ real grads[WARPS][2][WIDEST];
  RadialScratch& s = scratch[warp_index()];
  real* grad = grads[warp_index()][0];
  const i64 step = grid_threads() / 32;
  for (i64 k = grid_thread() / 32; k < count; k += step) {
    const i64 e = edge_at(list, first, k);
    radial_basis(s, frequencies, distance[e], {rcut, exponent});
    const real* hidden = radial_hidden(s, hidden_weights);
    const real* g = grad_kernel + k * COLUMNS;
    double dw = grad_weight[k];
    real factor = real(1);
    if (WEIGHTED) {
      factor = static_cast<real>(weight[e]);
      real sum = real(0);
      for (int p = lane_index(); p < COLUMNS; p += 32) {
        real raw = real(0);
        for (int j = 0; j < HIDDEN; ++j) raw = real_fma(hidden[j], edge_weights[j * COLUMNS + p], raw);
        sum += g[p] * raw;
      }
      dw += static_cast<double>(warp_sum(sum));
    }
    __syncwarp();
    for (int j = lane_index(); j < HIDDEN; j += 32) {
      real sum = real(0);
      for (int p = 0; p < COLUMNS; ++p) sum = real_fma(g[p], edge_weights_t[p * HIDDEN + j], sum);
      grad[j] = factor * sum;
    }
    __syncwarp();
    const double along = warp_sum(radial_adjoint_along(s, hidden_weights, grad, grads[warp_index()][1]));
    if (lane_index() == 0) radial[first + k] += along + dw * weight_slope[e];
    __syncwarp();
  }
}
