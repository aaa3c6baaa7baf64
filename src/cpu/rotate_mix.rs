//! `rotate_mix`: rotation of source features into the edge frame, mixing of degrees by the radial kernel, and capture
//! of the scalars that the focus competition reads (SPEC 8.2, steps 1, 2 and 4).
//!
//! Edge-frame features of an edge: `[focus][row][channel]`, rows in m-major order (SPEC 0).

use super::real::{Into, Real, combine, dot, update};
use crate::math::layout::{m_major, truncation_scale};
use crate::math::wigner::Wigner;
use crate::model::config::RadialMode;
use crate::model::parameters::{Convolution, Matrix};

/// Shapes and channel factors of one block's rotations.
pub struct RotateMix<T> {
    focuses: usize,
    channels: usize,
    /// Rows of an edge and focus.
    rows: usize,
    degrees: Vec<Degree<T>>,
    orders: Vec<Order>,
    kernel: Kernel<T>,
}

/// The rows of one degree.
struct Degree<T> {
    /// First packed row, and how many there are.
    first: usize,
    size: usize,
    /// (row of the edge frame, where its row of the Wigner-D record begins) for each order that is kept.
    kept: Vec<(usize, usize)>,
    /// Rescale of the way back (SPEC 8.2, step 7).
    back: T,
}

/// Rows of one |m|: `start .. start + degrees`, twice for m > 0.
struct Order {
    start: usize,
    degrees: usize,
    copies: usize,
    /// First kernel entry, `[l_in][l_out]`.
    kernel: usize,
}

enum Kernel<T> {
    /// A factor a degree and channel; which degree each row has.
    Factors(Vec<usize>),
    /// A matrix over degrees for each row of the R x W basis; one row of ones where all channels share a matrix.
    Ranked(Matrix<T>),
    /// A matrix a channel.
    Full,
}

impl<T: Real> RotateMix<T> {
    pub fn new(
        convolution: &Convolution<f64>,
        mode: RadialMode,
        wigner: &Wigner,
        (l, m): (usize, usize),
        (focuses, channels): (usize, usize),
    ) -> Self {
        let major = m_major(l, m);
        let degrees = (0..=l).map(|degree| {
            let size = 2 * degree + 1;
            let record = |order: i32| wigner.offset(degree) + (order + degree as i32) as usize * size;
            let kept = major.iter().enumerate().filter(|(_, r)| r.0 == degree).map(|(row, r)| (row, record(r.1)));
            Degree { first: degree * degree, size, kept: kept.collect(), back: T::of(truncation_scale(degree, m)) }
        });
        let (mut start, mut kernel) = (0, 0);
        let orders = (0..=m).map(|order| {
            let degrees = l - order + 1;
            let copies = if order == 0 { 1 } else { 2 };
            let out = Order { start, degrees, copies, kernel };
            start += copies * degrees;
            kernel += degrees * degrees;
            out
        });
        let basis = convolution.degree_mixer.as_ref().and_then(|d| d.basis.as_ref());
        RotateMix {
            focuses,
            channels,
            orders: orders.collect(),
            kernel: match (mode, basis) {
                (RadialMode::None, _) => Kernel::Factors(major.iter().map(|r| r.0).collect()),
                (_, Some(basis)) => Kernel::Ranked(basis.cast(&T::of)),
                (RadialMode::Degree, None) => {
                    let width = focuses * channels;
                    Kernel::Ranked(Matrix { rows: 1, cols: width, data: vec![T::one(); width] })
                }
                (RadialMode::DegreeChannel { .. }, None) => Kernel::Full,
            },
            rows: major.len(),
            degrees: degrees.collect(),
        }
    }

    /// Values of an edge in the edge frame.
    pub fn len(&self) -> usize {
        self.focuses * self.rows * self.channels
    }
    fn width(&self) -> usize {
        self.focuses * self.channels
    }

    /// `y <- D x`: `record` an edge's Wigner-D, `x` packed rows `[(l, m)][W]`.
    #[inline(always)]
    pub fn rotate(&self, record: &[T], x: &[T], y: &mut [T]) {
        self.rotate_scaled(record, x, y, |_| T::one());
    }
    /// `y <- S D x` with the truncation rescale S (SPEC 8.2, step 7): the adjoint of [`Self::rotate_back`].
    #[inline(always)]
    pub fn rotate_rescaled(&self, record: &[T], x: &[T], y: &mut [T]) {
        self.rotate_scaled(record, x, y, |degree| degree.back);
    }
    #[inline(always)]
    fn rotate_scaled(&self, record: &[T], x: &[T], y: &mut [T], scale: impl Fn(&Degree<T>) -> T) {
        let (c, w) = (self.channels, self.width());
        for degree in &self.degrees {
            let scale = scale(degree);
            for &(row, at) in &degree.kept {
                let d = &record[at..at + degree.size];
                for f in 0..self.focuses {
                    let first = degree.first * w + f * c;
                    let terms = d.iter().enumerate().map(|(m, &d)| (scale * d, first + m * w));
                    combine(terms, x, None, &mut y[(f * self.rows + row) * c..][..c], Into::Set);
                }
            }
        }
    }

