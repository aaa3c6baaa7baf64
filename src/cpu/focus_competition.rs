//! `focus_competition`: softmax between the focuses of an edge, from the captured scalars (SPEC 8.2, step 6).

use super::equivariant_norm::{scalar_norm, scalar_norm_adjoint};
use super::real::Real;
use crate::model::parameters::{Competition, Matrix};

/// Share of the softmax; the rest is spread evenly.
const SHARE: f64 = 0.98;

/// Weights of one block's competition.
pub struct FocusCompetition<T> {
    norm: Option<Matrix<T>>,
    weight: Matrix<T>,
    eps: f64,
}

impl<T: Real> FocusCompetition<T> {
    pub fn new(competition: &Competition<f64>, eps: f64) -> Self {
        FocusCompetition {
            norm: competition.norm.as_ref().map(|n| n.cast(&T::of)),
            weight: competition.weight.cast(&T::of),
            eps,
        }
    }

    /// Channels of a focus and number of focuses.
    fn shape(&self) -> (usize, usize) {
        (self.weight.rows, self.weight.cols)
    }

    /// Softmax of one edge: `captured` `[focus][channel]` -> `[focus]`; the norms' inverse roots.
    fn softmax(&self, captured: &[T], soft: &mut [T], inverse: &mut [T]) {
        let (c, focuses) = self.shape();
        let mut normed = vec![T::zero(); c];
        for f in 0..focuses {
            let v = &captured[f * c..(f + 1) * c];
            let u = match &self.norm {
                Some(scale) => {
                    inverse[f] = scalar_norm(scale.row(f), self.eps, v, &mut normed);
                    &normed[..]
                }
                None => v,
            };
            soft[f] = u.iter().enumerate().map(|(i, &u)| u * self.weight.data[i * focuses + f]).sum();
        }
        let top = soft.iter().copied().fold(T::neg_infinity(), T::max);
        soft.iter_mut().for_each(|s| *s = (*s - top).exp());
        let sum: T = soft.iter().copied().sum();
        soft.iter_mut().for_each(|s| *s /= sum);
    }

    /// Factor of each focus, `[edge][focus]`.
    pub fn forward(&self, captured: &[T]) -> Vec<T> {
        let (c, focuses) = self.shape();
        let (share, rest) = (T::of(SHARE), T::of((1.0 - SHARE) / focuses as f64));
        let mut out = vec![T::zero(); captured.len() / c];
        let mut inverse = vec![T::zero(); focuses];
        for (captured, out) in captured.chunks_exact(focuses * c).zip(out.chunks_exact_mut(focuses)) {
            self.softmax(captured, out, &mut inverse);
            out.iter_mut().for_each(|a| *a = share * *a + rest);
        }
        out
    }

    /// Gradient of the captured scalars of one edge, added; `grad` of its factors.
    pub fn adjoint(&self, captured: &[T], grad: &[T], grad_captured: &mut [T]) {
        let (c, focuses) = self.shape();
        let (mut soft, mut inverse) = (vec![T::zero(); focuses], vec![T::zero(); focuses]);
        self.softmax(captured, &mut soft, &mut inverse);
        let mean: T = soft.iter().zip(grad).map(|(&s, &g)| s * g).sum();
        let mut grad_u = vec![T::zero(); c];
        for f in 0..focuses {
            let grad_logit = T::of(SHARE) * soft[f] * (grad[f] - mean);
            let out = &mut grad_captured[f * c..(f + 1) * c];
            for (i, g) in grad_u.iter_mut().enumerate() {
                *g = grad_logit * self.weight.data[i * focuses + f];
            }
            match &self.norm {
                Some(scale) => {
                    let v = &captured[f * c..(f + 1) * c];
                    scalar_norm_adjoint(scale.row(f), inverse[f], v, &grad_u, out);
                }
                None => out.iter_mut().zip(&grad_u).for_each(|(o, &g)| *o += g),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{check_adjoint, committed_model, random};

    #[test]
    fn adjoint_matches_differences() {
        // With the norm, and without.
        for name in ["focus_3", "edge_norm_off"] {
            let model = committed_model(name);
            let weights = model.weights().blocks[0].convolution.competition.as_ref().unwrap();
            let stage = FocusCompetition::<f64>::new(weights, model.config().eps);
            let x = random(1, model.config().hidden());
            check_adjoint(
                &x,
                |x| stage.forward(x),
                |x, grad| {
                    let mut out = vec![0.0; x.len()];
                    stage.adjoint(x, grad, &mut out);
                    out
                },
            );
        }
    }

    #[test]
    fn shares_sum_to_one_and_none_vanishes() {
        let model = committed_model("focus_3");
        let weights = model.weights().blocks[0].convolution.competition.as_ref().unwrap();
        let stage = FocusCompetition::<f64>::new(weights, model.config().eps);
        for shares in stage.forward(&random(2, 5 * model.config().hidden())).chunks_exact(3) {
            assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-14);
            assert!(shares.iter().all(|&s| s >= 0.02 / 3.0));
        }
    }
}
