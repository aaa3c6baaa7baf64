// SPDX-License-Identifier: MIT OR Apache-2.0
// Stage `node_linear`, and every other matrix product: groups of products C <- A B (or C += A B) in one launch.
//
// A job is one block of C; its value is the sum over its segments (frames of a contraction, blocks of a product along
// K), always in the same order. Offsets are (fixed part) + (row part) * (plane given at launch), so that one table
// serves any number of atoms and edges: with nodes in `[row][node][channel]` order a plane is one row of all nodes.
#include "common.cuh"

struct Job {
  i64 c;
  int c_row, m, n, ldc;  // 0: the launch's own
  int first_segment, segments;
};
struct Segment {
  i64 a, b;
  int a_row, b_row, k, lda, ldb, unused;
};

#ifndef TILE_M
#define TILE_M 128
#endif
#ifndef TILE_N
#define TILE_N 64
#endif
constexpr int TILE_K = 16, THREADS = 256;
constexpr int ROWS = TILE_M / 16, COLUMNS = TILE_N / 16;  // of a thread
constexpr int A_LOADS = TILE_M * TILE_K / THREADS, B_LOADS = TILE_K * TILE_N / THREADS;

/// Grid: (tiles of M, tiles of N, jobs).
extern "C" __global__ void __launch_bounds__(THREADS)
    grouped_product(const real* __restrict__ a, const real* __restrict__ b, real* __restrict__ c,
                    const Job* __restrict__ jobs, const Segment* __restrict__ segments, i64 a_plane, i64 b_plane,
                    i64 c_plane, int m_arg, int n_arg, int lda_arg, int ldb_arg, int ldc_arg, int add) {
  __shared__ real tile_a[TILE_K][TILE_M + 4];
  __shared__ real tile_b[TILE_K][TILE_N + 4];
  const Job job = jobs[blockIdx.z];
  const int m = job.m ? job.m : m_arg, n = job.n ? job.n : n_arg, ldc = job.ldc ? job.ldc : ldc_arg;
  const int row0 = static_cast<int>(blockIdx.x) * TILE_M, col0 = static_cast<int>(blockIdx.y) * TILE_N;
  if (row0 >= m || col0 >= n) return;
  const int thread = static_cast<int>(threadIdx.x), tx = thread % 16, ty = thread / 16;
  real sum[ROWS][COLUMNS];
  UNROLL for (int i = 0; i < ROWS; ++i) {
    UNROLL for (int j = 0; j < COLUMNS; ++j) sum[i][j] = real(0);
  }
  for (int s = 0; s < job.segments; ++s) {
    const Segment seg = segments[job.first_segment + s];
    const int lda = seg.lda ? seg.lda : lda_arg, ldb = seg.ldb ? seg.ldb : ldb_arg;
    const real* pa = a + seg.a + seg.a_row * a_plane;
    const real* pb = b + seg.b + seg.b_row * b_plane;
    for (int k0 = 0; k0 < seg.k; k0 += TILE_K) {
      real next_a[A_LOADS], next_b[B_LOADS];
      UNROLL for (int i = 0; i < A_LOADS; ++i) {
        const int at = thread + i * THREADS, row = row0 + at / TILE_K, k = k0 + at % TILE_K;
        next_a[i] = row < m && k < seg.k ? pa[static_cast<i64>(row) * lda + k] : real(0);
      }
      UNROLL for (int i = 0; i < B_LOADS; ++i) {
        const int at = thread + i * THREADS, k = k0 + at / TILE_N, col = col0 + at % TILE_N;
        next_b[i] = k < seg.k && col < n ? pb[static_cast<i64>(k) * ldb + col] : real(0);
      }
      __syncthreads();
      UNROLL for (int i = 0; i < A_LOADS; ++i) {
        const int at = thread + i * THREADS;
        tile_a[at % TILE_K][at / TILE_K] = next_a[i];
      }
      UNROLL for (int i = 0; i < B_LOADS; ++i) {
        const int at = thread + i * THREADS;
        tile_b[at / TILE_N][at % TILE_N] = next_b[i];
      }
      __syncthreads();
      UNROLL for (int k = 0; k < TILE_K; ++k) {
        real x[ROWS], y[COLUMNS];
        UNROLL for (int i = 0; i < ROWS; ++i) x[i] = tile_a[k][ty * ROWS + i];
        UNROLL for (int j = 0; j < COLUMNS; ++j) y[j] = tile_b[k][tx * COLUMNS + j];
        UNROLL for (int i = 0; i < ROWS; ++i) {
          UNROLL for (int j = 0; j < COLUMNS; ++j) sum[i][j] = real_fma(x[i], y[j], sum[i][j]);
        }
      }
    }
  }
  real* pc = c + job.c + job.c_row * c_plane;
  UNROLL for (int i = 0; i < ROWS; ++i) {
    const int row = row0 + ty * ROWS + i;
    if (row >= m) continue;
    UNROLL for (int j = 0; j < COLUMNS; ++j) {
      const int col = col0 + tx * COLUMNS + j;
      if (col >= n) continue;
      real* out = pc + static_cast<i64>(row) * ldc + col;
      *out = add ? *out + sum[i][j] : sum[i][j];
    }
  }
}

/// y[row][..] = x[row][..] (add: +=) for `rows` rows of `count` values, `plane` values from row to row.
extern "C" __global__ void copy_rows(const real* __restrict__ x, real* __restrict__ y, i64 x_plane, i64 y_plane,
                                     int rows, i64 count, int add) {
  for (i64 i = grid_thread(); i < count; i += grid_threads()) {
    for (int row = 0; row < rows; ++row) {
      real* out = y + row * y_plane + i;
      *out = add ? *out + x[row * x_plane + i] : x[row * x_plane + i];
    }
  }
}
