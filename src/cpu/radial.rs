//! `radial`: radial basis and the hidden layers of the radial network (SPEC 3 and 5) for a chunk of edges.
//!
//! The last, linear layer is merged with what follows it (`model::merge::radial_kernel`).

use super::equivariant_norm::{scalar_norm, scalar_norm_adjoint};
use super::real::{Into, Real, activate, activate_with_slope, dense, matmul, matmul_transposed};
use crate::math::envelope::Envelope;
use crate::math::radial_basis::{RadialBasis, RadialKind};
use crate::model::Parameters;
use crate::model::config::{Activation, Basis, Config};
use crate::model::parameters::Matrix;

/// eps of the norms inside the radial network (SPEC 5).
const NORM_EPS: f64 = 1e-7;

/// Radial basis and hidden layers.
pub struct RadialStage<T> {
    basis: RadialBasis,
    hidden: Vec<(Matrix<T>, Option<Vec<T>>)>,
    activation: Activation,
}

/// A chunk's radial features and what their adjoint needs.
pub struct RadialForward<T> {
    /// `[edge][n_radial]`.
    pub rbf: Vec<T>,
    /// d(rbf)/dr, 1/Å; empty unless asked for.
    pub slopes: Vec<T>,
    layers: Vec<HiddenForward<T>>,
    /// `[edge][width]`: the last hidden layer (the basis itself where there is none).
    pub hidden: Vec<T>,
}

struct HiddenForward<T> {
    /// Before the norm.
    linear: Vec<T>,
    /// Before the activation; empty without a norm.
    normed: Vec<T>,
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

    /// `distance` of each edge of the chunk, Å; `slopes`: also the derivatives of the basis, for an adjoint.
    pub fn forward(&self, distance: impl ExactSizeIterator<Item = f64>, slopes: bool) -> RadialForward<T> {
        let (edges, n) = (distance.len(), self.basis.len());
        let mut rbf = Vec::with_capacity(edges * n);
        let mut slope = Vec::with_capacity(if slopes { edges * n } else { 0 });
        let (mut value, mut derivative) = (vec![0.0; n], vec![0.0; n]);
        for r in distance {
            if slopes {
                self.basis.values_and_slopes(r, &mut value, &mut derivative);
                slope.extend(derivative.iter().map(|&x| T::of(x)));
            } else {
                self.basis.values(r, &mut value);
            }
            rbf.extend(value.iter().map(|&x| T::of(x)));
        }
        let mut layers = Vec::with_capacity(self.hidden.len());
        let mut hidden = rbf.clone();
        for (matrix, scale) in &self.hidden {
            let (layer, out) = self.layer(edges, matrix, scale.as_deref(), &hidden);
            layers.push(layer);
            hidden = out;
        }
        RadialForward { rbf, slopes: slope, layers, hidden }
    }

    fn layer(&self, edges: usize, matrix: &Matrix<T>, scale: Option<&[T]>, x: &[T]) -> (HiddenForward<T>, Vec<T>) {
        let width = matrix.cols;
        let mut linear = vec![T::zero(); edges * width];
        matmul(dense(x, edges, matrix.rows), matrix.into(), &mut linear, width, Into::Set);
        let (mut normed, mut inverse) = (Vec::new(), Vec::new());
        if let Some(scale) = scale {
            normed = vec![T::zero(); edges * width];
            inverse = linear
                .chunks_exact(width)
                .zip(normed.chunks_exact_mut(width))
                .map(|(x, out)| scalar_norm(scale, NORM_EPS, x, out))
                .collect();
        }
        let before = if scale.is_some() { &normed } else { &linear };
        let out = before.iter().map(|&x| activate(self.activation, x)).collect();
        (HiddenForward { linear, normed, inverse }, out)
    }

    /// dE/d(rbf) `[edge][n_radial]` from dE/d(hidden).
    pub fn adjoint(&self, forward: &RadialForward<T>, grad: Vec<T>) -> Vec<T> {
        let mut grad = grad;
        for ((matrix, scale), layer) in self.hidden.iter().zip(&forward.layers).rev() {
            let width = matrix.cols;
            let edges = layer.linear.len() / width;
            let before = if scale.is_some() { &layer.normed } else { &layer.linear };
            for (g, &x) in grad.iter_mut().zip(before) {
                *g *= activate_with_slope(self.activation, x).1;
            }
            if let Some(scale) = scale {
                let mut grad_linear = vec![T::zero(); grad.len()];
                for (e, out) in grad_linear.chunks_exact_mut(width).enumerate() {
                    let row = e * width..(e + 1) * width;
                    scalar_norm_adjoint(scale, layer.inverse[e], &layer.linear[row.clone()], &grad[row], out);
                }
                grad = grad_linear;
            }
            let mut grad_x = vec![T::zero(); edges * matrix.rows];
            matmul_transposed(dense(&grad, edges, width), matrix.into(), &mut grad_x, matrix.rows, Into::Set);
            grad = grad_x;
        }
        grad
    }

    /// dE/dr of each edge, eV/Å, from dE/d(rbf).
    pub fn slope_along_edge(&self, forward: &RadialForward<T>, grad_rbf: &[T]) -> impl Iterator<Item = f64> {
        let n = self.basis.len();
        let pairs = grad_rbf.chunks_exact(n).zip(forward.slopes.chunks_exact(n));
        pairs
            .map(|(g, s)| g.iter().zip(s).map(|(&g, &s)| g.wide() * s.wide()).sum::<f64>())
            .collect::<Vec<_>>()
            .into_iter()
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
            let forward = |x: &[f64], slopes: bool| stage.forward(x.iter().copied(), slopes);
            check_adjoint(
                &[0.9, 2.0, 3.7, 5.6],
                |x| forward(x, false).hidden,
                |x, grad| {
                    let saved = forward(x, true);
                    let grad_rbf = stage.adjoint(&saved, grad.to_vec());
                    stage.slope_along_edge(&saved, &grad_rbf).collect()
                },
            );
        }
    }
}
