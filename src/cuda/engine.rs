//! The engine on a device: the stages in order, the step's memory, the answer. Generic over the machine, so that the
//! emulation runs the very same code.

use super::block::{Block, BlockState};
use super::context::{Array, Constants, Context};
use super::machine::Machine;
use super::node::{FfnForward, FfnStage, FittingStage, Rows, ScalarGrid, copy_rows};
use super::products::transpose;
use super::start::StartStage;
use super::{Args, CudaError, MemoryPlan, Plain, Program, Real, sources};
use crate::engine::{Engine, Evaluation, Exchange, Request};
use crate::graph::Graph;
use crate::model::config::{Activation, Basis, Config, Readout};
use crate::model::{Model, Parameters};
use crate::{Error, Result};
use std::ops::Range;

/// Number types of a device engine.
pub trait Scalar: crate::cpu::real::Real + Real + Plain {}
impl Scalar for f32 {}
impl Scalar for f64 {}

/// Tile of `kernels/node_linear.cu`.
pub const PRODUCT_TILE: (usize, usize) = (128, 64);
/// Edges that a chunk aims at.
const EDGE_CHUNK: usize = 16384;
/// Nodes of a tile.
const NODE_TILE: usize = 1024;

/// The name of an activation in `kernels/common.cuh`.
pub fn activation_name(kind: Activation) -> &'static str {
    match kind {
        Activation::Linear => "LINEAR",
        Activation::Relu => "RELU",
        Activation::Relu6 => "RELU6",
        Activation::Gelu => "GELU",
        Activation::Tanh => "TANH",
        Activation::Sigmoid => "SIGMOID",
        Activation::Softplus => "SOFTPLUS",
        Activation::Silu => "SILU",
    }
}

/// The programs of a model, each once.
#[derive(Default)]
pub struct Programs {
    list: Vec<Program>,
}

impl Programs {
    /// The place of a program in the list.
    pub fn add(&mut self, program: Program) -> usize {
        match self.list.iter().position(|p| *p == program) {
            Some(i) => i,
            None => {
                self.list.push(program);
                self.list.len() - 1
            }
        }
    }
    /// The grouped products in `T`.
    pub fn products<T: Real>(&mut self) -> usize {
        self.add(Program::new(&sources::NODE_LINEAR).real::<T>())
    }
}

/// Radial basis and hidden layers: shape and weights, shared by several programs.
pub struct Radial {
    n_radial: usize,
    basis: Basis,
    hidden: Vec<usize>,
    norm: bool,
    activation: Activation,
    /// Widest layer.
    pub widest: usize,
    /// Addresses of the packed hidden layers and of the frequencies.
    pub weights: u64,
    pub frequencies: u64,
    pub rcut: f64,
    pub exponent: i32,
}

impl Radial {
    fn new<M: Machine, T: Scalar>(
        constants: &mut Constants<M>,
        config: &Config,
        weights: &Parameters<f64>,
    ) -> super::Result<Self> {
        let mut packed = Vec::new();
        for (matrix, scale) in &weights.radial.hidden {
            packed.extend_from_slice(&matrix.data);
            packed.extend(transpose(matrix).data);
            packed.extend(scale.iter().flatten());
        }
        let hidden: Vec<usize> = weights.radial.hidden.iter().map(|(m, _)| m.cols).collect();
        Ok(Radial {
            n_radial: config.n_radial,
            basis: config.basis,
            widest: hidden.iter().copied().max().unwrap_or(0).max(config.n_radial),
            hidden,
            norm: config.edge_norm,
            activation: config.activation,
            weights: constants.real::<T>(&packed)?,
            frequencies: constants.keep(&weights.radial_frequencies)?,
            rcut: config.rcut,
            exponent: config.env_exp[0] as i32,
        })
    }
    /// A program with this shape.
    pub fn program<T: Real>(&self, program: Program) -> Program {
        let widths: Vec<String> = self.hidden.iter().map(usize::to_string).collect();
        let widths = if widths.is_empty() { self.n_radial.to_string() } else { widths.join(",") };
        let basis = if self.basis == Basis::Bessel { 0 } else { 1 };
        let program = program.real::<T>().define("N_RADIAL", self.n_radial).define("BASIS", basis);
        let program = program.define("N_HIDDEN", self.hidden.len()).define("WIDTHS", widths);
        let program = program.define("RADIAL_NORM", i32::from(self.norm));
        program.define("ACTIVATION", activation_name(self.activation))
    }
}

