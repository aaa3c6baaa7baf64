// SPDX-License-Identifier: MIT OR Apache-2.0
// Start values of the nodes: `environment_seed` for the scalars, `geometric_embedding` for the other degrees
// (SPEC 6 and 7). Edge features of a chunk of whole atoms, their sums, FiLM, and the adjoint of all of it.
//
// -DLMAX: node degree. -DCHANNELS. -DWEIGHTED. Seed widths -DEMBED (de), -DAXIS (da), -DSEED_RADIAL (dr),
// -DSEED_HIDDEN (dh). -DWARPS of a block. -DFILM_NORM. Radial shape as in radial.cuh.
#include "radial.cuh"
#include "torque.cuh"

constexpr int PACKED = (LMAX + 1) * (LMAX + 1);
constexpr int RHO = LMAX * CHANNELS;
constexpr int MATRIX = 4 * EMBED;
constexpr int SEED_WIDEST = SEED_HIDDEN > EMBED ? SEED_HIDDEN : EMBED;

/// Weights of the edge features; `_t`: transposes for the adjoint.
struct SeedWeights {
  const real *rbf, *rbf_t, *merged, *merged_t, *second, *second_t, *source_types, *destination_types;
  const real *last, *last_t, *hidden;
  const double* frequencies;
};

struct SeedScratch {
  RadialScratch radial;
  real first[SEED_RADIAL], first_active[SEED_RADIAL];
  real second[SEED_HIDDEN], second_active[SEED_HIDDEN];
};
struct AdjointScratch {
  real grad[SEED_WIDEST > WIDEST ? SEED_WIDEST : WIDEST], spare[SEED_WIDEST > WIDEST ? SEED_WIDEST : WIDEST];
  real rho[RHO > 0 ? RHO : 1], grad_rho[RHO > 0 ? RHO : 1];
  real z[PACKED], grad_z[PACKED];
};

/// y[j] = sum_k x[k] w[k][j], lane-strided over j.
DEVFN void multiply(const real* x, const real* __restrict__ w, int in, int out, real* y) {
  for (int j = lane_index(); j < out; j += 32) {
    real sum = real(0);
    for (int k = 0; k < in; ++k) sum = real_fma(x[k], w[k * out + j], sum);
    y[j] = sum;
  }
}

/// Basis, hidden radial layer and both hidden layers of the seed. Returns the hidden radial layer.
DEVFN const real* seed_hidden(SeedScratch& s, const SeedWeights& w, double r, RadialShape shape, int src,
                              int dst) {
  radial_basis(s.radial, w.frequencies, r, shape);
  const real* hidden = radial_hidden(s.radial, w.hidden);
  multiply(s.radial.basis, w.rbf, N_RADIAL, SEED_RADIAL, s.first);
  __syncwarp();
  for (int j = lane_index(); j < SEED_RADIAL; j += 32) s.first_active[j] = activate<ACTIVATION>(s.first[j]);
  __syncwarp();
  multiply(s.first_active, w.merged, SEED_RADIAL, SEED_HIDDEN, s.second);
  __syncwarp();
  for (int j = lane_index(); j < SEED_HIDDEN; j += 32) {
    s.second[j] += w.source_types[src * SEED_HIDDEN + j] + w.destination_types[dst * SEED_HIDDEN + j];
    s.second_active[j] = activate<ACTIVATION>(s.second[j]);
  }
  __syncwarp();
  return hidden;
}

/// z_{l,m}(n) of every edge of the chunk, zonal[k][PACKED] (SPEC 4.1). One thread an edge.
extern "C" __global__ void start_zonal(i64 first, i64 count, const double* __restrict__ direction,
                                       real* __restrict__ zonal) {
  for (i64 k = grid_thread(); k < count; k += grid_threads()) {
    const double3d n = load3(direction + 3 * (first + k));
    real* z = zonal + k * PACKED;
    double cosine = 1.0, sine = 0.0, top = 1.0;
    for (int m = 0; m <= LMAX; ++m) {
      if (m > 0) {
        const double c = -n.x * cosine - n.y * sine;
        sine = -n.x * sine + n.y * cosine;
        cosine = c;
        if (m > 1) top *= sqrt((2.0 * m - 1.0) / (2.0 * m));
      }
      double before = 0.0, value = top;
      for (int l = m; l <= LMAX; ++l) {
        if (l > m) {
          const double next =
              ((2 * l - 1) * n.z * value - sqrt(static_cast<double>((l - 1) * (l - 1) - m * m)) * before) /
              sqrt(static_cast<double>(l * l - m * m));
          before = value;
          value = next;
        }
        z[l * l + l + m] = static_cast<real>(value * cosine);
        if (m > 0) z[l * l + l - m] = static_cast<real>(value * sine);
      }
    }
  }
}

