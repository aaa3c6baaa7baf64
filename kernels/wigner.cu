// SPDX-License-Identifier: MIT OR Apache-2.0
// Stage `wigner`: the Wigner-D record of every edge (SPEC sections 4.2 and 4.3).
//
// -DLMAX: highest degree. -DTILE: edges a block works on together: their elements of one degree are spread
// over all threads, since the low degrees of one edge would leave most of a warp idle.
#include "wigner.cuh"

#ifndef LMAX
#define LMAX 3
#endif
#ifndef TILE
#define TILE 32
#endif

constexpr int THREADS = 256;
constexpr int RECORD = wigner_offset(LMAX + 1);
/// Room for the degrees that a later one is made of.
constexpr int LEVEL = wigner_block(LMAX > 1 ? LMAX - 1 : 0);

struct WignerShared {
  WignerRoots<LMAX> roots;
  double first[TILE][9];
  double level[2][TILE][LEVEL];
};

/// Degrees 2 to L of the tile, one after the other.
template <int L>
DEVFN void assemble_degrees(WignerShared& shared, real* __restrict__ record, int count) {
  if constexpr (L > 2) assemble_degrees<L - 1>(shared, record, count);
  __syncthreads();
  constexpr int size = 2 * L + 1, block = wigner_block(L);
  UNROLL_BY(1)
  for (int i = static_cast<int>(threadIdx.x); i < count * block; i += THREADS) {
    const int edge = i / block, element = i % block;
    const double* previous = L == 2 ? shared.first[edge] : shared.level[(L - 1) & 1][edge];
    const double value =
        wigner_element<L>(shared.roots, shared.first[edge], previous, element / size - L, element % size - L);
    if (L < LMAX) shared.level[L & 1][edge][element] = value;
    record[row_start(edge, RECORD) + wigner_offset(L) + element] = static_cast<real>(value);
  }
}

/// record[n_edges][RECORD] of the edges with vectors vec[n_edges][3], in Angstrom, none of length zero. Any
/// grid.
extern "C" __global__ void __launch_bounds__(THREADS, TILE > 1 ? 4 : 2)
    wigner_assemble(const double* __restrict__ vec, real* __restrict__ record, i64 n_edges) {
  __shared__ WignerShared shared;
  const int thread = static_cast<int>(threadIdx.x);
  fill_wigner_roots(shared.roots, thread, THREADS);
  for (i64 start = static_cast<i64>(blockIdx.x) * TILE; start < n_edges;
       start += static_cast<i64>(gridDim.x) * TILE) {
    const int count = n_edges - start < TILE ? static_cast<int>(n_edges - start) : TILE;
    real* tile = record + row_start(start, RECORD);
    for (int edge = thread; edge < count; edge += THREADS) {
      double* first = shared.first[edge];
      edge_frame(load3(vec + 3 * (start + edge)), first);
      real* out = tile + row_start(edge, RECORD);
      out[0] = real(1);
      if (LMAX > 0) {
        for (int k = 0; k < 9; ++k) out[1 + k] = static_cast<real>(first[k]);
      }
    }
    if constexpr (LMAX > 1) assemble_degrees<LMAX>(shared, tile, count);
    __syncthreads();
  }
}
