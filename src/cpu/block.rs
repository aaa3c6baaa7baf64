//! The node part of a block on tiles of nodes: features for the messages, and the update that follows them (SPEC 8).

use super::attention::AttentionStage;
use super::equivariant_norm::{Normalised, equivariant_norm, equivariant_norm_adjoint};
use super::ffn::{FfnForward, FfnStage};
use super::grid_product::{ProductForward, ProductStage};
use super::node_linear::{degree_linear, degree_linear_adjoint};
use super::profile::{Profile, Stage};
use super::real::{Into, Real, axpy};
use crate::model::Parameters;
use crate::model::config::{BlockDegrees, Config};
use crate::model::parameters::{DegreeLinear, EquivariantNorm, FfnUnit};

/// The node part of one block. Tiles are `[(l, m)][node][channel]`.
pub struct BlockStage<T> {
    channels: usize,
    width: usize,
    /// Packed rows of the message and of the node state.
    rows: usize,
    node_rows: usize,
    pre_norm: Option<EquivariantNorm<T>>,
    pre_mix: DegreeLinear<T>,
    pub attention: Option<AttentionStage<T>>,
    product: Option<ProductStage<T>>,
    post_mix: DegreeLinear<T>,
    post_norm: Option<EquivariantNorm<T>>,
    ffns: Vec<Unit<T>>,
}

struct Unit<T> {
    pre_norm: Option<EquivariantNorm<T>>,
    ffn: FfnStage<T>,
    post_norm: Option<EquivariantNorm<T>>,
}

/// What the adjoint of an update needs.
pub struct UpdateForward<T> {
    gate: Vec<T>,
    product: Option<ProductForward<T>>,
    post_norm: Option<Normalised<T>>,
    ffns: Vec<UnitForward<T>>,
}

struct UnitForward<T> {
    pre_norm: Option<Normalised<T>>,
    ffn: FfnForward<T>,
    post_norm: Option<Normalised<T>>,
}

fn cast_norm<T: Real>(norm: &EquivariantNorm<f64>) -> EquivariantNorm<T> {
    EquivariantNorm {
        scale: norm.scale.cast(&T::of),
        bias: norm.bias.iter().map(|&x| T::of(x)).collect(),
        eps: norm.eps,
    }
}

impl<T: Real> BlockStage<T> {
    pub fn new(config: &Config, weights: &Parameters<f64>, b: usize) -> Self {
        let BlockDegrees { l, k, node_l, .. } = config.blocks[b];
        let block = &weights.blocks[b];
        let cast = |d: &DegreeLinear<f64>| d.iter().map(|m| m.cast(&T::of)).collect::<DegreeLinear<T>>();
        let unit = |u: &FfnUnit<f64>| Unit {
            pre_norm: u.pre_norm.as_ref().map(cast_norm),
            ffn: FfnStage::new(&u.ffn, config.activation),
            post_norm: u.post_norm.as_ref().map(cast_norm),
        };
        BlockStage {
            channels: config.channels,
            width: config.hidden(),
            rows: (l + 1) * (l + 1),
            node_rows: (node_l + 1) * (node_l + 1),
            pre_norm: block.pre_so2_norm.as_ref().map(cast_norm),
            pre_mix: cast(&block.convolution.pre_mix),
            attention: block.convolution.attention.as_ref().map(|a| AttentionStage::new(a, config.eps)),
            product: block.convolution.product.as_ref().map(|p| ProductStage::new(p, k)),
            post_mix: cast(&block.convolution.post_mix),
            post_norm: block.post_so2_norm.as_ref().map(cast_norm),
            ffns: block.ffns.iter().map(unit).collect(),
        }
    }

    /// Rows of the node state, and values a node.
    pub fn node_len(&self) -> usize {
        self.node_rows * self.channels
    }

