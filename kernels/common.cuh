// SPDX-License-Identifier: MIT OR Apache-2.0
// What every kernel starts from. Header-free: NVRTC, nvcc and, through emu/emu_cuda.hpp, g++ take the same
// text.
//
// Rules of the house
//  * `real` is the storage and arithmetic type of the run: -DREAL=float or -DREAL=double.
//  * Shapes are -D constants; sizes that depend on the number of atoms or edges are i64 arguments.
//  * No floating-point atomics; every sum has an order that no launch geometry changes.
//  * No approximate intrinsics (__expf, fast division) outside code that states its error.
#pragma once

#ifndef REAL
#define REAL float
#endif

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef REAL real;

#ifdef SEZM_EMULATION
#define DEVFN static inline
#define UNROLL
#define UNROLL_BY(n)
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(emu::dynamic_shared)
#else
#define DEVFN static __device__ __forceinline__
#define SEZM_PRAGMA(text) _Pragma(#text)
#define UNROLL SEZM_PRAGMA(unroll)
#define UNROLL_BY(n) SEZM_PRAGMA(unroll n)
/// The block's dynamic shared memory; every kernel file declares it through this and at most once a kernel.
#define DYNAMIC_SHARED(type, name)                               \
  extern __shared__ __align__(1024) unsigned char sezm_shared[]; \
  type* name = reinterpret_cast<type*>(sezm_shared)
#endif

#define FULL_MASK 0xffffffffu

// ---- index helpers: edges x width passes 2^31, so products of counts are formed in 64 bits

/// Start of row `row` of a matrix `width` wide.
DEVFN i64 row_start(i64 row, int width) { return row * width; }
/// Number of this thread in the whole (one-dimensional) grid, and how many there are.
DEVFN i64 grid_thread() { return static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; }
DEVFN i64 grid_threads() { return static_cast<i64>(gridDim.x) * blockDim.x; }
DEVFN int lane_index() { return static_cast<int>(threadIdx.x & 31); }
DEVFN int warp_index() { return static_cast<int>(threadIdx.x >> 5); }
/// Edge number of place k of a chunk: from a list or consecutive.
DEVFN i64 edge_at(const u32* __restrict__ list, i64 first, i64 k) {
  return list ? static_cast<i64>(list[first + k]) : first + k;
}

// ---- vectors

/// Four values loaded or stored at once; the address is a multiple of 16 bytes.
template <class T>
struct __align__(16) Pack4 {
  T v[4];
};
typedef Pack4<real> real4;

struct double3d {
  double x, y, z;
};
DEVFN double3d load3(const double* p) { return {p[0], p[1], p[2]}; }
DEVFN double dot3(double3d a, double3d b) { return a.x * b.x + a.y * b.y + a.z * b.z; }
DEVFN double3d cross3(double3d a, double3d b) {
  return {a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x};
}

// ---- elementary functions, by type

DEVFN float real_exp(float x) { return expf(x); }
DEVFN double real_exp(double x) { return exp(x); }
DEVFN float real_log(float x) { return logf(x); }
DEVFN double real_log(double x) { return log(x); }
DEVFN float real_log1p(float x) { return log1pf(x); }
DEVFN double real_log1p(double x) { return log1p(x); }
DEVFN float real_sin(float x) { return sinf(x); }
DEVFN double real_sin(double x) { return sin(x); }
DEVFN float real_cos(float x) { return cosf(x); }
DEVFN double real_cos(double x) { return cos(x); }
DEVFN float real_tanh(float x) { return tanhf(x); }
DEVFN double real_tanh(double x) { return tanh(x); }
DEVFN float real_sqrt(float x) { return sqrtf(x); }
DEVFN double real_sqrt(double x) { return sqrt(x); }
DEVFN float real_max(float a, float b) { return fmaxf(a, b); }
DEVFN double real_max(double a, double b) { return fmax(a, b); }
DEVFN float real_min(float a, float b) { return fminf(a, b); }
DEVFN double real_min(double a, double b) { return fmin(a, b); }
DEVFN float real_fma(float a, float b, float c) { return fmaf(a, b, c); }
DEVFN double real_fma(double a, double b, double c) { return fma(a, b, c); }

