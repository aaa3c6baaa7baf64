// SPDX-License-Identifier: MIT OR Apache-2.0
// Radial basis and hidden layers of the radial network for one edge and one warp (SPEC sections 3 and 5).
//
// -DN_RADIAL, -DBASIS=0 (bessel) or 1 (gaussian), -DN_HIDDEN layers of widths -DWIDTHS=w1,w2,.. (without
// layers WIDTHS is N_RADIAL), -DRADIAL_NORM=0 or 1, -DACTIVATION. Weights layer by layer: the matrix
// [in][out], its transpose for the adjoint and, with the norm, its scale [out].
#pragma once
#include "envelope.cuh"

struct RadialShape {
  double rcut;
  int exponent;
};

DEVFN constexpr int radial_width(int layer) {
  constexpr int widths[] = {WIDTHS};
  return layer < 0 ? N_RADIAL : widths[layer];
}
constexpr int HIDDEN = N_HIDDEN == 0 ? N_RADIAL : radial_width(N_HIDDEN - 1);
DEVFN constexpr int radial_widest() {
  int w = N_RADIAL;
  for (int i = 0; i < N_HIDDEN; ++i) w = radial_width(i) > w ? radial_width(i) : w;
  return w;
}
constexpr int WIDEST = radial_widest();

/// Values of a layer's weights.
DEVFN constexpr int radial_layer(int i) {
  return 2 * radial_width(i - 1) * radial_width(i) + (RADIAL_NORM ? radial_width(i) : 0);
}

/// One warp's scratch in shared memory.
struct RadialScratch {
  real basis[N_RADIAL];
  real slope[N_RADIAL];
  real linear[N_HIDDEN > 0 ? N_HIDDEN : 1][WIDEST];
  real inverse[N_HIDDEN > 0 ? N_HIDDEN : 1];
  real hidden[2][WIDEST];
};

/// rbf_k and d(rbf_k)/dr of an edge of length r.
DEVFN void radial_basis(RadialScratch& s, const double* __restrict__ frequencies, double r,
                        RadialShape shape) {
  double e, de;
  envelope(shape.exponent, r, shape.rcut, &e, &de);
  for (int k = lane_index(); k < N_RADIAL; k += 32) {
    const double q = frequencies[k];
    double b, db;
    if (BASIS == 0) {
      const double x = q * r;
      if (fabs(x) < 1e-4) {
        b = q * (1.0 - x * x / 6.0);
        db = -q * q * x / 3.0;
      } else {
        const double sine = sin(x), cosine = cos(x);
        b = sine / r;
        db = (q * cosine - b) / r;
      }
    } else {
      const double width = shape.rcut / (N_RADIAL > 1 ? N_RADIAL - 1 : 1), t = (r - q) / width;
      b = exp(-0.5 * t * t);
      db = -b * t / width;
    }
    s.basis[k] = static_cast<real>(b * e);
    s.slope[k] = static_cast<real>(db * e + b * de);
  }
  __syncwarp();
}

/// The hidden layers; the result is in the returned row of the scratch.
DEVFN real* radial_hidden(RadialScratch& s, const real* __restrict__ weights) {
  real* x = s.basis;
  const real* w = weights;
  for (int i = 0; i < N_HIDDEN; ++i) {
    const int in = radial_width(i - 1), out = radial_width(i);
    real* y = s.hidden[i & 1];
    real square = real(0);
    for (int j = lane_index(); j < out; j += 32) {
      real sum = real(0);
      for (int k = 0; k < in; ++k) sum = real_fma(x[k], w[k * out + j], sum);
      s.linear[i][j] = sum;
      square += sum * sum;
    }
    const real* scale = w + 2 * in * out;
    real inverse = real(1);
    if (RADIAL_NORM) {
      inverse = real(1) / real_sqrt(warp_sum(square) / real(out) + real(1e-7));
      s.inverse[i] = inverse;
    }
    for (int j = lane_index(); j < out; j += 32) {
      const real v = s.linear[i][j];
      y[j] = activate<ACTIVATION>(RADIAL_NORM ? v * inverse * scale[j] : v);
    }
    __syncwarp();
    x = y;
    w += radial_layer(i);
  }
  return x;
}

/// dE/d(rbf) from dE/d(hidden) in `grad` (WIDEST values, used up): lane k holds the sum of grad_rbf_k *
/// slope_k over its k, to be added over the warp.
DEVFN double radial_adjoint_along(RadialScratch& s, const real* __restrict__ weights, real* grad,
                                  real* spare) {
  const real* w = weights;
  for (int i = 0; i < N_HIDDEN; ++i) w += radial_layer(i);
  for (int i = N_HIDDEN - 1; i >= 0; --i) {
    const int in = radial_width(i - 1), out = radial_width(i);
    w -= radial_layer(i);
    const real *transposed = w + in * out, *scale = w + 2 * in * out;
    const real inverse = RADIAL_NORM ? s.inverse[i] : real(1);
    real along = real(0);
    for (int j = lane_index(); j < out; j += 32) {
      const real v = s.linear[i][j];
      real g = grad[j] * activate_slope<ACTIVATION>(RADIAL_NORM ? v * inverse * scale[j] : v);
      if (RADIAL_NORM) {
        g *= scale[j];
        along += g * v;
      }
      grad[j] = g;
    }
    if (RADIAL_NORM) {
      const real pull = warp_sum(along) * inverse * inverse * inverse / real(out);
      for (int j = lane_index(); j < out; j += 32) grad[j] = grad[j] * inverse - pull * s.linear[i][j];
    }
    __syncwarp();
    for (int k = lane_index(); k < in; k += 32) {
      real sum = real(0);
      for (int j = 0; j < out; ++j) sum = real_fma(grad[j], transposed[j * in + k], sum);
      spare[k] = sum;
    }
    __syncwarp();
    for (int k = lane_index(); k < in; k += 32) grad[k] = spare[k];
    __syncwarp();
  }
  double sum = 0.0;
  for (int k = lane_index(); k < N_RADIAL; k += 32) {
    sum += static_cast<double>(grad[k]) * static_cast<double>(s.slope[k]);
  }
  return sum;
}
