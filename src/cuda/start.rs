//! Start values of the nodes on the device: `environment_seed` and `geometric_embedding` (SPEC 6 and 7).

use super::context::{Array, Constants, Context, Shape};
use super::engine::{Edges, Programs, Radial, Scalar};
use super::machine::Machine;
use super::node::{Linear, Rows};
use super::products::transpose;
use super::{Args, Launch, Program, Result, sources};
use crate::model::Parameters;
use crate::model::config::{Config, EnvWidths};
use crate::model::merge::seed_maps;
use crate::model::parameters::Matrix;

/// Weights of the start values.
pub struct StartStage {
    program: usize,
    norm: usize,
    channels: usize,
    rows: usize,
    widths: EnvWidths,
    warps: u32,
    type_embedding: u64,
    seed: Option<Seed>,
}

struct Seed {
    /// Addresses of `SeedWeights` in `kernels/node_start.cu`, in its order.
    weights: [u64; 12],
    film_scale: Option<u64>,
    output: Linear,
    strength: [f64; 2],
    eps: f64,
}

/// What the start leaves for its adjoint.
pub struct StartState<T> {
    /// Start values `[(l, m)][node][C]`.
    pub x: Rows<T>,
    /// Normalised environment matrices `[owned][4][de]`.
    matrix: Array<T>,
    /// Film logits, and normed where there is a norm.
    logits: Array<T>,
    normed: Array<T>,
}

impl StartStage {
    pub fn new<M: Machine, T: Scalar>(
        programs: &mut Programs,
        constants: &mut Constants<M>,
        config: &Config,
        weights: &Parameters<f64>,
        radial: &Radial,
    ) -> Result<Self> {
        let (widths, c, degree) = (config.env_widths(), config.channels, config.node_lmax());
        // A warp's scratch must fit into a block's static shared memory with the others.
        let widest = radial.widest.max(widths.hidden).max(widths.embed);
        let values = 8 * radial.widest
            + 2 * (widths.radial + widths.hidden)
            + 2 * widest
            + 2 * degree * c
            + 2 * (degree + 1) * (degree + 1)
            + 64;
        let warps = (40960 / (values * size_of::<T>())).clamp(1, 4) as u32;
        let program = radial.program::<T>(Program::new(&sources::NODE_START)).define("LMAX", degree);
        let program = program.define("CHANNELS", c).define("WEIGHTED", i32::from(config.version >= 1.1));
        let program = program.define("EMBED", widths.embed).define("AXIS", widths.axis);
        let program = program.define("SEED_RADIAL", widths.radial).define("SEED_HIDDEN", widths.hidden);
        let program = programs.add(program.define("WARPS", warps));
        let norm = programs.add(Program::new(&sources::SCALAR_NORM).real::<T>());
        let seed = match &weights.env_seed {
            None => None,
            Some(s) => {
                let maps = seed_maps(s);
                let last = weights.radial.last.columns(c, degree * c);
                let mut keep = |m: &Matrix<f64>| constants.real::<T>(&m.data);
                let weights = [
                    keep(&s.rbf1)?,
                    keep(&transpose(&s.rbf1))?,
                    keep(&maps.radial)?,
                    keep(&transpose(&maps.radial))?,
                    keep(&s.g2)?,
                    keep(&transpose(&s.g2))?,
                    keep(&maps.source_types)?,
                    keep(&maps.destination_types)?,
                    keep(&last)?,
                    keep(&transpose(&last))?,
                    radial.weights,
                    radial.frequencies,
                ];
                Some(Seed {
                    weights,
                    film_scale: match &s.film_norm {
                        Some([a, b]) => Some(constants.real::<T>(&[&a[..], &b[..]].concat())?),
                        None => None,
                    },
                    output: Linear::plain::<M, T>(programs, constants, &s.output)?,
                    strength: s.film_strength,
                    eps: config.eps,
                })
            }
        };
        Ok(StartStage {
            program,
            norm,
            channels: c,
            rows: (degree + 1) * (degree + 1),
            widths,
            warps,
            type_embedding: constants.real::<T>(&weights.type_embedding.data)?,
            seed,
        })
    }

