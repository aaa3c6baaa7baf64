//! `attention`: queries, keys and output gates of nodes, and the softmax over an atom's edges (SPEC 8.2 b).

use super::equivariant_norm::{scalar_norm, scalar_norm_adjoint};
use super::real::{Into, Real, View, matmul, matmul_transposed, sigmoid};
use crate::model::parameters::{Attention, Matrix};

/// Attention weights of one block.
pub struct AttentionStage<T> {
    focuses: usize,
    /// Channels of a focus.
    channels: usize,
    heads: usize,
    qk_norm: Matrix<T>,
    query: Vec<Matrix<T>>,
    key: Vec<Matrix<T>>,
    gate_norm: Matrix<T>,
    gate: Vec<Matrix<T>>,
    /// Null mass of the softmax, `[focus][head]`.
    null_mass: Vec<f64>,
    eps: f64,
}

impl<T: Real> AttentionStage<T> {
    pub fn new(a: &Attention<f64>, eps: f64) -> Self {
        let cast = |v: &Vec<Matrix<f64>>| v.iter().map(|m| m.cast(&T::of)).collect::<Vec<_>>();
        AttentionStage {
            focuses: a.qk_norm.rows,
            channels: a.qk_norm.cols,
            heads: a.null_mass.cols,
            qk_norm: a.qk_norm.cast(&T::of),
            query: cast(&a.query),
            key: cast(&a.key),
            gate_norm: a.gate_norm.cast(&T::of),
            gate: cast(&a.gate),
            null_mass: a.null_mass.data.clone(),
            eps,
        }
    }

    fn width(&self) -> usize {
        self.focuses * self.channels
    }

    /// RMS norm of each focus of `[node][W]`.
    fn normalise(&self, scale: &Matrix<T>, scalars: &[T]) -> (Vec<T>, Vec<T>) {
        let c = self.channels;
        let mut normed = vec![T::zero(); scalars.len()];
        let inverse = scalars
            .chunks_exact(c)
            .zip(normed.chunks_exact_mut(c))
            .enumerate()
            .map(|(i, (x, out))| scalar_norm(scale.row(i % self.focuses), self.eps, x, out))
            .collect();
        (normed, inverse)
    }

    /// `out <- x W` focus by focus; `x` has `cols_in`, `out` `cols_out` columns a focus.
    fn per_focus(&self, weights: &[Matrix<T>], nodes: usize, x: &[T], out: &mut [T]) {
        let (rows, cols) = (weights[0].rows, weights[0].cols);
        for (f, w) in weights.iter().enumerate() {
            let input = View { data: &x[f * rows..], rows: nodes, cols: rows, stride: self.focuses * rows };
            matmul(input, w.into(), &mut out[f * cols..], self.focuses * cols, Into::Set);
        }
    }
    fn per_focus_adjoint(&self, weights: &[Matrix<T>], nodes: usize, grad: &[T], grad_x: &mut [T]) {
        let (rows, cols) = (weights[0].rows, weights[0].cols);
        for (f, w) in weights.iter().enumerate() {
            let input = View { data: &grad[f * cols..], rows: nodes, cols, stride: self.focuses * cols };
            matmul_transposed(input, w.into(), &mut grad_x[f * rows..], self.focuses * rows, Into::Add);
        }
    }

    /// Queries and keys `[node][W]` from the scalars `[node][W]`.
    pub fn queries_keys(&self, nodes: usize, scalars: &[T]) -> (Vec<T>, Vec<T>) {
        let (normed, _) = self.normalise(&self.qk_norm, scalars);
        let (mut query, mut key) = (vec![T::zero(); scalars.len()], vec![T::zero(); scalars.len()]);
        self.per_focus(&self.query, nodes, &normed, &mut query);
        self.per_focus(&self.key, nodes, &normed, &mut key);
        (query, key)
    }

    /// Adds to `grad_scalars` what comes back through queries and keys.
    pub fn queries_keys_adjoint(
        &self,
        nodes: usize,
        scalars: &[T],
        grad_query: &[T],
        grad_key: &[T],
        grad_scalars: &mut [T],
    ) {
        let (_, inverse) = self.normalise(&self.qk_norm, scalars);
        let mut grad_normed = vec![T::zero(); scalars.len()];
        self.per_focus_adjoint(&self.query, nodes, grad_query, &mut grad_normed);
        self.per_focus_adjoint(&self.key, nodes, grad_key, &mut grad_normed);
        self.normalise_adjoint(&self.qk_norm, &inverse, scalars, &grad_normed, grad_scalars);
    }

    fn normalise_adjoint(&self, scale: &Matrix<T>, inverse: &[T], scalars: &[T], grad: &[T], grad_scalars: &mut [T]) {
        let c = self.channels;
        for (i, out) in grad_scalars.chunks_exact_mut(c).enumerate() {
            let row = i * c..(i + 1) * c;
            scalar_norm_adjoint(scale.row(i % self.focuses), inverse[i], &scalars[row.clone()], &grad[row], out);
        }
    }

    /// Output gates `[node][focus][head]` from the scalars `[node][W]`.
    pub fn gates(&self, nodes: usize, scalars: &[T]) -> Vec<T> {
        let (normed, _) = self.normalise(&self.gate_norm, scalars);
        let mut gate = vec![T::zero(); nodes * self.focuses * self.heads];
        self.per_focus(&self.gate, nodes, &normed, &mut gate);
        gate.iter_mut().for_each(|g| *g = sigmoid(*g));
        gate
    }

