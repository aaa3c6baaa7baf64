// SPDX-License-Identifier: MIT OR Apache-2.0
// Stage `attention`: logits, softmax with null mass, rotation back and aggregation, output gates (SPEC 8.2
// b). -DKERNEL_STRIDE, -DMIXING: values of an edge's radial kernel, and how many of them come before the
// logits. -DCOMPETE: 1 with a focus competition. -DATTEND: 0 without attention (weights n_dst w_e).
#include "message.cuh"
#include "torque.cuh"

/// Attention weights before the softmax, alpha[e][COLUMNS]: one warp an edge of the chunk first .. first +
/// count.
extern "C" __global__ void attention_logits(i64 first, i64 count, const u32* __restrict__ src,
                                            const u32* __restrict__ dst, const real* __restrict__ kernels,
                                            const real* __restrict__ query, const real* __restrict__ key,
                                            real* __restrict__ alpha) {
  const i64 step = grid_threads() / 32;
  const real scale = static_cast<real>(1.0 / sqrt(static_cast<double>(PER_HEAD)));
  for (i64 k = grid_thread() / 32; k < count; k += step) {
    const i64 e = first + k;
    const real* q = query + static_cast<i64>(dst[e]) * WIDTH;
    const real* s = key + static_cast<i64>(src[e]) * WIDTH;
    UNROLL_BY(1)
    for (int column = 0; column < COLUMNS; ++column) {
      real sum = real(0);
      for (int c = lane_index(); c < PER_HEAD; c += 32) {
        sum = real_fma(q[column * PER_HEAD + c], s[column * PER_HEAD + c], sum);
      }
      sum = warp_sum(sum);
      if (lane_index() == 0)
        alpha[e * COLUMNS + column] = kernels[k * KERNEL_STRIDE + MIXING + column] + scale * sum;
    }
  }
}

/// Softmax of each (atom, column) over the atom's edges, in place; one warp each, in double.
extern "C" __global__ void attention_softmax(i64 atom0, i64 atoms, const i64* __restrict__ dst_start,
                                             const double* __restrict__ weight,
                                             const double* __restrict__ normaliser,
                                             const double* __restrict__ null_mass, real* __restrict__ alpha) {
  const i64 step = grid_threads() / 32;
  for (i64 t = grid_thread() / 32; t < atoms * COLUMNS; t += step) {
    const i64 atom = atom0 + t / COLUMNS;
    const int column = static_cast<int>(t % COLUMNS);
    const i64 begin = dst_start[atom], end = dst_start[atom + 1];
    if (!ATTEND) {
      for (i64 e = begin + lane_index(); e < end; e += 32) {
        alpha[e * COLUMNS + column] = static_cast<real>(normaliser[atom] * weight[e]);
      }
      continue;
    }
    const double null = log(null_mass[column]);
    double top = null;
    for (i64 e = begin + lane_index(); e < end; e += 32) {
      top = fmax(top, static_cast<double>(alpha[e * COLUMNS + column]) + 2.0 * log(weight[e]));
    }
    top = warp_max(top);
    double sum = 0.0;
    for (i64 e = begin + lane_index(); e < end; e += 32) {
      sum += exp(static_cast<double>(alpha[e * COLUMNS + column]) + 2.0 * log(weight[e]) - top);
    }
    sum = warp_sum(sum) + exp(null - top);
    for (i64 e = begin + lane_index(); e < end; e += 32) {
      const double x = exp(static_cast<double>(alpha[e * COLUMNS + column]) + 2.0 * log(weight[e]) - top);
      alpha[e * COLUMNS + column] = static_cast<real>(x / sum);
    }
  }
}

/// Factor of hidden channel w of an edge on its way to the destination.
DEVFN real channel_factor(const real* __restrict__ alpha, const real* __restrict__ share, int w) {
  const real a = alpha[w / PER_HEAD];
  return COMPETE ? a * share[w / CHANNELS] : a;
}

constexpr int WARPS_W = (WIDTH + 31) / 32;
constexpr int GROUPS = WARPS_W > 8 ? 1 : 8 / WARPS_W;
constexpr int THREADS = WARPS_W * GROUPS * 32;