/// g[k][EMBED] and rho[k][l - 1][CHANNELS] of every edge of the chunk. One warp an edge.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    start_edges(i64 first, i64 count, const double* __restrict__ distance, const double* __restrict__ weight,
                const u32* __restrict__ src, const u32* __restrict__ dst, const int* __restrict__ node_type,
                const SeedWeights w, real* __restrict__ g, real* __restrict__ rho, double rcut,
                int exponent) {
  __shared__ SeedScratch scratch[WARPS];
  SeedScratch& s = scratch[warp_index()];
  const i64 step = grid_threads() / 32;
  for (i64 k = grid_thread() / 32; k < count; k += step) {
    const i64 e = first + k;
    const real* hidden = seed_hidden(s, w, distance[e], {rcut, exponent}, max(node_type[src[e]], 0),
                                     max(node_type[dst[e]], 0));
    multiply(s.second_active, w.second, SEED_HIDDEN, EMBED, g + k * EMBED);
    const real factor = WEIGHTED ? static_cast<real>(weight[e]) : real(1);
    for (int j = lane_index(); j < RHO; j += 32) {
      real sum = real(0);
      for (int i = 0; i < HIDDEN; ++i) sum = real_fma(hidden[i], w.last[i * RHO + j], sum);
      rho[k * RHO + j] = factor * sum;
    }
    __syncwarp();
  }
}

/// [s, s n] of an edge; `direction` its own.
DEVFN double coordinate(int a, double s, const double* __restrict__ direction) {
  return a == 0 ? s : s * direction[a - 1];
}

/// One block an atom of [atom0, atom0 + grid): environment matrix[atom][4][EMBED] and x[(l,m)][atom][C], l >=
/// 1, both times the normaliser; each thread sums its values over the atom's edges.
extern "C" __global__ void start_sums(i64 first, i64 atom0, const i64* __restrict__ dst_start,
                                      const double* __restrict__ distance,
                                      const double* __restrict__ direction, const double* __restrict__ weight,
                                      const double* __restrict__ normaliser, const real* __restrict__ g,
                                      const real* __restrict__ rho, const real* __restrict__ zonal,
                                      real* __restrict__ matrix, real* __restrict__ x, i64 plane) {
  const i64 atom = atom0 + blockIdx.x;
  const i64 begin = dst_start[atom], end = dst_start[atom + 1];
  const real n = static_cast<real>(normaliser[atom]);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  for (int i = thread; i < MATRIX; i += threads) {
    real sum = real(0);
    for (i64 e = begin; e < end; ++e) {
      const real a = static_cast<real>(coordinate(i / EMBED, weight[e] / distance[e], direction + 3 * e));
      sum = real_fma(a, g[(e - first) * EMBED + i % EMBED], sum);
    }
    matrix[atom * MATRIX + i] = n * sum;
  }
  for (int i = thread; i < (PACKED - 1) * CHANNELS; i += threads) {
    const int row = 1 + i / CHANNELS, c = i % CHANNELS;
    int l = 1;
    while ((l + 1) * (l + 1) <= row) ++l;
    real sum = real(0);
    for (i64 e = begin; e < end; ++e) {
      sum = real_fma(zonal[(e - first) * PACKED + row], rho[(e - first) * RHO + (l - 1) * CHANNELS + c], sum);
    }
    x[row * plane + atom * CHANNELS + c] = n * sum;
  }
}

