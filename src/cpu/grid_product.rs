//! `grid_product`: products of equivariant features on SO(3) or S2 grids (SPEC 10), and the message-node product.
//!
//! The third Euler angle of an SO(3) grid needs no points: functions on it are trigonometric polynomials of order K,
//! kept as their components `[1, cos g, sin g, cos 2g, ...]` at the sphere points and multiplied as such. That is the
//! quadrature of SPEC 10.2 summed in closed form. An S2 grid is the case K = 0 with its own normalisation (SPEC 10.3).

use super::node_linear::{
    contract_frames, contract_frames_adjoint, expand_frames, expand_frames_adjoint, first_row, frames_of_degree,
};
use super::real::{
    Into, Real, View, activate_with_slope, axpy, dense, matmul, matmul_left_transposed, matmul_transposed, sigmoid,
};
use crate::math::quadrature::sphere_rule;
use crate::math::wigner::{Wigner, edge_frame};
use crate::model::config::Activation;
use crate::model::merge::{GridInput, product_input};
use crate::model::parameters::{DegreeLinear, GridNet, GridWeights, Matrix, NodeProduct};

/// Coefficients <-> values on the grid.
pub struct Projector<T> {
    degree: usize,
    /// Sphere points.
    points: usize,
    /// 2K + 1: frames of the coefficients and components in the third angle.
    frames: usize,
    to: Vec<FrameMatrix<T>>,
    from: Vec<FrameMatrix<T>>,
    /// Product of trigonometric polynomials cut at order K: (left, right, result, factor).
    terms: Vec<(usize, usize, usize, T)>,
}

/// For each frame the first component that it feeds, and its matrix.
pub type FrameMatrices<T> = Vec<(usize, Matrix<T>)>;

/// One frame's rows (component, point) against its coefficients of degree |k| and above.
struct FrameMatrix<T> {
    /// First of the components it feeds, and how many: 1 for k = 0, else cos and sin.
    component: usize,
    matrix: Matrix<T>,
}

/// Order of a frame in `[0, -1, +1, -2, +2, ...]`.
fn frame_order(frame: usize) -> i64 {
    let k = frame.div_ceil(2) as i64;
    if frame % 2 == 1 { -k } else { k }
}

impl<T: Real> Projector<T> {
    /// SO(3) grid for degrees up to `degree` and frames |k| <= K (SPEC 10.2).
    pub fn so3(degree: usize, k: usize) -> Self {
        Self::new(degree, 2 * k + 1, 1.0)
    }
    /// Sphere grid (SPEC 10.3).
    pub fn s2(degree: usize) -> Self {
        Self::new(degree, 1, 1.0 / ((degree + 1) as f64).sqrt())
    }

    fn new(degree: usize, frames: usize, scale: f64) -> Self {
        let rule = sphere_rule(3 * degree);
        let wigner = Wigner::new(degree);
        let mut records = vec![0.0; rule.points.len() * wigner.record_len()];
        for (record, &point) in records.chunks_exact_mut(wigner.record_len()).zip(&rule.points) {
            wigner.assemble(&edge_frame(point), record);
        }
        // D(R_p)[(l, k), (l, m)] of one point.
        let element = |p: usize, l: usize, k: i64, column: usize| {
            let size = 2 * l + 1;
            records[p * wigner.record_len() + wigner.offset(l) + (k + l as i64) as usize * size + column]
        };
        let matrix = |frame: usize, factor: &dyn Fn(usize, usize) -> f64| {
            let k = frame_order(frame);
            let lowest = k.unsigned_abs() as usize;
            // The cos and sin components that a frame's coefficient multiplies (R_z of SPEC 4.2).
            let parts: &[(i64, f64)] = match k {
                0 => &[(0, 1.0)],
                k if k > 0 => &[(k, 1.0), (-k, 1.0)],
                k => &[(k, 1.0), (-k, -1.0)],
            };
            let mut data = Vec::new();
            for &(row, sign) in parts {
                for p in 0..rule.points.len() {
                    for l in lowest..=degree {
                        data.extend((0..2 * l + 1).map(|m| T::of(sign * element(p, l, row, m) * factor(p, l))));
                    }
                }
            }
            let rows = parts.len() * rule.points.len();
            let component = if lowest == 0 { 0 } else { 2 * lowest - 1 };
            FrameMatrix { component, matrix: Matrix { rows, cols: data.len() / rows, data } }
        };
        let to = (0..frames).map(|f| matrix(f, &|_, _| scale)).collect();
        let from = (0..frames)
            .map(|f| {
                let half = if f == 0 { 1.0 } else { 0.5 };
                matrix(f, &|p, l| half * rule.weights[p] * (2 * l + 1) as f64 / scale)
            })
            .collect();
        Projector { degree, points: rule.points.len(), frames, to, from, terms: product_terms(frames) }
    }