    /// Packed rows of the start values.
    pub fn rows(&self) -> usize {
        self.rows
    }
    fn matrix_len(&self) -> usize {
        4 * self.widths.embed
    }
    fn rho_len(&self) -> usize {
        self.rows.isqrt().saturating_sub(1) * self.channels
    }
    fn seed_bytes(seed: &Seed) -> Vec<u8> {
        seed.weights.iter().flat_map(|a| a.to_ne_bytes()).collect()
    }
    fn edge_launch(&self, n: usize) -> Launch {
        Launch::over(n, self.warps as usize, 32 * self.warps, 1 << 16)
    }

    /// Start values of the owned nodes (remote ones zero).
    pub fn forward<M: Machine, T: Scalar>(&self, ctx: &mut Context<M>, e: &Edges) -> Result<StartState<T>> {
        let c = self.channels;
        let x = Rows::tile(ctx.zeros::<T>(self.rows * e.nodes * c)?, e.nodes, c);
        let Some(seed) = &self.seed else {
            let args = Args::new().address(e.types.address).address(self.type_embedding).address(x.data.address);
            ctx.each(self.program, "start_types", e.owned * c, args.value(e.owned as i64))?;
            let none = Array::none();
            return Ok(StartState { x, matrix: none, logits: none, normed: none });
        };
        let matrix = ctx.take::<T>(e.owned * self.matrix_len())?;
        let logits = ctx.take::<T>(e.owned * 2 * c)?;
        let normed = if seed.film_scale.is_some() { ctx.take::<T>(logits.len)? } else { logits };
        for (range, edges) in &e.by_destination {
            let mark = ctx.mark();
            let (n, first) = (edges.len(), edges.start as i64);
            let g = ctx.take::<T>(n * self.widths.embed)?;
            let rho = ctx.take::<T>(n * self.rho_len())?;
            let zonal: Array<T> = self.zonal(ctx, e, edges.start, n)?;
            let args = Args::new().value(first).value(n as i64).address(e.distance.address);
            let args = args.address(e.weight.address).address(e.src.address).address(e.dst.address);
            let args = args.address(e.types.address).bytes(&Self::seed_bytes(seed));
            let args = args.address(g.address).address(rho.address);
            let args = args.value(e.radial.rcut).value(e.radial.exponent);
            ctx.run(self.program, "start_edges", self.edge_launch(n), args)?;
            let args = Args::new().value(first).value(range.start as i64).address(e.dst_start.address);
            let args = args.address(e.distance.address).address(e.direction.address).address(e.weight.address);
            let args = args.address(e.normaliser.address).address(g.address).address(rho.address);
            let args = args.address(zonal.address).address(matrix.address).address(x.data.address);
            ctx.run(self.program, "start_sums", Launch::new(range.len() as u32, 128), args.value(x.plane as i64))?;
            ctx.release(mark);
        }
        let mark = ctx.mark();
        let k = self.widths.embed * self.widths.axis;
        let b = ctx.take::<T>(e.owned * k)?;
        let args = Args::new().address(matrix.address).address(b.address).value(e.owned as i64);
        ctx.each(self.program, "film_quadratic", b.len, args)?;
        seed.output.run(ctx, b, logits, Shape { m: e.owned, lda: k, ldc: 2 * c, ..Shape::default() })?;
        if let Some(scale) = seed.film_scale {
            let args = Args::new().address(logits.address).address(scale).address(normed.address);
            let args = args.value(c as i32).value(2i32).value(T::of(seed.eps)).value(2 * e.owned as i64);
            ctx.warps(self.norm, "scalar_norm", 2 * e.owned, args)?;
        }
        let args = Args::new().address(normed.address).address(e.types.address).address(self.type_embedding);
        let args = args.value(T::of(seed.strength[0])).value(T::of(seed.strength[1]));
        ctx.each(self.program, "film_apply", e.owned * c, args.address(x.data.address).value(e.owned as i64))?;
        ctx.release(mark);
        Ok(StartState { x, matrix, logits, normed })
    }

