// SPDX-License-Identifier: MIT OR Apache-2.0
// Stage `edge_geometry`: distance, direction and envelope of every edge, and each atom's normaliser (SPEC
// section 3).
#include "envelope.cuh"

/// vec[n_edges][3] in Å -> distance, direction, weight and its slope, all in f64. Any one-dimensional grid.
extern "C" __global__ void edge_geometry(const double* __restrict__ vec, double* __restrict__ distance,
                                         double* __restrict__ direction, double* __restrict__ weight,
                                         double* __restrict__ slope, double rcut, double eps, int exponent,
                                         i64 n_edges) {
  for (i64 e = grid_thread(); e < n_edges; e += grid_threads()) {
    const double3d v = load3(vec + 3 * e);
    const double length2 = dot3(v, v);
    const double r = sqrt(length2 + eps * eps), inverse = 1.0 / sqrt(length2);
    distance[e] = r;
    direction[3 * e] = v.x * inverse;
    direction[3 * e + 1] = v.y * inverse;
    direction[3 * e + 2] = v.z * inverse;
    envelope(exponent, r, rcut, weight + e, slope + e);
  }
}

/// normaliser[i] = 1 / sqrt(sum w^2 + floor) over the edges that arrive at atom i. One thread an atom.
extern "C" __global__ void node_normaliser(const i64* __restrict__ dst_start,
                                           const double* __restrict__ weight, double* __restrict__ normaliser,
                                           double floor, i64 n_owned) {
  for (i64 i = grid_thread(); i < n_owned; i += grid_threads()) {
    double sum = 0.0;
    for (i64 e = dst_start[i]; e < dst_start[i + 1]; ++e) sum += weight[e] * weight[e];
    normaliser[i] = 1.0 / sqrt(sum + floor);
  }
}

/// out[k] = direction[list[first + k]]; one thread a component.
extern "C" __global__ void gather_directions(const u32* __restrict__ list, i64 first, i64 count,
                                             const double* __restrict__ direction, double* __restrict__ out) {
  for (i64 i = grid_thread(); i < 3 * count; i += grid_threads()) {
    out[i] = direction[3 * static_cast<i64>(list[first + i / 3]) + i % 3];
  }
}
