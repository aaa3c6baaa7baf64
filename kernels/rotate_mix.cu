// SPDX-License-Identifier: MIT OR Apache-2.0
// Stage `rotate_mix`: source features into the edge frame, mixing of degrees by the radial kernel, and
// capture of the scalars that the focus competition reads, written from the same accumulator into storage of
// their own (SPEC 8.2, steps 1, 2 and 4).
//
// -DMODE: 0 a factor a degree and channel, 1 a kernel for all channels, 2 ranked (-DRANK), 3 a kernel a
// channel. -DKERNEL_STRIDE: values of an edge's radial kernel, the mixing part first. -DCAPTURE: 1 with a
// competition. Node rows: [(l, m)][node][W], `plane` values from row to row.
#include "message.cuh"
#include "torque.cuh"

/// kernel entry (in, out) of order m for channel w.
DEVFN real mixing(const real* __restrict__ kernel, const real* __restrict__ basis, int m, int in, int out,
                  int w) {
  const int z = kernel_start(m) + in * (LMAX - m + 1) + out;
  if (MODE == 1) return kernel[z];
  if (MODE == 3) return kernel[z * WIDTH + w];
  real sum = real(0);
  UNROLL for (int q = 0; q < RANK; ++q) sum = real_fma(kernel[z * RANK + q], basis[q * WIDTH + w], sum);
  return sum;
}

/// f(m, in, out, row_in, row_out) for every pair of rows that the kernel couples.
template <class F>
DEVFN void each_pair(F f) {
  UNROLL for (int m = 0; m <= MMAX; ++m) {
    const int n = LMAX - m + 1;
    UNROLL for (int in = 0; in < n; ++in) {
      UNROLL for (int out = 0; out < n; ++out) {
        UNROLL for (int copy = 0; copy < (m == 0 ? 1 : 2); ++copy) {
          const int start = order_start(m) + copy * n;
          f(m, in, out, start + in, start + out);
        }
      }
    }
  }
}

/// One warp an edge: y[k][focus][row][channel], captured[k][W].
extern "C" __global__ void __launch_bounds__(128)
    rotate_mix_forward(const u32* __restrict__ list, i64 first, i64 count, const u32* __restrict__ src,
                       const real* __restrict__ records, const real* __restrict__ kernels,
                       const real* __restrict__ basis, const real* __restrict__ x, i64 plane,
                       real* __restrict__ y, real* __restrict__ captured) {
  const i64 step = grid_threads() / 32;
  for (i64 k = grid_thread() / 32; k < count; k += step) {
    const i64 node = src[edge_at(list, first, k)];
    const real* record = records + k * RECORD;
    const real* kernel = kernels + k * KERNEL_STRIDE;
    for (int w = lane_index(); w < WIDTH; w += 32) {
      real packed[PACKED], rotated[ROWS], mixed[ROWS];
      UNROLL for (int row = 0; row < PACKED; ++row) packed[row] = x[row * plane + node * WIDTH + w];
      rotate(record, packed, rotated);
      if (MODE == 0) {
        each_row([&](int row, int l, int) { mixed[row] = rotated[row] * kernel[l * WIDTH + w]; });
      } else {
        UNROLL for (int row = 0; row < ROWS; ++row) mixed[row] = real(0);
        each_pair([&](int m, int in, int out, int row_in, int row_out) {
          mixed[row_out] = real_fma(mixing(kernel, basis, m, in, out, w), rotated[row_in], mixed[row_out]);
        });
      }
      real* out = y + k * EDGE + (w / CHANNELS) * ROWS * CHANNELS + w % CHANNELS;
      UNROLL for (int row = 0; row < ROWS; ++row) out[row * CHANNELS] = mixed[row];
      if (CAPTURE) captured[k * WIDTH + w] = mixed[0];
    }
  }
}

constexpr int WARPS_W = (WIDTH + 31) / 32;             // warps that hold a node's channels
constexpr int GROUPS = WARPS_W > 8 ? 1 : 8 / WARPS_W;  // edges of a node that a block works on together
constexpr int THREADS = WARPS_W * GROUPS * 32;
/// Values of an edge that are sums over channels: the kernel (not for modes that keep channels) and the
/// torque.
constexpr int SUMS = (MODE == 1 ? KERNEL : MODE == 2 ? KERNEL * RANK : 0) + 3;

