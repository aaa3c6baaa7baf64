// SPDX-License-Identifier: MIT OR Apache-2.0
// Stage `force_virial`: edge gradients to forces and virials (SPEC 17), in f64 and in the order of the edges.
#include "common.cuh"

/// gradient[e][3] = dE/dvec_e, eV/Å, from slope along the edge and torque, by destination and by source.
extern "C" __global__ void edge_gradient(
    const double* __restrict__ radial_dst, const double* __restrict__ torque_dst,
    const double* __restrict__ radial_src, const double* __restrict__ torque_src,
    const u32* __restrict__ source_place, const double* __restrict__ direction,
    const double* __restrict__ distance, double* __restrict__ gradient, i64 n_edges) {
  for (i64 e = grid_thread(); e < n_edges; e += grid_threads()) {
    const i64 p = source_place[e];
    const double radial = radial_dst[e] + radial_src[p], inverse = 1.0 / distance[e];
    const double3d n = load3(direction + 3 * e);
    const double3d t = {torque_dst[3 * e] + torque_src[3 * p], torque_dst[3 * e + 1] + torque_src[3 * p + 1],
                        torque_dst[3 * e + 2] + torque_src[3 * p + 2]};
    const double3d turn = cross3(t, n);
    gradient[3 * e] = radial * n.x + turn.x * inverse;
    gradient[3 * e + 1] = radial * n.y + turn.y * inverse;
    gradient[3 * e + 2] = radial * n.z + turn.z * inverse;
  }
}

/// force[node][3]; one thread a node.
extern "C" __global__ void node_force(const double* __restrict__ gradient, const i64* __restrict__ dst_start,
                                      const i64* __restrict__ src_start, const u32* __restrict__ src_edges,
                                      double* __restrict__ force, i64 owned, i64 nodes) {
  for (i64 i = grid_thread(); i < nodes; i += grid_threads()) {
    double f[3] = {0.0, 0.0, 0.0};
    if (i < owned) {
      for (i64 e = dst_start[i]; e < dst_start[i + 1]; ++e) {
        for (int a = 0; a < 3; ++a) f[a] += gradient[3 * e + a];
      }
    }
    for (i64 k = src_start[i]; k < src_start[i + 1]; ++k) {
      const i64 e = src_edges[k];
      for (int a = 0; a < 3; ++a) f[a] -= gradient[3 * e + a];
    }
    for (int a = 0; a < 3; ++a) force[3 * i + a] = f[a];
  }
}

/// arrived[atom][9] = -sum g_a vec_b over the edges that arrive; virial[node][9] (if not null) half of them
/// plus half of those that leave. One thread a (node, component).
extern "C" __global__ void node_virial(const double* __restrict__ gradient, const double* __restrict__ vec,
                                       const i64* __restrict__ dst_start, const i64* __restrict__ src_start,
                                       const u32* __restrict__ src_edges, double* __restrict__ arrived,
                                       double* __restrict__ virial, i64 owned, i64 nodes) {
  for (i64 t = grid_thread(); t < nodes * 9; t += grid_threads()) {
    const i64 i = t / 9;
    const int a = static_cast<int>(t % 9) / 3, b = static_cast<int>(t % 3);
    double in = 0.0, out = 0.0;
    if (i < owned) {
      for (i64 e = dst_start[i]; e < dst_start[i + 1]; ++e) in -= gradient[3 * e + a] * vec[3 * e + b];
      arrived[t] = in;
    }
    if (virial) {
      for (i64 k = src_start[i]; k < src_start[i + 1]; ++k) {
        const i64 e = src_edges[k];
        out -= gradient[3 * e + a] * vec[3 * e + b];
      }
      virial[t] = 0.5 * (in + out);
    }
  }
}