// ---- activations (SPEC section 0) and their slopes

template <class T>
DEVFN T sigmoid(T x) {
  return T(1) / (T(1) + real_exp(-x));
}
template <class T>
DEVFN T silu(T x) {
  return x * sigmoid(x);
}
/// d silu / dx.
template <class T>
DEVFN T silu_slope(T x) {
  const T s = sigmoid(x);
  return s * (T(1) + x * (T(1) - s));
}
/// log(1 + e^x) without overflow.
template <class T>
DEVFN T softplus(T x) {
  return real_max(x, T(0)) + real_log1p(real_exp(x < T(0) ? x : -x));
}

enum Activation { LINEAR, SILU, GELU, TANH, RELU, RELU6, SOFTPLUS, SIGMOID };

/// The tanh form of gelu: its inner argument `c (x + 0.044715 x^3)`, with c = sqrt(2/pi).
template <class T>
DEVFN T gelu_inner(T x) {
  return T(0.7978845608028654) * (x + T(0.044715) * x * x * x);
}

template <int KIND, class T>
DEVFN T activate(T x) {
  switch (KIND) {
    case SILU:
      return silu(x);
    case GELU:
      return T(0.5) * x * (T(1) + real_tanh(gelu_inner(x)));
    case TANH:
      return real_tanh(x);
    case RELU:
      return real_max(x, T(0));
    case RELU6:
      return real_min(real_max(x, T(0)), T(6));
    case SOFTPLUS:
      return softplus(x);
    case SIGMOID:
      return sigmoid(x);
    default:
      return x;
  }
}

/// The derivative of `activate`, as a function of its argument.
template <int KIND, class T>
DEVFN T activate_slope(T x) {
  switch (KIND) {
    case SILU:
      return silu_slope(x);
    case GELU: {
      const T t = real_tanh(gelu_inner(x));
      const T inner = T(0.7978845608028654) * (T(1) + T(3 * 0.044715) * x * x);
      return T(0.5) * (T(1) + t) + T(0.5) * x * (T(1) - t * t) * inner;
    }
    case TANH: {
      const T t = real_tanh(x);
      return T(1) - t * t;
    }
    case RELU:
      return x > T(0) ? T(1) : T(0);
    case RELU6:
      return x > T(0) && x < T(6) ? T(1) : T(0);
    case SOFTPLUS:
      return sigmoid(x);
    case SIGMOID: {
      const T s = sigmoid(x);
      return s * (T(1) - s);
    }
    default:
      return T(1);
  }
}

// ---- reductions in a fixed order

/// Sum over the `WIDTH` neighbouring lanes (a power of two) of a warp; all of them receive the same bits.
template <int WIDTH = 32, class T>
DEVFN T warp_sum(T v) {
  UNROLL for (int bit = WIDTH / 2; bit > 0; bit >>= 1) v += __shfl_xor_sync(FULL_MASK, v, bit);
  return v;
}
/// Largest over `WIDTH` neighbouring lanes.
template <int WIDTH = 32, class T>
DEVFN T warp_max(T v) {
  UNROLL for (int bit = WIDTH / 2; bit > 0; bit >>= 1) v = real_max(v, __shfl_xor_sync(FULL_MASK, v, bit));
  return v;
}
/// Sum over the block (whole warps), the same bits in every thread. `scratch` holds one value a warp, in
/// shared memory; it can be used again after the call.
template <class T>
DEVFN T block_sum(T v, T* scratch) {
  v = warp_sum(v);
  if (lane_index() == 0) scratch[warp_index()] = v;
  __syncthreads();
  T sum = T(0);
  for (int w = 0; w < static_cast<int>((blockDim.x + 31) / 32); ++w) sum += scratch[w];
  __syncthreads();
  return sum;
}