/// b[atom][k][q] = sum_a A[a][k] A[a][q]; one thread a value.
extern "C" __global__ void film_quadratic(const real* __restrict__ matrix, real* __restrict__ b, i64 atoms) {
  for (i64 i = grid_thread(); i < atoms * EMBED * AXIS; i += grid_threads()) {
    const real* a = matrix + (i / (EMBED * AXIS)) * MATRIX;
    const int k = static_cast<int>(i / AXIS % EMBED), q = static_cast<int>(i % AXIS);
    real sum = real(0);
    for (int r = 0; r < 4; ++r) sum = real_fma(a[r * EMBED + k], a[r * EMBED + q], sum);
    b[i] = sum;
  }
}
extern "C" __global__ void film_quadratic_adjoint(const real* __restrict__ matrix,
                                                  const real* __restrict__ grad_b,
                                                  real* __restrict__ grad_matrix, i64 atoms) {
  for (i64 i = grid_thread(); i < atoms * MATRIX; i += grid_threads()) {
    const int j = static_cast<int>(i % EMBED);
    const real* a = matrix + i - j;
    const real* b = grad_b + (i / MATRIX) * EMBED * AXIS;
    real sum = real(0);
    for (int q = 0; q < AXIS; ++q) sum = real_fma(b[j * AXIS + q], a[q], sum);
    if (j < AXIS) {
      for (int k = 0; k < EMBED; ++k) sum = real_fma(b[k * AXIS + j], a[k], sum);
    }
    grad_matrix[i] = sum;
  }
}

/// x[0][atom][C] = t (1 + s0 tanh u0) + s1 tanh u1 from the film logits (normed where there is a norm)
/// [atom][2][C].
extern "C" __global__ void film_apply(const real* __restrict__ u, const int* __restrict__ node_type,
                                      const real* __restrict__ type_embedding, real strength_scale,
                                      real strength_shift, real* __restrict__ x, i64 atoms) {
  for (i64 i = grid_thread(); i < atoms * CHANNELS; i += grid_threads()) {
    const i64 atom = i / CHANNELS, c = i % CHANNELS;
    const real t = type_embedding[static_cast<i64>(max(node_type[atom], 0)) * CHANNELS + c];
    const real* v = u + atom * 2 * CHANNELS + c;
    x[i] = t * (real(1) + strength_scale * real_tanh(v[0])) + strength_shift * real_tanh(v[CHANNELS]);
  }
}
extern "C" __global__ void film_apply_adjoint(const real* __restrict__ u, const int* __restrict__ node_type,
                                              const real* __restrict__ type_embedding, real strength_scale,
                                              real strength_shift, const real* __restrict__ grad_x,
                                              real* __restrict__ grad_u, i64 atoms) {
  for (i64 i = grid_thread(); i < atoms * CHANNELS; i += grid_threads()) {
    const i64 atom = i / CHANNELS, c = i % CHANNELS, at = atom * 2 * CHANNELS + c;
    const real t = type_embedding[static_cast<i64>(max(node_type[atom], 0)) * CHANNELS + c];
    const real a = real_tanh(u[at]), b = real_tanh(u[at + CHANNELS]);
    grad_u[at] = grad_x[i] * t * strength_scale * (real(1) - a * a);
    grad_u[at + CHANNELS] = grad_x[i] * strength_shift * (real(1) - b * b);
  }
}
/// x[0][atom][C] = t: without an environment seed.
extern "C" __global__ void start_types(const int* __restrict__ node_type,
                                       const real* __restrict__ type_embedding, real* __restrict__ x,
                                       i64 atoms) {
  for (i64 i = grid_thread(); i < atoms * CHANNELS; i += grid_threads()) {
    x[i] = type_embedding[static_cast<i64>(max(node_type[i / CHANNELS], 0)) * CHANNELS + i % CHANNELS];
  }
}

/// dE/dn of every atom: what the blocks found plus (<A, dA> + <x, dx>) / n; one warp an atom.
extern "C" __global__ void start_normaliser_adjoint(const real* __restrict__ matrix,
                                                    const real* __restrict__ grad_matrix,
                                                    const real* __restrict__ x,
                                                    const real* __restrict__ grad_x, i64 plane,
                                                    const double* __restrict__ normaliser,
                                                    double* __restrict__ grad_normaliser, i64 atoms) {
  const i64 step = grid_threads() / 32;
  for (i64 atom = grid_thread() / 32; atom < atoms; atom += step) {
    double sum = 0.0;
    for (int i = lane_index(); i < MATRIX; i += 32) {
      sum += static_cast<double>(matrix[atom * MATRIX + i]) *
             static_cast<double>(grad_matrix[atom * MATRIX + i]);
    }
    for (int i = lane_index(); i < (PACKED - 1) * CHANNELS; i += 32) {
      const i64 at = (1 + i / CHANNELS) * plane + atom * CHANNELS + i % CHANNELS;
      sum += static_cast<double>(x[at]) * static_cast<double>(grad_x[at]);
    }
    sum = warp_sum(sum);
    if (lane_index() == 0) grad_normaliser[atom] += sum / normaliser[atom];
  }
}

