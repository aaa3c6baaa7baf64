// SPDX-License-Identifier: MIT OR Apache-2.0
// Stage `node_linear`, and every other matrix product: groups of products C <- A B (or C += A B) in one
// launch.
//
// A job is one block of C; its value is the sum over its segments (frames of a contraction, blocks of a
// product along K), always in the same order. Offsets are (fixed part) + (row part) * (plane given at
// launch), so that one table serves any number of atoms and edges: with nodes in `[row][node][channel]` order
// a plane is one row of all nodes.
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

constexpr int TILE_M = 128, TILE_N = 64, TILE_K = 16, THREADS = 128;
/// A thread's block of C: 8 rows in two groups of four 64 apart, 8 columns in two groups of four 32 apart, so
/// that neighbouring threads read neighbouring groups of shared memory.
constexpr int ROWS = 8, COLUMNS = 8;

/// Four neighbouring values of a row of `count`, zeros beyond it; `whole`: the address allows one load.
DEVFN real4 load4(const real* __restrict__ row, int at, int count, bool inside, bool whole) {
  real4 out = {{real(0), real(0), real(0), real(0)}};
  if (!inside) return out;
  if (whole && at + 4 <= count) return *reinterpret_cast<const real4*>(row + at);
  UNROLL for (int i = 0; i < 4; ++i) {
    if (at + i < count) out.v[i] = row[at + i];
  }
  return out;
}

/// Whether rows of `stride` values from `p` on all begin at multiples of four values.
DEVFN bool aligned(const real* p, int stride) {
  return stride % 4 == 0 && reinterpret_cast<u64>(p) % (4 * sizeof(real)) == 0;
}

/// Grid: (tiles of M, tiles of N, jobs).
extern "C" __global__ void __launch_bounds__(THREADS)
    grouped_product(const real* __restrict__ a, const real* __restrict__ b, real* __restrict__ c,
                    const Job* __restrict__ jobs, const Segment* __restrict__ segments, i64 a_plane,
                    i64 b_plane, i64 c_plane, int m_arg, int n_arg, int lda_arg, int ldb_arg, int ldc_arg,
                    int add) {
  __shared__ __align__(16) real tile_a[TILE_K][TILE_M + 4];
  __shared__ __align__(16) real tile_b[TILE_K][TILE_N + 4];
  const Job job = jobs[blockIdx.z];
  const int m = job.m ? job.m : m_arg, n = job.n ? job.n : n_arg, ldc = job.ldc ? job.ldc : ldc_arg;
  const int row0 = static_cast<int>(blockIdx.x) * TILE_M, col0 = static_cast<int>(blockIdx.y) * TILE_N;
  if (row0 >= m || col0 >= n) return;
  const int thread = static_cast<int>(threadIdx.x), tx = thread % 8, ty = thread / 8;
  real sum[ROWS][COLUMNS];
  UNROLL for (int i = 0; i < ROWS; ++i) { UNROLL for (int j = 0; j < COLUMNS; ++j) sum[i][j] = real(0); }
  // The next tiles travel to registers while the present ones are multiplied; their place is (segment, k).
  real4 next_a[4], next_b[2];
  int segment = 0, k0 = 0;
  Segment seg = segments[job.first_segment];
  const auto fetch = [&]() {
    const int lda = seg.lda ? seg.lda : lda_arg, ldb = seg.ldb ? seg.ldb : ldb_arg;
    const real* pa = a + seg.a + seg.a_row * a_plane;
    const real* pb = b + seg.b + seg.b_row * b_plane;
    const bool whole_a = aligned(pa, lda), whole_b = aligned(pb, ldb);
    // Thread t loads four values along k of rows t / 4 + 32 i, and four columns of rows t / 16 + 8 i of B.
    UNROLL for (int i = 0; i < 4; ++i) {
      const int row = row0 + thread / 4 + 32 * i;
      next_a[i] = load4(pa + static_cast<i64>(row) * lda, k0 + 4 * (thread % 4), seg.k, row < m, whole_a);
    }
    UNROLL for (int i = 0; i < 2; ++i) {
      const int k = k0 + thread / 16 + 8 * i;
      next_b[i] = load4(pb + static_cast<i64>(k) * ldb, col0 + 4 * (thread % 16), n, k < seg.k, whole_b);
    }
  };
  fetch();
  while (segment < job.segments) {
    __syncthreads();
    UNROLL for (int i = 0; i < 4; ++i) {
      UNROLL for (int q = 0; q < 4; ++q) tile_a[4 * (thread % 4) + q][thread / 4 + 32 * i] = next_a[i].v[q];
    }
    UNROLL for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<real4*>(&tile_b[thread / 16 + 8 * i][4 * (thread % 16)]) = next_b[i];
    }
    __syncthreads();
    k0 += TILE_K;
    if (k0 >= seg.k) {
      k0 = 0;
      if (++segment < job.segments) seg = segments[job.first_segment + segment];
    }
    if (segment < job.segments) fetch();
    UNROLL for (int k = 0; k < TILE_K; ++k) {
      real4 x[2], y[2];
      UNROLL for (int g = 0; g < 2; ++g) {
        x[g] = *reinterpret_cast<const real4*>(&tile_a[k][64 * g + 4 * ty]);
        y[g] = *reinterpret_cast<const real4*>(&tile_b[k][32 * g + 4 * tx]);
      }
      UNROLL for (int i = 0; i < ROWS; ++i) {
        UNROLL for (int j = 0; j < COLUMNS; ++j) {
          sum[i][j] = real_fma(x[i / 4].v[i % 4], y[j / 4].v[j % 4], sum[i][j]);
        }
      }
    }
  }
  real* pc = c + job.c + job.c_row * c_plane;
  const bool whole_c = aligned(pc, ldc);
  UNROLL for (int i = 0; i < ROWS; ++i) {
    const int row = row0 + 64 * (i / 4) + 4 * ty + i % 4;
    if (row >= m) continue;
    UNROLL for (int g = 0; g < 2; ++g) {
      const int col = col0 + 32 * g + 4 * tx;
      real* out = pc + static_cast<i64>(row) * ldc + col;
      real4 value = {{sum[i][4 * g], sum[i][4 * g + 1], sum[i][4 * g + 2], sum[i][4 * g + 3]}};
      if (whole_c && col + 4 <= n) {
        if (add) {
          const real4 old = *reinterpret_cast<const real4*>(out);
          UNROLL for (int q = 0; q < 4; ++q) value.v[q] = old.v[q] + value.v[q];
        }
        *reinterpret_cast<real4*>(out) = value;
      } else {
        UNROLL for (int q = 0; q < 4; ++q) {
          if (col + q < n) out[q] = add ? out[q] + value.v[q] : value.v[q];
        }
      }
    }
  }
}

/// y[row][..] = x[row][..] (add: +=) for `rows` rows of `count` values, `plane` values from row to row.
extern "C" __global__ void copy_rows(const real* __restrict__ x, real* __restrict__ y, i64 x_plane,
                                     i64 y_plane, int rows, i64 count, int add) {
  for (i64 i = grid_thread(); i < count; i += grid_threads()) {
    for (int row = 0; row < rows; ++row) {
      real* out = y + row * y_plane + i;
      *out = add ? *out + x[row * x_plane + i] : x[row * x_plane + i];
    }
  }
}
