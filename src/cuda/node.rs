//! Node stages on the device: `node_linear`, `equivariant_norm`, `grid_product`, `ffn`, `readout`, `fitting`.
//!
//! Node arrays are `[(l, m)][node][channel]`; a tile is a range of nodes of such an array (a pointer and a plane).

use super::context::{Array, Constants, Context, Shape, Table};
use super::engine::{PRODUCT_TILE, Programs, Scalar, activation_name};
use super::machine::Machine;
use super::products::{Products, transpose, transposes};
use super::{Args, Program, Result, sources};
use crate::cpu::grid_product::Projector;
use crate::model::config::Activation;
use crate::model::merge::{GridInput, ffn_input, product_input};
use crate::model::parameters::{
    EquivariantNorm, Ffn, FfnNonlinearity, Fitting, GridNet, GridWeights, Matrix, NodeProduct,
};

/// Rows of a node array and the distance from one to the next, in elements.
#[derive(Clone, Copy)]
pub struct Rows<T> {
    pub data: Array<T>,
    pub plane: usize,
}

impl<T> Rows<T> {
    /// The same rows from a node on, `width` values a node.
    pub fn from(self, node: usize, width: usize) -> Self {
        Rows { data: self.data.from(node * width), plane: self.plane }
    }
    /// A dense tile.
    pub fn tile(data: Array<T>, nodes: usize, width: usize) -> Self {
        Rows { data, plane: nodes * width }
    }
}

/// A linear map and its adjoint.
pub struct Linear {
    program: usize,
    forward: Table,
    adjoint: Table,
}

impl Linear {
    pub fn new<M: Machine, T: Scalar>(
        programs: &mut Programs,
        constants: &mut Constants<M>,
        forward: &Products,
        adjoint: &Products,
    ) -> Result<Self> {
        Ok(Linear {
            program: programs.products::<T>(),
            forward: constants.table::<T>(forward)?,
            adjoint: constants.table::<T>(adjoint)?,
        })
    }
    pub fn degrees<M: Machine, T: Scalar>(
        programs: &mut Programs,
        constants: &mut Constants<M>,
        weights: &[Matrix<f64>],
    ) -> Result<Self> {
        let adjoint = Products::degrees(&transposes(weights));
        Self::new::<M, T>(programs, constants, &Products::degrees(weights), &adjoint)
    }
    pub fn plain<M: Machine, T: Scalar>(
        programs: &mut Programs,
        constants: &mut Constants<M>,
        w: &Matrix<f64>,
    ) -> Result<Self> {
        Self::new::<M, T>(programs, constants, &Products::plain(w), &Products::plain(&transpose(w)))
    }
    pub fn focuses<M: Machine, T: Scalar>(
        programs: &mut Programs,
        constants: &mut Constants<M>,
        weights: &[Matrix<f64>],
    ) -> Result<Self> {
        let adjoint = Products::focuses(&transposes(weights));
        Self::new::<M, T>(programs, constants, &Products::focuses(weights), &adjoint)
    }
    /// `c <- a W`.
    pub fn run<M: Machine, T>(&self, ctx: &mut Context<M>, a: Array<T>, c: Array<T>, shape: Shape) -> Result<()> {
        let t = &self.forward;
        ctx.product(self.program, PRODUCT_TILE, t, a.address, t.weights, c.address, shape)
    }
    /// `c <- a W^T`.
    pub fn run_adjoint<M: Machine, T>(
        &self,
        ctx: &mut Context<M>,
        a: Array<T>,
        c: Array<T>,
        shape: Shape,
    ) -> Result<()> {
        let t = &self.adjoint;
        ctx.product(self.program, PRODUCT_TILE, t, a.address, t.weights, c.address, shape)
    }
}

/// Equivariant RMS norm (SPEC 8.1).
pub struct Norm {
    program: usize,
    scale: u64,
    bias: u64,
    eps: f64,
}

impl Norm {
    pub fn new<M: Machine, T: Scalar>(
        programs: &mut Programs,
        constants: &mut Constants<M>,
        norm: &EquivariantNorm<f64>,
    ) -> Result<Self> {
        let program = Program::new(&sources::EQUIVARIANT_NORM).real::<T>();
        let program = program.define("LMAX", norm.scale.rows - 1).define("CHANNELS", norm.scale.cols);
        Ok(Norm {
            program: programs.add(program),
            scale: constants.real::<T>(&norm.scale.data)?,
            bias: constants.real::<T>(&norm.bias)?,
            eps: norm.eps,
        })
    }
    /// `out <- norm(x)` or `out += norm(x)`.
    pub fn run<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        nodes: usize,
        x: Rows<T>,
        out: Rows<T>,
        add: bool,
    ) -> Result<()> {
        let args = Args::new().address(x.data.address).address(self.scale).address(self.bias).address(out.data.address);
        let args = args.value(x.plane as i64).value(out.plane as i64);
        let args = args.value(T::of(self.eps)).value(i32::from(add)).value(nodes as i64);
        ctx.warps(self.program, "equivariant_norm", nodes, args)
    }
    /// `grad_x <- adjoint(grad)` or `+=`; `x` as it went in.
    pub fn adjoint<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        nodes: usize,
        x: Rows<T>,
        grad: Rows<T>,
        grad_x: Rows<T>,
        add: bool,
    ) -> Result<()> {
        let args = Args::new().address(x.data.address).address(self.scale);
        let args = args.address(grad.data.address).address(grad_x.data.address);
        let args = args.value(x.plane as i64).value(grad.plane as i64).value(grad_x.plane as i64);
        let args = args.value(T::of(self.eps)).value(i32::from(add)).value(nodes as i64);
        ctx.warps(self.program, "equivariant_norm_adjoint", nodes, args)
    }
}

