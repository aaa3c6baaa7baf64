//! f32 and f64 behind one name, and matrix products on row-major slices.

use crate::engine::Rows;
use crate::model::config::Activation;
use crate::model::parameters::Matrix;
use num_traits::{Float, NumAssign};
use std::iter::Sum;

/// The number type of an engine.
pub trait Real: Float + NumAssign + Sum + Send + Sync + Default + std::fmt::Debug + 'static {
    /// Rounds an f64.
    fn of(x: f64) -> Self;
    /// Widens to f64.
    fn wide(self) -> f64;
    /// Rows for a ghost exchange.
    fn rows(rows: &mut [Self]) -> Rows<'_>;
}

impl Real for f32 {
    fn of(x: f64) -> f32 {
        x as f32
    }
    fn wide(self) -> f64 {
        f64::from(self)
    }
    fn rows(rows: &mut [f32]) -> Rows<'_> {
        Rows::F32(rows)
    }
}

impl Real for f64 {
    fn of(x: f64) -> f64 {
        x
    }
    fn wide(self) -> f64 {
        self
    }
    fn rows(rows: &mut [f64]) -> Rows<'_> {
        Rows::F64(rows)
    }
}

/// A block of a row-major matrix: `rows x cols` with `stride` values from row to row.
#[derive(Clone, Copy)]
pub struct View<'a, T> {
    pub data: &'a [T],
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
}

impl<'a, T> View<'a, T> {
    /// Columns `first .. first + count`.
    pub fn columns(self, first: usize, count: usize) -> View<'a, T> {
        assert!(first + count <= self.cols);
        View { data: &self.data[first.min(self.data.len())..], cols: count, ..self }
    }
    /// Rows `first .. first + count`.
    pub fn rows(self, first: usize, count: usize) -> View<'a, T> {
        assert!(first + count <= self.rows);
        View { data: &self.data[(first * self.stride).min(self.data.len())..], rows: count, ..self }
    }
}

impl<'a, T> From<&'a Matrix<T>> for View<'a, T> {
    fn from(m: &'a Matrix<T>) -> Self {
        View { data: &m.data, rows: m.rows, cols: m.cols, stride: m.cols }
    }
}

/// `rows x cols` values, row by row without gaps.
pub fn dense<T>(data: &[T], rows: usize, cols: usize) -> View<'_, T> {
    View { data, rows, cols, stride: cols }
}

/// Whether the destination of a product is overwritten or added to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Into {
    Set,
    Add,
}

/// `out (a.rows x w.cols, stride out_stride) <- a w`.
pub fn matmul<T: Real>(a: View<T>, w: View<T>, out: &mut [T], out_stride: usize, into: Into) {
    assert_eq!(a.cols, w.rows, "inner sizes of a product");
    product(a.rows, w.cols, a.cols, a, w, (w.stride, 1), out, out_stride, into);
}

/// `out (a.rows x w.rows, stride out_stride) <- a w^T`: the adjoint of [`matmul`] with respect to its input.
pub fn matmul_transposed<T: Real>(a: View<T>, w: View<T>, out: &mut [T], out_stride: usize, into: Into) {
    assert_eq!(a.cols, w.cols, "inner sizes of a product");
    product(a.rows, w.rows, a.cols, a, w, (1, w.stride), out, out_stride, into);
}

/// `out (w.cols x a.cols, stride out_stride) <- w^T a`.
pub fn matmul_left_transposed<T: Real>(w: View<T>, a: View<T>, out: &mut [T], out_stride: usize, into: Into) {
    assert_eq!(w.rows, a.rows, "inner sizes of a product");
    let (m, n, k) = (w.cols, a.cols, w.rows);
    check(w);
    product_raw(m, n, k, (w.data, 1, w.stride), (a, a.stride, 1), out, out_stride, into);
}

#[allow(clippy::too_many_arguments)]
fn product<T: Real>(
    m: usize,
    n: usize,
    k: usize,
    a: View<T>,
    w: View<T>,
    (w_row, w_col): (usize, usize),
    out: &mut [T],
    out_stride: usize,
    into: Into,
) {
    check(a);
    product_raw(m, n, k, (a.data, a.stride, 1), (w, w_row, w_col), out, out_stride, into);
}

fn check<T>(v: View<T>) {
    assert!(v.cols <= v.stride || v.rows <= 1);
    assert!(v.rows == 0 || v.cols == 0 || (v.rows - 1) * v.stride + v.cols <= v.data.len(), "view leaves its slice");
}