/// Adds J z against grad_z to the torque; the generators of torque.cuh on shared arrays, lanes over
/// couplings.
DEVFN void zonal_torque(const real* grad, const real* z, double* t) {
  for (int l = 1; l <= LMAX; ++l) {
    for (int m = lane_index(); m < l; m += 32) {
      const int o = l * l + l;
      const double g = generator_size(l, m);
      if (m == 0) {
        t[0] += g * (grad[o] * z[o - 1] - grad[o - 1] * z[o]);
        t[1] += g * (grad[o] * z[o + 1] - grad[o + 1] * z[o]);
      } else {
        t[0] += g * (grad[o + m] * z[o - m - 1] + grad[o + m + 1] * z[o - m] - grad[o - m - 1] * z[o + m] -
                     grad[o - m] * z[o + m + 1]);
        t[1] += g * (grad[o - m] * z[o - m - 1] + grad[o + m] * z[o + m + 1] - grad[o - m - 1] * z[o - m] -
                     grad[o + m + 1] * z[o + m]);
      }
      const int k = m + 1;
      t[2] += k * static_cast<double>(grad[o + k] * z[o - k] - grad[o - k] * z[o + k]);
    }
  }
}

/// Adjoint of the edge features: radial[e] and torque[e] (edge order) are set. grad_matrix: of the normalised
/// matrices; grad_normaliser as completed above. One warp an edge.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    start_edges_adjoint(i64 first, i64 count, const double* __restrict__ distance,
                        const double* __restrict__ direction, const double* __restrict__ weight,
                        const double* __restrict__ weight_slope, const double* __restrict__ normaliser,
                        const double* __restrict__ grad_normaliser, const u32* __restrict__ src,
                        const u32* __restrict__ dst, const int* __restrict__ node_type, const SeedWeights w,
                        const real* __restrict__ zonal, const real* __restrict__ grad_matrix,
                        const real* __restrict__ grad_x, i64 plane, double* __restrict__ radial,
                        double* __restrict__ torque, double rcut, int exponent) {
  __shared__ SeedScratch scratch[WARPS];
  __shared__ AdjointScratch adjoints[WARPS];
  SeedScratch& s = scratch[warp_index()];
  AdjointScratch& a = adjoints[warp_index()];
  const int lane = lane_index();
  const i64 step = grid_threads() / 32;
  for (i64 k = grid_thread() / 32; k < count; k += step) {
    const i64 e = first + k, atom = dst[e];
    const real* hidden =
        seed_hidden(s, w, distance[e], {rcut, exponent}, max(node_type[src[e]], 0), max(node_type[atom], 0));
    // Divisions come first: values around their calls would spill.
    const double n = normaliser[atom], we = weight[e], inverse = 1.0 / distance[e], sw = we * inverse;
    double dw = 0.0, dr = 0.0, t[3] = {0.0, 0.0, 0.0};
    // GIE: n z rho.
    const real factor = WEIGHTED ? static_cast<real>(we) : real(1);
    for (int j = lane; j < RHO; j += 32) {
      real sum = real(0);
      for (int i = 0; i < HIDDEN; ++i) sum = real_fma(hidden[i], w.last[i * RHO + j], sum);
      a.rho[j] = sum;
      a.grad_rho[j] = real(0);
    }
    for (int row = lane; row < PACKED; row += 32) {
      a.z[row] = zonal[k * PACKED + row];
      a.grad_z[row] = real(0);
    }
    __syncwarp();
    for (int l = 1; l <= LMAX; ++l) {
      for (int row = l * l; row < (l + 1) * (l + 1); ++row) {
        real sum = real(0);
        for (int c = lane; c < CHANNELS; c += 32) {
          const real g = static_cast<real>(n) * grad_x[row * plane + atom * CHANNELS + c];
          const int j = (l - 1) * CHANNELS + c;
          sum = real_fma(g, factor * a.rho[j], sum);
          a.grad_rho[j] = real_fma(a.z[row], g, a.grad_rho[j]);
        }
        sum = warp_sum(sum);
        if (lane == 0) a.grad_z[row] = sum;
      }
    }
    __syncwarp();
    zonal_torque(a.grad_z, a.z, t);
    if (WEIGHTED) {
      double sum = 0.0;
      for (int j = lane; j < RHO; j += 32) {
        sum += static_cast<double>(a.grad_rho[j]) * static_cast<double>(a.rho[j]);
        a.grad_rho[j] *= factor;
      }
      dw += sum;
    }
    __syncwarp();
    multiply(a.grad_rho, w.last_t, RHO, HIDDEN, a.grad);
    __syncwarp();
    dr += radial_adjoint_along(s.radial, w.hidden, a.grad, a.spare);
    __syncwarp();
    // Seed: coordinates and g, then g back to the basis.
    const real* dm = grad_matrix + atom * MATRIX;
    multiply(s.second_active, w.second, SEED_HIDDEN, EMBED, a.spare);
    __syncwarp();
    double of_coordinate[4];
    for (int q = 0; q < 4; ++q) {
      real sum = real(0);
      for (int j = lane; j < EMBED; j += 32) sum = real_fma(dm[q * EMBED + j], a.spare[j], sum);
      of_coordinate[q] = n * static_cast<double>(warp_sum(sum));
    }
    __syncwarp();
    for (int j = lane; j < EMBED; j += 32) {
      real sum = real(0);
      for (int q = 0; q < 4; ++q) {
        const real x = static_cast<real>(n * coordinate(q, sw, direction + 3 * e));
        sum = real_fma(x, dm[q * EMBED + j], sum);
      }
      a.grad[j] = sum;
    }
    __syncwarp();
    multiply(a.grad, w.second_t, EMBED, SEED_HIDDEN, a.spare);
    __syncwarp();
    for (int j = lane; j < SEED_HIDDEN; j += 32) a.spare[j] *= activate_slope<ACTIVATION>(s.second[j]);
    __syncwarp();
    multiply(a.spare, w.merged_t, SEED_HIDDEN, SEED_RADIAL, a.grad);
    __syncwarp();
    for (int j = lane; j < SEED_RADIAL; j += 32) a.grad[j] *= activate_slope<ACTIVATION>(s.first[j]);
    __syncwarp();
    for (int i = lane; i < N_RADIAL; i += 32) {
      real sum = real(0);
      for (int j = 0; j < SEED_RADIAL; ++j) sum = real_fma(a.grad[j], w.rbf_t[j * N_RADIAL + i], sum);
      dr += static_cast<double>(sum) * static_cast<double>(s.radial.slope[i]);
    }
    dw = warp_sum(dw);
    dr = warp_sum(dr);
    for (int q = 0; q < 3; ++q) t[q] = warp_sum(t[q]);
    if (lane == 0) {
      const double3d u = load3(direction + 3 * e);
      const double grad_s =
          of_coordinate[0] + of_coordinate[1] * u.x + of_coordinate[2] * u.y + of_coordinate[3] * u.z;
      const double3d turn = cross3(u, {sw * of_coordinate[1], sw * of_coordinate[2], sw * of_coordinate[3]});
      dw += grad_s * inverse - grad_normaliser[atom] * n * n * n * we;
      radial[e] = dr - grad_s * sw * inverse + dw * weight_slope[e];
      torque[3 * e] = t[0] + turn.x;
      torque[3 * e + 1] = t[1] + turn.y;
      torque[3 * e + 2] = t[2] + turn.z;
    }
    __syncwarp();
  }
}

/// Without an environment seed only the normaliser depends on the edges; one thread an edge.
extern "C" __global__ void start_normaliser_edges(i64 n_edges, const double* __restrict__ weight,
                                                  const double* __restrict__ weight_slope,
                                                  const double* __restrict__ normaliser,
                                                  const double* __restrict__ grad_normaliser,
                                                  const u32* __restrict__ dst, double* __restrict__ radial,
                                                  double* __restrict__ torque) {
  for (i64 e = grid_thread(); e < n_edges; e += grid_threads()) {
    const i64 atom = dst[e];
    const double n = normaliser[atom];
    radial[e] = -grad_normaliser[atom] * n * n * n * weight[e] * weight_slope[e];
    for (int a = 0; a < 3; ++a) torque[3 * e + a] = 0.0;
  }
}
