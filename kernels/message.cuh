// SPDX-License-Identifier: MIT OR Apache-2.0
// Shapes of one block's edge features. -DLMAX (L), -DMMAX (M), -DFOCUSES, -DCHANNELS (of a focus), -DHEADS.
//
// Edge-frame features of an edge: [focus][row][channel], rows in m-major order (SPEC 0): m = 0 with l = 0..L,
// then for every m the -m rows l = m..L and the +m rows.
#pragma once
#include "common.cuh"

constexpr int WIDTH = FOCUSES * CHANNELS;
constexpr int PACKED = (LMAX + 1) * (LMAX + 1);
constexpr int COLUMNS = FOCUSES * HEADS;
constexpr int PER_HEAD = CHANNELS / HEADS;

DEVFN constexpr int row_count() {
  int n = LMAX + 1;
  for (int m = 1; m <= MMAX; ++m) n += 2 * (LMAX - m + 1);
  return n;
}
constexpr int ROWS = row_count();
constexpr int EDGE = FOCUSES * ROWS * CHANNELS;

/// First row of the rows of |m|.
DEVFN constexpr int order_start(int m) {
  int r = 0;
  for (int i = 0; i < m; ++i) r += (i == 0 ? 1 : 2) * (LMAX - i + 1);
  return r;
}
/// First kernel entry of |m|.
DEVFN constexpr int kernel_start(int m) {
  int z = 0;
  for (int i = 0; i < m; ++i) z += (LMAX - i + 1) * (LMAX - i + 1);
  return z;
}
constexpr int KERNEL = kernel_start(MMAX + 1);

/// Start of D^l in a record.
DEVFN constexpr int record_offset(int l) { return l * (4 * l * l - 1) / 3; }
constexpr int RECORD = record_offset(LMAX + 1);

/// f(row, l, m) for every row of the edge frame, in order; unrolled by the compiler.
template <class F>
DEVFN void each_row(F f) {
  UNROLL for (int l = 0; l <= LMAX; ++l) f(l, l, 0);
  UNROLL for (int m = 1; m <= MMAX; ++m) {
    const int n = LMAX - m + 1, start = order_start(m);
    UNROLL for (int i = 0; i < n; ++i) {
      f(start + i, m + i, -m);
      f(start + n + i, m + i, m);
    }
  }
}

/// Rescale of the way back (SPEC 8.2, step 7).
DEVFN real back_scale(int l) {
  return l > MMAX ? static_cast<real>(sqrt(static_cast<double>(2 * l + 1) / (2 * MMAX + 1))) : real(1);
}

/// y <- D x for one channel: `record` of the edge, x packed rows.
DEVFN void rotate(const real* __restrict__ record, const real* x, real* y) {
  each_row([&](int row, int l, int m) {
    const real* d = record + record_offset(l) + (m + l) * (2 * l + 1);
    real sum = real(0);
    UNROLL for (int k = 0; k < 2 * l + 1; ++k) sum = real_fma(d[k], x[l * l + k], sum);
    y[row] = sum;
  });
}
/// x += D^T y for one channel: the same record read transposed.
DEVFN void rotate_transposed(const real* __restrict__ record, const real* y, real* x) {
  each_row([&](int row, int l, int m) {
    const real* d = record + record_offset(l) + (m + l) * (2 * l + 1);
    UNROLL for (int k = 0; k < 2 * l + 1; ++k) x[l * l + k] = real_fma(d[k], y[row], x[l * l + k]);
  });
}
