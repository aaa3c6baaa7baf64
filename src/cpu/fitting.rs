//! `fitting`: descriptor to atomic energies (SPEC 16), on a tile of nodes.

use super::real::{Into, Real, dense, dot, matmul, matmul_transposed, update, update_activated, vectorised};
use crate::model::config::Activation;
use crate::model::parameters::{Fitting, Matrix};

/// The fitting net and the energy shifts.
pub struct FittingStage<T> {
    hidden: Vec<(Matrix<T>, Vec<T>)>,
    output: Vec<T>,
    /// Shift of each type, eV, in f64: net bias, output bias and data-set bias.
    shift: Vec<f64>,
    activation: Activation,
}

impl<T: Real> FittingStage<T> {
    pub fn new(fitting: &Fitting<f64>, activation: Activation) -> Self {
        FittingStage {
            hidden: fitting
                .hidden
                .iter()
                .map(|(m, b)| (m.cast(&T::of), b.iter().map(|&x| T::of(x)).collect()))
                .collect(),
            output: fitting.output.iter().map(|&x| T::of(x)).collect(),
            shift: fitting.shifts(),
            activation,
        }
    }

    /// `descriptor` `[node][C]`; energies in eV, 0 for type -1. Returns what the adjoint needs: each layer's `[value, gate]`.
    pub fn forward(&self, descriptor: &[T], types: &[i32], energy: &mut [f64]) -> Vec<Vec<T>> {
        let nodes = types.len();
        let mut saved: Vec<Vec<T>> = Vec::with_capacity(self.hidden.len());
        let mut h = descriptor.to_vec();
        for (matrix, bias) in &self.hidden {
            let (width, n) = (matrix.cols, matrix.cols / 2);
            let mut hidden: Vec<T> = bias.iter().copied().cycle().take(nodes * width).collect();
            matmul(dense(&h, nodes, matrix.rows), matrix.into(), &mut hidden, width, Into::Add);
            h = vec![T::zero(); nodes * n];
            vectorised!({
                for (row, out) in hidden.chunks_exact(width).zip(h.chunks_exact_mut(n)) {
                    let (value, gate) = row.split_at(n);
                    update_activated(self.activation, gate, value, out, |_, value, act, _| value * act);
                }
            });
            saved.push(hidden);
        }
        for ((energy, &kind), h) in energy.iter_mut().zip(types).zip(h.chunks_exact(self.output.len())) {
            *energy = usize::try_from(kind).map_or(0.0, |kind| dot(h, &self.output).wide() + self.shift[kind]);
        }
        saved
    }

    /// dE/d(descriptor) `[node][C]`; 0 for type -1.
    pub fn adjoint(&self, types: &[i32], saved: &[Vec<T>]) -> Vec<T> {
        let nodes = types.len();
        let mut grad: Vec<T> = types
            .iter()
            .flat_map(|&kind| self.output.iter().map(move |&w| if kind < 0 { T::zero() } else { w }))
            .collect();
        for ((matrix, _), hidden) in self.hidden.iter().zip(saved).rev() {
            let (width, n) = (matrix.cols, matrix.cols / 2);
            let mut grad_hidden = vec![T::zero(); nodes * width];
            vectorised!({
                let rows = grad_hidden.chunks_exact_mut(width).zip(hidden.chunks_exact(width));
                for ((out, row), g) in rows.zip(grad.chunks_exact(n)) {
                    let ((value, gate), (out, out_gate)) = (row.split_at(n), out.split_at_mut(n));
                    update_activated(self.activation, gate, g, out, |_, g, act, _| g * act);
                    update_activated(self.activation, gate, g, out_gate, |_, g, _, slope| g * slope);
                    update(out_gate, value, value, |grad, value, _| grad * value);
                }
            });
            grad = vec![T::zero(); nodes * matrix.rows];
            matmul_transposed(dense(&grad_hidden, nodes, width), matrix.into(), &mut grad, matrix.rows, Into::Set);
        }
        grad
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{check_adjoint, committed_model, random};

    #[test]
    fn adjoint_matches_differences() {
        for name in ["base", "fitting_2_layers"] {
            let model = committed_model(name);
            let stage = FittingStage::<f64>::new(&model.weights().fitting, model.config().fitting.activation);
            let types = [1, -1, 0];
            let channels = model.config().channels;
            let forward = |x: &[f64]| {
                let mut energy = vec![0.0; types.len()];
                stage.forward(x, &types, &mut energy);
                energy
            };
            // The stage gives dE/d(descriptor) of the sum; atoms do not see each other.
            check_adjoint(&random(1, types.len() * channels), forward, |x, grad| {
                let saved = stage.forward(x, &types, &mut vec![0.0; types.len()]);
                let slopes = stage.adjoint(&types, &saved);
                slopes.iter().enumerate().map(|(k, s)| s * grad[k / channels]).collect()
            });
        }
    }
}
