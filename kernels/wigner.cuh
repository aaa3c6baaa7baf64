// SPDX-License-Identifier: MIT OR Apache-2.0
// The frame of an edge and the Wigner-D recursion of Ivanic and Ruedenberg (J. Phys. Chem. 1996, 100, 6342;
// erratum 1998, 102, 9099) in the packed basis of SPEC section 4: z_l(R n) = D^l(R) z_l(n), element [m +
// l][m' + l].
//
// A record is D^0, D^1, ... D^LMAX one after the other, each row-major: sum (2l+1)^2 values. The inverse
// rotation is the same record read transposed. Everything is computed in double.
#pragma once
#include "common.cuh"

/// Elements of D^l, and where it starts in a record.
DEVFN constexpr int wigner_block(int l) { return (2 * l + 1) * (2 * l + 1); }
DEVFN constexpr int wigner_offset(int l) { return l * (4 * l * l - 1) / 3; }

/// D^1 of a rotation R with R n = +z, n the direction of `vec` (not zero). The roll about z is arbitrary
/// (SPEC 4.3): here R is the shortest rotation in the upper hemisphere and, in the lower one, the shortest
/// after a half turn about x, so that the divisor 1 + |n_z| never gets small.
DEVFN void edge_frame(double3d vec, double* first) {
  const double inverse = 1.0 / sqrt(dot3(vec, vec));
  const double flip = vec.z < 0.0 ? -1.0 : 1.0;
  const double x = vec.x * inverse, y = flip * vec.y * inverse, z = flip * vec.z * inverse;
  const double scale = 1.0 / (1.0 + z), shear = -x * y * scale;
  // The packed basis of degree 1 is (y, z, -x): elements that mix x with another axis change sign.
  first[0] = flip * (1.0 - y * y * scale);
  first[1] = -flip * y;
  first[2] = -shear;
  first[3] = flip * y;
  first[4] = flip * z;
  first[5] = -x;
  first[6] = -flip * shear;
  first[7] = flip * x;
  first[8] = 1.0 - x * x * scale;
}

/// Square roots of 0, 1, ... 2 LMAX and their inverses (0 for the first): all the factors of the recursion.
template <int LMAX_>
struct WignerRoots {
  double root[2 * LMAX_ + 1], inverse[2 * LMAX_ + 1];
};

template <int LMAX_>
DEVFN void fill_wigner_roots(WignerRoots<LMAX_>& roots, int thread, int threads) {
  for (int k = thread; k <= 2 * LMAX_; k += threads) {
    const double root = sqrt(static_cast<double>(k));
    roots.root[k] = root;
    roots.inverse[k] = k == 0 ? 0.0 : 1.0 / root;
  }
}

/// Element `column` of row `axis` of D^1 coupled to row `row` of D^{L-1}; indices count from minus the
/// degree.
template <int L>
DEVFN double wigner_couple(const double* first, const double* previous, int axis, int row, int column) {
  const double* vector = first + 3 * (axis + 1);
  const double* source = previous + (row + L - 1) * (2 * L - 1);
  if (column == -L) return vector[2] * source[0] + vector[0] * source[2 * L - 2];
  if (column == L) return vector[2] * source[2 * L - 2] - vector[0] * source[0];
  return vector[1] * source[column + L - 1];
}

/// Element (m, column) of D^L, L >= 2, from D^1 and D^{L-1}.
template <int L, class Roots>
DEVFN double wigner_element(const Roots& roots, const double* first, const double* previous, int m,
                            int column) {
  const double* root = roots.root;
  const double root2 = root[2];
  const int size = m < 0 ? -m : m, sign = m < 0 ? -1 : 1;
  double sum = 0.0;
  if (size < L) sum = root[L + m] * root[L - m] * wigner_couple<L>(first, previous, 0, m, column);
  const double v = 0.5 * root[L + size - 1] * root[L + size];
  if (m == 0) {
    sum -=
        root2 * v *
        (wigner_couple<L>(first, previous, 1, 1, column) + wigner_couple<L>(first, previous, -1, -1, column));
  } else if (size == 1) {
    sum += root2 * v * wigner_couple<L>(first, previous, sign, 0, column);
  } else {
    const int inner = m - sign;
    sum += v * (wigner_couple<L>(first, previous, 1, inner, column) -
                sign * wigner_couple<L>(first, previous, -1, -inner, column));
  }
  if (m != 0 && size < L - 1) {
    const int outer = m + sign;
    const double w = -0.5 * root[L - size - 1] * root[L - size];
    sum += w * (wigner_couple<L>(first, previous, 1, outer, column) +
                sign * wigner_couple<L>(first, previous, -1, -outer, column));
  }
  const bool edge = column == L || column == -L;
  return sum * (edge ? roots.inverse[2 * L] * roots.inverse[2 * L - 1]
                     : roots.inverse[L + column] * roots.inverse[L - column]);
}