/// The edges of a step on the device, and how they are cut.
pub struct Edges<'a> {
    pub nodes: usize,
    pub owned: usize,
    pub edges: usize,
    pub program: usize,
    pub radial: &'a Radial,
    pub vec: Array<f64>,
    pub distance: Array<f64>,
    pub direction: Array<f64>,
    pub weight: Array<f64>,
    pub weight_slope: Array<f64>,
    pub normaliser: Array<f64>,
    pub types: Array<i32>,
    pub src: Array<u32>,
    pub dst: Array<u32>,
    pub dst_start: Array<i64>,
    pub src_start: Array<i64>,
    pub src_edges: Array<u32>,
    pub source_place: Array<u32>,
    /// Chunks: (atoms, their edges) by destination, and (nodes, places) by source.
    pub by_destination: Vec<(Range<usize>, Range<usize>)>,
    pub by_source: Vec<(Range<usize>, Range<usize>)>,
    pub tiles: Vec<Range<usize>>,
}

/// Whole rows with about `EDGE_CHUNK` edges each; rows without edges belong to a chunk too.
fn chunks(starts: &[usize]) -> Vec<(Range<usize>, Range<usize>)> {
    let rows = starts.len().saturating_sub(1);
    let mut out = Vec::new();
    let mut first = 0;
    for row in 0..rows {
        if row > first && starts[row + 1] - starts[first] > EDGE_CHUNK {
            out.push((first..row, starts[first]..starts[row]));
            first = row;
        }
    }
    if first < rows {
        out.push((first..rows, starts[first]..starts[rows]));
    }
    out
}

enum Last {
    Scalar(Box<FfnStage>),
    /// With the program of its scalar path.
    Grid(Box<ScalarGrid>, usize),
}
enum LastForward<T> {
    Scalar(FfnForward<T>),
    Grid(super::node::ScalarGridForward<T>),
}

/// The engine of one model in one number type.
pub struct DeviceEngine<M: Machine, T> {
    machine: M,
    stages: Stages<T>,
    /// The step's memory: address and bytes, and what it was counted for.
    step: (u64, usize),
    planned: Extent,
}

/// What the memory of a step grows with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Extent {
    owned: usize,
    nodes: usize,
    edges: usize,
    /// Edges of the largest chunk.
    chunk: usize,
    want: Request,
}

impl Extent {
    fn of(graph: &Graph, want: Request) -> Self {
        let largest = |starts: &[usize]| chunks(starts).iter().map(|(_, edges)| edges.len()).max().unwrap_or(0);
        Extent {
            owned: graph.n_owned,
            nodes: graph.n_nodes(),
            edges: graph.n_edges(),
            chunk: largest(&graph.dst_start).max(largest(&graph.src_start)),
            want,
        }
    }
    /// Whether memory for `self` does for `other`: it grows with each of the numbers.
    fn covers(&self, other: &Self) -> bool {
        (self.want.atom_virial || !other.want.atom_virial)
            && (self.want.descriptor || !other.want.descriptor)
            && self.owned >= other.owned
            && self.nodes >= other.nodes
            && self.edges >= other.edges
            && self.chunk >= other.chunk
    }
}

/// A model's stages on a machine.
struct Stages<T> {
    precision: &'static str,
    channels: usize,
    eps: f64,
    floor: f64,
    edge_exponent: i32,
    geometry: usize,
    force_virial: usize,
    copy: usize,
    radial: Radial,
    start: StartStage,
    blocks: Vec<Block>,
    readout_rows: usize,
    readout: Vec<FfnStage>,
    last: Last,
    fitting: FittingStage,
    constant_bytes: usize,
    marker: std::marker::PhantomData<T>,
}