/// One block a source node of [node0, node0 + grid): grad_x[(l,m)][node][W] += D^T kernel^T grad_y over the
/// edges that leave it; grad_kernel of each edge (its mixing part set); torque[first + k] -= <grad_x, J x>.
/// `first`: place of the chunk's first edge among the edges by source.
extern "C" __global__ void __launch_bounds__(THREADS)
    rotate_mix_adjoint(i64 first, const i64* __restrict__ src_start, i64 node0,
                       const real* __restrict__ records, const real* __restrict__ kernels,
                       const real* __restrict__ basis, const real* __restrict__ x, i64 plane,
                       const real* __restrict__ grad_y, const real* __restrict__ grad_captured,
                       real* __restrict__ grad_kernels, double* __restrict__ torque,
                       real* __restrict__ grad_x) {
  __shared__ real sums[GROUPS][WARPS_W][SUMS];
  __shared__ real total[WARPS_W * 32];
  const i64 node = node0 + blockIdx.x;
  const int warp = warp_index(), group = warp / WARPS_W, part = warp % WARPS_W;
  const int w = part * 32 + lane_index();
  const bool active = w < WIDTH;
  const int channel = active ? w : 0;
  real packed[PACKED], sum_x[PACKED];
  UNROLL for (int row = 0; row < PACKED; ++row) {
    packed[row] = active ? x[row * plane + node * WIDTH + w] : real(0);
    sum_x[row] = real(0);
  }
  const i64 begin = src_start[node] - first, end = src_start[node + 1] - first;
  for (i64 base = begin; base < end; base += GROUPS) {
    const i64 k = base + group;
    const bool work = k < end;
    if (work) {
      const real* record = records + k * RECORD;
      const real* kernel = kernels + k * KERNEL_STRIDE;
      real* grad_kernel = grad_kernels + k * KERNEL_STRIDE;
      real rotated[ROWS], grad[ROWS], back[ROWS], turned[PACKED];
      rotate(record, packed, rotated);
      const real* g = grad_y + k * EDGE + (channel / CHANNELS) * ROWS * CHANNELS + channel % CHANNELS;
      UNROLL for (int row = 0; row < ROWS; ++row) {
        grad[row] = active ? g[row * CHANNELS] : real(0);
        back[row] = real(0);
      }
      if (CAPTURE && active) grad[0] += grad_captured[k * WIDTH + w];
      if (MODE == 0) {
        UNROLL for (int l = 0; l <= LMAX; ++l) {
          real sum = real(0);
          each_row([&](int row, int degree, int) {
            if (degree == l) sum = real_fma(grad[row], rotated[row], sum);
          });
          if (active) grad_kernel[l * WIDTH + w] = sum;
        }
        each_row([&](int row, int l, int) { back[row] = grad[row] * kernel[l * WIDTH + channel]; });
      } else {
        UNROLL for (int m = 0; m <= MMAX; ++m) {
          const int n = LMAX - m + 1;
          UNROLL for (int in = 0; in < n; ++in) {
            UNROLL for (int out = 0; out < n; ++out) {
              real product = real(0);
              const real factor = mixing(kernel, basis, m, in, out, channel);
              UNROLL for (int copy = 0; copy < (m == 0 ? 1 : 2); ++copy) {
                const int start = order_start(m) + copy * n;
                product = real_fma(rotated[start + in], grad[start + out], product);
                back[start + in] = real_fma(factor, grad[start + out], back[start + in]);
              }
              const int z = kernel_start(m) + in * n + out;
              if (MODE == 3) {
                if (active) grad_kernel[z * WIDTH + w] = product;
              } else {
                UNROLL for (int q = 0; q < (MODE == 2 ? RANK : 1); ++q) {
                  const real share = MODE == 2 ? product * basis[q * WIDTH + channel] : product;
                  const real sum = warp_sum(share);
                  if (lane_index() == 0) sums[group][part][z * (MODE == 2 ? RANK : 1) + q] = sum;
                }
              }
            }
          }
        }
      }
      UNROLL for (int row = 0; row < PACKED; ++row) turned[row] = real(0);
      rotate_transposed(record, back, turned);
      real t[3] = {real(0), real(0), real(0)};
      add_torque<LMAX>(turned, packed, t);
      UNROLL for (int a = 0; a < 3; ++a) {
        const real sum = warp_sum(t[a]);
        if (lane_index() == 0) sums[group][part][SUMS - 3 + a] = sum;
      }
      UNROLL for (int row = 0; row < PACKED; ++row) sum_x[row] += turned[row];
    }
    __syncthreads();
    if (work && part == 0) {
      for (int i = lane_index(); i < SUMS; i += 32) {
        real sum = real(0);
        for (int p = 0; p < WARPS_W; ++p) sum += sums[group][p][i];
        if (i < SUMS - 3) grad_kernels[k * KERNEL_STRIDE + i] = sum;
        else torque[3 * (first + k) + i - (SUMS - 3)] -= static_cast<double>(sum);
      }
    }
    __syncthreads();
  }
  // Groups add up in their order.
  UNROLL_BY(1)
  for (int row = 0; row < PACKED; ++row) {
    for (int g = 0; g < GROUPS; ++g) {
      if (group == g) total[w] = g == 0 ? sum_x[row] : total[w] + sum_x[row];
      __syncthreads();
    }
    if (group == 0 && active) grad_x[row * plane + node * WIDTH + w] += total[w];
    __syncthreads();
  }
}