#[allow(clippy::too_many_arguments)]
fn product_raw<T: Real>(
    m: usize,
    n: usize,
    k: usize,
    (lhs, lhs_row, lhs_col): (&[T], usize, usize),
    (rhs, rhs_row, rhs_col): (View<T>, usize, usize),
    out: &mut [T],
    out_stride: usize,
    into: Into,
) {
    if m == 0 || n == 0 {
        return;
    }
    check(rhs);
    assert!(n <= out_stride || m == 1);
    assert!((m - 1) * out_stride + n <= out.len(), "product leaves its destination");
    let alpha = if into == Into::Add { T::one() } else { T::zero() };
    // SAFETY: `check` and the assertions above keep every index that the strides reach inside the three slices;
    // `out` is a unique borrow, so it does not overlap the inputs. `T` is f32 or f64, which gemm supports.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            out_stride as isize,
            into == Into::Add,
            lhs.as_ptr(),
            lhs_col as isize,
            lhs_row as isize,
            rhs.data.as_ptr(),
            rhs_col as isize,
            rhs_row as isize,
            alpha,
            T::one(),
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// `y += a x`.
#[inline(always)]
pub fn axpy<T: Real>(a: T, x: &[T], y: &mut [T]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

/// Dot product in eight interleaved sums: a fixed order that vectorises.
#[inline(always)]
pub fn dot<T: Real>(x: &[T], y: &[T]) -> T {
    let mut sums = [T::zero(); 8];
    let (xc, yc) = (x.chunks_exact(8), y.chunks_exact(8));
    let tail: T = xc.remainder().iter().zip(yc.remainder()).map(|(&a, &b)| a * b).sum();
    for (a, b) in xc.zip(yc) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7])) + tail
}

/// `1 / (1 + exp(-x))`.
#[inline(always)]
pub fn sigmoid<T: Real>(x: T) -> T {
    T::one() / (T::one() + (-x).exp())
}

/// Value of an activation (SPEC 0).
pub fn activate<T: Real>(kind: Activation, x: T) -> T {
    activate_with_slope(kind, x).0
}

/// Value and derivative of an activation.
pub fn activate_with_slope<T: Real>(kind: Activation, x: T) -> (T, T) {
    let (zero, one) = (T::zero(), T::one());
    match kind {
        Activation::Linear => (x, one),
        Activation::Relu => {
            if x > zero {
                (x, one)
            } else {
                (zero, zero)
            }
        }
        Activation::Relu6 => {
            let six = T::of(6.0);
            if x <= zero {
                (zero, zero)
            } else if x >= six {
                (six, zero)
            } else {
                (x, one)
            }
        }
        Activation::Gelu => {
            // The tanh form: 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
            let (a, b) = (T::of((2.0 / std::f64::consts::PI).sqrt()), T::of(0.044715));
            let half = T::of(0.5);
            let t = (a * (x + b * x * x * x)).tanh();
            let du = a * (one + T::of(3.0) * b * x * x);
            (half * x * (one + t), half * (one + t) + half * x * (one - t * t) * du)
        }
        Activation::Tanh => {
            let t = x.tanh();
            (t, one - t * t)
        }
        Activation::Sigmoid => {
            let s = sigmoid(x);
            (s, s * (one - s))
        }
        Activation::Softplus => (x.max(zero) + (-x.abs()).exp().ln_1p(), sigmoid(x)),
        Activation::Silu => {
            let s = sigmoid(x);
            (x * s, s * (one + x * (one - s)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_match_the_sums_they_stand_for() {
        let a: Vec<f64> = (0..12).map(|i| (i as f64).sin()).collect(); // 3 x 4
        let w: Vec<f64> = (0..20).map(|i| (i as f64).cos()).collect(); // 4 x 5
        let mut out = vec![1.0; 3 * 6];
        matmul(dense(&a, 3, 4), dense(&w, 4, 5), &mut out, 6, Into::Add);
        for i in 0..3 {
            for j in 0..5 {
                let sum: f64 = (0..4).map(|k| a[i * 4 + k] * w[k * 5 + j]).sum();
                assert!((out[i * 6 + j] - 1.0 - sum).abs() < 1e-14);
            }
            assert_eq!(out[i * 6 + 5], 1.0);
        }
        let mut back = vec![0.0; 12];
        matmul_transposed(View { data: &out, rows: 3, cols: 5, stride: 6 }, dense(&w, 4, 5), &mut back, 4, Into::Set);
        let mut left = vec![0.0; 20];
        matmul_left_transposed(
            dense(&a, 3, 4),
            View { data: &out, rows: 3, cols: 5, stride: 6 },
            &mut left,
            5,
            Into::Set,
        );
        for k in 0..4 {
            for i in 0..3 {
                let sum: f64 = (0..5).map(|j| out[i * 6 + j] * w[k * 5 + j]).sum();
                assert!((back[i * 4 + k] - sum).abs() < 1e-14);
            }
            for j in 0..5 {
                let sum: f64 = (0..3).map(|i| a[i * 4 + k] * out[i * 6 + j]).sum();
                assert!((left[k * 5 + j] - sum).abs() < 1e-14);
            }
        }
    }

    #[test]
    fn slopes_match_differences() {
        use Activation::*;
        for kind in [Linear, Relu, Relu6, Gelu, Tanh, Sigmoid, Softplus, Silu] {
            for x in [-2.3, -0.4, 0.3, 1.7, 5.2, 8.0] {
                let h = 1e-5;
                let numeric = (activate(kind, x + h) - activate(kind, x - h)) / (2.0 * h);
                let (_, slope) = activate_with_slope::<f64>(kind, x);
                assert!((slope - numeric).abs() < 1e-8, "{kind:?} at {x}: {slope} {numeric}");
            }
        }
    }
}