/// `y[row] = x[row]` (add: `+=`) for rows of `nodes * width` values.
pub fn copy_rows<M: Machine, T>(
    ctx: &mut Context<M>,
    program: usize,
    x: Rows<T>,
    y: Rows<T>,
    rows: usize,
    values: usize,
    add: bool,
) -> Result<()> {
    let args = Args::new().address(x.data.address).address(y.data.address);
    let args = args.value(x.plane as i64).value(y.plane as i64);
    let args = args.value(rows as i32).value(values as i64).value(i32::from(add));
    ctx.each(program, "copy_rows", values, args)
}

/// Grid operation between coefficients (SPEC 10.1); rows are (node, focus).
struct GridOperation {
    program: usize,
    products: usize,
    to: Table,
    from: Table,
    to_adjoint: Table,
    from_adjoint: Table,
    points: usize,
    frames: usize,
    packed: usize,
    /// C' of the result, channels of a branch on the grid, all channels on the grid.
    channels: usize,
    result: usize,
    width: usize,
    router: Option<Linear>,
    branches: usize,
    out: Option<Linear>,
    scalar_gate: Linear,
    focuses: usize,
}

/// What the adjoint of a grid operation needs.
struct GridForward<T> {
    left: Array<T>,
    right: Array<T>,
    before: Array<T>,
    gate: Array<T>,
    scalars: Array<T>,
    route: Array<T>,
}

impl GridOperation {
    fn new<M: Machine, T: Scalar>(
        programs: &mut Programs,
        constants: &mut Constants<M>,
        projector: &Projector<f64>,
        degrees: usize,
        net: &GridNet<f64>,
        width: usize,
    ) -> Result<Self> {
        let (frames, channels, focuses) = (net.frames, net.channels, net.scalar_gate.len());
        let (to, from, points) = projector.matrices();
        let (router, out) = match &net.op {
            GridWeights::Glu => (None, None),
            GridWeights::Mlp { out, .. } => (None, Some(out)),
            GridWeights::Branch { router, out, .. } => ((router.cols > 1).then_some(router), Some(out)),
        };
        let branches = router.map_or(1, |r| r.cols);
        let result = width / branches;
        let program = Program::new(&sources::GRID_PRODUCT).real::<T>();
        let program = program.define("FRAMES", frames).define("LMAX", degrees - 1).define("CHANNELS", channels);
        let program = program.define("BRANCHES", branches).define("GRID_CHANNELS", result).define("FOCUSES", focuses);
        let out = match out {
            Some(w) => Some(Linear::new::<M, T>(
                programs,
                constants,
                &Products::frames(w, degrees, frames),
                &Products::frames(&transpose(w), degrees, frames),
            )?),
            None => None,
        };
        let router = match router {
            Some(w) => Some(Linear::plain::<M, T>(programs, constants, w)?),
            None => None,
        };
        Ok(GridOperation {
            program: programs.add(program),
            products: programs.products::<T>(),
            to: constants.table::<T>(&Products::to_grid(&to, degrees, points))?,
            from: constants.table::<T>(&Products::from_grid(&from, degrees, points))?,
            to_adjoint: constants.table::<T>(&Products::from_grid(&to, degrees, points))?,
            from_adjoint: constants.table::<T>(&Products::to_grid(&from, degrees, points))?,
            points,
            frames,
            packed: degrees * degrees,
            channels,
            result,
            width,
            router,
            branches,
            out,
            scalar_gate: Linear::focuses::<M, T>(programs, constants, &net.scalar_gate)?,
            focuses,
        })
    }

    /// The projections: constants on the left, data of `width` values a row on the right.
    fn project<M: Machine, T>(
        &self,
        ctx: &mut Context<M>,
        table: &Table,
        x: Array<T>,
        y: Array<T>,
        width: usize,
    ) -> Result<()> {
        let shape = Shape { n: width, ldb: width, ldc: width, b_plane: width, c_plane: width, ..Shape::default() };
        ctx.product(self.products, PRODUCT_TILE, table, table.weights, x.address, y.address, shape)
    }
    fn coefficients(&self, rows: usize, channels: usize) -> usize {
        self.frames * self.packed * rows * channels
    }
    fn grid(&self, rows: usize, channels: usize) -> usize {
        self.frames * self.points * rows * channels
    }
    fn gate_shape(&self, rows: usize, add: bool) -> Shape {
        let c = self.channels;
        Shape { m: rows / self.focuses, lda: self.focuses * 2 * c, ldc: self.focuses * c, add, ..Shape::default() }
    }