    /// For each frame the first component it feeds and its matrix, to the grid and (transposed) back; sphere points.
    pub fn matrices(&self) -> (FrameMatrices<T>, FrameMatrices<T>, usize) {
        let list = |m: &[FrameMatrix<T>]| m.iter().map(|f| (f.component, f.matrix.clone())).collect();
        (list(&self.to), list(&self.from), self.points)
    }

    /// Values of a grid function of the given width: `[component][point][width]`.
    pub fn grid_len(&self, width: usize) -> usize {
        self.frames * self.points * width
    }
    /// Coefficients: `[frame][(l, m)][width]`.
    pub fn coefficients_len(&self, width: usize) -> usize {
        self.frames * first_row(self.degree + 1) * width
    }

    /// Coefficients to grid values.
    pub fn to(&self, width: usize, coefficients: &[T], grid: &mut [T]) {
        self.forth(&self.to, width, coefficients, grid);
    }
    /// Grid values to coefficients; frames that a degree does not have are left alone.
    pub fn from(&self, width: usize, grid: &[T], coefficients: &mut [T]) {
        self.back(&self.from, width, grid, coefficients);
    }
    /// Adjoint of [`Self::to`].
    pub fn to_adjoint(&self, width: usize, grid: &[T], coefficients: &mut [T]) {
        self.back(&self.to, width, grid, coefficients);
    }
    /// Adjoint of [`Self::from`].
    pub fn from_adjoint(&self, width: usize, coefficients: &[T], grid: &mut [T]) {
        self.forth(&self.from, width, coefficients, grid);
    }

    fn forth(&self, matrices: &[FrameMatrix<T>], width: usize, coefficients: &[T], grid: &mut [T]) {
        for (frame, f) in matrices.iter().enumerate() {
            let input = dense(&coefficients[self.first(frame) * width..], f.matrix.cols, width);
            // Frame +k meets the components that frame -k has just set.
            let into = if frame > 0 && frame % 2 == 0 { Into::Add } else { Into::Set };
            matmul(View::from(&f.matrix), input, &mut grid[f.component * self.points * width..], width, into);
        }
    }
    fn back(&self, matrices: &[FrameMatrix<T>], width: usize, grid: &[T], coefficients: &mut [T]) {
        for (frame, f) in matrices.iter().enumerate() {
            let values = dense(&grid[f.component * self.points * width..], f.matrix.rows, width);
            let out = &mut coefficients[self.first(frame) * width..];
            matmul_left_transposed(View::from(&f.matrix), values, out, width, Into::Set);
        }
    }
    /// Row of a frame's first coefficient among all frames' rows.
    fn first(&self, frame: usize) -> usize {
        frame * first_row(self.degree + 1) + first_row(frame.div_ceil(2))
    }

    /// Pointwise product of two grid functions of the same width.
    pub fn multiply(&self, width: usize, left: &[T], right: &[T], out: &mut [T]) {
        let plane = self.points * width;
        out[..self.grid_len(width)].fill(T::zero());
        for &(i, j, o, factor) in &self.terms {
            let (left, right) = (&left[i * plane..][..plane], &right[j * plane..][..plane]);
            for ((out, &a), &b) in out[o * plane..][..plane].iter_mut().zip(left).zip(right) {
                *out += factor * a * b;
            }
        }
    }
    /// Adjoint of [`Self::multiply`] with respect to the factor that is not `other`.
    pub fn multiply_adjoint(&self, width: usize, other: &[T], grad: &[T], grad_factor: &mut [T]) {
        let plane = self.points * width;
        grad_factor[..self.grid_len(width)].fill(T::zero());
        // The terms are symmetric in their factors.
        for &(i, j, o, factor) in &self.terms {
            let (other, grad) = (&other[j * plane..][..plane], &grad[o * plane..][..plane]);
            for ((out, &a), &g) in grad_factor[i * plane..][..plane].iter_mut().zip(other).zip(grad) {
                *out += factor * a * g;
            }
        }
    }
}

