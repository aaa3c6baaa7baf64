// SPDX-License-Identifier: MIT OR Apache-2.0
// Stage `grid_product`: products on SO(3) and S2 grids between the projections (SPEC 10). The third angle of
// a grid is kept as trigonometric components [1, cos g, sin g, cos 2g, ...] and multiplied as such.
//
// -DFRAMES = 2K + 1, -DLMAX, -DCHANNELS (C'), -DBRANCHES (1: no router), -DFOCUSES (rows are (node, focus)).
// Grid functions [component][point][row][width], coefficients [frame][(l,m)][row][C'].
#include "common.cuh"

constexpr int ORDER = FRAMES / 2;
constexpr int PACKED = (LMAX + 1) * (LMAX + 1);
/// Channels on the grid of one branch: -DGRID_CHANNELS (2C' for the self-mode mlp, else C').
constexpr int GRID_WIDTH = BRANCHES * GRID_CHANNELS;

DEVFN constexpr int cos_component(int k) { return k == 0 ? 0 : 2 * k - 1; }
DEVFN constexpr int sin_component(int k) { return 2 * k; }

/// f(i, j, o, factor) for every product left_i right_j that contributes to component o of order <= K.
template <class F>
DEVFN void each_term(F f) {
  UNROLL for (int a = 0; a <= ORDER; ++a) {
    UNROLL for (int b = 0; b <= ORDER; ++b) {
      const real half = a == 0 || b == 0 ? real(1) : real(0.5);
      UNROLL for (int which = 0; which < 2; ++which) {
        const bool sum = which == 0;
        const int k = sum ? a + b : (a > b ? a - b : b - a);
        if (k > ORDER || (!sum && (a == 0 || b == 0))) continue;
        f(cos_component(a), cos_component(b), cos_component(k), half);
        if (a > 0 && b > 0) f(sin_component(a), sin_component(b), cos_component(k), sum ? -half : half);
        if (k > 0) {
          if (a > 0) f(sin_component(a), cos_component(b), sin_component(k), sum || a > b ? half : -half);
          if (b > 0) f(cos_component(a), sin_component(b), sin_component(k), sum || a < b ? half : -half);
        }
      }
    }
  }
}

/// out[component][point][row][GRID_CHANNELS] = sum over branches of route left right.
extern "C" __global__ void grid_multiply(const real* __restrict__ left, const real* __restrict__ right,
                                         const real* __restrict__ route, real* __restrict__ out, int points,
                                         i64 rows) {
  const i64 total = points * rows * GRID_CHANNELS, plane_in = points * rows * GRID_WIDTH;
  for (i64 i = grid_thread(); i < total; i += grid_threads()) {
    const i64 point_row = i / GRID_CHANNELS, row = point_row % rows;
    const int c = static_cast<int>(i % GRID_CHANNELS);
    real sum[FRAMES];
    UNROLL for (int o = 0; o < FRAMES; ++o) sum[o] = real(0);
    for (int branch = 0; branch < BRANCHES; ++branch) {
      const i64 at = point_row * GRID_WIDTH + branch * GRID_CHANNELS + c;
      real x[FRAMES], y[FRAMES];
      UNROLL for (int o = 0; o < FRAMES; ++o) {
        x[o] = left[o * plane_in + at];
        y[o] = right[o * plane_in + at];
      }
      const real share = BRANCHES > 1 ? route[row * BRANCHES + branch] : real(1);
      each_term([&](int p, int q, int o, real factor) { sum[o] += share * factor * x[p] * y[q]; });
    }
    UNROLL for (int o = 0; o < FRAMES; ++o) out[o * total + i] = sum[o];
  }
}

/// Gradients of left and right (in place of them) from grad[component][point][row][GRID_CHANNELS].
extern "C" __global__ void grid_multiply_adjoint(real* __restrict__ left, real* __restrict__ right,
                                                 const real* __restrict__ route,
                                                 const real* __restrict__ grad, int points, i64 rows) {
  const i64 total = points * rows * GRID_CHANNELS, plane_in = points * rows * GRID_WIDTH;
  for (i64 i = grid_thread(); i < total; i += grid_threads()) {
    const i64 point_row = i / GRID_CHANNELS, row = point_row % rows;
    const int c = static_cast<int>(i % GRID_CHANNELS);
    real g[FRAMES];
    UNROLL for (int o = 0; o < FRAMES; ++o) g[o] = grad[o * total + i];
    for (int branch = 0; branch < BRANCHES; ++branch) {
      const i64 at = point_row * GRID_WIDTH + branch * GRID_CHANNELS + c;
      real x[FRAMES], y[FRAMES], gx[FRAMES], gy[FRAMES];
      UNROLL for (int o = 0; o < FRAMES; ++o) {
        x[o] = left[o * plane_in + at];
        y[o] = right[o * plane_in + at];
        gx[o] = gy[o] = real(0);
      }
      const real share = BRANCHES > 1 ? route[row * BRANCHES + branch] : real(1);
      each_term([&](int p, int q, int o, real factor) {
        gx[p] += share * factor * y[q] * g[o];
        gy[q] += share * factor * x[p] * g[o];
      });
      UNROLL for (int o = 0; o < FRAMES; ++o) {
        left[o * plane_in + at] = gx[o];
        right[o * plane_in + at] = gy[o];
      }
    }
  }
}