    /// `left`, `right`: `[frame][(l, m)][row][width]`, `scalars`: `[row][2C']`. Returns `[frame][(l, m)][row][C']`.
    fn forward<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        rows: usize,
        (left, right): (Array<T>, Array<T>),
        scalars: Array<T>,
    ) -> Result<(Array<T>, GridForward<T>)> {
        let (c, width) = (self.channels, rows * self.width);
        let left_grid = ctx.take::<T>(self.grid(rows, self.width))?;
        let right_grid = ctx.take::<T>(self.grid(rows, self.width))?;
        self.project(ctx, &self.to, left, left_grid, width)?;
        self.project(ctx, &self.to, right, right_grid, width)?;
        let mut route = Array::none();
        if let Some(router) = &self.router {
            route = ctx.take::<T>(rows * self.branches)?;
            let shape = Shape { m: rows, lda: 2 * c, ldc: self.branches, ..Shape::default() };
            router.run(ctx, scalars, route, shape)?;
            ctx.each(self.program, "grid_route", rows, Args::new().address(route.address).value(rows as i64))?;
        }
        let before = ctx.take::<T>(self.coefficients(rows, c))?;
        let gate = ctx.take::<T>(rows * c)?;
        let output = ctx.take::<T>(self.coefficients(rows, c))?;
        let mark = ctx.mark();
        let product = ctx.take::<T>(self.grid(rows, self.result))?;
        let args = Args::new().address(left_grid.address).address(right_grid.address).address(route.address);
        let args = args.address(product.address).value(self.points as i32).value(rows as i64);
        ctx.each(self.program, "grid_multiply", self.points * rows * self.result, args)?;
        match &self.out {
            None => self.project(ctx, &self.from, product, before, rows * self.result)?,
            Some(out) => {
                let coefficients = ctx.take::<T>(self.coefficients(rows, self.result))?;
                self.project(ctx, &self.from, product, coefficients, rows * self.result)?;
                let shape = Shape {
                    m: rows,
                    lda: self.result,
                    ldc: c,
                    a_plane: rows * self.result,
                    c_plane: rows * c,
                    ..Shape::default()
                };
                out.run(ctx, coefficients, before, shape)?;
            }
        }
        ctx.release(mark);
        self.scalar_gate.run(ctx, scalars, gate, self.gate_shape(rows, false))?;
        let args = Args::new().address(before.address).address(gate.address).address(scalars.address);
        let args = args.address(output.address).value(rows as i64);
        ctx.each(self.program, "grid_scalar_forward", rows * c, args)?;
        Ok((output, GridForward { left: left_grid, right: right_grid, before, gate, scalars, route }))
    }

    /// Gradients of left, right `[frame][(l, m)][row][width]` and scalars; `grad` of the output is used up.
    fn adjoint<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        rows: usize,
        f: &GridForward<T>,
        grad: Array<T>,
    ) -> Result<(Array<T>, Array<T>, Array<T>)> {
        let (c, width) = (self.channels, rows * self.width);
        let grad_scalars = ctx.take::<T>(rows * 2 * c)?;
        let left = ctx.take::<T>(self.coefficients(rows, self.width))?;
        let right = ctx.take::<T>(self.coefficients(rows, self.width))?;
        let mark = ctx.mark();
        let grad_gate = ctx.take::<T>(rows * c)?;
        let args = Args::new().address(f.before.address).address(f.gate.address).address(f.scalars.address);
        let args = args.address(grad.address).address(grad_gate.address).address(grad_scalars.address);
        ctx.each(self.program, "grid_scalar_adjoint", rows * c, args.value(rows as i64))?;
        let shape = Shape {
            m: rows / self.focuses,
            lda: self.focuses * c,
            ldc: self.focuses * 2 * c,
            add: true,
            ..Shape::default()
        };
        self.scalar_gate.run_adjoint(ctx, grad_gate, grad_scalars, shape)?;
        let grad_grid = ctx.take::<T>(self.grid(rows, self.result))?;
        match &self.out {
            None => self.project(ctx, &self.from_adjoint, grad, grad_grid, rows * self.result)?,
            Some(out) => {
                let coefficients = ctx.take::<T>(self.coefficients(rows, self.result))?;
                let shape = Shape {
                    m: rows,
                    lda: c,
                    ldc: self.result,
                    a_plane: rows * c,
                    c_plane: rows * self.result,
                    ..Shape::default()
                };
                out.run_adjoint(ctx, grad, coefficients, shape)?;
                self.project(ctx, &self.from_adjoint, coefficients, grad_grid, rows * self.result)?;
            }
        }
        let points = self.points as i32;
        if let Some(router) = &self.router {
            let grad_route = ctx.take::<T>(rows * self.branches)?;
            let args = Args::new().address(f.left.address).address(f.right.address).address(grad_grid.address);
            let args = args.address(grad_route.address).value(points).value(rows as i64);
            ctx.warps(self.program, "grid_route_gradient", rows * self.branches, args)?;
            let args = Args::new().address(f.route.address).address(grad_route.address).value(rows as i64);
            ctx.each(self.program, "grid_route_adjoint", rows, args)?;
            let shape = Shape { m: rows, lda: self.branches, ldc: 2 * c, add: true, ..Shape::default() };
            router.run_adjoint(ctx, grad_route, grad_scalars, shape)?;
        }
        let args = Args::new().address(f.left.address).address(f.right.address).address(f.route.address);
        let args = args.address(grad_grid.address).value(points).value(rows as i64);
        ctx.each(self.program, "grid_multiply_adjoint", self.points * rows * self.result, args)?;
        self.project(ctx, &self.to_adjoint, f.left, left, width)?;
        self.project(ctx, &self.to_adjoint, f.right, right, width)?;
        ctx.release(mark);
        Ok((left, right, grad_scalars))
    }
}