/// Products of `[1, cos g, sin g, cos 2g, sin 2g, ...]` as sums of the same functions, orders above K dropped.
fn product_terms<T: Real>(frames: usize) -> Vec<(usize, usize, usize, T)> {
    let order = (frames / 2) as i64;
    let cos = |k: i64| if k == 0 { 0 } else { 2 * k as usize - 1 };
    let sin = |k: i64| 2 * k as usize;
    let mut terms = Vec::new();
    for a in 0..=order {
        for b in 0..=order {
            // A constant contributes its value once, not half as a sum and half as a difference.
            let half = if a == 0 || b == 0 { 1.0 } else { 0.5 };
            for (k, is_sum) in [(a + b, true), ((a - b).abs(), false)] {
                if k > order || (!is_sum && (a == 0 || b == 0)) {
                    continue;
                }
                terms.push((cos(a), cos(b), cos(k), half));
                if a > 0 && b > 0 {
                    terms.push((sin(a), sin(b), cos(k), if is_sum { -half } else { half }));
                }
                if k > 0 {
                    // sin a cos b = (sin(a + b) + sin(a - b)) / 2, and the mirror image.
                    let sign = |first: bool| if is_sum || (a > b) == first { half } else { -half };
                    if a > 0 {
                        terms.push((sin(a), cos(b), sin(k), sign(true)));
                    }
                    if b > 0 {
                        terms.push((cos(a), sin(b), sin(k), sign(false)));
                    }
                }
            }
        }
    }
    terms.into_iter().map(|(i, j, o, f)| (i, j, o, T::of(f))).collect()
}

/// The grid operation and its scalar path, from left and right coefficients to the result (SPEC 10.1).
pub struct GridOperation<T> {
    projector: Projector<T>,
    frames: usize,
    /// C' of the result.
    channels: usize,
    /// Channels on the grid: C', 2C' or branches * C'.
    width: usize,
    /// 2C' x branches, with more than one branch.
    router: Option<Matrix<T>>,
    /// width (or C') -> C'.
    out: Option<Matrix<T>>,
    /// `[focus]`: 2C' x C'.
    scalar_gate: Vec<Matrix<T>>,
}

/// What the adjoint of a grid operation needs from its forward pass.
pub struct GridForward<T> {
    left: Vec<T>,
    right: Vec<T>,
    before_gate: Vec<T>,
    gate: Vec<T>,
    route: Vec<T>,
}

impl<T: Real> GridOperation<T> {
    /// `width`: grid channels that the merged input maps deliver.
    pub fn new(projector: Projector<T>, net: &GridNet<f64>, width: usize) -> Self {
        let cast = |m: &Matrix<f64>| m.cast(&T::of);
        let (router, out) = match &net.op {
            GridWeights::Glu => (None, None),
            GridWeights::Mlp { out, .. } => (None, Some(cast(out))),
            GridWeights::Branch { router, out, .. } => {
                // A softmax over one entry is 1 (SPEC 22.4).
                ((router.cols > 1).then(|| cast(router)), Some(cast(out)))
            }
        };
        GridOperation {
            projector,
            frames: net.frames,
            channels: net.channels,
            width,
            router,
            out,
            scalar_gate: net.scalar_gate.iter().map(cast).collect(),
        }
    }

    fn plane(&self, rows: usize, channels: usize) -> usize {
        first_row(self.projector.degree + 1) * rows * channels
    }
    /// Length of left or right coefficients: `[frame][(l, m)][row][width]`.
    pub fn input_len(&self, rows: usize) -> usize {
        self.projector.coefficients_len(rows * self.width)
    }
    /// Channels that come out of the grid before `out`.
    fn result_width(&self) -> usize {
        if self.router.is_some() { self.channels } else { self.width }
    }