    /// `x <- D^T y`: the same record read transposed.
    #[inline(always)]
    pub fn rotate_transposed(&self, record: &[T], y: &[T], x: &mut [T]) {
        self.transposed(record, y, None, x, Into::Set);
    }
    /// `x <- F D^T S y` or added: truncation rescale S and a factor F of each channel of W.
    #[inline(always)]
    pub fn rotate_back(&self, record: &[T], y: &[T], factor: &[T], x: &mut [T], into: Into) {
        self.transposed(record, y, Some(factor), x, into);
    }
    #[inline(always)]
    fn transposed(&self, record: &[T], y: &[T], factor: Option<&[T]>, x: &mut [T], into: Into) {
        let (c, w) = (self.channels, self.width());
        for degree in &self.degrees {
            let back = if factor.is_some() { degree.back } else { T::one() };
            for m in 0..degree.size {
                for f in 0..self.focuses {
                    let terms = degree.kept.iter().map(|&(row, at)| (back * record[at + m], (f * self.rows + row) * c));
                    let factor = factor.map(|factor| &factor[f * c..(f + 1) * c]);
                    combine(terms, y, factor, &mut x[(degree.first + m) * w + f * c..][..c], into);
                }
            }
        }
    }

    /// `mixed <- kernel y`, and the scalars (row 0 of each focus) copied to storage of their own: `[focus][channel]`.
    #[inline(always)]
    pub fn mix(&self, kernel: &[T], y: &[T], mixed: &mut [T], captured: &mut [T]) {
        let (c, w) = (self.channels, self.width());
        match &self.kernel {
            Kernel::Factors(degree) => {
                for (i, (out, y)) in mixed.chunks_exact_mut(c).zip(y.chunks_exact(c)).enumerate() {
                    let (f, row) = (i / degree.len(), i % degree.len());
                    let factor = &kernel[degree[row] * w + f * c..][..c];
                    update(out, y, factor, |_, y, k| y * k);
                }
            }
            Kernel::Ranked(basis) => self.each_row(|f, order, first, l_out| {
                let out = &mut mixed[(first + l_out) * c..][..c];
                for q in 0..basis.rows {
                    let entry = |l_in: usize| (order.kernel + l_in * order.degrees + l_out) * basis.rows + q;
                    let terms = (0..order.degrees).map(|l_in| (kernel[entry(l_in)], (first + l_in) * c));
                    let into = if q == 0 { Into::Set } else { Into::Add };
                    combine(terms, y, Some(&basis.row(q)[f * c..(f + 1) * c]), out, into);
                }
            }),
            Kernel::Full => self.each_row(|f, order, first, l_out| {
                let out = &mut mixed[(first + l_out) * c..][..c];
                out.fill(T::zero());
                for l_in in 0..order.degrees {
                    let kernel = &kernel[(order.kernel + l_in * order.degrees + l_out) * w + f * c..][..c];
                    let y = &y[(first + l_in) * c..][..c];
                    update(out, y, kernel, |out, y, k| out + k * y);
                }
            }),
        }
        for (f, out) in captured.chunks_exact_mut(c).enumerate() {
            out.copy_from_slice(&mixed[f * self.rows * c..][..c]);
        }
    }