impl<M: Machine, T: Scalar> DeviceEngine<M, T> {
    /// Uploads the weights and loads the kernels.
    pub fn new(mut machine: M, model: &Model) -> Result<Self> {
        let (config, weights) = (model.config(), model.weights());
        let mut programs = Programs::default();
        let mut c = Constants::new(&mut machine);
        let radial = Radial::new::<M, T>(&mut c, config, weights)?;
        let start = StartStage::new::<M, T>(&mut programs, &mut c, config, weights, &radial)?;
        let mut blocks = Vec::new();
        for b in 0..config.blocks.len() {
            blocks.push(Block::new::<M, T>(&mut programs, &mut c, model, weights, b, &radial)?);
        }
        let (last, hidden) =
            weights.readout.split_last().ok_or_else(|| Error::Internal("a model without read-out".into()))?;
        let mut readout = Vec::new();
        for ffn in hidden {
            readout.push(FfnStage::new::<M, T>(&mut programs, &mut c, ffn, config.activation)?);
        }
        let last = match ScalarGrid::new::<M, T>(&mut programs, &mut c, last)? {
            Some(grid) => {
                let program = grid.scalar_program::<T>(&mut programs);
                Last::Grid(Box::new(grid), program)
            }
            None => Last::Scalar(Box::new(FfnStage::new::<M, T>(&mut programs, &mut c, last, config.activation)?)),
        };
        let fitting = FittingStage::new::<M, T>(
            &mut programs,
            &mut c,
            &weights.fitting,
            config.fitting.activation,
            config.channels,
        )?;
        let geometry = programs.add(Program::new(&sources::EDGE_GEOMETRY).real::<T>());
        let force_virial = programs.add(Program::new(&sources::FORCE_VIRIAL).real::<T>());
        let copy = programs.products::<T>();
        let (_, constant_bytes) = c.finish();
        machine.load(programs.list)?;
        let degrees = if config.readout == Readout::Scalar { 1 } else { config.readout_degree() + 1 };
        let stages = Stages {
            precision: if size_of::<T>() == 4 { "fp32" } else { "fp64" },
            channels: config.channels,
            eps: config.eps,
            floor: if config.version >= 1.1 { 0.25 } else { config.eps },
            edge_exponent: config.env_exp[1] as i32,
            geometry,
            force_virial,
            copy,
            radial,
            start,
            blocks,
            readout_rows: degrees * degrees,
            readout,
            last,
            fitting,
            constant_bytes,
            marker: std::marker::PhantomData,
        };
        Ok(DeviceEngine { machine, stages, step: (0, 0), planned: Extent::default() })
    }

    /// The machine.
    pub fn machine(&mut self) -> &mut M {
        &mut self.machine
    }

    /// Memory for a step of this graph: counted by a dry run, checked, allocated. An MD step that needs no more than one
    /// before it counts nothing.
    fn prepare(&mut self, graph: &Graph, want: Request) -> Result<()> {
        let extent = Extent::of(graph, want);
        if self.planned.covers(&extent) {
            return Ok(());
        }
        let mut nobody = Nobody { programs: Vec::new() };
        let mut ctx = Context::dry(&mut nobody);
        self.stages.run(&mut ctx, graph, want)?;
        let needed = ctx.peak();
        if needed > self.step.1 {
            if self.step.1 > 0 {
                self.machine.free(self.step.0);
                self.step = (0, 0);
            }
            // Some room for a neighbour list that grows a little between two steps.
            let size = needed + needed / 32;
            if let Some(free) = self.machine.available() {
                MemoryPlan::new().growing("one step", size).check(free as u64, graph.n_owned)?;
            }
            self.step = (self.machine.allocate(size)?, size);
        }
        self.planned = extent;
        Ok(())
    }
}

impl<T: Scalar> Stages<T> {
    /// Packed rows of the node state before block `b`, or of the final state.
    fn state_rows(&self, b: usize) -> usize {
        self.blocks.get(b).or(self.blocks.last()).map_or(self.start.rows(), |b| b.node_rows)
    }