    /// `left`, `right`: `[frame][(l, m)][row][width]`, rows = (node, focus); `scalars`: `[row][2C']`.
    /// Returns `[frame][(l, m)][row][C']` and what the adjoint needs.
    pub fn forward(&self, rows: usize, left: &[T], right: &[T], scalars: &[T]) -> (Vec<T>, GridForward<T>) {
        let (c, p) = (self.channels, &self.projector);
        let width = rows * self.width;
        let mut left_grid = vec![T::zero(); p.grid_len(width)];
        let mut right_grid = vec![T::zero(); p.grid_len(width)];
        p.to(width, left, &mut left_grid);
        p.to(width, right, &mut right_grid);
        let mut product = vec![T::zero(); p.grid_len(width)];
        p.multiply(width, &left_grid, &right_grid, &mut product);
        let route = self.route(rows, scalars);
        if let Some(router) = &self.router {
            product = self.blend(rows, router.cols, &route, &product);
        }
        let result = self.result_width();
        let mut coefficients = vec![T::zero(); p.coefficients_len(rows * result)];
        p.from(rows * result, &product, &mut coefficients);
        let before_gate = match &self.out {
            None => coefficients,
            Some(out) => {
                let mut mapped = vec![T::zero(); p.coefficients_len(rows * c)];
                self.each_row_block(rows, |first, count| {
                    let x = dense(&coefficients[first * result..], count, result);
                    matmul(x, out.into(), &mut mapped[first * c..], c, Into::Set);
                });
                mapped
            }
        };
        let gate = self.gates(rows, scalars);
        let mut output = before_gate.clone();
        output.chunks_exact_mut(rows * c).for_each(|row| {
            row.iter_mut().zip(&gate).for_each(|(o, &g)| *o *= g);
        });
        for (row, out) in output[..rows * c].chunks_exact_mut(c).enumerate() {
            let (a, b) = scalars[row * 2 * c..(row + 1) * 2 * c].split_at(c);
            for ((o, &a), &b) in out.iter_mut().zip(a).zip(b) {
                *o += a * sigmoid(a) * b;
            }
        }
        (output, GridForward { left: left_grid, right: right_grid, before_gate, gate, route })
    }

    /// Gradients of left, right and scalars from that of the output.
    pub fn adjoint(
        &self,
        rows: usize,
        forward: &GridForward<T>,
        scalars: &[T],
        grad: &[T],
    ) -> (Vec<T>, Vec<T>, Vec<T>) {
        let (c, p) = (self.channels, &self.projector);
        let mut grad_scalars = vec![T::zero(); rows * 2 * c];
        self.scalar_product_adjoint(rows, scalars, grad, &mut grad_scalars);
        let mut grad_before = grad.to_vec();
        let mut grad_gate = vec![T::zero(); rows * c];
        for (g, x) in grad_before.chunks_exact_mut(rows * c).zip(forward.before_gate.chunks_exact(rows * c)) {
            for (((gate_sum, g), &x), &gate) in grad_gate.iter_mut().zip(g).zip(x).zip(&forward.gate) {
                *gate_sum += *g * x;
                *g *= gate;
            }
        }
        self.gates_adjoint(rows, &forward.gate, &mut grad_gate, &mut grad_scalars);
        let result = self.result_width();
        let grad_coefficients = match &self.out {
            None => grad_before,
            Some(out) => {
                let mut mapped = vec![T::zero(); p.coefficients_len(rows * result)];
                self.each_row_block(rows, |first, count| {
                    let g = dense(&grad_before[first * c..], count, c);
                    matmul_transposed(g, out.into(), &mut mapped[first * result..], result, Into::Set);
                });
                mapped
            }
        };
        let mut grad_grid = vec![T::zero(); p.grid_len(rows * result)];
        p.from_adjoint(rows * result, &grad_coefficients, &mut grad_grid);
        let width = rows * self.width;
        if let Some(router) = &self.router {
            let mut product = vec![T::zero(); p.grid_len(width)];
            p.multiply(width, &forward.left, &forward.right, &mut product);
            grad_grid = self.blend_adjoint(rows, router, forward, &product, &grad_grid, &mut grad_scalars);
        }
        let mut grad_factor = vec![T::zero(); p.grid_len(width)];
        let mut side = |other: &[T]| {
            p.multiply_adjoint(width, other, &grad_grid, &mut grad_factor);
            let mut out = vec![T::zero(); p.coefficients_len(width)];
            p.to_adjoint(width, &grad_factor, &mut out);
            out
        };
        (side(&forward.right), side(&forward.left), grad_scalars)
    }