/// The maps in front of a grid.
struct Input {
    left: Linear,
    right: Linear,
}

impl Input {
    fn new<M: Machine, T: Scalar>(
        programs: &mut Programs,
        constants: &mut Constants<M>,
        input: &GridInput,
        frames: usize,
    ) -> Result<Self> {
        let mut side = |weights: &[Matrix<f64>]| {
            // The adjoint sums over the frames of a degree.
            let adjoint = Products::contract(&transposes(weights), frames);
            Linear::new::<M, T>(programs, constants, &Products::expand(weights, frames), &adjoint)
        };
        Ok(Input { left: side(&input.left)?, right: side(&input.right)? })
    }
}

/// FFN (SPEC 9).
pub struct FfnStage {
    channels: usize,
    degrees: usize,
    kind: Kind,
    linear2: Linear,
}

enum Kind {
    Grid(Box<GridParts>),
    Gated { program: usize, linear1: Linear, gate: Option<Linear>, hidden: usize, glu: bool },
}

struct GridParts {
    input: Input,
    scalars: Linear,
    operation: GridOperation,
}

/// What the adjoint of an FFN needs.
pub enum FfnForward<T> {
    Grid(GridForwardOf<T>),
    Gated { hidden: Array<T>, gate: Array<T> },
}
/// A saved grid operation.
pub struct GridForwardOf<T>(GridForward<T>);

impl FfnStage {
    pub fn new<M: Machine, T: Scalar>(
        programs: &mut Programs,
        constants: &mut Constants<M>,
        ffn: &Ffn<f64>,
        activation: Activation,
    ) -> Result<Self> {
        let (degrees, channels) = (ffn.linear1.len(), ffn.linear1[0].rows);
        let (projector, frames) = match &ffn.nonlinearity {
            FfnNonlinearity::So3Grid { k, net } => (Some((Projector::so3(degrees - 1, *k), net)), net.frames),
            FfnNonlinearity::S2Grid { net } => (Some((Projector::s2(degrees - 1), net)), 1),
            FfnNonlinearity::Gated { .. } => (None, 1),
        };
        let kind = match (&ffn.nonlinearity, projector, ffn_input(ffn)) {
            (FfnNonlinearity::Gated { hidden, glu, gate }, ..) => {
                let program = Program::new(&sources::FFN).real::<T>().define("LMAX", degrees - 1);
                let program = program.define("HIDDEN_WIDTH", hidden).define("GLU", i32::from(*glu));
                let program = program.define("ACTIVATION", activation_name(activation));
                Kind::Gated {
                    program: programs.add(program),
                    linear1: Linear::degrees::<M, T>(programs, constants, &ffn.linear1)?,
                    gate: match gate {
                        Some(w) => Some(Linear::plain::<M, T>(programs, constants, w)?),
                        None => None,
                    },
                    hidden: *hidden,
                    glu: *glu,
                }
            }
            (_, Some((projector, net)), Some(input)) => {
                let scalars = input.scalars.clone().unwrap_or_default();
                Kind::Grid(Box::new(GridParts {
                    operation: GridOperation::new::<M, T>(programs, constants, &projector, degrees, net, input.width)?,
                    input: Input::new::<M, T>(programs, constants, &input, frames)?,
                    scalars: Linear::plain::<M, T>(programs, constants, &scalars)?,
                }))
            }
            _ => unreachable!("a grid FFN has a projector and input maps"),
        };
        let linear2 = Products::contract(&ffn.linear2, frames);
        let adjoint = Products::expand(&transposes(&ffn.linear2), frames);
        Ok(FfnStage { channels, degrees, kind, linear2: Linear::new::<M, T>(programs, constants, &linear2, &adjoint)? })
    }

    fn packed(&self) -> usize {
        self.degrees * self.degrees
    }

