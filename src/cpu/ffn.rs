//! `ffn`: degree-wise linear maps around a grid product or a gated activation (SPEC 9), on a tile of nodes.

use super::grid_product::{GridForward, GridOperation, Projector};
use super::node_linear::{
    contract_frames, contract_frames_adjoint, degree_linear, degree_linear_adjoint, expand_frames,
    expand_frames_adjoint,
};
use super::real::{Into, Real, View, dense, matmul, matmul_transposed, sigmoids, update, update_activated, vectorised};
use crate::model::config::Activation;
use crate::model::merge::ffn_input;
use crate::model::parameters::{DegreeLinear, Ffn, FfnNonlinearity, Matrix};

/// One FFN, ready for tiles `[(l, m)][node][channel]`.
pub struct FfnStage<T> {
    kind: Kind<T>,
    linear2: DegreeLinear<T>,
}

enum Kind<T> {
    Grid(Box<Grid<T>>),
    Gated(Gated<T>),
}

/// A product on a grid between merged input maps and the second linear map.
struct Grid<T> {
    left: DegreeLinear<T>,
    right: DegreeLinear<T>,
    scalars: Matrix<T>,
    frames: usize,
    operation: GridOperation<T>,
}

/// What the adjoint of an FFN needs.
pub enum FfnForward<T> {
    Grid { scalars: Vec<T>, grid: GridForward<T> },
    Gated { hidden: Vec<T>, gate: Vec<T> },
}

impl<T: Real> FfnStage<T> {
    /// `activation`: of the gated form; grids use silu (SPEC 9).
    pub fn new(ffn: &Ffn<f64>, activation: Activation) -> Self {
        let cast = |d: &DegreeLinear<f64>| d.iter().map(|m| m.cast(&T::of)).collect::<DegreeLinear<T>>();
        let degree = ffn.linear1.len() - 1;
        let grid = |projector, net: &crate::model::parameters::GridNet<f64>| {
            let input = ffn_input(ffn)?;
            Some(Kind::Grid(Box::new(Grid {
                operation: GridOperation::new(projector, net, input.width),
                frames: net.frames,
                left: cast(&input.left),
                right: cast(&input.right),
                scalars: input.scalars?.cast(&T::of),
            })))
        };
        let kind = match &ffn.nonlinearity {
            FfnNonlinearity::So3Grid { k, net } => grid(Projector::so3(degree, *k), net),
            FfnNonlinearity::S2Grid { net } => grid(Projector::s2(degree), net),
            FfnNonlinearity::Gated { hidden, glu, gate } => Some(Kind::Gated(Gated {
                linear1: cast(&ffn.linear1),
                hidden: *hidden,
                glu: *glu,
                gate: gate.as_ref().map(|g| g.cast(&T::of)),
                activation,
            })),
        };
        // `ffn_input` gives the maps and scalars of every grid FFN.
        let kind = kind.unwrap_or_else(|| unreachable!("a grid FFN has merged input maps"));
        FfnStage { kind, linear2: cast(&ffn.linear2) }
    }

    /// `out <- ffn(x)`.
    pub fn forward(&self, nodes: usize, x: &[T], out: &mut [T]) -> FfnForward<T> {
        match &self.kind {
            Kind::Grid(grid) => {
                let Grid { left, right, scalars, frames, operation } = &**grid;
                let mut l = vec![T::zero(); operation.input_len(nodes)];
                let mut r = vec![T::zero(); operation.input_len(nodes)];
                expand_frames(left, *frames, nodes, x, &mut l);
                expand_frames(right, *frames, nodes, x, &mut r);
                let mut s = vec![T::zero(); nodes * scalars.cols];
                matmul(dense(x, nodes, scalars.rows), scalars.into(), &mut s, scalars.cols, Into::Set);
                let (grid_out, grid) = operation.forward(nodes, &l, &r, &s);
                contract_frames(&self.linear2, *frames, nodes, &grid_out, out, Into::Set);
                FfnForward::Grid { scalars: s, grid }
            }
            Kind::Gated(gated) => {
                let (hidden, gate, activated) = gated.forward(nodes, x);
                degree_linear(&self.linear2, nodes, &activated, out, Into::Set);
                FfnForward::Gated { hidden, gate }
            }
        }
    }