    /// Blocks of rows `[(l, m)][row]` with |k| <= l, over all frames: (first row, rows).
    fn each_row_block(&self, rows: usize, mut f: impl FnMut(usize, usize)) {
        let degrees = self.projector.degree + 1;
        for frame in 0..self.frames {
            let lowest = first_row(frame.div_ceil(2));
            let first = (frame * first_row(degrees) + lowest) * rows;
            f(first, (first_row(degrees) - lowest) * rows);
        }
    }

    fn scalar_product_adjoint(&self, rows: usize, scalars: &[T], grad: &[T], grad_scalars: &mut [T]) {
        let c = self.channels;
        for row in 0..rows {
            let (a, b) = scalars[row * 2 * c..(row + 1) * 2 * c].split_at(c);
            let (grad_a, grad_b) = grad_scalars[row * 2 * c..(row + 1) * 2 * c].split_at_mut(c);
            let grad = &grad[row * c..(row + 1) * c];
            for i in 0..c {
                let (value, slope) = activate_with_slope(Activation::Silu, a[i]);
                grad_a[i] += grad[i] * slope * b[i];
                grad_b[i] += grad[i] * value;
            }
        }
    }

    /// `sigmoid(scalars W)` of each row with its focus' weights.
    fn gates(&self, rows: usize, scalars: &[T]) -> Vec<T> {
        let (c, focuses) = (self.channels, self.scalar_gate.len());
        let mut gate = vec![T::zero(); rows * c];
        for (f, w) in self.scalar_gate.iter().enumerate() {
            let input = View {
                data: &scalars[(f * 2 * c).min(scalars.len())..],
                rows: rows / focuses,
                cols: 2 * c,
                stride: focuses * 2 * c,
            };
            matmul(input, w.into(), &mut gate[f * c..], focuses * c, Into::Set);
        }
        gate.iter_mut().for_each(|g| *g = sigmoid(*g));
        gate
    }
    fn gates_adjoint(&self, rows: usize, gate: &[T], grad_gate: &mut [T], grad_scalars: &mut [T]) {
        let (c, focuses) = (self.channels, self.scalar_gate.len());
        grad_gate.iter_mut().zip(gate).for_each(|(d, &g)| *d *= g * (T::one() - g));
        for (f, w) in self.scalar_gate.iter().enumerate() {
            let grad = View { data: &grad_gate[f * c..], rows: rows / focuses, cols: c, stride: focuses * c };
            matmul_transposed(grad, w.into(), &mut grad_scalars[f * 2 * c..], focuses * 2 * c, Into::Add);
        }
    }

    /// Softmax over the branches of each row; empty without a router.
    fn route(&self, rows: usize, scalars: &[T]) -> Vec<T> {
        let Some(router) = &self.router else { return Vec::new() };
        let branches = router.cols;
        let mut route = vec![T::zero(); rows * branches];
        matmul(dense(scalars, rows, router.rows), router.into(), &mut route, branches, Into::Set);
        for row in route.chunks_exact_mut(branches) {
            let top = row.iter().copied().fold(T::neg_infinity(), T::max);
            row.iter_mut().for_each(|v| *v = (*v - top).exp());
            let sum: T = row.iter().copied().sum();
            row.iter_mut().for_each(|v| *v /= sum);
        }
        route
    }
    /// Weighted sum over the branches: `[..][row][branch][C'] -> [..][row][C']`.
    fn blend(&self, rows: usize, branches: usize, route: &[T], product: &[T]) -> Vec<T> {
        let c = self.channels;
        let mut out = vec![T::zero(); product.len() / branches];
        for (i, out) in out.chunks_exact_mut(c).enumerate() {
            let row = i % rows;
            for b in 0..branches {
                axpy(route[row * branches + b], &product[(i * branches + b) * c..][..c], out);
            }
        }
        out
    }
    fn blend_adjoint(
        &self,
        rows: usize,
        router: &Matrix<T>,
        forward: &GridForward<T>,
        product: &[T],
        grad: &[T],
        grad_scalars: &mut [T],
    ) -> Vec<T> {
        let (c, branches, route) = (self.channels, router.cols, &forward.route);
        let mut out = vec![T::zero(); grad.len() * branches];
        let mut grad_route = vec![T::zero(); rows * branches];
        for (i, grad) in grad.chunks_exact(c).enumerate() {
            let row = i % rows;
            for b in 0..branches {
                let at = (i * branches + b) * c;
                axpy(route[row * branches + b], grad, &mut out[at..at + c]);
                grad_route[row * branches + b] +=
                    grad.iter().zip(&product[at..at + c]).map(|(&g, &x)| g * x).sum::<T>();
            }
        }
        for (grad, route) in grad_route.chunks_exact_mut(branches).zip(route.chunks_exact(branches)) {
            let mean: T = grad.iter().zip(route).map(|(&g, &p)| g * p).sum();
            grad.iter_mut().zip(route).for_each(|(g, &p)| *g = p * (*g - mean));
        }
        let grad_route = dense(&grad_route, rows, branches);
        matmul_transposed(grad_route, router.into(), grad_scalars, router.rows, Into::Add);
        out
    }
}

