//! `so2_stack`: the gated stack of SO(2)-equivariant layers on a chunk of edges (SPEC 8.2, step 5).

use super::real::{Into, Real, View, axpy, matmul, sigmoids, update, update_activated, vectorised};
use super::scratch::Buffer;
use crate::math::layout::m_major;
use crate::model::config::Activation;
use crate::model::parameters::{Matrix, So2Layer};

/// The layers of one block. Features: `[edge][focus][row][channel]`.
pub struct So2Stack<T> {
    focuses: usize,
    channels: usize,
    degree: usize,
    /// Degree of each row.
    degrees: Vec<usize>,
    /// First row and row count of m = 0, then of each |m| (both signs).
    orders: Vec<(usize, usize)>,
    layers: Vec<So2Layer<T>>,
    /// The same matrices transposed: a product with them packs its operand without strides.
    transposed: Vec<So2Layer<T>>,
    activation: Activation,
}

/// A gated layer's values before the activation, and its opened gates.
pub struct LayerForward<T: Real> {
    linear: Buffer<T>,
    /// `[edge][focus][l - 1][channel]`.
    gate: Buffer<T>,
}

impl<T: Real> So2Stack<T> {
    pub fn new(
        layers: &[So2Layer<f64>],
        (l, m): (usize, usize),
        (focuses, channels): (usize, usize),
        activation: Activation,
    ) -> Self {
        let convert = |matrix: &dyn Fn(&Matrix<f64>) -> Matrix<T>| {
            let all = |v: &Vec<Matrix<f64>>| v.iter().map(matrix).collect::<Vec<_>>();
            let layer = |layer: &So2Layer<f64>| So2Layer {
                m0: all(&layer.m0),
                m: layer.m.iter().map(all).collect(),
                gate: layer.gate.as_ref().map(all),
                gated: layer.gated,
            };
            layers.iter().map(layer).collect()
        };
        let mut start = 0;
        let orders = (0..=m).map(|order| {
            let rows = (l - order + 1) * if order == 0 { 1 } else { 2 };
            start += rows;
            (start - rows, rows)
        });
        So2Stack {
            focuses,
            channels,
            degree: l,
            degrees: m_major(l, m).iter().map(|r| r.0).collect(),
            orders: orders.collect(),
            layers: convert(&|m| m.cast(&T::of)),
            transposed: convert(&|m| transposed(m).cast(&T::of)),
            activation,
        }
    }

    fn focus_len(&self) -> usize {
        self.degrees.len() * self.channels
    }
    fn edge_len(&self) -> usize {
        self.focuses * self.focus_len()
    }

