//! The node part of a block on tiles of nodes, and the block's step over all nodes and edges (SPEC 8).

use super::context::{Array, Constants, Context, Shape};
use super::engine::{Edges, Programs, Radial, Scalar};
use super::machine::Machine;
use super::message::{Features, MessageStage, OutputGradient};
use super::node::{FfnForward, FfnStage, Linear, Norm, ProductForward, ProductStage, Rows, copy_rows};
use super::{Args, Program, Result, sources};
use crate::model::config::BlockDegrees;
use crate::model::{Model, Parameters};
use std::ops::Range;

/// Attention parts that work on nodes.
struct NodeAttention {
    norm: usize,
    qk_scale: u64,
    gate_scale: u64,
    query: Linear,
    key: Linear,
    gate: Linear,
    eps: f64,
}

struct Unit {
    pre_norm: Option<Norm>,
    ffn: FfnStage,
    post_norm: Option<Norm>,
}

/// One block.
pub struct Block {
    pub message: MessageStage,
    channels: usize,
    width: usize,
    focuses: usize,
    focus_channels: usize,
    /// Packed rows of the message and of the node state.
    rows: usize,
    pub node_rows: usize,
    pre_norm: Option<Norm>,
    pre_mix: Linear,
    attention: Option<NodeAttention>,
    product: Option<ProductStage>,
    post_mix: Linear,
    post_norm: Option<Norm>,
    ffns: Vec<Unit>,
    copy: usize,
}

/// What a block leaves for its adjoint.
pub struct BlockState<T> {
    /// `[(l, m)][node][C]`.
    pub x: Rows<T>,
    /// `[(l, m)][owned][W]`.
    pub message: Rows<T>,
    /// `[edge][focus][head]`.
    pub alpha: Array<T>,
}

/// What the adjoint of an update needs.
struct Update<T> {
    /// Scalars after the gate's norm, opened gates, gated message, message after the product, update before its norm.
    normed: Array<T>,
    gate: Array<T>,
    product: Option<ProductForward<T>>,
    y: Array<T>,
    units: Vec<UnitForward<T>>,
    x: Array<T>,
}
struct UnitForward<T> {
    before: Array<T>,
    ffn: FfnForward<T>,
    out: Array<T>,
}

impl Block {
    pub fn new<M: Machine, T: Scalar>(
        programs: &mut Programs,
        constants: &mut Constants<M>,
        model: &Model,
        weights: &Parameters<f64>,
        b: usize,
        radial: &Radial,
    ) -> Result<Self> {
        let config = model.config();
        let BlockDegrees { l, k, node_l, .. } = config.blocks[b];
        let block = &weights.blocks[b];
        let convolution = &block.convolution;
        let message = MessageStage::new::<M, T>(programs, constants, model, weights, b, radial)?;
        let norm = |programs: &mut Programs,
                    constants: &mut Constants<M>,
                    n: &Option<crate::model::parameters::EquivariantNorm<f64>>| {
            n.as_ref().map(|n| Norm::new::<M, T>(programs, constants, n)).transpose()
        };
        let attention = match &convolution.attention {
            None => None,
            Some(a) => Some(NodeAttention {
                norm: programs.add(Program::new(&sources::SCALAR_NORM).real::<T>()),
                qk_scale: constants.real::<T>(&a.qk_norm.data)?,
                gate_scale: constants.real::<T>(&a.gate_norm.data)?,
                query: Linear::focuses::<M, T>(programs, constants, &a.query)?,
                key: Linear::focuses::<M, T>(programs, constants, &a.key)?,
                gate: Linear::focuses::<M, T>(programs, constants, &a.gate)?,
                eps: config.eps,
            }),
        };
        let mut ffns = Vec::new();
        for unit in &block.ffns {
            ffns.push(Unit {
                pre_norm: norm(programs, constants, &unit.pre_norm)?,
                ffn: FfnStage::new::<M, T>(programs, constants, &unit.ffn, config.activation)?,
                post_norm: norm(programs, constants, &unit.post_norm)?,
            });
        }
        let product = match &convolution.product {
            None => None,
            Some(p) => Some(ProductStage::new::<M, T>(programs, constants, p, k)?),
        };
        Ok(Block {
            message,
            channels: config.channels,
            width: config.hidden(),
            focuses: config.n_focus,
            focus_channels: config.focus_dim,
            rows: (l + 1) * (l + 1),
            node_rows: (node_l + 1) * (node_l + 1),
            pre_norm: norm(programs, constants, &block.pre_so2_norm)?,
            pre_mix: Linear::degrees::<M, T>(programs, constants, &convolution.pre_mix)?,
            attention,
            product,
            post_mix: Linear::degrees::<M, T>(programs, constants, &convolution.post_mix)?,
            post_norm: norm(programs, constants, &block.post_so2_norm)?,
            ffns,
            copy: programs.products::<T>(),
        })
    }

