//! `rotate_mix`: rotation of source features into the edge frame, mixing of degrees by the radial kernel, and capture
//! of the scalars that the focus competition reads (SPEC 8.2, steps 1, 2 and 4).
//!
//! Edge-frame features of an edge: `[focus][row][channel]`, rows in m-major order (SPEC 0).

use super::real::{Real, axpy, dot};
use crate::math::layout::{m_major, truncation_scale};
use crate::math::wigner::Wigner;
use crate::model::config::RadialMode;
use crate::model::parameters::{Convolution, Matrix};

/// Shapes and channel factors of one block's rotations.
pub struct RotateMix<T> {
    focuses: usize,
    channels: usize,
    rows: Vec<Row<T>>,
    orders: Vec<Order>,
    kernel: Kernel<T>,
}

/// One row of the edge frame.
struct Row<T> {
    /// First packed row of its degree, and how many rows the degree has.
    first: usize,
    size: usize,
    /// Where its row of the Wigner-D record begins.
    record: usize,
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
    /// The same for all channels.
    Degrees,
    /// R x W basis.
    Ranked(Matrix<T>),
    /// A kernel a channel.
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
        let rows = major.iter().map(|&(degree, order)| {
            let size = 2 * degree + 1;
            Row {
                first: degree * degree,
                size,
                record: wigner.offset(degree) + (order + degree as i32) as usize * size,
                back: T::of(truncation_scale(degree, m)),
            }
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
                (RadialMode::Degree, None) => Kernel::Degrees,
                (RadialMode::DegreeChannel { .. }, None) => Kernel::Full,
            },
            rows: rows.collect(),
        }
    }

    /// Values of an edge in the edge frame.
    pub fn len(&self) -> usize {
        self.focuses * self.rows.len() * self.channels
    }
    fn width(&self) -> usize {
        self.focuses * self.channels
    }

    /// `y <- D x`: `record` an edge's Wigner-D, `x` packed rows `[(l, m)][W]`.
    pub fn rotate(&self, record: &[T], x: &[T], y: &mut [T]) {
        let (c, w) = (self.channels, self.width());
        for (row, shape) in self.rows.iter().enumerate() {
            let d = &record[shape.record..shape.record + shape.size];
            for f in 0..self.focuses {
                let out = &mut y[(f * self.rows.len() + row) * c..][..c];
                let x = |m: usize| &x[(shape.first + m) * w + f * c..][..c];
                out.iter_mut().zip(x(0)).for_each(|(o, &x)| *o = d[0] * x);
                (1..shape.size).for_each(|m| axpy(d[m], x(m), out));
            }
        }
    }

    /// `x += D^T y`: the same record read transposed.
    pub fn rotate_transposed(&self, record: &[T], y: &[T], x: &mut [T]) {
        let (c, w) = (self.channels, self.width());
        for (row, shape) in self.rows.iter().enumerate() {
            let d = &record[shape.record..shape.record + shape.size];
            for f in 0..self.focuses {
                let y = &y[(f * self.rows.len() + row) * c..][..c];
                for (m, &d) in d.iter().enumerate() {
                    axpy(d, y, &mut x[(shape.first + m) * w + f * c..][..c]);
                }
            }
        }
    }

    /// Multiplies rows with the truncation rescale (SPEC 8.2, step 7) and `factor[channel of W]`.
    pub fn scale_back(&self, factor: &[T], y: &mut [T]) {
        let c = self.channels;
        for (i, out) in y.chunks_exact_mut(c).enumerate() {
            let (f, row) = (i / self.rows.len(), i % self.rows.len());
            let back = self.rows[row].back;
            out.iter_mut().zip(&factor[f * c..(f + 1) * c]).for_each(|(o, &s)| *o *= back * s);
        }
    }

    /// `mixed <- kernel y`, and the scalars (row 0 of each focus) copied to storage of their own: `[focus][channel]`.
    pub fn mix(&self, kernel: &[T], y: &[T], mixed: &mut [T], captured: &mut [T]) {
        match &self.kernel {
            Kernel::Factors(degree) => {
                let (c, w) = (self.channels, self.width());
                for (i, (out, y)) in mixed.chunks_exact_mut(c).zip(y.chunks_exact(c)).enumerate() {
                    let (f, row) = (i / degree.len(), i % degree.len());
                    let factor = &kernel[degree[row] * w + f * c..][..c];
                    out.iter_mut().zip(y).zip(factor).for_each(|((o, &y), &k)| *o = y * k);
                }
            }
            _ => {
                mixed.fill(T::zero());
                self.each_pair(|f, entry, row_in, row_out| {
                    let c = self.channels;
                    let (y, out) = (&y[row_in * c..(row_in + 1) * c], &mut mixed[row_out * c..(row_out + 1) * c]);
                    self.add_product(kernel, f, entry, y, out);
                });
            }
        }
        let (c, stride) = (self.channels, self.rows.len() * self.channels);
        for (f, out) in captured.chunks_exact_mut(c).enumerate() {
            out.copy_from_slice(&mixed[f * stride..f * stride + c]);
        }
    }

    /// `out += kernel[entry] y` with the channel factors of focus `f`.
    fn add_product(&self, kernel: &[T], f: usize, entry: usize, y: &[T], out: &mut [T]) {
        let (c, w) = (self.channels, self.width());
        match &self.kernel {
            Kernel::Degrees => axpy(kernel[entry], y, out),
            Kernel::Full => {
                let k = &kernel[entry * w + f * c..][..c];
                out.iter_mut().zip(y).zip(k).for_each(|((o, &y), &k)| *o += k * y);
            }
            Kernel::Ranked(basis) => {
                for q in 0..basis.rows {
                    let (k, basis) = (kernel[entry * basis.rows + q], &basis.row(q)[f * c..(f + 1) * c]);
                    out.iter_mut().zip(y).zip(basis).for_each(|((o, &y), &b)| *o += k * b * y);
                }
            }
            Kernel::Factors(_) => {}
        }
    }

    /// Adjoint of [`Self::mix`]: `grad_y <- kernel^T grad`, `grad_kernel += ...`.
    pub fn mix_adjoint(&self, kernel: &[T], y: &[T], grad: &[T], grad_y: &mut [T], grad_kernel: &mut [T]) {
        let (c, w) = (self.channels, self.width());
        if let Kernel::Factors(degree) = &self.kernel {
            for (i, out) in grad_y.chunks_exact_mut(c).enumerate() {
                let (f, row) = (i / degree.len(), i % degree.len());
                let at = degree[row] * w + f * c;
                for j in 0..c {
                    out[j] = grad[i * c + j] * kernel[at + j];
                    grad_kernel[at + j] += grad[i * c + j] * y[i * c + j];
                }
            }
            return;
        }
        grad_y.fill(T::zero());
        self.each_pair(|f, entry, row_in, row_out| {
            let (y, grad) = (&y[row_in * c..(row_in + 1) * c], &grad[row_out * c..(row_out + 1) * c]);
            self.add_product(kernel, f, entry, grad, &mut grad_y[row_in * c..(row_in + 1) * c]);
            match &self.kernel {
                Kernel::Degrees => grad_kernel[entry] += dot(y, grad),
                Kernel::Full => {
                    let k = &mut grad_kernel[entry * w + f * c..][..c];
                    k.iter_mut().zip(y).zip(grad).for_each(|((k, &y), &g)| *k += y * g);
                }
                Kernel::Ranked(basis) => {
                    for q in 0..basis.rows {
                        let basis_row = &basis.row(q)[f * c..(f + 1) * c];
                        let sum: T = y.iter().zip(grad).zip(basis_row).map(|((&y, &g), &b)| y * g * b).sum();
                        grad_kernel[entry * basis.rows + q] += sum;
                    }
                }
                Kernel::Factors(_) => {}
            }
        });
    }

    /// All (focus, kernel entry, input row, output row) of the mixing; rows counted over all focuses.
    #[inline]
    fn each_pair(&self, mut f: impl FnMut(usize, usize, usize, usize)) {
        for focus in 0..self.focuses {
            let base = focus * self.rows.len();
            for order in &self.orders {
                for copy in 0..order.copies {
                    let start = base + order.start + copy * order.degrees;
                    for l_in in 0..order.degrees {
                        for l_out in 0..order.degrees {
                            f(focus, order.kernel + l_in * order.degrees + l_out, start + l_in, start + l_out);
                        }
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
                stage.mix_adjoint(&x[..kernel], &x[kernel..], grad, &mut grad_y, &mut grad_kernel);
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
