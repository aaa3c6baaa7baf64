//! `readout`: residual layers on the node state down to the descriptor (SPEC 12), on a tile of nodes.

use super::ffn::{FfnForward, FfnStage};
use super::grid_product::{scalar_product, scalar_product_adjoint};
use super::node_linear::{expand_frames, expand_frames_adjoint, first_row};
use super::real::{Into, Real, View, activate_with_slope, axpy, dense, matmul, matmul_transposed, sigmoid};
use crate::model::Parameters;
use crate::model::config::{Activation, Config, Readout};
use crate::model::merge::ffn_input;
use crate::model::parameters::{DegreeLinear, Ffn, FfnNonlinearity, GridWeights, Matrix};

/// All layers of the read-out.
pub struct ReadoutStage<T> {
    channels: usize,
    /// Degrees that the layers see: one without an SO(3) read-out.
    degrees: usize,
    hidden: Vec<FfnStage<T>>,
    last: Last<T>,
}

/// The last layer gives scalars only.
enum Last<T> {
    Scalar(FfnStage<T>),
    Grid(ScalarGrid<T>),
}

/// A grid FFN whose scalar output is had in closed form (SPEC 22.3).
struct ScalarGrid<T> {
    left: DegreeLinear<T>,
    right: DegreeLinear<T>,
    scalars: Matrix<T>,
    frames: usize,
    width: usize,
    channels: usize,
    out: Option<Matrix<T>>,
    scalar_gate: Matrix<T>,
    /// Frame 0 of the second linear map's degree 0: C' x C.
    linear2: Matrix<T>,
}

/// What the adjoint of the read-out needs.
pub struct ReadoutForward<T> {
    hidden: Vec<FfnForward<T>>,
    last: LastForward<T>,
}

enum LastForward<T> {
    Scalar(FfnForward<T>),
    Grid(ScalarGridForward<T>),
}

struct ScalarGridForward<T> {
    left: Vec<T>,
    right: Vec<T>,
    scalars: Vec<T>,
    before_gate: Vec<T>,
    gate: Vec<T>,
}

impl<T: Real> ReadoutStage<T> {
    pub fn new(config: &Config, weights: &Parameters<f64>) -> Self {
        let (last, hidden) = weights.readout.split_last().unwrap_or_else(|| unreachable!("there is an output FFN"));
        let scalar = || Last::Scalar(FfnStage::new(last, config.activation));
        ReadoutStage {
            channels: config.channels,
            degrees: if config.readout == Readout::Scalar { 1 } else { config.readout_degree() + 1 },
            hidden: hidden.iter().map(|f| FfnStage::new(f, config.activation)).collect(),
            last: ScalarGrid::new(last).map_or_else(scalar, Last::Grid),
        }
    }

    /// Rows of the node state that the read-out sees.
    pub fn rows(&self) -> usize {
        first_row(self.degrees)
    }

    /// `x`: tile `[(l, m)][node][C]` of [`Self::rows`] rows. Returns the descriptor `[node][C]`.
    pub fn forward(&self, nodes: usize, x: &[T]) -> (Vec<T>, ReadoutForward<T>) {
        let mut u = x[..self.rows() * nodes * self.channels].to_vec();
        let mut layer = vec![T::zero(); u.len()];
        let mut hidden = Vec::with_capacity(self.hidden.len());
        for ffn in &self.hidden {
            hidden.push(ffn.forward(nodes, &u, &mut layer));
            axpy(T::one(), &layer, &mut u);
        }
        let mut out = vec![T::zero(); nodes * self.channels];
        let last = match &self.last {
            Last::Scalar(ffn) => LastForward::Scalar(ffn.forward(nodes, &u, &mut layer)),
            Last::Grid(grid) => LastForward::Grid(grid.forward(nodes, &u, &mut layer)),
        };
        out.copy_from_slice(&u[..nodes * self.channels]);
        axpy(T::one(), &layer[..nodes * self.channels], &mut out);
        (out, ReadoutForward { hidden, last })
    }

    /// Gradient of the rows that went in, from that of the descriptor.
    pub fn adjoint(&self, nodes: usize, forward: &ReadoutForward<T>, grad: &[T]) -> Vec<T> {
        let mut grad_u = vec![T::zero(); self.rows() * nodes * self.channels];
        match (&self.last, &forward.last) {
            (Last::Scalar(ffn), LastForward::Scalar(saved)) => {
                // The scalar output is row 0 of a degree-0 tile.
                ffn.adjoint(nodes, saved, grad, &mut grad_u, Into::Set)
            }
            (Last::Grid(grid), LastForward::Grid(saved)) => grid.adjoint(nodes, saved, grad, &mut grad_u),
            _ => unreachable!("forward and adjoint of the same stage"),
        }
        axpy(T::one(), grad, &mut grad_u[..nodes * self.channels]);
        for (ffn, saved) in self.hidden.iter().zip(&forward.hidden).rev() {
            let grad = grad_u.clone();
            ffn.adjoint(nodes, saved, &grad, &mut grad_u, Into::Add);
        }
        grad_u
    }
}