/// Message-node product: `out += product(out, X)` (SPEC 10.4). Rows are (node, focus), channels those of a focus.
pub struct ProductStage<T> {
    left: DegreeLinear<T>,
    right: DegreeLinear<T>,
    operation: GridOperation<T>,
    contract: DegreeLinear<T>,
    /// `[focus][channel]`.
    residual_scale: Matrix<T>,
}

/// What the adjoint of the message-node product needs.
pub struct ProductForward<T> {
    scalars: Vec<T>,
    grid: GridForward<T>,
}

impl<T: Real> ProductStage<T> {
    /// `k`: largest frame order.
    pub fn new(product: &NodeProduct<f64>, k: usize) -> Self {
        let GridInput { left, right, width, .. } = product_input(product);
        let cast = |d: &DegreeLinear<f64>| d.iter().map(|m| m.cast(&T::of)).collect::<DegreeLinear<T>>();
        ProductStage {
            operation: GridOperation::new(Projector::so3(left.len() - 1, k), &product.net, width),
            left: cast(&left),
            right: cast(&right),
            contract: cast(&product.contract),
            residual_scale: product.residual_scale.cast(&T::of),
        }
    }

    /// `message`, `node`: tiles `[(l, m)][node][W]`; adds the product to `message`.
    pub fn forward(&self, nodes: usize, message: &mut [T], node: &[T]) -> ProductForward<T> {
        let (focuses, c) = (self.residual_scale.rows, self.residual_scale.cols);
        let (rows, frames) = (nodes * focuses, self.operation.frames);
        let mut left = vec![T::zero(); self.operation.input_len(rows)];
        let mut right = vec![T::zero(); self.operation.input_len(rows)];
        expand_frames(&self.left, frames, rows, message, &mut left);
        expand_frames(&self.right, frames, rows, node, &mut right);
        let mut scalars = vec![T::zero(); rows * 2 * c];
        for (row, out) in scalars.chunks_exact_mut(2 * c).enumerate() {
            out[..c].copy_from_slice(&message[row * c..(row + 1) * c]);
            out[c..].copy_from_slice(&node[row * c..(row + 1) * c]);
        }
        let (grid_out, grid) = self.operation.forward(rows, &left, &right, &scalars);
        let mut contracted = vec![T::zero(); self.operation.plane(rows, c)];
        contract_frames(&self.contract, frames, rows, &grid_out, &mut contracted, Into::Set);
        for (row, (out, x)) in message.chunks_exact_mut(c).zip(contracted.chunks_exact(c)).enumerate() {
            let scale = self.residual_scale.row(row % focuses);
            out.iter_mut().zip(x).zip(scale).for_each(|((o, &x), &s)| *o += x * s);
        }
        ProductForward { scalars, grid }
    }