    /// Message features of a tile: rows `[(l, m)][node][W]`, queries and keys `[node][W]`.
    pub fn features(&self, profile: &Profile, nodes: usize, x: &[T]) -> (Vec<T>, Vec<T>, Vec<T>) {
        let mut time = profile.start();
        let mut features = vec![T::zero(); self.rows * nodes * self.width];
        let (normed, _) = self.pre_norm(nodes, x);
        degree_linear(&self.pre_mix, nodes, normed.as_deref().unwrap_or(x), &mut features, Into::Set);
        let (query, key) = match &self.attention {
            Some(a) => a.queries_keys(nodes, &features[..nodes * self.width]),
            None => (Vec::new(), Vec::new()),
        };
        time.stage(Stage::NodeLinear);
        (features, query, key)
    }

    fn pre_norm(&self, nodes: usize, x: &[T]) -> (Option<Vec<T>>, Option<Normalised<T>>) {
        match &self.pre_norm {
            None => (None, None),
            Some(norm) => {
                let mut out = vec![T::zero(); self.rows * nodes * self.channels];
                let saved = equivariant_norm(norm, nodes, x, &mut out);
                (Some(out), Some(saved))
            }
        }
    }

    /// Gradient of the tile's node state (message rows only) from those of its features, queries and keys.
    pub fn features_adjoint(
        &self,
        profile: &Profile,
        nodes: usize,
        x: &[T],
        features: &[T],
        (mut grad, grad_query, grad_key): (Vec<T>, &[T], &[T]),
    ) -> Vec<T> {
        let mut time = profile.start();
        let scalars = nodes * self.width;
        if let Some(a) = &self.attention {
            a.queries_keys_adjoint(nodes, &features[..scalars], grad_query, grad_key, &mut grad[..scalars]);
        }
        let mut grad_x = vec![T::zero(); self.rows * nodes * self.channels];
        degree_linear_adjoint(&self.pre_mix, nodes, &grad, &mut grad_x, Into::Set);
        if let Some(norm) = &self.pre_norm {
            let mut out = vec![T::zero(); self.rows * nodes * self.channels];
            let saved = equivariant_norm(norm, nodes, x, &mut out);
            equivariant_norm_adjoint(norm, nodes, &saved, &mut grad_x);
        }
        time.stage(Stage::NodeLinear);
        grad_x
    }

    /// `x` becomes the node state after the block. `message`: the aggregated tile, used up; `features` as above.
    pub fn update(
        &self,
        profile: &Profile,
        nodes: usize,
        x: &mut [T],
        message: &mut [T],
        features: &[T],
    ) -> UpdateForward<T> {
        let mut time = profile.start();
        let gate = match &self.attention {
            Some(a) => {
                let gate = a.gates(nodes, &features[..nodes * self.width]);
                a.apply_gates(nodes, &gate, message);
                gate
            }
            None => Vec::new(),
        };
        time.stage(Stage::Attention);
        let product = self.product.as_ref().map(|p| p.forward(nodes, message, features));
        time.stage(Stage::GridProduct);
        let mut y = vec![T::zero(); self.rows * nodes * self.channels];
        degree_linear(&self.post_mix, nodes, message, &mut y, Into::Set);
        let post_norm = self.post_norm.as_ref().map(|norm| {
            let input = y.clone();
            equivariant_norm(norm, nodes, &input, &mut y)
        });
        axpy(T::one(), &y, &mut x[..self.rows * nodes * self.channels]);
        time.stage(Stage::NodeLinear);
        let mut ffns = Vec::with_capacity(self.ffns.len());
        let mut out = vec![T::zero(); self.node_rows * nodes * self.channels];
        for unit in &self.ffns {
            let mut normed = Vec::new();
            let pre_norm = unit.pre_norm.as_ref().map(|norm| {
                normed = vec![T::zero(); x.len()];
                equivariant_norm(norm, nodes, x, &mut normed)
            });
            let ffn = unit.ffn.forward(nodes, if pre_norm.is_some() { &normed } else { x }, &mut out);
            let post_norm = unit.post_norm.as_ref().map(|norm| {
                let input = out.clone();
                equivariant_norm(norm, nodes, &input, &mut out)
            });
            axpy(T::one(), &out, x);
            ffns.push(UnitForward { pre_norm, ffn, post_norm });
        }
        time.stage(Stage::Ffn);
        UpdateForward { gate, product, post_norm, ffns }
    }