    /// `grad_x <- adjoint(grad)` (set or added).
    pub fn adjoint(&self, nodes: usize, forward: &FfnForward<T>, grad: &[T], grad_x: &mut [T], into: Into) {
        match (&self.kind, forward) {
            (Kind::Grid(parts), FfnForward::Grid { scalars: s, grid }) => {
                let Grid { left, right, scalars, frames, operation } = &**parts;
                let width = self.linear2[0].rows;
                let rows = self.linear2.len() * self.linear2.len() * nodes;
                let mut grad_grid = vec![T::zero(); rows * width];
                contract_frames_adjoint(&self.linear2, *frames, nodes, grad, &mut grad_grid);
                let (l, r, grad_s) = operation.adjoint(nodes, grid, s, &grad_grid);
                expand_frames_adjoint(left, *frames, nodes, &l, grad_x, into);
                expand_frames_adjoint(right, *frames, nodes, &r, grad_x, Into::Add);
                let grad_s = dense(&grad_s, nodes, scalars.cols);
                matmul_transposed(grad_s, scalars.into(), grad_x, scalars.rows, Into::Add);
            }
            (Kind::Gated(gated), FfnForward::Gated { hidden, gate }) => {
                let mut grad_activated = vec![T::zero(); gated.activated_len(nodes)];
                degree_linear_adjoint(&self.linear2, nodes, grad, &mut grad_activated, Into::Set);
                gated.adjoint(nodes, hidden, gate, &grad_activated, grad_x, into);
            }
            _ => unreachable!("forward and adjoint of the same stage"),
        }
    }
}

/// Gated activation on packed rows (SPEC 8.3).
struct Gated<T> {
    linear1: DegreeLinear<T>,
    hidden: usize,
    glu: bool,
    /// H x (L H).
    gate: Option<Matrix<T>>,
    activation: Activation,
}

