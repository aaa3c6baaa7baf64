//! The edge part of a block on the device: a chunk of edges from gathered sources to aggregated destinations, and its
//! adjoint. Chunks hold whole destination atoms forward and whole source atoms in the adjoint (DESIGN section 6).

use super::context::{Array, Constants, Context, Shape, Table};
use super::engine::{Edges, PRODUCT_TILE, Programs, Radial, Scalar, activation_name};
use super::machine::Machine;
use super::node::Rows;
use super::products::{Products, transpose};
use super::{Args, Launch, Program, Result, sources};
use crate::math::layout::m_major;
use crate::model::config::{BlockDegrees, Config, RadialMode};
use crate::model::merge::radial_kernel;
use crate::model::parameters::Matrix;
use crate::model::{Model, Parameters};
use std::ops::Range;

/// The edge part of one block.
pub struct MessageStage {
    degree: usize,
    rows: usize,
    packed: usize,
    focuses: usize,
    channels: usize,
    width: usize,
    columns: usize,
    attend: bool,
    kernel_columns: usize,
    record: usize,
    radial: usize,
    kernel: u64,
    kernel_t: u64,
    kernel_types: u64,
    rotate_mix: usize,
    basis: u64,
    wigner: usize,
    stack: usize,
    products: usize,
    layers: Vec<Layer>,
    competition: Option<Competition>,
    attention: usize,
    null_mass: u64,
}

struct Layer {
    forward: Table,
    adjoint: Table,
    gated: bool,
    gate: Option<(Table, Table)>,
}
struct Competition {
    program: usize,
    scale: u64,
    weight: u64,
    eps: f64,
}

/// Message features of the nodes.
#[derive(Clone, Copy)]
pub struct Features<T> {
    /// `[(l, m)][node][W]`.
    pub rows: Rows<T>,
    /// `[node][W]`.
    pub query: Array<T>,
    pub key: Array<T>,
}

/// Gradients by destination, as on the CPU.
#[derive(Clone, Copy)]
pub struct OutputGradient<T> {
    pub rows: Rows<T>,
    pub along: Array<T>,
    pub alpha: Array<T>,
}

struct Chunk<T> {
    kernel: Array<T>,
    records: Array<T>,
    captured: Array<T>,
    y: Array<T>,
    share: Array<T>,
    /// Values before the activation and opened gates of each gated layer; in a forward pass one of each, reused.
    layers: Vec<(Array<T>, Array<T>)>,
}