    /// `out <- ffn(x)`, dense tiles `[(l, m)][node][C]`.
    pub fn forward<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        nodes: usize,
        x: Array<T>,
        out: Array<T>,
    ) -> Result<FfnForward<T>> {
        let c = self.channels;
        match &self.kind {
            Kind::Grid(parts) => {
                let GridParts { input, scalars, operation } = &**parts;
                let width = operation.width;
                let s = ctx.take::<T>(nodes * 2 * operation.channels)?;
                let left = ctx.take::<T>(operation.coefficients(nodes, width))?;
                let right = ctx.take::<T>(operation.coefficients(nodes, width))?;
                let shape = Shape {
                    m: nodes,
                    lda: c,
                    ldc: width,
                    a_plane: nodes * c,
                    c_plane: nodes * width,
                    ..Shape::default()
                };
                input.left.run(ctx, x, left, shape)?;
                input.right.run(ctx, x, right, shape)?;
                let shape = Shape { m: nodes, lda: c, ldc: 2 * operation.channels, ..Shape::default() };
                scalars.run(ctx, x, s, shape)?;
                let (grid_out, saved) = operation.forward(ctx, nodes, (left, right), s)?;
                self.contract(ctx, nodes, grid_out, out, operation.channels)?;
                Ok(FfnForward::Grid(GridForwardOf(saved)))
            }
            Kind::Gated { program, linear1, gate, hidden, glu } => {
                let width = if *glu { 2 * hidden } else { *hidden };
                let z = ctx.take::<T>(self.packed() * nodes * width)?;
                let gates = ctx.take::<T>(nodes * (self.degrees - 1) * hidden)?;
                let activated = ctx.take::<T>(self.packed() * nodes * hidden)?;
                let shape = Shape {
                    m: nodes,
                    lda: c,
                    ldc: width,
                    a_plane: nodes * c,
                    c_plane: nodes * width,
                    ..Shape::default()
                };
                linear1.run(ctx, x, z, shape)?;
                if let Some(gate) = gate {
                    let shape = Shape { m: nodes, lda: width, ldc: (self.degrees - 1) * hidden, ..Shape::default() };
                    gate.run(ctx, z.from(if *glu { *hidden } else { 0 }), gates, shape)?;
                }
                let args = Args::new().address(z.address).address(gates.address).address(activated.address);
                ctx.each(*program, "gated_forward", nodes * hidden, args.value(nodes as i64))?;
                self.contract(ctx, nodes, activated, out, *hidden)?;
                Ok(FfnForward::Gated { hidden: z, gate: gates })
            }
        }
    }

    fn contract<M: Machine, T>(
        &self,
        ctx: &mut Context<M>,
        nodes: usize,
        x: Array<T>,
        out: Array<T>,
        width: usize,
    ) -> Result<()> {
        let c = self.channels;
        let shape =
            Shape { m: nodes, lda: width, ldc: c, a_plane: nodes * width, c_plane: nodes * c, ..Shape::default() };
        self.linear2.run(ctx, x, out, shape)
    }

    /// `grad_x <- adjoint(grad)` (add: `+=`), dense tiles.
    pub fn adjoint<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        nodes: usize,
        forward: &FfnForward<T>,
        grad: Array<T>,
        grad_x: Array<T>,
        add: bool,
    ) -> Result<()> {
        let c = self.channels;
        let spread = |width: usize| Shape {
            m: nodes,
            lda: c,
            ldc: width,
            a_plane: nodes * c,
            c_plane: nodes * width,
            ..Shape::default()
        };
        let gather = |width: usize, add: bool| Shape {
            m: nodes,
            lda: width,
            ldc: c,
            a_plane: nodes * width,
            c_plane: nodes * c,
            add,
            ..Shape::default()
        };
        match (&self.kind, forward) {
            (Kind::Grid(parts), FfnForward::Grid(GridForwardOf(saved))) => {
                let GridParts { input, scalars, operation } = &**parts;
                let grad_grid = ctx.take::<T>(operation.coefficients(nodes, operation.channels))?;
                self.linear2.run_adjoint(ctx, grad, grad_grid, spread(operation.channels))?;
                let (left, right, grad_s) = operation.adjoint(ctx, nodes, saved, grad_grid)?;
                input.left.run_adjoint(ctx, left, grad_x, gather(operation.width, add))?;
                input.right.run_adjoint(ctx, right, grad_x, gather(operation.width, true))?;
                let shape = Shape { m: nodes, lda: 2 * operation.channels, ldc: c, add: true, ..Shape::default() };
                scalars.run_adjoint(ctx, grad_s, grad_x, shape)
            }
            (Kind::Gated { program, linear1, gate, hidden, glu }, FfnForward::Gated { hidden: z, gate: gates }) => {
                let width = if *glu { 2 * hidden } else { *hidden };
                let grad_activated = ctx.take::<T>(self.packed() * nodes * hidden)?;
                self.linear2.run_adjoint(ctx, grad, grad_activated, spread(*hidden))?;
                let grad_z = ctx.take::<T>(z.len)?;
                let grad_gates = ctx.take::<T>(gates.len)?;
                let args = Args::new().address(z.address).address(gates.address).address(grad_activated.address);
                let args = args.address(grad_z.address).address(grad_gates.address).value(nodes as i64);
                ctx.each(*program, "gated_adjoint", nodes * hidden, args)?;
                if let Some(gate) = gate {
                    let shape =
                        Shape { m: nodes, lda: (self.degrees - 1) * hidden, ldc: width, add: true, ..Shape::default() };
                    gate.run_adjoint(ctx, grad_gates, grad_z.from(if *glu { *hidden } else { 0 }), shape)?;
                }
                linear1.run_adjoint(ctx, grad_z, grad_x, gather(width, add))
            }
            _ => unreachable!("forward and adjoint of the same stage"),
        }
    }
}