impl<T: Real> Gated<T> {
    fn rows(&self) -> usize {
        self.linear1.len() * self.linear1.len()
    }
    fn activated_len(&self, nodes: usize) -> usize {
        self.rows() * nodes * self.hidden
    }
    fn width(&self) -> usize {
        self.linear1[0].cols
    }
    /// The scalars that open the gates: the gate half of a GLU, else the scalars themselves.
    fn gate_input<'a>(&self, nodes: usize, hidden: &'a [T]) -> View<'a, T> {
        let first = if self.glu { self.hidden } else { 0 };
        View { data: &hidden[first..], rows: nodes, cols: self.hidden, stride: self.width() }
    }

    /// Hidden rows, opened gates `[node][l - 1][H]` and the activated rows.
    fn forward(&self, nodes: usize, x: &[T]) -> (Vec<T>, Vec<T>, Vec<T>) {
        let width = self.width();
        let mut hidden = vec![T::zero(); self.rows() * nodes * width];
        degree_linear(&self.linear1, nodes, x, &mut hidden, Into::Set);
        let mut gate = Vec::new();
        if let Some(w) = &self.gate {
            gate = vec![T::zero(); nodes * w.cols];
            matmul(self.gate_input(nodes, &hidden), w.into(), &mut gate, w.cols, Into::Set);
            sigmoids(&mut gate);
        }
        let mut activated = vec![T::zero(); self.activated_len(nodes)];
        vectorised!(self.activate_rows(nodes, &hidden, &gate, &mut activated));
        (hidden, gate, activated)
    }

    #[inline(always)]
    fn activate_rows(&self, nodes: usize, hidden: &[T], gate: &[T], activated: &mut [T]) {
        let (h, width) = (self.hidden, self.width());
        for (i, out) in activated.chunks_exact_mut(h).enumerate() {
            let (row, node) = (i / nodes, i % nodes);
            let value = &hidden[i * width..(i + 1) * width];
            match row.isqrt() {
                0 if self.glu => {
                    let (value, gate) = value.split_at(h);
                    update_activated(self.activation, gate, value, out, |_, value, act, _| value * act);
                }
                0 => update_activated(self.activation, value, value, out, |_, _, act, _| act),
                l => {
                    let gate = &gate[(node * (self.linear1.len() - 1) + l - 1) * h..][..h];
                    (0..h).for_each(|c| out[c] = value[c] * gate[c]);
                }
            }
        }
    }

    fn adjoint(&self, nodes: usize, hidden: &[T], gate: &[T], grad: &[T], grad_x: &mut [T], into: Into) {
        let (h, width) = (self.hidden, self.width());
        let mut grad_hidden = vec![T::zero(); self.rows() * nodes * width];
        let mut grad_gate = vec![T::zero(); gate.len()];
        vectorised!(self.activate_rows_adjoint(nodes, (hidden, gate), grad, &mut grad_hidden, &mut grad_gate));
        if let Some(w) = &self.gate {
            grad_gate.iter_mut().zip(gate).for_each(|(d, &g)| *d *= g * (T::one() - g));
            let first = if self.glu { h } else { 0 };
            let grad_gate = dense(&grad_gate, nodes, w.cols);
            matmul_transposed(grad_gate, w.into(), &mut grad_hidden[first..], width, Into::Add);
        }
        degree_linear_adjoint(&self.linear1, nodes, &grad_hidden, grad_x, into);
    }

    #[inline(always)]
    fn activate_rows_adjoint(
        &self,
        nodes: usize,
        (hidden, gate): (&[T], &[T]),
        grad: &[T],
        grad_hidden: &mut [T],
        grad_gate: &mut [T],
    ) {
        let (h, width, degrees) = (self.hidden, self.width(), self.linear1.len());
        for (i, g) in grad.chunks_exact(h).enumerate() {
            let (row, node) = (i / nodes, i % nodes);
            let value = &hidden[i * width..(i + 1) * width];
            let out = &mut grad_hidden[i * width..(i + 1) * width];
            match row.isqrt() {
                0 if self.glu => {
                    let ((value, gate), (out, out_gate)) = (value.split_at(h), out.split_at_mut(h));
                    update_activated(self.activation, gate, g, out, |_, g, act, _| g * act);
                    update_activated(self.activation, gate, g, out_gate, |_, g, _, slope| g * slope);
                    update(out_gate, value, value, |grad, value, _| grad * value);
                }
                0 => update_activated(self.activation, value, g, out, |_, g, _, slope| g * slope),
                l => {
                    let at = (node * (degrees - 1) + l - 1) * h;
                    for c in 0..h {
                        out[c] = g[c] * gate[at + c];
                        grad_gate[at + c] += g[c] * value[c];
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

    #[test]
    fn adjoint_matches_differences() {
        let grids =
            ["base", "ffn_s2_mlp", "ffn_s2_branch_2", "ffn_so3_glu", "ffn_so3_mlp", "ffn_so3_branch_2", "kmax_2"];
        for name in [&grids[..], &["ffn_gated", "ffn_plain"]].concat() {
            let model = committed_model(name);
            let stage = FfnStage::<f64>::new(&model.weights().blocks[0].ffns[0].ffn, model.config().activation);
            let (nodes, degree) = (2, model.config().blocks[0].node_l);
            let x = random(1, (degree + 1) * (degree + 1) * nodes * model.config().channels);
            let forward = |x: &[f64]| {
                let mut out = vec![0.0; x.len()];
                stage.forward(nodes, x, &mut out);
                out
            };
            check_adjoint(&x, forward, |x, grad| {
                let saved = stage.forward(nodes, x, &mut vec![0.0; x.len()]);
                let mut out = vec![0.0; x.len()];
                stage.adjoint(nodes, &saved, grad, &mut out, Into::Set);
                out
            });
        }
    }
}