    /// `grad`: gradient of the sum, becomes that of the message that went in; adds to `grad_node`.
    pub fn adjoint(&self, nodes: usize, forward: &ProductForward<T>, grad: &mut [T], grad_node: &mut [T]) {
        let (focuses, c) = (self.residual_scale.rows, self.residual_scale.cols);
        let (rows, frames) = (nodes * focuses, self.operation.frames);
        let mut scaled = grad.to_vec();
        for (row, x) in scaled.chunks_exact_mut(c).enumerate() {
            let scale = self.residual_scale.row(row % focuses);
            x.iter_mut().zip(scale).for_each(|(x, &s)| *x *= s);
        }
        let mut grad_grid = vec![T::zero(); self.operation.frames * self.operation.plane(rows, c)];
        contract_frames_adjoint(&self.contract, frames, rows, &scaled, &mut grad_grid);
        let (left, right, scalars) = self.operation.adjoint(rows, &forward.grid, &forward.scalars, &grad_grid);
        expand_frames_adjoint(&self.left, frames, rows, &left, grad, Into::Add);
        expand_frames_adjoint(&self.right, frames, rows, &right, grad_node, Into::Add);
        for (row, x) in scalars.chunks_exact(2 * c).enumerate() {
            axpy(T::one(), &x[..c], &mut grad[row * c..(row + 1) * c]);
            axpy(T::one(), &x[c..], &mut grad_node[row * c..(row + 1) * c]);
        }
    }
}

/// `from(to(left) to(right))` at l = 0, k = 0 without a grid (SPEC 22.3): `sum left right / (2l + 1)`.
/// Returns `[row][width]`.
pub fn scalar_product<T: Real>(
    degrees: usize,
    frames: usize,
    rows: usize,
    width: usize,
    left: &[T],
    right: &[T],
) -> Vec<T> {
    let mut out = vec![T::zero(); rows * width];
    each_coefficient(degrees, frames, |l, at| {
        let factor = T::of(1.0 / (2 * l + 1) as f64);
        let range = at * rows * width..(at + 1) * rows * width;
        for ((o, &a), &b) in out.iter_mut().zip(&left[range.clone()]).zip(&right[range]) {
            *o += factor * a * b;
        }
    });
    out
}

/// Adjoint of [`scalar_product`]: overwrites `left` and `right` with their gradients.
pub fn scalar_product_adjoint<T: Real>(
    degrees: usize,
    frames: usize,
    rows: usize,
    width: usize,
    left: &mut [T],
    right: &mut [T],
    grad: &[T],
) {
    each_coefficient(degrees, frames, |l, at| {
        let factor = T::of(1.0 / (2 * l + 1) as f64);
        let range = at * rows * width..(at + 1) * rows * width;
        for ((a, b), &g) in left[range.clone()].iter_mut().zip(&mut right[range]).zip(grad) {
            (*a, *b) = (factor * *b * g, factor * *a * g);
        }
    });
}