/// Message-node product (SPEC 10.4).
pub struct ProductStage {
    input: Input,
    operation: GridOperation,
    contract: Linear,
    residual_scale: u64,
}

/// What its adjoint needs.
pub struct ProductForward<T>(GridForward<T>);

impl ProductStage {
    pub fn new<M: Machine, T: Scalar>(
        programs: &mut Programs,
        constants: &mut Constants<M>,
        product: &NodeProduct<f64>,
        k: usize,
    ) -> Result<Self> {
        let input = product_input(product);
        let degrees = input.left.len();
        let (net, frames) = (&product.net, product.net.frames);
        Ok(ProductStage {
            operation: GridOperation::new::<M, T>(
                programs,
                constants,
                &Projector::so3(degrees - 1, k),
                degrees,
                net,
                input.width,
            )?,
            input: Input::new::<M, T>(programs, constants, &input, frames)?,
            contract: Linear::new::<M, T>(
                programs,
                constants,
                &Products::contract(&product.contract, frames),
                &Products::expand(&transposes(&product.contract), frames),
            )?,
            residual_scale: constants.real::<T>(&product.residual_scale.data)?,
        })
    }

    /// `out <- message + product(message, node)`; `message` and `out` are dense tiles `[(l, m)][node][W]`.
    pub fn forward<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        nodes: usize,
        message: Array<T>,
        node: Rows<T>,
        out: Array<T>,
    ) -> Result<ProductForward<T>> {
        let op = &self.operation;
        let (rows, c, width) = (nodes * op.focuses, op.channels, op.width);
        let scalars = ctx.take::<T>(rows * 2 * c)?;
        let left = ctx.take::<T>(op.coefficients(rows, width))?;
        let right = ctx.take::<T>(op.coefficients(rows, width))?;
        let shape = |plane: usize| Shape {
            m: rows,
            lda: c,
            ldc: width,
            a_plane: plane,
            c_plane: rows * width,
            ..Shape::default()
        };
        self.input.left.run(ctx, message, left, shape(rows * c))?;
        self.input.right.run(ctx, node.data, right, shape(node.plane))?;
        let args = Args::new().address(message.address).address(node.data.address).address(scalars.address);
        ctx.each(op.program, "grid_pack_scalars", rows * c, args.value(rows as i64))?;
        let (grid_out, saved) = op.forward(ctx, rows, (left, right), scalars)?;
        let mark = ctx.mark();
        let contracted = ctx.take::<T>(op.packed * rows * c)?;
        let shape = Shape { m: rows, lda: c, ldc: c, a_plane: rows * c, c_plane: rows * c, ..Shape::default() };
        self.contract.run(ctx, grid_out, contracted, shape)?;
        // out = message + scale * contracted.
        let args = Args::new().address(contracted.address).address(self.residual_scale).address(out.address);
        ctx.each(op.program, "grid_residual", op.packed * rows * c, args.value(1i32).value(rows as i64))?;
        ctx.release(mark);
        Ok(ProductForward(saved))
    }

    /// `grad` of the result becomes that of the message; adds to `grad_node`.
    pub fn adjoint<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        nodes: usize,
        forward: &ProductForward<T>,
        grad: Array<T>,
        grad_node: Rows<T>,
    ) -> Result<()> {
        let op = &self.operation;
        let (rows, c, width) = (nodes * op.focuses, op.channels, op.width);
        let scaled = ctx.take::<T>(op.packed * rows * c)?;
        let args = Args::new().address(grad.address).address(self.residual_scale).address(scaled.address);
        ctx.each(op.program, "grid_residual", op.packed * rows * c, args.value(0i32).value(rows as i64))?;
        let grad_grid = ctx.take::<T>(op.coefficients(rows, c))?;
        let shape = Shape { m: rows, lda: c, ldc: c, a_plane: rows * c, c_plane: rows * c, ..Shape::default() };
        self.contract.run_adjoint(ctx, scaled, grad_grid, shape)?;
        let (left, right, scalars) = op.adjoint(ctx, rows, &forward.0, grad_grid)?;
        let shape = |plane: usize| Shape {
            m: rows,
            lda: width,
            ldc: c,
            a_plane: rows * width,
            c_plane: plane,
            add: true,
            ..Shape::default()
        };
        self.input.left.run_adjoint(ctx, left, grad, shape(rows * c))?;
        self.input.right.run_adjoint(ctx, right, grad_node.data, shape(grad_node.plane))?;
        let args = Args::new().address(scalars.address).address(grad.address).address(grad_node.data.address);
        ctx.each(op.program, "grid_unpack_scalars", rows * c, args.value(rows as i64))
    }
}

/// The last read-out layer with a grid, in closed form (SPEC 22.3).
pub struct ScalarGrid {
    channels: usize,
    input: Input,
    scalars: Linear,
    operation: GridOperation,
    out: Option<Linear>,
    linear2: Linear,
}