    /// Adjoint of [`Self::update`]. `grad`: of the state after the block, becomes that of the state before it (the way
    /// around the message); `message`: the aggregated tile before the gates. Returns the gradients of the aggregated
    /// message and of the features.
    pub fn update_adjoint(
        &self,
        profile: &Profile,
        nodes: usize,
        forward: &UpdateForward<T>,
        message: &[T],
        features: &[T],
        grad: &mut [T],
    ) -> (Vec<T>, Vec<T>) {
        let mut time = profile.start();
        for (unit, saved) in self.ffns.iter().zip(&forward.ffns).rev() {
            let mut grad_out = grad.to_vec();
            if let (Some(norm), Some(saved)) = (&unit.post_norm, &saved.post_norm) {
                equivariant_norm_adjoint(norm, nodes, saved, &mut grad_out);
            }
            match (&unit.pre_norm, &saved.pre_norm) {
                (Some(norm), Some(pre)) => {
                    let mut grad_normed = vec![T::zero(); grad.len()];
                    unit.ffn.adjoint(nodes, &saved.ffn, &grad_out, &mut grad_normed, Into::Set);
                    equivariant_norm_adjoint(norm, nodes, pre, &mut grad_normed);
                    axpy(T::one(), &grad_normed, grad);
                }
                _ => unit.ffn.adjoint(nodes, &saved.ffn, &grad_out, grad, Into::Add),
            }
        }
        time.stage(Stage::Ffn);
        let mut grad_y = grad[..self.rows * nodes * self.channels].to_vec();
        if let (Some(norm), Some(saved)) = (&self.post_norm, &forward.post_norm) {
            equivariant_norm_adjoint(norm, nodes, saved, &mut grad_y);
        }
        let mut grad_message = vec![T::zero(); self.rows * nodes * self.width];
        degree_linear_adjoint(&self.post_mix, nodes, &grad_y, &mut grad_message, Into::Set);
        time.stage(Stage::NodeLinear);
        let mut grad_features = vec![T::zero(); self.rows * nodes * self.width];
        if let (Some(product), Some(saved)) = (&self.product, &forward.product) {
            product.adjoint(nodes, saved, &mut grad_message, &mut grad_features);
        }
        time.stage(Stage::GridProduct);
        if let Some(a) = &self.attention {
            let mut grad_gate = self.head_sums(nodes, forward.gate.len(), message, &grad_message);
            a.apply_gates(nodes, &forward.gate, &mut grad_message);
            let scalars = nodes * self.width;
            let grad_scalars = &mut grad_features[..scalars];
            a.gates_adjoint(nodes, &features[..scalars], &forward.gate, &mut grad_gate, grad_scalars);
        }
        time.stage(Stage::Attention);
        (grad_message, grad_features)
    }

    /// `<a, b>` over the rows, for each of `heads` equal parts of a node's channels, `[node][head]`.
    pub fn head_sums(&self, nodes: usize, heads: usize, a: &[T], b: &[T]) -> Vec<T> {
        let mut sums = vec![T::zero(); heads];
        let part = nodes * self.width / heads;
        for (a, b) in a.chunks_exact(nodes * self.width).zip(b.chunks_exact(nodes * self.width)) {
            for ((sum, a), b) in sums.iter_mut().zip(a.chunks_exact(part)).zip(b.chunks_exact(part)) {
                *sum += a.iter().zip(b).map(|(&a, &b)| a * b).sum::<T>();
            }
        }
        sums
    }
}