    /// The stages in order.
    fn run<N: Machine>(&self, ctx: &mut Context<N>, graph: &Graph, want: Request) -> super::Result<Evaluation> {
        let e = self.edges(ctx, graph)?;
        let c = self.channels;
        let start = self.start.forward::<N, T>(ctx, &e)?;
        let mut states: Vec<BlockState<T>> = Vec::with_capacity(self.blocks.len());
        let mut x = start.x;
        for (b, block) in self.blocks.iter().enumerate() {
            let width = block.message.packed() * self.width();
            let message = Rows::tile(ctx.take::<T>(e.owned * width)?, e.owned, self.width());
            let alpha = ctx.take::<T>(e.edges * block.message.columns())?;
            let next_rows = self.state_rows(b + 1);
            let next = Rows::tile(ctx.take::<T>(next_rows * e.nodes * c)?, e.nodes, c);
            block.forward(ctx, &e, x, message, alpha, next, next_rows)?;
            states.push(BlockState { x, message, alpha });
            x = next;
        }
        let rows = self.state_rows(self.blocks.len());
        let energy = ctx.take::<f64>(e.owned)?;
        let descriptor = ctx.take::<T>(if want.descriptor { e.owned * c } else { 0 })?;
        let mut grad = Rows::tile(ctx.zeros::<T>(rows * e.nodes * c)?, e.nodes, c);
        for tile in &e.tiles {
            self.energy(ctx, &e, tile, x, grad, energy, descriptor)?;
        }
        let by_source = (ctx.zeros::<f64>(e.edges)?, ctx.zeros::<f64>(3 * e.edges)?);
        let by_destination = (ctx.take::<f64>(e.edges)?, ctx.take::<f64>(3 * e.edges)?);
        let grad_normaliser = ctx.zeros::<f64>(e.owned)?;
        for (b, block) in self.blocks.iter().enumerate().rev() {
            let grad_x = Rows::tile(ctx.take::<T>(self.state_rows(b) * e.nodes * c)?, e.nodes, c);
            let next_rows = self.state_rows(b + 1);
            block.adjoint(ctx, &e, &states[b], grad, next_rows, grad_x, by_source, grad_normaliser)?;
            grad = grad_x;
        }
        self.start.adjoint(ctx, &e, &start, grad, grad_normaliser, by_destination)?;
        let gradient = ctx.take::<f64>(3 * e.edges)?;
        let args = Args::new().address(by_destination.0.address).address(by_destination.1.address);
        let args = args.address(by_source.0.address).address(by_source.1.address).address(e.source_place.address);
        let args = args.address(e.direction.address).address(e.distance.address).address(gradient.address);
        ctx.each(self.force_virial, "edge_gradient", e.edges, args.value(e.edges as i64))?;
        let force = ctx.take::<f64>(3 * e.nodes)?;
        let args = Args::new().address(gradient.address).address(e.dst_start.address).address(e.src_start.address);
        let args = args.address(e.src_edges.address).address(force.address);
        ctx.each(self.force_virial, "node_force", e.nodes, args.value(e.owned as i64).value(e.nodes as i64))?;
        let arrived = ctx.take::<f64>(9 * e.owned)?;
        let virial = ctx.take::<f64>(if want.atom_virial { 9 * e.nodes } else { 0 })?;
        let of = if want.atom_virial { virial.address } else { 0 };
        let args = Args::new().address(gradient.address).address(e.vec.address).address(e.dst_start.address);
        let args = args.address(e.src_start.address).address(e.src_edges.address).address(arrived.address);
        let args = args.address(of).value(e.owned as i64).value(e.nodes as i64);
        ctx.each(self.force_virial, "node_virial", 9 * e.nodes, args)?;
        self.collect(ctx, energy, force, arrived, virial, descriptor)
    }

    fn width(&self) -> usize {
        self.blocks.first().map_or(0, Block::width)
    }

    fn collect<N: Machine>(
        &self,
        ctx: &mut Context<N>,
        energy: Array<f64>,
        force: Array<f64>,
        arrived: Array<f64>,
        virial: Array<f64>,
        descriptor: Array<T>,
    ) -> super::Result<Evaluation> {
        let atom_energy = ctx.download(energy)?;
        let forces = ctx.download(force)?.as_chunks().0.to_vec();
        let mut total = [0.0; 9];
        for v in ctx.download(arrived)?.as_chunks::<9>().0 {
            total.iter_mut().zip(v).for_each(|(t, v)| *t += v);
        }
        Ok(Evaluation {
            energy: atom_energy.iter().sum(),
            atom_energy,
            forces,
            virial: total,
            atom_virial: ctx.download(virial)?.as_chunks().0.to_vec(),
            descriptor: ctx.download(descriptor)?.into_iter().map(|x| x.wide()).collect(),
        })
    }