/// One block an atom of [atom0, atom0 + grid): out[(l,m)][atom][W] = sum over its edges of alpha share D^T
/// (back y). y, records, share belong to the chunk whose first edge is `first`.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_aggregate(i64 first, i64 atom0, const i64* __restrict__ dst_start,
                        const real* __restrict__ records, const real* __restrict__ y,
                        const real* __restrict__ alpha, const real* __restrict__ share,
                        real* __restrict__ out, i64 plane) {
  __shared__ real total[WARPS_W * 32];
  const i64 atom = atom0 + blockIdx.x;
  const int warp = warp_index(), group = warp / WARPS_W;
  const int w = (warp % WARPS_W) * 32 + lane_index();
  const bool active = w < WIDTH;
  real sum[PACKED];
  UNROLL for (int row = 0; row < PACKED; ++row) sum[row] = real(0);
  if (active) {
    for (i64 e = dst_start[atom] + group; e < dst_start[atom + 1]; e += GROUPS) {
      const i64 k = e - first;
      const real factor = channel_factor(alpha + e * COLUMNS, share + k * FOCUSES, w);
      const real* from = y + k * EDGE + (w / CHANNELS) * ROWS * CHANNELS + w % CHANNELS;
      real scaled[ROWS];
      each_row([&](int row, int l, int) { scaled[row] = from[row * CHANNELS] * (back_scale(l) * factor); });
      rotate_transposed(records + k * RECORD, scaled, sum);
    }
  }
  UNROLL_BY(1)
  for (int row = 0; row < PACKED; ++row) {
    for (int g = 0; g < GROUPS; ++g) {
      if (group == g) total[w] = g == 0 ? sum[row] : total[w] + sum[row];
      __syncthreads();
    }
    if (group == 0 && active) out[row * plane + atom * WIDTH + w] = total[w];
    __syncthreads();
  }
}

/// The same edge from its destination back to the end of the stack; one warp an edge of the chunk `list[first
/// ..]`. grad_y, grad_share, the logit part of grad_kernels and grad_weight are set, torque[first + k] is
/// added to.
extern "C" __global__ void __launch_bounds__(128)
    attention_adjoint(const u32* __restrict__ list, i64 first, i64 count, const u32* __restrict__ dst,
                      const double* __restrict__ weight, const double* __restrict__ normaliser,
                      const real* __restrict__ records, const real* __restrict__ y,
                      const real* __restrict__ alpha, const real* __restrict__ share,
                      const real* __restrict__ grad_out, const real* __restrict__ along, i64 plane,
                      real* __restrict__ grad_y, real* __restrict__ grad_share,
                      real* __restrict__ grad_kernels, double* __restrict__ grad_weight,
                      double* __restrict__ torque) {
  __shared__ real products[4][WIDTH];
  const int warp = warp_index();
  const i64 step = grid_threads() / 32;
  for (i64 k = grid_thread() / 32; k < count; k += step) {
    const i64 e = edge_at(list, first, k), node = dst[e];
    const real* record = records + k * RECORD;
    real t[3] = {real(0), real(0), real(0)};
    for (int w = lane_index(); w < WIDTH; w += 32) {
      const real factor = channel_factor(alpha + e * COLUMNS, share + k * FOCUSES, w);
      real grad[PACKED], message[PACKED], turned[ROWS], value[ROWS];
      UNROLL for (int row = 0; row < PACKED; ++row) {
        grad[row] = grad_out[row * plane + node * WIDTH + w];
        message[row] = real(0);
      }
      const i64 at = k * EDGE + (w / CHANNELS) * ROWS * CHANNELS + w % CHANNELS;
      rotate(record, grad, turned);
      real product = real(0);
      each_row([&](int row, int l, int) {
        const real v = y[at + row * CHANNELS], back = back_scale(l);
        product = real_fma(v, back * turned[row], product);
        value[row] = v * (back * factor);
        grad_y[at + row * CHANNELS] = factor * (back * turned[row]);
      });
      rotate_transposed(record, value, message);
      add_torque<LMAX>(grad, message, t);
      products[warp][w] = product;
    }
    UNROLL for (int a = 0; a < 3; ++a) {
      const real sum = warp_sum(t[a]);
      if (lane_index() == a) torque[3 * (first + k) + a] += static_cast<double>(sum);
    }
    __syncwarp();
    // <y, D grad_out> of each column, then back through softmax and competition.
    double dw = 0.0;
    for (int column = lane_index(); column < COLUMNS; column += 32) {
      real p = real(0);
      for (int c = 0; c < PER_HEAD; ++c) p += products[warp][column * PER_HEAD + c];
      const real a = alpha[e * COLUMNS + column];
      const real grad_alpha = COMPETE ? share[k * FOCUSES + column / HEADS] * p : p;
      if (ATTEND) {
        const real logit = a * (grad_alpha - along[node * COLUMNS + column]);
        grad_kernels[k * KERNEL_STRIDE + MIXING + column] = logit;
        dw += static_cast<double>(logit);
      } else {
        dw += static_cast<double>(grad_alpha);
      }
      products[warp][column * PER_HEAD] = a * p;
    }
    dw = warp_sum(dw);
    if (lane_index() == 0) {
      grad_weight[k] = ATTEND ? (weight[e] > 0.0 ? 2.0 * dw / weight[e] : 0.0) : normaliser[node] * dw;
    }
    __syncwarp();
    if (COMPETE) {
      for (int f = lane_index(); f < FOCUSES; f += 32) {
        real sum = real(0);
        for (int h = 0; h < HEADS; ++h) sum += products[warp][(f * HEADS + h) * PER_HEAD];
        grad_share[k * FOCUSES + f] = sum;
      }
    }
    __syncwarp();
  }
}