    /// The products of a layer: for each focus and |m|, (first value of an edge, width, weights).
    fn each_product<'a>(&'a self, layer: &'a So2Layer<T>) -> impl Iterator<Item = (usize, usize, View<'a, T>)> {
        (0..self.focuses).flat_map(move |f| {
            self.orders.iter().enumerate().map(move |(m, &(row, rows))| {
                let weights = if m == 0 { &layer.m0[f] } else { &layer.m[m - 1][f] };
                (f * self.focus_len() + row * self.channels, rows * self.channels, View::from(weights))
            })
        })
    }

    /// `y` goes through all layers in place. Returns what the adjoint needs, one entry a gated layer.
    pub fn forward(&self, edges: usize, y: &mut [T]) -> Vec<LayerForward<T>> {
        let stride = self.edge_len();
        let mut saved = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            let mut linear = Buffer::stale(edges * stride);
            for (first, width, weights) in self.each_product(layer) {
                let input = View { data: &y[first.min(y.len())..], rows: edges, cols: width, stride };
                let at = first.min(linear.len());
                matmul(input, weights, &mut linear[at..], stride, Into::Set);
            }
            if !layer.gated {
                axpy(T::one(), &linear, y);
                continue;
            }
            let gate = self.gates(layer, edges, &linear);
            self.add_activated(&linear, &gate, y);
            saved.push(LayerForward { linear, gate });
        }
        saved
    }

    fn gates(&self, layer: &So2Layer<T>, edges: usize, linear: &[T]) -> Buffer<T> {
        let Some(weights) = &layer.gate else { return Buffer::stale(0) };
        let gates = self.degree * self.channels;
        let mut gate = Buffer::stale(edges * self.focuses * gates);
        for (f, w) in weights.iter().enumerate() {
            let at = (f * self.focus_len()).min(linear.len());
            let scalars = View { data: &linear[at..], rows: edges, cols: self.channels, stride: self.edge_len() };
            let at = (f * gates).min(gate.len());
            matmul(scalars, w.into(), &mut gate[at..], self.focuses * gates, Into::Set);
        }
        sigmoids(&mut gate);
        gate
    }

    fn add_activated(&self, linear: &[T], gate: &[T], y: &mut [T]) {
        vectorised!(self.add_activated_rows(linear, gate, y));
    }

    #[inline(always)]
    fn add_activated_rows(&self, linear: &[T], gate: &[T], y: &mut [T]) {
        let c = self.channels;
        for (i, (y, z)) in y.chunks_exact_mut(self.focus_len()).zip(linear.chunks_exact(self.focus_len())).enumerate() {
            for (row, &l) in self.degrees.iter().enumerate() {
                let (y, z) = (&mut y[row * c..(row + 1) * c], &z[row * c..(row + 1) * c]);
                if l == 0 {
                    update_activated(self.activation, z, z, y, |y, _, value, _| y + value);
                } else {
                    let gate = &gate[(i * self.degree + l - 1) * c..][..c];
                    update(y, z, gate, |y, z, gate| y + z * gate);
                }
            }
        }
    }

    /// Adjoint of [`Self::forward`]: `grad` of the result becomes that of the input, in place.
    pub fn adjoint(&self, edges: usize, saved: &[LayerForward<T>], grad: &mut [T]) {
        let stride = self.edge_len();
        let mut saved = saved.iter().rev();
        let mut grad_linear = Buffer::stale(edges * stride);
        for layer in self.transposed.iter().rev() {
            match saved.next_if_gated(layer.gated) {
                Some(forward) => self.activation_adjoint(layer, edges, forward, grad, &mut grad_linear),
                None => grad_linear.copy_from_slice(grad),
            }
            for (first, width, weights) in self.each_product(layer) {
                let at = first.min(grad.len());
                let input = View { data: &grad_linear[at..], rows: edges, cols: width, stride };
                matmul(input, weights, &mut grad[at..], stride, Into::Add);
            }
        }
    }

    fn activation_adjoint(
        &self,
        layer: &So2Layer<T>,
        edges: usize,
        forward: &LayerForward<T>,
        grad: &[T],
        grad_linear: &mut [T],
    ) {
        let mut grad_gate = Buffer::zeros(forward.gate.len());
        let grad_gate = &mut grad_gate[..];
        vectorised!(self.activation_adjoint_rows(forward, grad, grad_linear, grad_gate));
        let (c, n) = (self.channels, self.focus_len());
        let Some(weights) = &layer.gate else { return };
        grad_gate.iter_mut().zip(&*forward.gate).for_each(|(d, &g)| *d *= g * (T::one() - g));
        let gates = self.degree * c;
        for (f, w) in weights.iter().enumerate() {
            let at = (f * gates).min(grad_gate.len());
            let input = View { data: &grad_gate[at..], rows: edges, cols: gates, stride: self.focuses * gates };
            let at = (f * n).min(grad_linear.len());
            matmul(input, w.into(), &mut grad_linear[at..], self.edge_len(), Into::Add);
        }
    }

    #[inline(always)]
    fn activation_adjoint_rows(
        &self,
        forward: &LayerForward<T>,
        grad: &[T],
        grad_linear: &mut [T],
        grad_gate: &mut [T],
    ) {
        let (c, n) = (self.channels, self.focus_len());
        for (i, out) in grad_linear.chunks_exact_mut(n).enumerate() {
            let (grad, z) = (&grad[i * n..(i + 1) * n], &forward.linear[i * n..(i + 1) * n]);
            for (row, &l) in self.degrees.iter().enumerate() {
                let at = row * c..(row + 1) * c;
                let (out, grad, z) = (&mut out[at.clone()], &grad[at.clone()], &z[at]);
                if l == 0 {
                    update_activated(self.activation, z, grad, out, |_, grad, _, slope| grad * slope);
                } else {
                    let at = (i * self.degree + l - 1) * c..(i * self.degree + l) * c;
                    let (gate, grad_gate) = (&forward.gate[at.clone()], &mut grad_gate[at]);
                    update(out, grad, gate, |_, grad, gate| grad * gate);
                    update(grad_gate, grad, z, |sum, grad, z| sum + grad * z);
                }
            }
        }
    }
}

fn transposed(m: &Matrix<f64>) -> Matrix<f64> {
    let data = (0..m.cols).flat_map(|j| (0..m.rows).map(move |i| m.data[i * m.cols + j])).collect();
    Matrix { rows: m.cols, cols: m.rows, data }
}

/// Saved values exist for gated layers only.
trait NextIfGated<'a, T: Real> {
    fn next_if_gated(&mut self, gated: bool) -> Option<&'a LayerForward<T>>;
}

impl<'a, T: Real, I: Iterator<Item = &'a LayerForward<T>>> NextIfGated<'a, T> for I {
    fn next_if_gated(&mut self, gated: bool) -> Option<&'a LayerForward<T>> {
        if gated { self.next() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{check_adjoint, committed_model, random};

    #[test]
    fn adjoint_matches_differences() {
        for name in ["lmax_0", "mmax_2", "neo_like"] {
            let model = committed_model(name);
            let (config, degrees) = (model.config(), model.config().blocks[0]);
            let layers = &model.weights().blocks[0].convolution.layers;
            let shape = (config.n_focus, config.focus_dim);
            let stack = So2Stack::<f64>::new(layers, (degrees.l, degrees.m), shape, config.activation);
            let edges = 2;
            let x = random(1, edges * stack.edge_len());
            let forward = |x: &[f64]| {
                let mut y = x.to_vec();
                stack.forward(edges, &mut y);
                y
            };
            check_adjoint(&x, forward, |x, grad| {
                let saved = stack.forward(edges, &mut x.to_vec());
                let mut grad = grad.to_vec();
                stack.adjoint(edges, &saved, &mut grad);
                grad
            });
        }
    }
}