    /// Uploads the graph; geometry and normalisers on the device.
    fn edges<'a, N: Machine>(&'a self, ctx: &mut Context<N>, graph: &Graph) -> super::Result<Edges<'a>> {
        let n = graph.n_edges();
        let starts = |s: &[usize]| s.iter().map(|&x| x as i64).collect::<Vec<i64>>();
        let mut place = vec![0u32; n];
        for (at, &edge) in graph.src_edges.iter().enumerate() {
            place[edge as usize] = at as u32;
        }
        let e = Edges {
            nodes: graph.n_nodes(),
            owned: graph.n_owned,
            edges: n,
            program: self.geometry,
            radial: &self.radial,
            vec: ctx.upload(graph.vec.as_flattened())?,
            distance: ctx.take(n)?,
            direction: ctx.take(3 * n)?,
            weight: ctx.take(n)?,
            weight_slope: ctx.take(n)?,
            normaliser: ctx.take(graph.n_owned)?,
            types: ctx.upload(&graph.types)?,
            src: ctx.upload(&graph.src)?,
            dst: ctx.upload(&graph.dst)?,
            dst_start: ctx.upload(&starts(&graph.dst_start))?,
            src_start: ctx.upload(&starts(&graph.src_start))?,
            src_edges: ctx.upload(&graph.src_edges)?,
            source_place: ctx.upload(&place)?,
            by_destination: chunks(&graph.dst_start),
            by_source: chunks(&graph.src_start),
            tiles: (0..graph.n_owned).step_by(NODE_TILE).map(|i| i..(i + NODE_TILE).min(graph.n_owned)).collect(),
        };
        let args = Args::new().address(e.vec.address).address(e.distance.address).address(e.direction.address);
        let args = args.address(e.weight.address).address(e.weight_slope.address);
        let args = args.value(self.radial.rcut).value(self.eps).value(self.edge_exponent).value(n as i64);
        ctx.each(self.geometry, "edge_geometry", n, args)?;
        let args = Args::new().address(e.dst_start.address).address(e.weight.address).address(e.normaliser.address);
        ctx.each(self.geometry, "node_normaliser", e.owned, args.value(self.floor).value(e.owned as i64))?;
        Ok(e)
    }

    /// Read-out and fitting of a tile: energies, and dE/d(final state) into `grad`.
    #[allow(clippy::too_many_arguments)]
    fn energy<N: Machine>(
        &self,
        ctx: &mut Context<N>,
        e: &Edges,
        tile: &Range<usize>,
        x: Rows<T>,
        grad: Rows<T>,
        energy: Array<f64>,
        descriptor: Array<T>,
    ) -> super::Result<()> {
        let mark = ctx.mark();
        let (n, c, rows) = (tile.len(), self.channels, self.readout_rows);
        let mut u = ctx.take::<T>(rows * n * c)?;
        copy_rows(ctx, self.copy, x.from(tile.start, c), Rows::tile(u, n, c), rows, n * c, false)?;
        let mut saved = Vec::with_capacity(self.readout.len());
        for ffn in &self.readout {
            let out = ctx.take::<T>(rows * n * c)?;
            saved.push(ffn.forward(ctx, n, u, out)?);
            copy_rows(ctx, self.copy, Rows::tile(u, n, c), Rows::tile(out, n, c), rows, n * c, true)?;
            u = out;
        }
        let d = ctx.take::<T>(n * c)?;
        let last = match &self.last {
            Last::Scalar(ffn) => {
                let out = ffn.forward(ctx, n, u, d)?;
                copy_rows(ctx, self.copy, Rows::tile(u, n, c), Rows::tile(d, n, c), 1, n * c, true)?;
                LastForward::Scalar(out)
            }
            Last::Grid(grid, program) => {
                copy_rows(ctx, self.copy, Rows::tile(u, n, c), Rows::tile(d, n, c), 1, n * c, false)?;
                LastForward::Grid(grid.forward(ctx, *program, n, u, d)?)
            }
        };
        if descriptor.len > 0 {
            let to = Rows::tile(descriptor.from(tile.start * c), n, c);
            copy_rows(ctx, self.copy, Rows::tile(d, n, c), to, 1, n * c, false)?;
        }
        let grad_d = ctx.take::<T>(n * c)?;
        let types = e.types.from(tile.start);
        self.fitting.run(ctx, n, d, types, energy.from(tile.start), grad_d)?;
        let mut grad_u = ctx.take::<T>(rows * n * c)?;
        match (&self.last, &last) {
            (Last::Scalar(ffn), LastForward::Scalar(f)) => ffn.adjoint(ctx, n, f, grad_d, grad_u, false)?,
            (Last::Grid(grid, program), LastForward::Grid(f)) => grid.adjoint(ctx, *program, n, f, grad_d, grad_u)?,
            _ => return Err(CudaError::Size("forward and adjoint of different read-outs".into())),
        }
        copy_rows(ctx, self.copy, Rows::tile(grad_d, n, c), Rows::tile(grad_u, n, c), 1, n * c, true)?;
        for (ffn, f) in self.readout.iter().zip(&saved).rev() {
            let next = ctx.take::<T>(rows * n * c)?;
            copy_rows(ctx, self.copy, Rows::tile(grad_u, n, c), Rows::tile(next, n, c), rows, n * c, false)?;
            ffn.adjoint(ctx, n, f, grad_u, next, true)?;
            grad_u = next;
        }
        copy_rows(ctx, self.copy, Rows::tile(grad_u, n, c), grad.from(tile.start, c), rows, n * c, false)?;
        ctx.release(mark);
        Ok(())
    }
}