    fn zonal<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        e: &Edges,
        first: usize,
        n: usize,
    ) -> Result<Array<T>> {
        let zonal = ctx.take::<T>(n * self.rows)?;
        let args = Args::new().value(first as i64).value(n as i64).address(e.direction.address);
        ctx.each(self.program, "start_zonal", n, args.address(zonal.address))?;
        Ok(zonal)
    }

    /// Sets the edge gradients by destination; completes `grad_normaliser`.
    pub fn adjoint<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        e: &Edges,
        state: &StartState<T>,
        grad: Rows<T>,
        grad_normaliser: Array<f64>,
        (radial, torque): (Array<f64>, Array<f64>),
    ) -> Result<()> {
        let mark = ctx.mark();
        let c = self.channels;
        let Some(seed) = &self.seed else {
            let args = Args::new().value(e.edges as i64).address(e.weight.address).address(e.weight_slope.address);
            let args = args.address(e.normaliser.address).address(grad_normaliser.address).address(e.dst.address);
            let args = args.address(radial.address).address(torque.address);
            return ctx.each(self.program, "start_normaliser_edges", e.edges, args);
        };
        let grad_u = ctx.take::<T>(state.logits.len)?;
        let args = Args::new().address(state.normed.address).address(e.types.address).address(self.type_embedding);
        let args = args.value(T::of(seed.strength[0])).value(T::of(seed.strength[1]));
        let args = args.address(grad.data.address).address(grad_u.address).value(e.owned as i64);
        ctx.each(self.program, "film_apply_adjoint", e.owned * c, args)?;
        let mut grad_logits = grad_u;
        if let Some(scale) = seed.film_scale {
            grad_logits = ctx.zeros::<T>(state.logits.len)?;
            let args = Args::new().address(state.logits.address).address(scale).address(grad_u.address);
            let args = args.address(grad_logits.address).value(c as i32).value(2i32);
            let args = args.value(T::of(seed.eps)).value(2 * e.owned as i64);
            ctx.warps(self.norm, "scalar_norm_adjoint", 2 * e.owned, args)?;
        }
        let k = self.widths.embed * self.widths.axis;
        let grad_b = ctx.take::<T>(e.owned * k)?;
        let shape = Shape { m: e.owned, lda: 2 * c, ldc: k, ..Shape::default() };
        seed.output.run_adjoint(ctx, grad_logits, grad_b, shape)?;
        let grad_matrix = ctx.take::<T>(state.matrix.len)?;
        let args = Args::new().address(state.matrix.address).address(grad_b.address).address(grad_matrix.address);
        ctx.each(self.program, "film_quadratic_adjoint", grad_matrix.len, args.value(e.owned as i64))?;
        let args = Args::new().address(state.matrix.address).address(grad_matrix.address);
        let args = args.address(state.x.data.address).address(grad.data.address).value(grad.plane as i64);
        let args = args.address(e.normaliser.address).address(grad_normaliser.address).value(e.owned as i64);
        ctx.warps(self.program, "start_normaliser_adjoint", e.owned, args)?;
        for (_, edges) in &e.by_destination {
            let inner = ctx.mark();
            let n = edges.len();
            let zonal: Array<T> = self.zonal(ctx, e, edges.start, n)?;
            let args = Args::new().value(edges.start as i64).value(n as i64).address(e.distance.address);
            let args = args.address(e.direction.address).address(e.weight.address).address(e.weight_slope.address);
            let args = args.address(e.normaliser.address).address(grad_normaliser.address).address(e.src.address);
            let args = args.address(e.dst.address).address(e.types.address).bytes(&Self::seed_bytes(seed));
            let args = args.address(zonal.address).address(grad_matrix.address).address(grad.data.address);
            let args = args.value(grad.plane as i64).address(radial.address).address(torque.address);
            let args = args.value(e.radial.rcut).value(e.radial.exponent);
            ctx.run(self.program, "start_edges_adjoint", self.edge_launch(n), args)?;
            ctx.release(inner);
        }
        ctx.release(mark);
        Ok(())
    }
}