/// grad_route[row][BRANCHES] = sum over points and channels of grad left right; one warp a (row, branch).
/// Runs before grid_multiply_adjoint.
extern "C" __global__ void grid_route_gradient(const real* __restrict__ left, const real* __restrict__ right,
                                               const real* __restrict__ grad, real* __restrict__ grad_route,
                                               int points, i64 rows) {
  const i64 step = grid_threads() / 32;
  const i64 total = points * rows * GRID_CHANNELS, plane_in = points * rows * GRID_WIDTH;
  for (i64 t = grid_thread() / 32; t < rows * BRANCHES; t += step) {
    const i64 row = t / BRANCHES;
    const int branch = static_cast<int>(t % BRANCHES);
    real sum = real(0);
    for (int i = lane_index(); i < points * GRID_CHANNELS; i += 32) {
      const i64 point_row = (i / GRID_CHANNELS) * rows + row;
      const i64 at = point_row * GRID_WIDTH + branch * GRID_CHANNELS + i % GRID_CHANNELS;
      real x[FRAMES], y[FRAMES];
      UNROLL for (int o = 0; o < FRAMES; ++o) {
        x[o] = left[o * plane_in + at];
        y[o] = right[o * plane_in + at];
      }
      each_term([&](int p, int q, int o, real factor) {
        sum += factor * x[p] * y[q] * grad[o * total + point_row * GRID_CHANNELS + i % GRID_CHANNELS];
      });
    }
    sum = warp_sum(sum);
    if (lane_index() == 0) grad_route[t] = sum;
  }
}

/// Softmax of each row of BRANCHES, in place.
extern "C" __global__ void grid_route(real* __restrict__ route, i64 rows) {
  for (i64 row = grid_thread(); row < rows; row += grid_threads()) {
    real* p = route + row * BRANCHES;
    real top = p[0], sum = real(0);
    for (int b = 1; b < BRANCHES; ++b) top = real_max(top, p[b]);
    for (int b = 0; b < BRANCHES; ++b) sum += p[b] = real_exp(p[b] - top);
    for (int b = 0; b < BRANCHES; ++b) p[b] /= sum;
  }
}
/// Gradient before the softmax, in place of `grad`.
extern "C" __global__ void grid_route_adjoint(const real* __restrict__ route, real* __restrict__ grad,
                                              i64 rows) {
  for (i64 row = grid_thread(); row < rows; row += grid_threads()) {
    real mean = real(0);
    for (int b = 0; b < BRANCHES; ++b) mean += route[row * BRANCHES + b] * grad[row * BRANCHES + b];
    for (int b = 0; b < BRANCHES; ++b) {
      grad[row * BRANCHES + b] = route[row * BRANCHES + b] * (grad[row * BRANCHES + b] - mean);
    }
  }
}

/// First packed row of a frame, |k| <= l.
DEVFN int frame_first(int frame) {
  const int k = (frame + 1) / 2;
  return k * k;
}

