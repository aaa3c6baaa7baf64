//! `radial`: radial basis and the hidden layers of the radial network (SPEC 3 and 5) for a chunk of edges.
//!
//! The last, linear layer is merged with what follows it (`model::merge::radial_kernel`).

use super::equivariant_norm::{scalar_norm, scalar_norm_adjoint};
use super::real::{Into, Real, activated, dense, matmul, matmul_transposed, multiply_slopes};
use super::scratch::Buffer;
use crate::math::envelope::Envelope;
use crate::math::radial_basis::{RadialBasis, RadialKind};
use crate::model::Parameters;
use crate::model::config::{Activation, Basis, Config};
use crate::model::parameters::Matrix;
use rayon::prelude::*;

/// eps of the norms inside the radial network (SPEC 5).
const NORM_EPS: f64 = 1e-7;

/// Radial basis and hidden layers.
pub struct RadialStage<T> {
    basis: RadialBasis,
    hidden: Vec<(Matrix<T>, Option<Vec<T>>)>,
    activation: Activation,
}

/// The radial basis of all edges: it is the same in every block, and dear.
pub struct BasisTable<T> {
    /// Functions.
    pub len: usize,
    /// `[edge][n_radial]`, and d/dr of it, 1/Å.
    values: Vec<T>,
    slopes: Vec<T>,
}

impl<T: Real> BasisTable<T> {
    /// dE/dr of an edge, eV/Å, from dE/d(rbf).
    pub fn slope_along_edge(&self, edge: usize, grad_rbf: &[T]) -> f64 {
        let slopes = &self.slopes[edge * self.len..(edge + 1) * self.len];
        grad_rbf.iter().zip(slopes).map(|(&g, &s)| g.wide() * s.wide()).sum()
    }
}

/// A chunk's radial features and what their adjoint needs.
pub struct RadialForward<T: Real> {
    /// `[edge][n_radial]`.
    pub rbf: Buffer<T>,
    layers: Vec<HiddenForward<T>>,
    /// `[edge][width]`: the last hidden layer (the basis itself where there is none).
    pub hidden: Buffer<T>,
}

struct HiddenForward<T: Real> {
    /// Before the norm.
    linear: Buffer<T>,
    /// Before the activation; empty without a norm.
    normed: Buffer<T>,
    inverse: Vec<T>,
}

impl<T: Real> RadialStage<T> {
    pub fn new(config: &Config, weights: &Parameters<f64>) -> Self {
        let kind = match config.basis {
            Basis::Bessel => RadialKind::Bessel,
            Basis::Gaussian => RadialKind::Gaussian,
        };
        let envelope = Envelope::new(config.env_exp[0], config.rcut);
        let hidden = weights.radial.hidden.iter();
        RadialStage {
            basis: RadialBasis::new(kind, weights.radial_frequencies.clone(), config.rcut, envelope),
            hidden: hidden
                .map(|(m, s)| (m.cast(&T::of), s.as_ref().map(|s| s.iter().map(|&x| T::of(x)).collect())))
                .collect(),
            activation: config.activation,
        }
    }

    /// The basis of edges of the given lengths, Å.
    pub fn basis(&self, distance: &[f64]) -> BasisTable<T> {
        let len = self.basis.len();
        let (mut values, mut slopes) = (vec![T::zero(); distance.len() * len], vec![T::zero(); distance.len() * len]);
        let rows = values.par_chunks_mut(len).zip(slopes.par_chunks_mut(len)).zip(distance).with_min_len(64);
        rows.for_each_init(
            || (vec![0.0; len], vec![0.0; len]),
            |(value, slope), ((values, slopes), &r)| {
                self.basis.values_and_slopes(r, value, slope);
                values.iter_mut().zip(&*value).for_each(|(o, &x)| *o = T::of(x));
                slopes.iter_mut().zip(&*slope).for_each(|(o, &x)| *o = T::of(x));
            },
        );
        BasisTable { len, values, slopes }
    }