    /// Hidden width of the message.
    pub fn width(&self) -> usize {
        self.width
    }

    /// `a -> b` on packed rows, `width_a` to `width_b` values a node.
    fn shape<T>(&self, nodes: usize, a: Rows<T>, width_a: usize, c: Rows<T>, width_c: usize, add: bool) -> Shape {
        Shape { m: nodes, lda: width_a, ldc: width_c, a_plane: a.plane, c_plane: c.plane, add, ..Shape::default() }
    }

    fn scalar_norm<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        a: &NodeAttention,
        scale: u64,
        nodes: usize,
        x: Array<T>,
        out: Array<T>,
    ) -> Result<()> {
        let args = Args::new().address(x.address).address(scale).address(out.address);
        let args = args.value(self.focus_channels as i32).value(self.focuses as i32).value(T::of(a.eps));
        let groups = nodes * self.focuses;
        ctx.warps(a.norm, "scalar_norm", groups, args.value(groups as i64))
    }
    #[allow(clippy::too_many_arguments)]
    fn scalar_norm_adjoint<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        a: &NodeAttention,
        scale: u64,
        nodes: usize,
        x: Array<T>,
        grad: Array<T>,
        grad_x: Array<T>,
    ) -> Result<()> {
        let args = Args::new().address(x.address).address(scale).address(grad.address).address(grad_x.address);
        let args = args.value(self.focus_channels as i32).value(self.focuses as i32).value(T::of(a.eps));
        let groups = nodes * self.focuses;
        ctx.warps(a.norm, "scalar_norm_adjoint", groups, args.value(groups as i64))
    }
    fn focus_shape(&self, nodes: usize, into: usize, add: bool) -> Shape {
        Shape { m: nodes, lda: self.width, ldc: into, add, ..Shape::default() }
    }

    /// Message features of all nodes.
    pub fn features<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        nodes: usize,
        x: Rows<T>,
    ) -> Result<Features<T>> {
        let rows = Rows::tile(ctx.take::<T>(self.rows * nodes * self.width)?, nodes, self.width);
        let heads = if self.attention.is_some() { nodes * self.width } else { 0 };
        let (query, key) = (ctx.take::<T>(heads)?, ctx.take::<T>(heads)?);
        let mark = ctx.mark();
        let input = self.normed(ctx, nodes, x)?;
        let shape = self.shape(nodes, input, self.channels, rows, self.width, false);
        self.pre_mix.run(ctx, input.data, rows.data, shape)?;
        if let Some(a) = &self.attention {
            let normed = ctx.take::<T>(heads)?;
            self.scalar_norm(ctx, a, a.qk_scale, nodes, rows.data, normed)?;
            a.query.run(ctx, normed, query, self.focus_shape(nodes, self.width, false))?;
            a.key.run(ctx, normed, key, self.focus_shape(nodes, self.width, false))?;
        }
        ctx.release(mark);
        Ok(Features { rows, query, key })
    }

    fn normed<M: Machine, T: Scalar>(&self, ctx: &mut Context<M>, nodes: usize, x: Rows<T>) -> Result<Rows<T>> {
        match &self.pre_norm {
            None => Ok(x),
            Some(norm) => {
                let out = Rows::tile(ctx.take::<T>(self.rows * nodes * self.channels)?, nodes, self.channels);
                norm.run(ctx, nodes, x, out, false)?;
                Ok(out)
            }
        }
    }

    /// Update of a tile of nodes; `message`, `features`, `x` are rows that begin at the tile.
    fn update<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        nodes: usize,
        x: Rows<T>,
        message: Rows<T>,
        features: Rows<T>,
    ) -> Result<Update<T>> {
        let (w, c) = (self.width, self.channels);
        let columns = self.message.columns();
        let gated = ctx.take::<T>(self.rows * nodes * w)?;
        let (mut normed, mut gate) = (Array::none(), Array::none());
        if let Some(a) = &self.attention {
            normed = ctx.take::<T>(nodes * w)?;
            gate = ctx.take::<T>(nodes * columns)?;
            self.scalar_norm(ctx, a, a.gate_scale, nodes, features.data, normed)?;
            a.gate.run(ctx, normed, gate, self.focus_shape(nodes, columns, false))?;
            let args = Args::new().address(gate.address).value(gate.len as i64);
            ctx.each(self.message.attention_program(), "attention_gates", gate.len, args)?;
        }
        let args = Args::new().address(gate.address).address(message.data.address).address(gated.address);
        let args = args.value(message.plane as i64).value((nodes * w) as i64).value(nodes as i64);
        ctx.each(self.message.attention_program(), "attention_apply_gates", nodes * w, args)?;
        // The product reads the gated message and writes the sum beside it.
        let mut mixed = gated;
        let mut product = None;
        if let Some(p) = &self.product {
            mixed = ctx.take::<T>(self.rows * nodes * w)?;
            let (from, to) = (Rows::tile(gated, nodes, w), Rows::tile(mixed, nodes, w));
            copy_rows(ctx, self.copy, from, to, self.rows, nodes * w, false)?;
            product = Some(p.forward(ctx, nodes, gated, features, mixed)?);
        }
        let y = ctx.take::<T>(self.rows * nodes * c)?;
        let (from, to) = (Rows::tile(mixed, nodes, w), Rows::tile(y, nodes, c));
        self.post_mix.run(ctx, mixed, y, self.shape(nodes, from, w, to, c, false))?;
        let mut state = ctx.take::<T>(self.node_rows * nodes * c)?;
        copy_rows(ctx, self.copy, x, Rows::tile(state, nodes, c), self.node_rows, nodes * c, false)?;
        match &self.post_norm {
            Some(norm) => norm.run(ctx, nodes, to, Rows::tile(state, nodes, c), true)?,
            None => copy_rows(ctx, self.copy, to, Rows::tile(state, nodes, c), self.rows, nodes * c, true)?,
        }
        let mut units = Vec::with_capacity(self.ffns.len());
        for unit in &self.ffns {
            let before = state;
            let rows = Rows::tile(before, nodes, c);
            let input = match &unit.pre_norm {
                None => before,
                Some(norm) => {
                    let normed = ctx.take::<T>(self.node_rows * nodes * c)?;
                    norm.run(ctx, nodes, rows, Rows::tile(normed, nodes, c), false)?;
                    normed
                }
            };
            let out = ctx.take::<T>(self.node_rows * nodes * c)?;
            let ffn = unit.ffn.forward(ctx, nodes, input, out)?;
            state = ctx.take::<T>(self.node_rows * nodes * c)?;
            let (to, out_rows) = (Rows::tile(state, nodes, c), Rows::tile(out, nodes, c));
            copy_rows(ctx, self.copy, rows, to, self.node_rows, nodes * c, false)?;
            match &unit.post_norm {
                Some(norm) => norm.run(ctx, nodes, out_rows, to, true)?,
                None => copy_rows(ctx, self.copy, out_rows, to, self.node_rows, nodes * c, true)?,
            }
            units.push(UnitForward { before, ffn, out });
        }
        Ok(Update { normed, gate, product, y, units, x: state })
    }

    /// Adjoint of [`Self::update`] on a tile. `grad` (dense, of the state after) becomes that of the state before, on
    /// the way around the message. Returns the gradient of the aggregated message (dense tile).
    #[allow(clippy::too_many_arguments)]
    fn update_adjoint<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        nodes: usize,
        forward: &Update<T>,
        message: Rows<T>,
        features: Rows<T>,
        grad: Array<T>,
        grad_features: Rows<T>,
    ) -> Result<Array<T>> {
        let (w, c) = (self.width, self.channels);
        let columns = self.message.columns();
        let grad_rows = Rows::tile(grad, nodes, c);
        for (unit, saved) in self.ffns.iter().zip(&forward.units).rev() {
            let mark = ctx.mark();
            let mut grad_out = grad;
            if let Some(norm) = &unit.post_norm {
                grad_out = ctx.take::<T>(grad.len)?;
                let out = Rows::tile(saved.out, nodes, c);
                norm.adjoint(ctx, nodes, out, grad_rows, Rows::tile(grad_out, nodes, c), false)?;
            }
            match &unit.pre_norm {
                Some(norm) => {
                    let grad_normed = ctx.take::<T>(grad.len)?;
                    unit.ffn.adjoint(ctx, nodes, &saved.ffn, grad_out, grad_normed, false)?;
                    let before = Rows::tile(saved.before, nodes, c);
                    norm.adjoint(ctx, nodes, before, Rows::tile(grad_normed, nodes, c), grad_rows, true)?;
                }
                None => {
                    let copy = ctx.take::<T>(grad.len)?;
                    let from = Rows::tile(grad_out, nodes, c);
                    copy_rows(ctx, self.copy, from, Rows::tile(copy, nodes, c), self.node_rows, nodes * c, false)?;
                    unit.ffn.adjoint(ctx, nodes, &saved.ffn, copy, grad, true)?;
                }
            }
            ctx.release(mark);
        }
        let grad_message = ctx.take::<T>(self.rows * nodes * w)?;
        let message_rows = Rows::tile(grad_message, nodes, w);
        let mut grad_y = grad_rows;
        if let Some(norm) = &self.post_norm {
            grad_y = Rows::tile(ctx.take::<T>(self.rows * nodes * c)?, nodes, c);
            norm.adjoint(ctx, nodes, Rows::tile(forward.y, nodes, c), grad_rows, grad_y, false)?;
        }
        let shape = self.shape(nodes, grad_y, c, message_rows, w, false);
        self.post_mix.run_adjoint(ctx, grad_y.data, grad_message, shape)?;
        let grad_scalars = grad_features.data;
        if let (Some(product), Some(saved)) = (&self.product, &forward.product) {
            product.adjoint(ctx, nodes, saved, grad_message, grad_features)?;
        }
        if let Some(a) = &self.attention {
            let program = self.message.attention_program();
            let grad_gate = ctx.take::<T>(nodes * columns)?;
            self.head_sums(ctx, nodes, message, message_rows, grad_gate)?;
            let args = Args::new().address(forward.gate.address).address(grad_message.address);
            let args = args.address(grad_message.address).value((nodes * w) as i64);
            let args = args.value((nodes * w) as i64).value(nodes as i64);
            ctx.each(program, "attention_apply_gates", nodes * w, args)?;
            let args = Args::new().address(forward.gate.address).address(grad_gate.address);
            ctx.each(program, "attention_gates_adjoint", grad_gate.len, args.value(grad_gate.len as i64))?;
            let grad_normed = ctx.take::<T>(forward.normed.len)?;
            let shape = Shape { m: nodes, lda: columns, ldc: w, ..Shape::default() };
            a.gate.run_adjoint(ctx, grad_gate, grad_normed, shape)?;
            self.scalar_norm_adjoint(ctx, a, a.gate_scale, nodes, features.data, grad_normed, grad_scalars)?;
        }
        Ok(grad_message)
    }

    fn head_sums<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        nodes: usize,
        a: Rows<T>,
        b: Rows<T>,
        sums: Array<T>,
    ) -> Result<()> {
        let args = Args::new().address(a.data.address).address(b.data.address).address(sums.address);
        let args = args.value(a.plane as i64).value(b.plane as i64).value(nodes as i64);
        let columns = self.message.columns();
        ctx.warps(self.message.attention_program(), "attention_head_sums", nodes * columns, args)
    }

    /// The block: aggregated messages and weights (kept), next node state into `next` (`next_rows` rows of it).
    #[allow(clippy::too_many_arguments)]
    pub fn forward<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        e: &Edges,
        x: Rows<T>,
        message: Rows<T>,
        alpha: Array<T>,
        next: Rows<T>,
        next_rows: usize,
    ) -> Result<()> {
        let mark = ctx.mark();
        let features = self.features(ctx, e.nodes, x)?;
        for (range, edges) in &e.by_destination {
            self.message.forward(ctx, e, &features, (range.clone(), edges.clone()), message, alpha)?;
        }
        for tile in &e.tiles {
            let inner = ctx.mark();
            let (w, c) = (self.width, self.channels);
            let from = |rows: Rows<T>, width: usize| rows.from(tile.start, width);
            let update = self.update(ctx, tile.len(), from(x, c), from(message, w), from(features.rows, w))?;
            let state = Rows::tile(update.x, tile.len(), c);
            copy_rows(ctx, self.copy, state, from(next, c), next_rows, tile.len() * c, false)?;
            ctx.release(inner);
        }
        ctx.release(mark);
        Ok(())
    }

    /// Adjoint of the block: sets `grad_x` (all nodes) from `grad` of the next state (owned nodes, `next_rows` rows).
    #[allow(clippy::too_many_arguments)]
    pub fn adjoint<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        e: &Edges,
        state: &BlockState<T>,
        grad: Rows<T>,
        next_rows: usize,
        grad_x: Rows<T>,
        (radial, torque): (Array<f64>, Array<f64>),
        grad_normaliser: Array<f64>,
    ) -> Result<()> {
        let mark = ctx.mark();
        let (w, c, columns) = (self.width, self.channels, self.message.columns());
        let features = self.features(ctx, e.nodes, state.x)?;
        let grad_message = Rows::tile(ctx.take::<T>(self.rows * e.owned * w)?, e.owned, w);
        let grad_features = Rows::tile(ctx.zeros::<T>(self.rows * e.nodes * w)?, e.nodes, w);
        let along = ctx.take::<T>(e.owned * columns)?;
        ctx.zero(grad_x.data)?;
        for tile in &e.tiles {
            let inner = ctx.mark();
            let n = tile.len();
            let from = |rows: Rows<T>, width: usize| rows.from(tile.start, width);
            let (message, rows) = (from(state.message, w), from(features.rows, w));
            let update = self.update(ctx, n, from(state.x, c), message, rows)?;
            let tile_grad = ctx.zeros::<T>(self.node_rows * n * c)?;
            let dense = Rows::tile(tile_grad, n, c);
            copy_rows(ctx, self.copy, from(grad, c), dense, next_rows.min(self.node_rows), n * c, false)?;
            let tile_features = from(grad_features, w);
            let m = self.update_adjoint(ctx, n, &update, message, rows, tile_grad, tile_features)?;
            let m_rows = Rows::tile(m, n, w);
            self.head_sums(ctx, n, message, m_rows, along.from(tile.start * columns))?;
            copy_rows(ctx, self.copy, dense, from(grad_x, c), self.node_rows, n * c, false)?;
            copy_rows(ctx, self.copy, m_rows, from(grad_message, w), self.rows, n * w, false)?;
            ctx.release(inner);
        }
        if !self.message.attends() {
            let args = Args::new().address(along.address).address(e.normaliser.address);
            let args = args.address(grad_normaliser.address).value(e.owned as i64);
            ctx.each(self.message.attention_program(), "attention_normaliser_adjoint", e.owned, args)?;
        }
        let logits = ctx.take::<T>(if self.message.attends() { e.edges * columns } else { 0 })?;
        let output = OutputGradient { rows: grad_message, along, alpha: state.alpha };
        for (range, edges) in &e.by_source {
            let place: (Range<usize>, Range<usize>) = (range.clone(), edges.clone());
            self.message.adjoint(ctx, e, &features, &output, place, grad_features, logits, (radial, torque))?;
        }
        if let Some(a) = &self.attention {
            let (grad_query, grad_key) = (ctx.zeros::<T>(e.nodes * w)?, ctx.take::<T>(e.nodes * w)?);
            self.message.heads_adjoint(ctx, e, true, e.nodes, logits, features.query, grad_key)?;
            self.message.heads_adjoint(ctx, e, false, e.owned, logits, features.key, grad_query)?;
            let grad_normed = ctx.take::<T>(e.nodes * w)?;
            a.query.run_adjoint(ctx, grad_query, grad_normed, self.focus_shape(e.nodes, w, false))?;
            a.key.run_adjoint(ctx, grad_key, grad_normed, self.focus_shape(e.nodes, w, true))?;
            let scalars = features.rows.data;
            self.scalar_norm_adjoint(ctx, a, a.qk_scale, e.nodes, scalars, grad_normed, grad_features.data)?;
        }
        match &self.pre_norm {
            None => {
                let shape = self.shape(e.nodes, grad_features, w, grad_x, c, true);
                self.pre_mix.run_adjoint(ctx, grad_features.data, grad_x.data, shape)?;
            }
            Some(norm) => {
                let grad_normed = Rows::tile(ctx.take::<T>(self.rows * e.nodes * c)?, e.nodes, c);
                let shape = self.shape(e.nodes, grad_features, w, grad_normed, c, false);
                self.pre_mix.run_adjoint(ctx, grad_features.data, grad_normed.data, shape)?;
                norm.adjoint(ctx, e.nodes, state.x, grad_normed, grad_x, true)?;
            }
        }
        ctx.release(mark);
        Ok(())
    }
}