/// What its adjoint needs.
pub struct ScalarGridForward<T> {
    left: Array<T>,
    right: Array<T>,
    before: Array<T>,
    gate: Array<T>,
    scalars: Array<T>,
}

impl ScalarGrid {
    /// `None` for a gated FFN.
    pub fn new<M: Machine, T: Scalar>(
        programs: &mut Programs,
        constants: &mut Constants<M>,
        ffn: &Ffn<f64>,
    ) -> Result<Option<Self>> {
        let (net, input) = match (&ffn.nonlinearity, ffn_input(ffn)) {
            (FfnNonlinearity::So3Grid { net, .. } | FfnNonlinearity::S2Grid { net }, Some(input)) => (net, input),
            _ => return Ok(None),
        };
        let degrees = ffn.linear1.len();
        let out = match &net.op {
            GridWeights::Mlp { out, .. } => Some(Linear::plain::<M, T>(programs, constants, out)?),
            _ => None,
        };
        let mut linear2 = ffn.linear2[0].clone();
        linear2.data.truncate(net.channels * linear2.cols);
        linear2.rows = net.channels;
        // Only degree 0 and frame 0 of the operation's scalar path are used.
        let projector = Projector::so3(degrees - 1, net.frames / 2);
        Ok(Some(ScalarGrid {
            channels: ffn.linear1[0].rows,
            scalars: Linear::plain::<M, T>(programs, constants, &input.scalars.clone().unwrap_or_default())?,
            operation: GridOperation::new::<M, T>(programs, constants, &projector, degrees, net, input.width)?,
            input: Input::new::<M, T>(programs, constants, &input, net.frames)?,
            out,
            linear2: Linear::plain::<M, T>(programs, constants, &linear2)?,
        }))
    }

    /// Adds the scalars of the layer to `descriptor` `[node][C]`; `x` a dense tile.
    pub fn forward<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        scalar_program: usize,
        nodes: usize,
        x: Array<T>,
        descriptor: Array<T>,
    ) -> Result<ScalarGridForward<T>> {
        let op = &self.operation;
        let (c, h, width) = (self.channels, op.channels, op.width);
        let left = ctx.take::<T>(op.coefficients(nodes, width))?;
        let right = ctx.take::<T>(op.coefficients(nodes, width))?;
        let scalars = ctx.take::<T>(nodes * 2 * h)?;
        let product = ctx.take::<T>(nodes * width)?;
        let gate = ctx.take::<T>(nodes * h)?;
        let gated = ctx.take::<T>(nodes * h)?;
        let shape =
            Shape { m: nodes, lda: c, ldc: width, a_plane: nodes * c, c_plane: nodes * width, ..Shape::default() };
        self.input.left.run(ctx, x, left, shape)?;
        self.input.right.run(ctx, x, right, shape)?;
        self.scalars.run(ctx, x, scalars, Shape { m: nodes, lda: c, ldc: 2 * h, ..Shape::default() })?;
        let args = Args::new().address(left.address).address(right.address).address(product.address);
        ctx.each(op.program, "grid_scalar_product", nodes * width, args.value(nodes as i64))?;
        let before = match &self.out {
            None => product,
            Some(out) => {
                let mapped = ctx.take::<T>(nodes * h)?;
                out.run(ctx, product, mapped, Shape { m: nodes, lda: width, ldc: h, ..Shape::default() })?;
                mapped
            }
        };
        op.scalar_gate.run(ctx, scalars, gate, op.gate_shape(nodes, false))?;
        let args = Args::new().address(before.address).address(gate.address).address(scalars.address);
        let args = args.address(gated.address).value(nodes as i64);
        ctx.each(scalar_program, "grid_scalar_forward", nodes * h, args)?;
        let shape = Shape { m: nodes, lda: h, ldc: c, add: true, ..Shape::default() };
        self.linear2.run(ctx, gated, descriptor, shape)?;
        Ok(ScalarGridForward { left, right, before, gate, scalars })
    }

    /// Sets `grad_x` (dense tile) from `grad` of the descriptor.
    pub fn adjoint<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        scalar_program: usize,
        nodes: usize,
        f: &ScalarGridForward<T>,
        grad: Array<T>,
        grad_x: Array<T>,
    ) -> Result<()> {
        let op = &self.operation;
        let (c, h, width) = (self.channels, op.channels, op.width);
        let grad_gated = ctx.take::<T>(nodes * h)?;
        let grad_gate = ctx.take::<T>(nodes * h)?;
        let grad_scalars = ctx.take::<T>(nodes * 2 * h)?;
        let shape = Shape { m: nodes, lda: c, ldc: h, ..Shape::default() };
        self.linear2.run_adjoint(ctx, grad, grad_gated, shape)?;
        let args = Args::new().address(f.before.address).address(f.gate.address).address(f.scalars.address);
        let args = args.address(grad_gated.address).address(grad_gate.address).address(grad_scalars.address);
        ctx.each(scalar_program, "grid_scalar_adjoint", nodes * h, args.value(nodes as i64))?;
        let shape = Shape { m: nodes, lda: h, ldc: 2 * h, add: true, ..Shape::default() };
        op.scalar_gate.run_adjoint(ctx, grad_gate, grad_scalars, shape)?;
        let grad_product = match &self.out {
            None => grad_gated,
            Some(out) => {
                let mapped = ctx.take::<T>(nodes * width)?;
                let shape = Shape { m: nodes, lda: h, ldc: width, ..Shape::default() };
                out.run_adjoint(ctx, grad_gated, mapped, shape)?;
                mapped
            }
        };
        let args = Args::new().address(f.left.address).address(f.right.address).address(grad_product.address);
        ctx.each(op.program, "grid_scalar_product_adjoint", nodes * width, args.value(nodes as i64))?;
        let shape = |add: bool| Shape {
            m: nodes,
            lda: width,
            ldc: c,
            a_plane: nodes * width,
            c_plane: nodes * c,
            add,
            ..Shape::default()
        };
        self.input.left.run_adjoint(ctx, f.left, grad_x, shape(false))?;
        self.input.right.run_adjoint(ctx, f.right, grad_x, shape(true))?;
        let shape = Shape { m: nodes, lda: 2 * h, ldc: c, add: true, ..Shape::default() };
        self.scalars.run_adjoint(ctx, grad_scalars, grad_x, shape)
    }

    /// The program of the scalar path: one row, one frame.
    pub fn scalar_program<T: Scalar>(&self, programs: &mut Programs) -> usize {
        let program = Program::new(&sources::GRID_PRODUCT).real::<T>().define("FRAMES", 1).define("LMAX", 0);
        let program = program.define("CHANNELS", self.operation.channels).define("BRANCHES", 1);
        programs.add(program.define("GRID_CHANNELS", self.operation.channels).define("FOCUSES", 1))
    }
}