impl<M: Machine, T: Scalar> Engine for DeviceEngine<M, T> {
    fn evaluate(&mut self, graph: &Graph, want: Request, _: &mut dyn Exchange) -> Result<Evaluation> {
        if graph.n_nodes() > graph.n_owned {
            return Err(Error::Unsupported("the GPU engine runs on one rank in this version; use device cpu".into()));
        }
        self.prepare(graph, want)?;
        let (base, size) = self.step;
        let mut ctx = Context::new(&mut self.machine, base, size);
        let evaluation = self.stages.run(&mut ctx, graph, want)?;
        let values = [evaluation.energy].into_iter().chain(evaluation.forces.iter().flatten().copied());
        if let Some(bad) = values.into_iter().find(|x| !x.is_finite()) {
            return Err(Error::Structure(format!(
                "the energy or a force is {bad}: the configuration is far outside of what the model can describe"
            )));
        }
        Ok(evaluation)
    }
    fn describe(&self) -> String {
        format!("{}, {}", self.machine.describe(), self.stages.precision)
    }
    fn profile(&self) -> Vec<(&'static str, u64, f64)> {
        Vec::new()
    }
    fn memory_usage(&self) -> usize {
        self.stages.constant_bytes + self.step.1
    }
}

/// The programs that a model's engine loads, in `T`: what a kernel cache has to hold.
pub fn programs<T: Scalar>(model: &Model) -> Result<Vec<Program>> {
    let engine = DeviceEngine::<Nobody, T>::new(Nobody { programs: Vec::new() }, model)?;
    Ok(engine.machine.programs)
}

/// The machine of a dry run: it runs nothing.
struct Nobody {
    programs: Vec<Program>,
}
impl Machine for Nobody {
    fn load(&mut self, programs: Vec<Program>) -> super::Result<()> {
        self.programs = programs;
        Ok(())
    }
    fn allocate(&mut self, _: usize) -> super::Result<u64> {
        Ok(0)
    }
    fn free(&mut self, _: u64) {}
    fn available(&self) -> Option<usize> {
        None
    }
    fn upload(&mut self, _: u64, _: &[u8]) -> super::Result<()> {
        Ok(())
    }
    fn download(&mut self, _: u64, _: &mut [u8]) -> super::Result<()> {
        Ok(())
    }
    fn zero(&mut self, _: u64, _: usize) -> super::Result<()> {
        Ok(())
    }
    fn launch(&mut self, _: usize, _: &'static str, _: super::Launch, _: Args) -> super::Result<()> {
        Ok(())
    }
    fn synchronize(&mut self) -> super::Result<()> {
        Ok(())
    }
    fn describe(&self) -> String {
        String::new()
    }
}