    /// Radial features of a chunk of edges.
    pub fn forward(&self, basis: &BasisTable<T>, chunk: impl ExactSizeIterator<Item = usize>) -> RadialForward<T> {
        let (edges, n) = (chunk.len(), basis.len);
        let mut rbf = Buffer::stale(edges * n);
        for (e, out) in chunk.zip(rbf.chunks_exact_mut(n)) {
            out.copy_from_slice(&basis.values[e * n..(e + 1) * n]);
        }
        let mut layers = Vec::with_capacity(self.hidden.len());
        let mut hidden = Buffer::stale(rbf.len());
        hidden.copy_from_slice(&rbf);
        for (matrix, scale) in &self.hidden {
            let (layer, out) = self.layer(edges, matrix, scale.as_deref(), &hidden);
            layers.push(layer);
            hidden = out;
        }
        RadialForward { rbf, layers, hidden }
    }

    fn layer(&self, edges: usize, matrix: &Matrix<T>, scale: Option<&[T]>, x: &[T]) -> (HiddenForward<T>, Buffer<T>) {
        let width = matrix.cols;
        let mut linear = Buffer::stale(edges * width);
        matmul(dense(x, edges, matrix.rows), matrix.into(), &mut linear, width, Into::Set);
        let (mut normed, mut inverse) = (Buffer::stale(0), Vec::new());
        if let Some(scale) = scale {
            normed = Buffer::stale(edges * width);
            inverse = linear
                .chunks_exact(width)
                .zip(normed.chunks_exact_mut(width))
                .map(|(x, out)| scalar_norm(scale, NORM_EPS, x, out))
                .collect();
        }
        let before = if scale.is_some() { &normed } else { &linear };
        let out = activated(self.activation, before);
        (HiddenForward { linear, normed, inverse }, out)
    }

    /// dE/d(rbf) `[edge][n_radial]` from dE/d(hidden).
    pub fn adjoint(&self, forward: &RadialForward<T>, grad: Buffer<T>) -> Buffer<T> {
        let mut grad = grad;
        for ((matrix, scale), layer) in self.hidden.iter().zip(&forward.layers).rev() {
            let width = matrix.cols;
            let edges = layer.linear.len() / width;
            let before = if scale.is_some() { &layer.normed } else { &layer.linear };
            multiply_slopes(self.activation, before, &mut grad);
            if let Some(scale) = scale {
                let mut grad_linear = Buffer::zeros(grad.len());
                for (e, out) in grad_linear.chunks_exact_mut(width).enumerate() {
                    let row = e * width..(e + 1) * width;
                    scalar_norm_adjoint(scale, layer.inverse[e], &layer.linear[row.clone()], &grad[row], out);
                }
                grad = grad_linear;
            }
            let mut grad_x = Buffer::stale(edges * matrix.rows);
            matmul_transposed(dense(&grad, edges, width), matrix.into(), &mut grad_x, matrix.rows, Into::Set);
            grad = grad_x;
        }
        grad
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{check_adjoint, committed_model};

    #[test]
    fn slopes_match_differences() {
        for name in ["base", "edge_norm_off", "gaussian", "radial_mlp"] {
            let model = committed_model(name);
            let stage = RadialStage::<f64>::new(model.config(), model.weights());
            check_adjoint(
                &[0.9, 2.0, 3.7, 5.6],
                |x| stage.forward(&stage.basis(x), 0..x.len()).hidden.to_vec(),
                |x, grad| {
                    let basis = stage.basis(x);
                    let mut grad_hidden = Buffer::stale(grad.len());
                    grad_hidden.copy_from_slice(grad);
                    let grad_rbf = stage.adjoint(&stage.forward(&basis, 0..x.len()), grad_hidden);
                    let rows = grad_rbf.chunks_exact(basis.len).enumerate();
                    rows.map(|(e, g)| basis.slope_along_edge(e, g)).collect()
                },
            );
        }
    }
}