/// Coefficients `[frame][(l, m)]` with |k| <= l: (degree, position).
fn each_coefficient(degrees: usize, frames: usize, mut f: impl FnMut(usize, usize)) {
    for frame in 0..frames {
        for row in 0..first_row(degrees) {
            let l = row.isqrt();
            if frame < frames_of_degree(frames, l) {
                f(l, frame * first_row(degrees) + row);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{check_adjoint, random};

    fn operation(op: GridWeights<f64>, degree: usize, k: usize, c: usize, width: usize) -> GridOperation<f64> {
        let scalar_gate = (0..2).map(|f| Matrix { rows: 2 * c, cols: c, data: random(40 + f, 2 * c * c) }).collect();
        let net = GridNet { frames: 2 * k + 1, channels: c, op, scalar_gate };
        GridOperation::new(Projector::so3(degree, k), &net, width)
    }

    /// Coefficients of frames that a degree does not have are zero in every use.
    fn mask(degrees: usize, frames: usize, block: usize, x: &mut [f64]) {
        let mut keep = vec![false; frames * first_row(degrees)];
        each_coefficient(degrees, frames, |_, at| keep[at] = true);
        for (at, x) in x.chunks_exact_mut(block).enumerate() {
            if !keep[at] {
                x.fill(0.0);
            }
        }
    }

    #[test]
    fn from_undoes_to() {
        for (degree, k) in [(0, 0), (1, 1), (3, 1), (3, 0), (4, 2), (4, 4)] {
            let p = Projector::<f64>::so3(degree, k);
            let mut x = random(7, p.coefficients_len(3));
            mask(degree + 1, p.frames, 3, &mut x);
            let mut grid = vec![0.0; p.grid_len(3)];
            p.to(3, &x, &mut grid);
            let mut back = vec![0.0; x.len()];
            p.from(3, &grid, &mut back);
            x.iter().zip(&back).for_each(|(a, b)| assert!((a - b).abs() < 1e-13, "degree {degree} k {k}: {a} {b}"));
        }
    }

    #[test]
    fn products_follow_the_third_angle() {
        for k in 0..4usize {
            let frames = 2 * k + 1;
            let terms = product_terms::<f64>(frames);
            let (x, y) = (random(1, frames), random(2, frames));
            let value = |c: &[f64], g: f64| -> f64 {
                (0..frames)
                    .map(|i| {
                        let order = i.div_ceil(2) as f64;
                        c[i] * if i == 0 || i % 2 == 1 { (order * g).cos() } else { (order * g).sin() }
                    })
                    .sum()
            };
            let mut product = vec![0.0; frames];
            terms.iter().for_each(|&(i, j, o, f)| product[o] += f * x[i] * y[j]);
            // Fourier coefficients of the product by a sum that is exact for this order.
            let n = 4 * k + 3;
            for (i, &p) in product.iter().enumerate() {
                let order = i.div_ceil(2) as f64;
                let sum: f64 = (0..n)
                    .map(|s| {
                        let g = 2.0 * std::f64::consts::PI * s as f64 / n as f64;
                        let wave = if i == 0 || i % 2 == 1 { (order * g).cos() } else { (order * g).sin() };
                        value(&x, g) * value(&y, g) * wave
                    })
                    .sum();
                let expected = sum / n as f64 * if i == 0 { 1.0 } else { 2.0 };
                assert!((p - expected).abs() < 1e-13, "k {k} component {i}: {p} {expected}");
            }
        }
    }

    #[test]
    fn closed_form_scalar_matches_the_grid() {
        let (degree, k, width) = (3, 1, 4);
        let p = Projector::<f64>::so3(degree, k);
        let (mut left, mut right) = (random(1, p.coefficients_len(width)), random(2, p.coefficients_len(width)));
        mask(degree + 1, p.frames, width, &mut left);
        mask(degree + 1, p.frames, width, &mut right);
        let (mut a, mut b) = (vec![0.0; p.grid_len(width)], vec![0.0; p.grid_len(width)]);
        p.to(width, &left, &mut a);
        p.to(width, &right, &mut b);
        let mut product = vec![0.0; a.len()];
        p.multiply(width, &a, &b, &mut product);
        let mut out = vec![0.0; left.len()];
        p.from(width, &product, &mut out);
        let closed = scalar_product(degree + 1, p.frames, 1, width, &left, &right);
        closed.iter().zip(&out).for_each(|(a, b)| assert!((a - b).abs() < 1e-13));
    }

    #[test]
    fn adjoints_match_differences() {
        let (degree, k, c, rows) = (2, 1, 2, 2);
        let m = |seed, rows, cols| Matrix { rows, cols, data: random(seed, rows * cols) };
        let branch = GridWeights::Branch {
            left: m(1, c, 3 * c),
            right: m(2, c, 3 * c),
            router: m(3, 2 * c, 3),
            out: m(4, c, c),
        };
        let mlp = GridWeights::Mlp { left: m(5, c, c), right: m(6, c, c), out: m(7, 2 * c, c) };
        for (op, width) in [(GridWeights::Glu, c), (mlp, 2 * c), (branch, 3 * c)] {
            let operation = operation(op, degree, k, c, width);
            let n = operation.input_len(rows);
            let mut x = random(11, 2 * n + rows * 2 * c);
            mask(degree + 1, 2 * k + 1, rows * width, &mut x[..n]);
            mask(degree + 1, 2 * k + 1, rows * width, &mut x[n..2 * n]);
            let zero_frames = |out: &mut Vec<f64>, block| mask(degree + 1, 2 * k + 1, block, out);
            let forward = |x: &[f64]| {
                let mut out = operation.forward(rows, &x[..n], &x[n..2 * n], &x[2 * n..]).0;
                zero_frames(&mut out, rows * c);
                out
            };
            check_adjoint(&x, forward, |x, grad| {
                let mut grad = grad.to_vec();
                zero_frames(&mut grad, rows * c);
                let saved = operation.forward(rows, &x[..n], &x[n..2 * n], &x[2 * n..]).1;
                let (left, right, scalars) = operation.adjoint(rows, &saved, &x[2 * n..], &grad);
                [left, right, scalars].concat()
            });
        }
    }
}