/// logits[first + k][COLUMNS] = the logit part of grad_kernels: kept for the queries.
extern "C" __global__ void attention_keep_logits(i64 first, i64 count, const real* __restrict__ grad_kernels,
                                                 real* __restrict__ logits) {
  for (i64 i = grid_thread(); i < count * COLUMNS; i += grid_threads()) {
    logits[first * COLUMNS + i] = grad_kernels[(i / COLUMNS) * KERNEL_STRIDE + MIXING + i % COLUMNS];
  }
}

/// grad[node][W] = scale sum_e grad_logit_e other[partner_e], one thread a (node, channel). By source (keys):
/// entries and places coincide, partners are destinations; by destination (queries): place = source_place[e].
extern "C" __global__ void attention_heads_adjoint(i64 nodes, const i64* __restrict__ start,
                                                   const u32* __restrict__ list,
                                                   const u32* __restrict__ place,
                                                   const u32* __restrict__ partner,
                                                   const real* __restrict__ logits,
                                                   const real* __restrict__ other, real* __restrict__ grad) {
  const real scale = static_cast<real>(1.0 / sqrt(static_cast<double>(PER_HEAD)));
  for (i64 i = grid_thread(); i < nodes * WIDTH; i += grid_threads()) {
    const i64 node = i / WIDTH;
    const int w = static_cast<int>(i % WIDTH);
    real sum = real(0);
    for (i64 k = start[node]; k < start[node + 1]; ++k) {
      const i64 e = list ? list[k] : k, at = place ? place[k] : k;
      sum =
          real_fma(logits[at * COLUMNS + w / PER_HEAD], other[static_cast<i64>(partner[e]) * WIDTH + w], sum);
    }
    grad[i] = scale * sum;
  }
}

/// Gates from their logits, in place.
extern "C" __global__ void attention_gates(real* __restrict__ gate, i64 values) {
  for (i64 i = grid_thread(); i < values; i += grid_threads()) {
    gate[i] = sigmoid(gate[i]);
  }
}
/// out[(l,m)][node][W] = gate[node][COLUMNS] rows; without gates a copy.
extern "C" __global__ void attention_apply_gates(const real* __restrict__ gate, const real* __restrict__ rows,
                                                 real* __restrict__ out, i64 plane, i64 out_plane,
                                                 i64 nodes) {
  for (i64 i = grid_thread(); i < nodes * WIDTH; i += grid_threads()) {
    const real g = gate ? gate[(i / WIDTH) * COLUMNS + (i % WIDTH) / PER_HEAD] : real(1);
    for (int row = 0; row < PACKED; ++row) out[row * out_plane + i] = g * rows[row * plane + i];
  }
}

/// sums[node][COLUMNS] = <a, b> over rows and the channels of a head; one warp a (node, column).
extern "C" __global__ void attention_head_sums(const real* __restrict__ a, const real* __restrict__ b,
                                               real* __restrict__ sums, i64 a_plane, i64 b_plane, i64 nodes) {
  const i64 step = grid_threads() / 32;
  for (i64 i = grid_thread() / 32; i < nodes * COLUMNS; i += step) {
    real sum = real(0);
    for (int row = 0; row < PACKED; ++row) {
      const real *x = a + row * a_plane + i * PER_HEAD, *y = b + row * b_plane + i * PER_HEAD;
      for (int c = lane_index(); c < PER_HEAD; c += 32) sum = real_fma(x[c], y[c], sum);
    }
    sum = warp_sum(sum);
    if (lane_index() == 0) sums[i] = sum;
  }
}

/// grad of the gates before their sigmoid, in place.
extern "C" __global__ void attention_gates_adjoint(const real* __restrict__ gate, real* __restrict__ grad,
                                                   i64 values) {
  for (i64 i = grid_thread(); i < values; i += grid_threads()) grad[i] *= gate[i] * (real(1) - gate[i]);
}

/// grad_normaliser[atom] += sum of `along` / n, for aggregation without attention.
extern "C" __global__ void attention_normaliser_adjoint(const real* __restrict__ along,
                                                        const double* __restrict__ normaliser,
                                                        double* __restrict__ grad_normaliser, i64 atoms) {
  for (i64 i = grid_thread(); i < atoms; i += grid_threads()) {
    double sum = 0.0;
    for (int column = 0; column < COLUMNS; ++column) sum += static_cast<double>(along[i * COLUMNS + column]);
    grad_normaliser[i] += sum / normaliser[i];
  }
}