    /// Adds to `grad_scalars` what comes back through the gates; `grad_gate` is used up.
    pub fn gates_adjoint(&self, nodes: usize, scalars: &[T], gate: &[T], grad_gate: &mut [T], grad_scalars: &mut [T]) {
        let (_, inverse) = self.normalise(&self.gate_norm, scalars);
        grad_gate.iter_mut().zip(gate).for_each(|(d, &g)| *d *= g * (T::one() - g));
        let mut grad_normed = vec![T::zero(); scalars.len()];
        self.per_focus_adjoint(&self.gate, nodes, grad_gate, &mut grad_normed);
        self.normalise_adjoint(&self.gate_norm, &inverse, scalars, &grad_normed, grad_scalars);
    }

    /// Multiplies the rows `[(l, m)][node][W]` with the gate of their head.
    pub fn apply_gates(&self, nodes: usize, gate: &[T], rows: &mut [T]) {
        let per_head = self.channels / self.heads;
        for tile in rows.chunks_exact_mut(nodes * self.width()) {
            for (out, &g) in tile.chunks_exact_mut(per_head).zip(gate) {
                out.iter_mut().for_each(|x| *x *= g);
            }
        }
    }

    /// `q k / sqrt(channels of a head)` of each head, added to `logits` `[focus][head]`.
    pub fn add_logits(&self, query: &[T], key: &[T], logits: &mut [T]) {
        let per_head = self.channels / self.heads;
        let scale = self.logit_scale();
        for ((logit, q), k) in logits.iter_mut().zip(query.chunks_exact(per_head)).zip(key.chunks_exact(per_head)) {
            *logit += scale * q.iter().zip(k).map(|(&q, &k)| q * k).sum::<T>();
        }
    }
    /// The factor of [`Self::add_logits`].
    pub fn logit_scale(&self) -> T {
        T::of(1.0 / ((self.channels / self.heads) as f64).sqrt())
    }

    /// Softmax with null mass over the edges of one atom, in place: logits `[edge][focus][head]` become weights.
    ///
    /// `alpha = w^2 exp(logit) / (null + sum w^2 exp(logit))`, shifted by the largest exponent, null mass included;
    /// an edge whose weight is zero takes no part.
    pub fn softmax(&self, weight: &[f64], logits: &mut [T]) {
        let columns = self.focuses * self.heads;
        for (column, &null) in self.null_mass.iter().enumerate() {
            let exponent = |e: usize, logits: &[T]| logits[e * columns + column].wide() + 2.0 * weight[e].ln();
            let top = (0..weight.len()).map(|e| exponent(e, logits)).fold(null.ln(), f64::max);
            let mut sum = (null.ln() - top).exp();
            for e in 0..weight.len() {
                sum += (exponent(e, logits) - top).exp();
            }
            for e in 0..weight.len() {
                logits[e * columns + column] = T::of((exponent(e, logits) - top).exp() / sum);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{check_adjoint, committed_model, random};

    fn stage() -> (AttentionStage<f64>, usize) {
        let model = committed_model("heads_4_focus_2");
        let attention = model.weights().blocks[0].convolution.attention.as_ref().unwrap();
        (AttentionStage::new(attention, model.config().eps), model.config().hidden())
    }

    #[test]
    fn adjoint_of_queries_and_keys_matches_differences() {
        let ((stage, width), nodes) = (stage(), 2);
        let forward = |x: &[f64]| {
            let (query, key) = stage.queries_keys(nodes, x);
            [query, key].concat()
        };
        check_adjoint(&random(1, nodes * width), forward, |x, grad| {
            let (query, key) = grad.split_at(nodes * width);
            let mut out = vec![0.0; x.len()];
            stage.queries_keys_adjoint(nodes, x, query, key, &mut out);
            out
        });
    }

    #[test]
    fn adjoint_of_the_gates_matches_differences() {
        let ((stage, width), nodes) = (stage(), 2);
        check_adjoint(
            &random(2, nodes * width),
            |x| stage.gates(nodes, x),
            |x, grad| {
                let mut out = vec![0.0; x.len()];
                stage.gates_adjoint(nodes, x, &stage.gates(nodes, x), &mut grad.to_vec(), &mut out);
                out
            },
        );
    }

    /// The form that the message stage uses: `dE/dlogit = alpha (g - sum alpha g)`, null mass in the normalisation only.
    #[test]
    fn adjoint_of_the_softmax_matches_differences() {
        let (stage, _) = stage();
        let weight = [0.9, 0.4, 0.0, 1e-3];
        let columns = stage.focuses * stage.heads;
        let forward = |x: &[f64]| {
            let mut alpha = x.to_vec();
            stage.softmax(&weight, &mut alpha);
            alpha
        };
        check_adjoint(&random(3, weight.len() * columns), forward, |x, grad| {
            let alpha = forward(x);
            let along = |column: usize| -> f64 {
                (0..weight.len()).map(|e| alpha[e * columns + column] * grad[e * columns + column]).sum()
            };
            (0..x.len()).map(|k| alpha[k] * (grad[k] - along(k % columns))).collect()
        });
    }

    #[test]
    fn softmax_is_its_definition_and_survives_large_logits() {
        let (stage, _) = stage();
        let (weight, columns) = ([0.9, 0.0], stage.focuses * stage.heads);
        let mut alpha = vec![0.5; 2 * columns];
        stage.softmax(&weight, &mut alpha);
        for (column, null) in stage.null_mass.iter().enumerate() {
            let mass = 0.81 * 0.5f64.exp();
            assert!((alpha[column] - mass / (null + mass)).abs() < 1e-15);
            assert_eq!(alpha[columns + column], 0.0);
        }
        let mut alpha = [vec![800.0; columns], vec![-800.0; columns]].concat();
        stage.softmax(&[1.0, 1.0], &mut alpha);
        assert!(alpha[..columns].iter().all(|&a| a == 1.0) && alpha[columns..].iter().all(|&a| a == 0.0));
    }
}