/// gate[row][C'] becomes its sigmoid; out = gate before, plus silu(a) b on row 0 of frame 0 with scalars
/// [row][a, b].
extern "C" __global__ void grid_scalar_forward(const real* __restrict__ before, real* __restrict__ gate,
                                               const real* __restrict__ scalars, real* __restrict__ out,
                                               i64 rows) {
  const i64 plane = rows * CHANNELS;
  for (i64 i = grid_thread(); i < plane; i += grid_threads()) {
    const real g = sigmoid(gate[i]);
    gate[i] = g;
    const real* s = scalars + (i / CHANNELS) * 2 * CHANNELS + i % CHANNELS;
    for (int frame = 0; frame < FRAMES; ++frame) {
      for (int row = frame_first(frame); row < PACKED; ++row) {
        const i64 at = (static_cast<i64>(frame) * PACKED + row) * plane + i;
        out[at] = before[at] * g + (frame == 0 && row == 0 ? silu(s[0]) * s[CHANNELS] : real(0));
      }
    }
  }
}
/// grad becomes the gradient of `before`; grad_gate: before the sigmoid; grad_scalars is set.
extern "C" __global__ void grid_scalar_adjoint(const real* __restrict__ before, const real* __restrict__ gate,
                                               const real* __restrict__ scalars, real* __restrict__ grad,
                                               real* __restrict__ grad_gate, real* __restrict__ grad_scalars,
                                               i64 rows) {
  const i64 plane = rows * CHANNELS;
  for (i64 i = grid_thread(); i < plane; i += grid_threads()) {
    const i64 at_s = (i / CHANNELS) * 2 * CHANNELS + i % CHANNELS;
    const real a = scalars[at_s], b = scalars[at_s + CHANNELS], g = gate[i], first = grad[i];
    grad_scalars[at_s] = first * silu_slope(a) * b;
    grad_scalars[at_s + CHANNELS] = first * silu(a);
    real sum = real(0);
    for (int frame = 0; frame < FRAMES; ++frame) {
      for (int row = frame_first(frame); row < PACKED; ++row) {
        const i64 at = (static_cast<i64>(frame) * PACKED + row) * plane + i;
        sum = real_fma(grad[at], before[at], sum);
        grad[at] *= g;
      }
    }
    grad_gate[i] = sum * g * (real(1) - g);
  }
}

/// Message-node product: scalars [row][message, node] from the l = 0 rows [row][C'].
extern "C" __global__ void grid_pack_scalars(const real* __restrict__ message, const real* __restrict__ node,
                                             real* __restrict__ scalars, i64 rows) {
  for (i64 i = grid_thread(); i < rows * CHANNELS; i += grid_threads()) {
    const i64 at = (i / CHANNELS) * 2 * CHANNELS + i % CHANNELS;
    scalars[at] = message[i];
    scalars[at + CHANNELS] = node[i];
  }
}
/// And back: added to both gradients.
extern "C" __global__ void grid_unpack_scalars(const real* __restrict__ grad_scalars,
                                               real* __restrict__ message, real* __restrict__ node,
                                               i64 rows) {
  for (i64 i = grid_thread(); i < rows * CHANNELS; i += grid_threads()) {
    const i64 at = (i / CHANNELS) * 2 * CHANNELS + i % CHANNELS;
    message[i] += grad_scalars[at];
    node[i] += grad_scalars[at + CHANNELS];
  }
}
/// y[(l,m)][row][C'] = scale[row % FOCUSES][C'] x (add: y += ...).
extern "C" __global__ void grid_residual(const real* __restrict__ x, const real* __restrict__ scale,
                                         real* __restrict__ y, int add, i64 rows) {
  for (i64 i = grid_thread(); i < PACKED * rows * CHANNELS; i += grid_threads()) {
    const real v = x[i] * scale[(i / CHANNELS % rows % FOCUSES) * CHANNELS + i % CHANNELS];
    y[i] = add ? y[i] + v : v;
  }
}

/// Scalar part of a product in closed form (SPEC 22.3): out[row][GRID_WIDTH] = sum left right / (2l + 1).
extern "C" __global__ void grid_scalar_product(const real* __restrict__ left, const real* __restrict__ right,
                                               real* __restrict__ out, i64 rows) {
  const i64 plane = rows * GRID_WIDTH;
  for (i64 i = grid_thread(); i < plane; i += grid_threads()) {
    real sum = real(0);
    for (int frame = 0; frame < FRAMES; ++frame) {
      for (int l = (frame + 1) / 2; l <= LMAX; ++l) {
        real part = real(0);
        for (int row = l * l; row < (l + 1) * (l + 1); ++row) {
          const i64 at = (static_cast<i64>(frame) * PACKED + row) * plane + i;
          part = real_fma(left[at], right[at], part);
        }
        sum += part * real(1.0 / (2 * l + 1));
      }
    }
    out[i] = sum;
  }
}
/// Gradients of left and right, in place of them.
extern "C" __global__ void grid_scalar_product_adjoint(real* __restrict__ left, real* __restrict__ right,
                                                       const real* __restrict__ grad, i64 rows) {
  const i64 plane = rows * GRID_WIDTH;
  for (i64 i = grid_thread(); i < plane; i += grid_threads()) {
    const real g = grad[i];
    for (int frame = 0; frame < FRAMES; ++frame) {
      for (int l = (frame + 1) / 2; l <= LMAX; ++l) {
        const real f = g * real(1.0 / (2 * l + 1));
        for (int row = l * l; row < (l + 1) * (l + 1); ++row) {
          const i64 at = (static_cast<i64>(frame) * PACKED + row) * plane + i;
          const real x = left[at];
          left[at] = f * right[at];
          right[at] = f * x;
        }
      }
    }
  }
}