impl<T: Real> ScalarGrid<T> {
    /// `None` for a gated FFN.
    fn new(ffn: &Ffn<f64>) -> Option<Self> {
        let (FfnNonlinearity::So3Grid { net, .. } | FfnNonlinearity::S2Grid { net }) = &ffn.nonlinearity else {
            return None;
        };
        let out = match &net.op {
            GridWeights::Glu => None,
            GridWeights::Mlp { out, .. } => Some(out),
            GridWeights::Branch { .. } => return None,
        };
        let input = ffn_input(ffn)?;
        let cast = |d: &DegreeLinear<f64>| d.iter().map(|m| m.cast(&T::of)).collect::<DegreeLinear<T>>();
        let c = net.channels;
        let mut linear2 = ffn.linear2[0].cast(&T::of);
        linear2.data.truncate(c * linear2.cols);
        linear2.rows = c;
        Some(ScalarGrid {
            left: cast(&input.left),
            right: cast(&input.right),
            scalars: input.scalars?.cast(&T::of),
            frames: net.frames,
            width: input.width,
            channels: c,
            out: out.map(|m| m.cast(&T::of)),
            scalar_gate: net.scalar_gate[0].cast(&T::of),
            linear2,
        })
    }

    fn expand(&self, weights: &DegreeLinear<T>, nodes: usize, x: &[T]) -> Vec<T> {
        let mut out = vec![T::zero(); self.frames * first_row(self.left.len()) * nodes * self.width];
        expand_frames(weights, self.frames, nodes, x, &mut out);
        out
    }

    fn forward(&self, nodes: usize, x: &[T], out: &mut [T]) -> ScalarGridForward<T> {
        let c = self.channels;
        let (left, right) = (self.expand(&self.left, nodes, x), self.expand(&self.right, nodes, x));
        let mut scalars = vec![T::zero(); nodes * 2 * c];
        matmul(dense(x, nodes, self.scalars.rows), View::from(&self.scalars), &mut scalars, 2 * c, Into::Set);
        let product = scalar_product(self.left.len(), self.frames, nodes, self.width, &left, &right);
        let before_gate = match &self.out {
            None => product,
            Some(w) => {
                let mut mapped = vec![T::zero(); nodes * c];
                matmul(dense(&product, nodes, self.width), w.into(), &mut mapped, c, Into::Set);
                mapped
            }
        };
        let mut gate = vec![T::zero(); nodes * c];
        matmul(dense(&scalars, nodes, 2 * c), View::from(&self.scalar_gate), &mut gate, c, Into::Set);
        gate.iter_mut().for_each(|g| *g = sigmoid(*g));
        let mut gated = before_gate.clone();
        for (i, value) in gated.iter_mut().enumerate() {
            let (a, b) = (scalars[i / c * 2 * c + i % c], scalars[i / c * 2 * c + c + i % c]);
            *value = *value * gate[i] + a * sigmoid(a) * b;
        }
        matmul(dense(&gated, nodes, c), View::from(&self.linear2), out, self.linear2.cols, Into::Set);
        ScalarGridForward { left, right, scalars, before_gate, gate }
    }

    fn adjoint(&self, nodes: usize, saved: &ScalarGridForward<T>, grad: &[T], grad_x: &mut [T]) {
        let c = self.channels;
        let mut grad_gated = vec![T::zero(); nodes * c];
        let grad = dense(grad, nodes, self.linear2.cols);
        matmul_transposed(grad, View::from(&self.linear2), &mut grad_gated, c, Into::Set);
        let mut grad_scalars = vec![T::zero(); nodes * 2 * c];
        let mut grad_gate = vec![T::zero(); nodes * c];
        for (i, g) in grad_gated.iter_mut().enumerate() {
            let (at_a, at_b) = (i / c * 2 * c + i % c, i / c * 2 * c + c + i % c);
            let (act, slope) = activate_with_slope(Activation::Silu, saved.scalars[at_a]);
            grad_scalars[at_a] = *g * slope * saved.scalars[at_b];
            grad_scalars[at_b] = *g * act;
            grad_gate[i] = *g * saved.before_gate[i] * saved.gate[i] * (T::one() - saved.gate[i]);
            *g *= saved.gate[i];
        }
        let grad_gate = dense(&grad_gate, nodes, c);
        matmul_transposed(grad_gate, View::from(&self.scalar_gate), &mut grad_scalars, 2 * c, Into::Add);
        let grad_product = match &self.out {
            None => grad_gated,
            Some(w) => {
                let mut mapped = vec![T::zero(); nodes * self.width];
                matmul_transposed(dense(&grad_gated, nodes, c), w.into(), &mut mapped, self.width, Into::Set);
                mapped
            }
        };
        let (mut left, mut right) = (saved.left.clone(), saved.right.clone());
        let degrees = self.left.len();
        scalar_product_adjoint(degrees, self.frames, nodes, self.width, &mut left, &mut right, &grad_product);
        expand_frames_adjoint(&self.left, self.frames, nodes, &left, grad_x, Into::Set);
        expand_frames_adjoint(&self.right, self.frames, nodes, &right, grad_x, Into::Add);
        let grad_scalars = dense(&grad_scalars, nodes, 2 * c);
        matmul_transposed(grad_scalars, View::from(&self.scalars), grad_x, self.scalars.rows, Into::Add);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{check_adjoint, committed_model, random};

    #[test]
    fn adjoint_matches_differences() {
        let grids = ["readout_glu", "readout_mlp", "readout_glu_layers_2", "readout_mlp_layers_2"];
        for name in [&grids[..], &["base", "readout_scalar_layers_2"]].concat() {
            let model = committed_model(name);
            let stage = ReadoutStage::<f64>::new(model.config(), model.weights());
            let nodes = 2;
            let x = random(1, stage.rows() * nodes * model.config().channels);
            check_adjoint(
                &x,
                |x| stage.forward(nodes, x).0,
                |x, grad| stage.adjoint(nodes, &stage.forward(nodes, x).1, grad),
            );
        }
    }
}