/// Fitting net (SPEC 16).
pub struct FittingStage {
    program: usize,
    hidden: Vec<(Linear, u64, usize)>,
    output: u64,
    shift: u64,
    width: usize,
    channels: usize,
}

impl FittingStage {
    pub fn new<M: Machine, T: Scalar>(
        programs: &mut Programs,
        constants: &mut Constants<M>,
        fitting: &Fitting<f64>,
        activation: Activation,
        channels: usize,
    ) -> Result<Self> {
        let program = Program::new(&sources::FITTING).real::<T>().define("ACTIVATION", activation_name(activation));
        let mut hidden = Vec::new();
        for (matrix, bias) in &fitting.hidden {
            hidden.push((
                Linear::plain::<M, T>(programs, constants, matrix)?,
                constants.real::<T>(bias)?,
                matrix.cols / 2,
            ));
        }
        Ok(FittingStage {
            program: programs.add(program),
            hidden,
            output: constants.real::<T>(&fitting.output)?,
            shift: constants.keep(&fitting.shifts())?,
            width: fitting.output.len(),
            channels,
        })
    }

    /// Energies, eV, of `types.len` nodes and dE/d(descriptor) in `grad` `[node][C]`.
    pub fn run<M: Machine, T: Scalar>(
        &self,
        ctx: &mut Context<M>,
        nodes: usize,
        descriptor: Array<T>,
        types: Array<i32>,
        energy: Array<f64>,
        grad: Array<T>,
    ) -> Result<()> {
        let mut h = descriptor;
        let mut width = self.channels;
        let mut saved = Vec::with_capacity(self.hidden.len());
        for (linear, bias, n) in &self.hidden {
            let hidden = ctx.take::<T>(nodes * 2 * n)?;
            let next = ctx.take::<T>(nodes * n)?;
            linear.run(ctx, h, hidden, Shape { m: nodes, lda: width, ldc: 2 * n, ..Shape::default() })?;
            let args = Args::new().address(hidden.address).address(*bias).address(next.address);
            ctx.each(self.program, "fitting_gate", nodes * n, args.value(*n as i32).value(nodes as i64))?;
            saved.push((hidden, width));
            (h, width) = (next, *n);
        }
        let mut g = if self.hidden.is_empty() { grad } else { ctx.take::<T>(nodes * width)? };
        let args = Args::new().address(h.address).address(self.output).address(self.shift).address(types.address);
        let args = args.address(energy.address).address(g.address).value(self.width as i32).value(nodes as i64);
        ctx.warps(self.program, "fitting_energy", nodes, args)?;
        for (i, ((linear, _, n), (hidden, inputs))) in self.hidden.iter().zip(saved).enumerate().rev() {
            let grad_hidden = ctx.take::<T>(nodes * 2 * n)?;
            let out = if i == 0 { grad } else { ctx.take::<T>(nodes * inputs)? };
            let args = Args::new().address(hidden.address).address(g.address).address(grad_hidden.address);
            ctx.each(self.program, "fitting_gate_adjoint", nodes * n, args.value(*n as i32).value(nodes as i64))?;
            let shape = Shape { m: nodes, lda: 2 * n, ldc: inputs, ..Shape::default() };
            linear.run_adjoint(ctx, grad_hidden, out, shape)?;
            g = out;
        }
        Ok(())
    }
}
