// SPDX-License-Identifier: MIT OR Apache-2.0
// Envelope and radial basis of an edge (SPEC section 3), in double.
#pragma once
#include "common.cuh"

/// Value and slope of the envelope of exponent p: u^4 sum_k binom(k+3,3) x^k, u = 1 - x, x = r / rcut.
DEVFN void envelope(int p, double r, double rcut, double* value, double* slope) {
  const double x = r / rcut, u = 1.0 - x;
  double sum = 0.0, derivative = 0.0, power = 1.0, coefficient = 1.0;
  for (int k = 0; k < p; ++k) {
    sum += coefficient * power;
    coefficient = coefficient * (k + 4) / (k + 1);
    if (k + 1 < p) derivative += coefficient * (k + 1) * power;
    power *= x;
  }
  const double u3 = u * u * u;
  const bool inside = r < rcut;
  *value = inside ? u3 * u * sum : 0.0;
  *slope = inside ? (u3 * u * derivative - 4.0 * u3 * sum) / rcut : 0.0;
}