    /// Adjoint of [`Self::mix`]: `grad_y <- kernel^T grad`, `grad_kernel += ...`; `weighted`: room for one edge.
    #[inline(always)]
    pub fn mix_adjoint(
        &self,
        kernel: &[T],
        y: &[T],
        grad: &[T],
        grad_y: &mut [T],
        grad_kernel: &mut [T],
        weighted: &mut [T],
    ) {
        let (c, w) = (self.channels, self.width());
        match &self.kernel {
            Kernel::Factors(degree) => {
                for (i, out) in grad_y.chunks_exact_mut(c).enumerate() {
                    let (f, row) = (i / degree.len(), i % degree.len());
                    let at = degree[row] * w + f * c;
                    let (kernel, grad_kernel) = (&kernel[at..at + c], &mut grad_kernel[at..at + c]);
                    let (grad, y) = (&grad[i * c..(i + 1) * c], &y[i * c..(i + 1) * c]);
                    update(out, grad, kernel, |_, grad, k| grad * k);
                    update(grad_kernel, grad, y, |sum, grad, y| sum + grad * y);
                }
            }
            Kernel::Ranked(basis) => {
                for q in 0..basis.rows {
                    for (i, (out, grad)) in weighted.chunks_exact_mut(c).zip(grad.chunks_exact(c)).enumerate() {
                        let basis = &basis.row(q)[i / self.rows * c..][..c];
                        update(out, grad, basis, |_, g, b| g * b);
                    }
                    let into = if q == 0 { Into::Set } else { Into::Add };
                    self.each_row(|_, order, first, l_in| {
                        let entry = |l_out: usize| (order.kernel + l_in * order.degrees + l_out) * basis.rows + q;
                        let terms = (0..order.degrees).map(|l_out| (kernel[entry(l_out)], (first + l_out) * c));
                        let row = (first + l_in) * c..(first + l_in + 1) * c;
                        combine(terms, weighted, None, &mut grad_y[row.clone()], into);
                        for l_out in 0..order.degrees {
                            grad_kernel[entry(l_out)] += dot(&y[row.clone()], &weighted[(first + l_out) * c..][..c]);
                        }
                    });
                }
            }
            Kernel::Full => self.each_row(|f, order, first, l_in| {
                let row = (first + l_in) * c..(first + l_in + 1) * c;
                let (y, grad_y) = (&y[row.clone()], &mut grad_y[row]);
                grad_y.fill(T::zero());
                for l_out in 0..order.degrees {
                    let at = (order.kernel + l_in * order.degrees + l_out) * w + f * c;
                    let (kernel, grad_kernel) = (&kernel[at..at + c], &mut grad_kernel[at..at + c]);
                    let grad = &grad[(first + l_out) * c..][..c];
                    update(grad_y, kernel, grad, |sum, k, grad| sum + k * grad);
                    update(grad_kernel, y, grad, |sum, y, grad| sum + y * grad);
                }
            }),
        }
    }

    /// All rows that are mixed: (focus, order, first row of those mixed with it, which of them); rows counted over all
    /// focuses.
    #[inline(always)]
    fn each_row(&self, mut f: impl FnMut(usize, &Order, usize, usize)) {
        for focus in 0..self.focuses {
            for order in &self.orders {
                for copy in 0..order.copies {
                    let first = focus * self.rows + order.start + copy * order.degrees;
                    // No `for_each`: what it hides in would stay out of line, and out of the dispatch.
                    for l in 0..order.degrees {
                        f(focus, order, first, l);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{check_adjoint, committed_model, random};
    use crate::math::wigner::edge_frame;

    /// One model of each radial mode: its first block's rotations, Wigner-D tables and kernel length.
    fn for_each_mode(check: impl Fn(&RotateMix<f64>, &Wigner, usize)) {
        for name in ["radial_none", "radial_degree", "radial_rank_3", "radial_full_rank", "focus_3"] {
            let model = committed_model(name);
            let (config, degrees) = (model.config(), model.config().blocks[0]);
            let convolution = &model.weights().blocks[0].convolution;
            let wigner = Wigner::new(degrees.l);
            let (shape, mode) = ((config.n_focus, config.focus_dim), config.radial_mode);
            let stage = RotateMix::new(convolution, mode, &wigner, (degrees.l, degrees.m), shape);
            let factors = (degrees.l + 1) * config.hidden();
            let kernel = convolution.degree_mixer.as_ref().map_or(factors, |mixer| mixer.weight.cols);
            check(&stage, &wigner, kernel);
        }
    }

    #[test]
    fn adjoint_of_the_mixing_matches_differences() {
        for_each_mode(|stage, _, kernel| {
            let x = random(1, kernel + stage.len());
            let forward = |x: &[f64]| {
                let mut mixed = vec![0.0; stage.len()];
                stage.mix(&x[..kernel], &x[kernel..], &mut mixed, &mut vec![0.0; stage.width()]);
                mixed
            };
            check_adjoint(&x, forward, |x, grad| {
                let (mut grad_kernel, mut grad_y) = (vec![0.0; kernel], vec![0.0; stage.len()]);
                let mut room = vec![0.0; stage.len()];
                stage.mix_adjoint(&x[..kernel], &x[kernel..], grad, &mut grad_y, &mut grad_kernel, &mut room);
                [grad_kernel, grad_y].concat()
            });
        });
    }

    #[test]
    fn the_way_back_is_the_adjoint_of_the_rotation() {
        for_each_mode(|stage, wigner, _| {
            let mut record = vec![0.0; wigner.record_len()];
            wigner.assemble(&edge_frame([2.0 / 7.0, -3.0 / 7.0, 6.0 / 7.0]), &mut record);
            let x = random(2, (wigner.lmax() + 1) * (wigner.lmax() + 1) * stage.width());
            let forward = |x: &[f64]| {
                let mut y = vec![0.0; stage.len()];
                stage.rotate(&record, x, &mut y);
                y
            };
            check_adjoint(&x, forward, |x, grad| {
                let mut back = vec![0.0; x.len()];
                stage.rotate_transposed(&record, grad, &mut back);
                back
            });
        });
    }
}