impl MessageStage {
    pub fn new<M: Machine, T: Scalar>(
        programs: &mut Programs,
        constants: &mut Constants<M>,
        model: &Model,
        weights: &Parameters<f64>,
        b: usize,
        radial: &Radial,
    ) -> Result<Self> {
        let config: &Config = model.config();
        let BlockDegrees { l, m, .. } = config.blocks[b];
        let convolution = &weights.blocks[b].convolution;
        let (focuses, channels) = (config.n_focus, config.focus_dim);
        let heads = config.n_atten_head.max(1);
        let merged = radial_kernel(weights, convolution, l);
        let kernel_columns = merged.edge.cols;
        let rows = m_major(l, m).len();
        let shape = |p: Program| {
            let p = p.real::<T>().define("LMAX", l).define("MMAX", m).define("FOCUSES", focuses);
            p.define("CHANNELS", channels).define("HEADS", heads)
        };
        let compete = i32::from(convolution.competition.is_some());
        let attend = convolution.attention.is_some();
        let (mode, rank) = match config.radial_mode {
            RadialMode::None => (0, 1),
            RadialMode::Degree => (1, 1),
            RadialMode::DegreeChannel { rank: 0 } => (3, 1),
            RadialMode::DegreeChannel { rank } => (2, rank),
        };
        let basis = convolution.degree_mixer.as_ref().and_then(|d| d.basis.as_ref());
        let rotate_mix = shape(Program::new(&sources::ROTATE_MIX)).define("MODE", mode).define("RANK", rank);
        let rotate_mix = rotate_mix.define("KERNEL_STRIDE", kernel_columns).define("CAPTURE", compete);
        let attention = shape(Program::new(&sources::ATTENTION)).define("KERNEL_STRIDE", kernel_columns);
        let attention = attention.define("MIXING", merged.mixing).define("COMPETE", compete);
        let attention = attention.define("ATTEND", i32::from(attend));
        let stack = shape(Program::new(&sources::SO2_STACK)).define("ACTIVATION", activation_name(config.activation));
        let mut layers = Vec::new();
        for layer in &convolution.layers {
            let mut blocks: Vec<(usize, &Matrix<f64>)> = Vec::new();
            let mut start = 0;
            for order in 0..=m {
                for f in 0..focuses {
                    let w = if order == 0 { &layer.m0[f] } else { &layer.m[order - 1][f] };
                    blocks.push((f * rows * channels + start * channels, w));
                }
                start += (l - order + 1) * if order == 0 { 1 } else { 2 };
            }
            let transposed: Vec<(usize, Matrix<f64>)> = blocks.iter().map(|&(at, w)| (at, transpose(w))).collect();
            let back: Vec<(usize, &Matrix<f64>)> = transposed.iter().map(|(at, w)| (*at, w)).collect();
            let gate = match &layer.gate {
                None => None,
                Some(gates) => {
                    let place = |f: usize| (f * rows * channels, f * l * channels);
                    let forward: Vec<_> = gates.iter().enumerate().map(|(f, w)| (place(f).0, place(f).1, w)).collect();
                    let transposed: Vec<_> = gates.iter().map(transpose).collect();
                    let adjoint: Vec<_> =
                        transposed.iter().enumerate().map(|(f, w)| (place(f).1, place(f).0, w)).collect();
                    Some((
                        constants.table::<T>(&Products::scattered(&forward))?,
                        constants.table::<T>(&Products::scattered(&adjoint))?,
                    ))
                }
            };
            layers.push(Layer {
                forward: constants.table::<T>(&Products::blocks(&blocks))?,
                adjoint: constants.table::<T>(&Products::blocks(&back))?,
                gated: layer.gated,
                gate,
            });
        }
        let competition = match &convolution.competition {
            None => None,
            Some(c) => {
                let program = shape(Program::new(&sources::FOCUS_COMPETITION));
                Some(Competition {
                    program: programs.add(program.define("NORM", i32::from(c.norm.is_some()))),
                    scale: c.norm.as_ref().map_or(Ok(0), |n| constants.real::<T>(&n.data))?,
                    weight: constants.real::<T>(&c.weight.data)?,
                    eps: config.eps,
                })
            }
        };
        let radial_program = radial.program::<T>(Program::new(&sources::RADIAL)).define("COLUMNS", kernel_columns);
        let radial_program = radial_program.define("WEIGHTED", i32::from(config.version >= 1.1));
        let null_mass = convolution.attention.as_ref().map_or(&[][..], |a| &a.null_mass.data);
        Ok(MessageStage {
            degree: l,
            rows,
            packed: (l + 1) * (l + 1),
            focuses,
            channels,
            width: focuses * channels,
            columns: focuses * heads,
            attend,
            kernel_columns,
            record: super::wigner::record_len(l),
            radial: programs.add(radial_program),
            kernel: constants.real::<T>(&merged.edge.data)?,
            kernel_t: constants.real::<T>(&transpose(&merged.edge).data)?,
            kernel_types: constants.real::<T>(&merged.types.data)?,
            rotate_mix: programs.add(rotate_mix),
            basis: basis.map_or(Ok(0), |b| constants.real::<T>(&b.data))?,
            wigner: programs.add(super::wigner::program::<T>(l)),
            stack: programs.add(stack),
            products: programs.products::<T>(),
            layers,
            competition,
            attention: programs.add(attention),
            null_mass: constants.keep(null_mass)?,
        })
    }

    /// Attention columns of an edge.
    pub fn columns(&self) -> usize {
        self.columns
    }
    /// Packed rows of a node.
    pub fn packed(&self) -> usize {
        self.packed
    }
    /// Whether there is attention.
    pub fn attends(&self) -> bool {
        self.attend
    }
    /// The program of the attention kernels that work on nodes.
    pub fn attention_program(&self) -> usize {
        self.attention
    }
    /// Values of an edge in the edge frame.
    fn edge_len(&self) -> usize {
        self.focuses * self.rows * self.channels
    }
    /// Blocks that hold the channels of a node and several edges at once, as in the kernels.
    fn block_threads(&self) -> u32 {
        let warps = self.width.div_ceil(32);
        (if warps > 8 { warps } else { warps * (8 / warps) }) as u32 * 32
    }

