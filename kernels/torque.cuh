// SPDX-License-Identifier: MIT OR Apache-2.0
// Direction gradients without differentiating Wigner matrices (SPEC 22.5): T_a = <grad, J_a x> with the
// generators of rotations in the packed basis.
#pragma once
#include "common.cuh"

/// Size of the coupling between |m| and |m| + 1 in degree l.
DEVFN double generator_size(int l, int m) {
  return m == 0 ? sqrt(0.5 * l * (l + 1)) : 0.5 * sqrt(static_cast<double>((l - m) * (l + m + 1)));
}

/// Adds <grad, J_a x> of degrees up to L_ for one channel: `grad`, `x` hold the packed rows.
template <int L_, class T>
DEVFN void add_torque(const T* grad, const T* x, T* torque) {
  UNROLL for (int l = 1; l <= L_; ++l) {
    const int o = l * l + l;
    UNROLL for (int m = 0; m < l; ++m) {
      const T g = static_cast<T>(generator_size(l, m));
      if (m == 0) {
        torque[0] += g * (grad[o] * x[o - 1] - grad[o - 1] * x[o]);
        torque[1] += g * (grad[o] * x[o + 1] - grad[o + 1] * x[o]);
      } else {
        torque[0] += g * (grad[o + m] * x[o - m - 1] + grad[o + m + 1] * x[o - m] -
                          grad[o - m - 1] * x[o + m] - grad[o - m] * x[o + m + 1]);
        torque[1] += g * (grad[o - m] * x[o - m - 1] + grad[o + m] * x[o + m + 1] -
                          grad[o - m - 1] * x[o - m] - grad[o + m + 1] * x[o + m]);
      }
      const int k = m + 1;
      torque[2] += static_cast<T>(k) * (grad[o + k] * x[o - k] - grad[o - k] * x[o + k]);
    }
  }
}
