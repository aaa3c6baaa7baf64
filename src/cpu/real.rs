//! f32 and f64 behind one name, and matrix products on row-major slices.

use super::scratch::{Buffer, Spare};
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
    /// `exp(x)` to about one unit in the last place; for f32 written so that loops over it vectorise.
    fn exponential(self) -> Self;
    /// The calling thread's spare buffers.
    fn with_spare<R>(f: impl FnOnce(&Spare<Self>) -> R) -> R;
}

impl Real for f32 {
    fn with_spare<R>(f: impl FnOnce(&Spare<f32>) -> R) -> R {
        thread_local!(static SPARE: Spare<f32> = const { Spare::new() });
        SPARE.with(f)
    }
    /// `2^k exp(r)` with `|r| <= ln 2 / 2`. Arguments out of range end as infinity or zero, NaN stays NaN.
    #[inline(always)]
    fn exponential(self) -> f32 {
        /// Adding it to |x| < 2^22 rounds x to an integer, which then lies in the last bits.
        const ROUND: f32 = 12_582_912.0;
        // ln 2 in two parts; products of the first with k are exact.
        const LN2: [f32; 2] = [355.0 / 512.0, -2.121_944_4e-4];
        let x = if self > 89.0 { 89.0 } else { self };
        let x = if x < -104.0 { -104.0 } else { x };
        let shifted = x * std::f32::consts::LOG2_E + ROUND;
        let k = shifted - ROUND;
        let r = x - k * LN2[0] - k * LN2[1];
        let tail = 0.5
            + r * (1.666_666_6e-1
                + r * (4.166_579_6e-2 + r * (8.333_452e-3 + r * (1.398_199_9e-3 + r * 1.987_569_1e-4))));
        // What 1 + r rounds away comes back with the small terms: nearly the correctly rounded sum.
        let head = 1.0 + r;
        let value = head + ((r - (head - 1.0)) + r * r * tail);
        // 2^k as a product of two factors that are always normal numbers.
        let k = shifted.to_bits() as i32 - ROUND.to_bits() as i32;
        let power = |k: i32| f32::from_bits(((k + 127) << 23) as u32);
        value * power(k >> 1) * power(k - (k >> 1))
    }

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
    fn with_spare<R>(f: impl FnOnce(&Spare<f64>) -> R) -> R {
        thread_local!(static SPARE: Spare<f64> = const { Spare::new() });
        SPARE.with(f)
    }
    #[inline(always)]
    fn exponential(self) -> f64 {
        self.exp()
    }
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

/// Values that the loops over channels take at once.
const LANES: usize = 16;

/// `out[i] = f(out[i], a[i], b[i])`. Whole blocks are read before they are written, so that the compiler need not know
/// that the slices do not overlap.
#[inline(always)]
pub fn update<T: Real>(out: &mut [T], a: &[T], b: &[T], f: impl Fn(T, T, T) -> T) {
    let (outs, out_tail) = out.as_chunks_mut::<LANES>();
    let ((a_blocks, a_tail), (b_blocks, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for ((out, a), b) in outs.iter_mut().zip(a_blocks).zip(b_blocks) {
        let (old, a, b) = (*out, *a, *b);
        let mut new = [T::zero(); LANES];
        for i in 0..LANES {
            new[i] = f(old[i], a[i], b[i]);
        }
        *out = new;
    }
    for ((out, &a), &b) in out_tail.iter_mut().zip(a_tail).zip(b_tail) {
        *out = f(*out, a, b);
    }
}

/// `y += a x`.
#[inline(always)]
pub fn axpy<T: Real>(a: T, x: &[T], y: &mut [T]) {
    update(y, x, x, |y, x, _| y + a * x);
}

/// Dot product in interleaved sums: a fixed order that vectorises.
#[inline(always)]
pub fn dot<T: Real>(x: &[T], y: &[T]) -> T {
    let ((xs, x_tail), (ys, y_tail)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    let mut sums = [T::zero(); LANES];
    for (x, y) in xs.iter().zip(ys) {
        for i in 0..LANES {
            sums[i] += x[i] * y[i];
        }
    }
    let mut tail = T::zero();
    for (&x, &y) in x_tail.iter().zip(y_tail) {
        tail += x * y;
    }
    sum_lanes(sums) + tail
}

/// The sum of all lanes, by halves.
#[inline(always)]
fn sum_lanes<T: Real>(mut sums: [T; LANES]) -> T {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
    }
    sums[0]
}

/// `out <- scale * sum_k a_k x[at_k ..]` over the terms `(a_k, at_k)`, or added to `out`; sums stay in registers.
/// `scale` has a factor for each value of `out`.
#[inline(always)]
pub fn combine<T: Real>(
    terms: impl Iterator<Item = (T, usize)> + Clone,
    x: &[T],
    scale: Option<&[T]>,
    out: &mut [T],
    into: Into,
) {
    let rest = combine_blocks::<T, LANES>(&terms, x, scale, 0, out, into);
    let rest = combine_blocks::<T, 8>(&terms, x, scale, rest, out, into);
    combine_blocks::<T, 1>(&terms, x, scale, rest, out, into);
}

/// The values of `out` from `first` on, as far as they fill blocks of N; returns how far that is.
#[inline(always)]
fn combine_blocks<T: Real, const N: usize>(
    terms: &(impl Iterator<Item = (T, usize)> + Clone),
    x: &[T],
    scale: Option<&[T]>,
    first: usize,
    out: &mut [T],
    into: Into,
) -> usize {
    let (blocks, rest) = out[first..].as_chunks_mut::<N>();
    for (b, out) in blocks.iter_mut().enumerate() {
        let first = first + b * N;
        let mut sum = [T::zero(); N];
        for (a, at) in terms.clone() {
            let x = &x[at + first..][..N];
            for i in 0..N {
                sum[i] += a * x[i];
            }
        }
        if let Some(scale) = scale {
            let scale = &scale[first..][..N];
            for i in 0..N {
                sum[i] *= scale[i];
            }
        }
        for i in 0..N {
            out[i] = if into == Into::Add { out[i] + sum[i] } else { sum[i] };
        }
    }
    let rest = rest.len();
    out.len() - rest
}

/// `sum_k v_k (<x[r_k ..], y[c_k ..]> - <x[c_k ..], y[r_k ..]>)` over the terms `(v_k, r_k, c_k)`, rows of `len` values.
#[inline(always)]
pub fn antisymmetric<T: Real>(terms: &[(T, usize, usize)], len: usize, x: &[T], y: &[T]) -> T {
    let mut sums = [T::zero(); LANES];
    let whole = len / LANES * LANES;
    let mut tail = T::zero();
    for &(v, r, c) in terms {
        let (xr, xc, yr, yc) = (&x[r..r + len], &x[c..c + len], &y[r..r + len], &y[c..c + len]);
        for first in (0..whole).step_by(LANES) {
            let at = first..first + LANES;
            let (xr, xc, yr, yc) = (&xr[at.clone()], &xc[at.clone()], &yr[at.clone()], &yc[at]);
            for i in 0..LANES {
                sums[i] += v * (xr[i] * yc[i] - xc[i] * yr[i]);
            }
        }
        for i in whole..len {
            tail += v * (xr[i] * yc[i] - xc[i] * yr[i]);
        }
    }
    sum_lanes(sums) + tail
}

/// `1 / (1 + exp(-x))`.
#[inline(always)]
pub fn sigmoid<T: Real>(x: T) -> T {
    T::one() / (T::one() + (-x).exponential())
}

/// Replaces each value with its [`sigmoid`].
pub fn sigmoids<T: Real>(values: &mut [T]) {
    vectorised!({
        let (blocks, tail) = values.as_chunks_mut::<LANES>();
        for block in blocks {
            for x in block {
                *x = sigmoid(*x);
            }
        }
        for x in tail {
            *x = sigmoid(*x);
        }
    });
}

/// Evaluates an expression compiled for the widest vectors that this machine has; functions that it calls take part
/// only if they are `#[inline(always)]`.
macro_rules! vectorised {
    ($body:expr) => {
        pulp::Arch::new().dispatch($crate::cpu::real::Loop(
            #[inline(always)]
            || $body,
        ))
    };
}
pub(crate) use vectorised;

/// The closure of [`vectorised`]. A bare closure would be reached through the adapter that makes an `FnOnce` of it,
/// which is never inlined and so stays compiled for the oldest machine.
pub struct Loop<F>(pub F);

impl<R, F: FnMut() -> R> pulp::NullaryFnOnce for Loop<F> {
    type Output = R;
    #[inline(always)]
    fn call(mut self) -> R {
        (self.0)()
    }
}

/// `out[i] = f(out[i], a[i], value, slope)` with value and slope of the activation at `x[i]`.
#[inline(always)]
pub fn update_activated<T: Real>(kind: Activation, x: &[T], a: &[T], out: &mut [T], f: impl Fn(T, T, T, T) -> T) {
    // The usual kind has a loop of its own, which vectorises.
    if kind == Activation::Silu {
        update(out, a, x, |out, a, x| {
            let (value, slope) = silu(x);
            f(out, a, value, slope)
        });
    } else {
        for ((out, &a), &x) in out.iter_mut().zip(a).zip(x) {
            let (value, slope) = activate_with_slope(kind, x);
            *out = f(*out, a, value, slope);
        }
    }
}

/// The activations of a slice.
pub fn activated<T: Real>(kind: Activation, x: &[T]) -> Buffer<T> {
    let mut out = Buffer::stale(x.len());
    let values = &mut out[..];
    vectorised!(update_activated(kind, x, x, values, |_, _, value, _| value));
    out
}

/// `grad[i] *= slope of the activation at x[i]`.
pub fn multiply_slopes<T: Real>(kind: Activation, x: &[T], grad: &mut [T]) {
    vectorised!(update_activated(kind, x, x, grad, |grad, _, _, slope| grad * slope));
}

/// Value and derivative of `x sigmoid(x)`.
#[inline(always)]
fn silu<T: Real>(x: T) -> (T, T) {
    let s = sigmoid(x);
    (x * s, s * (T::one() + x * (T::one() - s)))
}

/// Value and derivative of an activation (SPEC 0).
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
        Activation::Silu => silu(x),
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
                let value = |x: f64| activate_with_slope(kind, x).0;
                let numeric = (value(x + h) - value(x - h)) / (2.0 * h);
                let (_, slope) = activate_with_slope::<f64>(kind, x);
                assert!((slope - numeric).abs() < 1e-8, "{kind:?} at {x}: {slope} {numeric}");
            }
        }
    }
    #[test]
    fn single_precision_exponential_is_exact_to_an_ulp() {
        // Every 211th number of the whole range, subnormals of the result included.
        for bits in (0..f32::INFINITY.to_bits()).step_by(211) {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                let (found, exact) = (x.exponential(), f64::from(x).exp());
                let rounded = exact as f32;
                if rounded.is_infinite() || found.is_infinite() {
                    assert!(exact > 0.999_999 * f64::from(f32::MAX) && found > 0.999_999 * f32::MAX, "{x}: {found}");
                    continue;
                }
                let ulp = f64::from(f32::from_bits(rounded.to_bits() + 1)) - f64::from(rounded);
                let ulp = ulp.max(f64::from(f32::from_bits(1)));
                assert!((f64::from(found) - exact).abs() <= ulp, "{x}: {found} {exact}");
            }
        }
        assert_eq!((0f32.exponential(), f32::INFINITY.exponential()), (1.0, f32::INFINITY));
        assert_eq!(f32::NEG_INFINITY.exponential(), 0.0);
        assert!(f32::NAN.exponential().is_nan());
    }
}