    fn evaluate<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        e: &Edges,
        nodes: &Features<T>,
        list: u64,
        edges: Range<usize>,
        keep: bool,
    ) -> Result<Chunk<T>> {
        let (n, first) = (edges.len(), edges.start as i64);
        let kernel = ctx.take::<T>(n * self.kernel_columns)?;
        let records = ctx.take::<T>(n * self.record)?;
        let captured = ctx.take::<T>(if self.competition.is_some() { n * self.width } else { 0 })?;
        let y = ctx.take::<T>(n * self.edge_len())?;
        let share = ctx.take::<T>(if self.competition.is_some() { n * self.focuses } else { 0 })?;
        let r = e.radial;
        let args = Args::new().address(list).value(first).value(n as i64).address(e.distance.address);
        let args = args.address(e.weight.address).address(e.src.address).address(e.dst.address);
        let args = args.address(e.types.address).address(r.frequencies).address(r.weights);
        let args = args.address(self.kernel).address(self.kernel_types).address(kernel.address);
        ctx.warps(self.radial, "radial_forward", n, args.value(r.rcut).value(r.exponent))?;
        let vec = if list == 0 {
            e.direction.from(3 * edges.start)
        } else {
            let gathered = ctx.take::<f64>(3 * n)?;
            let args = Args::new().address(list).value(first).value(n as i64).address(e.direction.address);
            ctx.each(e.program, "gather_directions", 3 * n, args.address(gathered.address))?;
            gathered
        };
        let args = Args::new().address(vec.address).address(records.address).value(n as i64);
        ctx.run(self.wigner, "wigner_assemble", super::wigner::launch(self.degree, n), args)?;
        let args = Args::new().address(list).value(first).value(n as i64).address(e.src.address);
        let args = args.address(records.address).address(kernel.address).address(self.basis);
        let args = args.address(nodes.rows.data.address).value(nodes.rows.plane as i64);
        ctx.warps(self.rotate_mix, "rotate_mix_forward", n, args.address(y.address).address(captured.address))?;
        let layers = self.stack_forward(ctx, n, y, keep)?;
        if let Some(c) = &self.competition {
            let args = Args::new().address(captured.address).address(c.scale).address(c.weight);
            let args = args.address(share.address).value(T::of(c.eps)).value(n as i64);
            ctx.warps(c.program, "focus_competition_forward", n, args)?;
        }
        Ok(Chunk { kernel, records, captured, y, share, layers })
    }

    fn stack_shape(&self, n: usize, add: bool) -> Shape {
        Shape { m: n, lda: self.edge_len(), ldc: self.edge_len(), add, ..Shape::default() }
    }
    fn gate_len(&self) -> usize {
        self.degree * self.width
    }

    fn stack_forward<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        n: usize,
        y: Array<T>,
        keep: bool,
    ) -> Result<Vec<(Array<T>, Array<T>)>> {
        let mut saved: Vec<(Array<T>, Array<T>)> = Vec::new();
        for layer in &self.layers {
            let t = &layer.forward;
            if !layer.gated {
                // The last layer adds its product to a copy of its input: products read y while they write.
                let mark = ctx.mark();
                let linear = ctx.take::<T>(n * self.edge_len())?;
                let shape = self.stack_shape(n, false);
                ctx.product(self.products, PRODUCT_TILE, t, y.address, t.weights, linear.address, shape)?;
                let args = Args::new().address(linear.address).address(y.address);
                ctx.each(self.stack, "stack_add", linear.len, args.value(linear.len as i64))?;
                ctx.release(mark);
                continue;
            }
            let (linear, gate) = match saved.first() {
                Some(&pair) if !keep => pair,
                _ => {
                    let pair = (ctx.take::<T>(n * self.edge_len())?, ctx.take::<T>(n * self.gate_len())?);
                    saved.push(pair);
                    pair
                }
            };
            let shape = self.stack_shape(n, false);
            ctx.product(self.products, PRODUCT_TILE, t, y.address, t.weights, linear.address, shape)?;
            if let Some((t, _)) = &layer.gate {
                let shape = Shape { m: n, lda: self.edge_len(), ldc: self.gate_len(), ..Shape::default() };
                ctx.product(self.products, PRODUCT_TILE, t, linear.address, t.weights, gate.address, shape)?;
            }
            let args = Args::new().address(linear.address).address(gate.address).address(y.address);
            ctx.each(self.stack, "stack_gate_forward", n * self.width, args.value(n as i64))?;
        }
        Ok(saved)
    }

    fn stack_adjoint<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        n: usize,
        saved: &[(Array<T>, Array<T>)],
        grad: Array<T>,
    ) -> Result<()> {
        let grad_linear = ctx.take::<T>(n * self.edge_len())?;
        let grad_gate = ctx.take::<T>(n * self.gate_len())?;
        let mut saved = saved.iter().rev();
        for layer in self.layers.iter().rev() {
            let forward = if layer.gated { saved.next() } else { None };
            match forward {
                Some((linear, gate)) => {
                    let args = Args::new().address(linear.address).address(gate.address).address(grad.address);
                    let args = args.address(grad_linear.address).address(grad_gate.address);
                    ctx.each(self.stack, "stack_gate_adjoint", n * self.width, args.value(n as i64))?;
                    if let Some((_, t)) = &layer.gate {
                        let shape =
                            Shape { m: n, lda: self.gate_len(), ldc: self.edge_len(), add: true, ..Shape::default() };
                        let (a, c) = (grad_gate.address, grad_linear.address);
                        ctx.product(self.products, PRODUCT_TILE, t, a, t.weights, c, shape)?;
                    }
                }
                None => {
                    let rows = Rows { data: grad, plane: 0 };
                    let to = Rows { data: grad_linear, plane: 0 };
                    super::node::copy_rows(ctx, self.products, rows, to, 1, grad.len, false)?;
                }
            }
            let t = &layer.adjoint;
            let shape = self.stack_shape(n, true);
            ctx.product(self.products, PRODUCT_TILE, t, grad_linear.address, t.weights, grad.address, shape)?;
        }
        Ok(())
    }

    /// Aggregated messages of the atoms in `range` into `out` `[(l, m)][atom][W]`, attention weights into `alpha`.
    pub fn forward<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        e: &Edges,
        nodes: &Features<T>,
        (range, edges): (Range<usize>, Range<usize>),
        out: Rows<T>,
        alpha: Array<T>,
    ) -> Result<()> {
        let mark = ctx.mark();
        let n = edges.len();
        let chunk = self.evaluate(ctx, e, nodes, 0, edges.clone(), false)?;
        if self.attend {
            let args = Args::new().value(edges.start as i64).value(n as i64).address(e.src.address);
            let args = args.address(e.dst.address).address(chunk.kernel.address).address(nodes.query.address);
            let args = args.address(nodes.key.address).address(alpha.address);
            ctx.warps(self.attention, "attention_logits", n, args)?;
        }
        let args = Args::new().value(range.start as i64).value(range.len() as i64).address(e.dst_start.address);
        let args = args.address(e.weight.address).address(e.normaliser.address).address(self.null_mass);
        ctx.warps(self.attention, "attention_softmax", range.len() * self.columns, args.address(alpha.address))?;
        let args = Args::new().value(edges.start as i64).value(range.start as i64).address(e.dst_start.address);
        let args = args.address(chunk.records.address).address(chunk.y.address).address(alpha.address);
        let args = args.address(chunk.share.address).address(out.data.address).value(out.plane as i64);
        let launch = Launch::new(range.len() as u32, self.block_threads());
        ctx.run(self.attention, "attention_aggregate", launch, args)?;
        ctx.release(mark);
        Ok(())
    }

    /// Adjoint for the edges that leave the nodes in `range` (`edges`: their places in the order of sources). Adds to
    /// `grad_rows`, sets `logits` (by place), adds to `radial` and `torque` (by place).
    #[allow(clippy::too_many_arguments)]
    pub fn adjoint<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        e: &Edges,
        nodes: &Features<T>,
        grad: &OutputGradient<T>,
        (range, edges): (Range<usize>, Range<usize>),
        grad_rows: Rows<T>,
        logits: Array<T>,
        (radial, torque): (Array<f64>, Array<f64>),
    ) -> Result<()> {
        let mark = ctx.mark();
        let (n, first) = (edges.len(), edges.start as i64);
        let list = e.src_edges.address;
        let chunk = self.evaluate(ctx, e, nodes, list, edges, true)?;
        let grad_y = ctx.take::<T>(n * self.edge_len())?;
        let grad_share = ctx.take::<T>(chunk.share.len)?;
        let grad_captured = ctx.take::<T>(chunk.captured.len)?;
        let grad_kernel = ctx.take::<T>(n * self.kernel_columns)?;
        let grad_weight = ctx.take::<f64>(n)?;
        let args = Args::new().address(list).value(first).value(n as i64).address(e.dst.address);
        let args = args.address(e.weight.address).address(e.normaliser.address).address(chunk.records.address);
        let args = args.address(chunk.y.address).address(grad.alpha.address).address(chunk.share.address);
        let args = args.address(grad.rows.data.address).address(grad.along.address).value(grad.rows.plane as i64);
        let args = args.address(grad_y.address).address(grad_share.address).address(grad_kernel.address);
        let args = args.address(grad_weight.address).address(torque.address);
        ctx.warps(self.attention, "attention_adjoint", n, args)?;
        if self.attend {
            let args = Args::new().value(first).value(n as i64).address(grad_kernel.address).address(logits.address);
            ctx.each(self.attention, "attention_keep_logits", n * self.columns, args)?;
        }
        if let Some(c) = &self.competition {
            let args = Args::new().address(chunk.captured.address).address(c.scale).address(c.weight);
            let args = args.address(grad_share.address).address(grad_captured.address);
            ctx.warps(c.program, "focus_competition_adjoint", n, args.value(T::of(c.eps)).value(n as i64))?;
        }
        let inner = ctx.mark();
        self.stack_adjoint(ctx, n, &chunk.layers, grad_y)?;
        ctx.release(inner);
        let args = Args::new().value(first).address(e.src_start.address).value(range.start as i64);
        let args = args.address(chunk.records.address).address(chunk.kernel.address).address(self.basis);
        let args = args.address(nodes.rows.data.address).value(nodes.rows.plane as i64).address(grad_y.address);
        let args = args.address(grad_captured.address).address(grad_kernel.address).address(torque.address);
        let launch = Launch::new(range.len() as u32, self.block_threads());
        ctx.run(self.rotate_mix, "rotate_mix_adjoint", launch, args.address(grad_rows.data.address))?;
        let r = e.radial;
        let args = Args::new().address(list).value(first).value(n as i64).address(e.distance.address);
        let args = args.address(e.weight.address).address(e.weight_slope.address).address(r.frequencies);
        let args = args.address(r.weights).address(self.kernel).address(self.kernel_t);
        let args = args.address(grad_kernel.address).address(grad_weight.address).address(radial.address);
        ctx.warps(self.radial, "radial_adjoint", n, args.value(r.rcut).value(r.exponent))?;
        ctx.release(mark);
        Ok(())
    }

    /// Gradients of keys (by source) or queries (by destination) from the kept logits.
    #[allow(clippy::too_many_arguments)]
    pub fn heads_adjoint<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        e: &Edges,
        by_source: bool,
        nodes: usize,
        logits: Array<T>,
        other: Array<T>,
        grad: Array<T>,
    ) -> Result<()> {
        let (start, list, place, partner) = if by_source {
            (e.src_start.address, e.src_edges.address, 0, e.dst.address)
        } else {
            (e.dst_start.address, 0, e.source_place.address, e.src.address)
        };
        let args = Args::new().value(nodes as i64).address(start).address(list).address(place).address(partner);
        let args = args.address(logits.address).address(other.address).address(grad.address);
        ctx.each(self.attention, "attention_heads_adjoint", nodes * self.width, args)
    }
}
