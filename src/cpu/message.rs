//! The edge part of a block: one chunk of edges from gathered sources to aggregated destinations, and its adjoint
//! (SPEC 8.2 a and b). Chunks hold whole destination atoms forward, whole source atoms in the adjoint, so every sum
//! is made inside one chunk and in a fixed order; nothing of an edge is kept but its attention weights.

use super::attention::AttentionStage;
use super::edge_geometry::{EdgeGeometry, EdgeGradient};
use super::focus_competition::FocusCompetition;
use super::profile::{Profile, Stage};
use super::radial::{BasisTable, RadialForward, RadialStage};
use super::real::{Into, Real, antisymmetric, axpy, dense, dot, matmul, matmul_transposed, vectorised};
use super::rotate_mix::RotateMix;
use super::scratch::Buffer;
use super::so2_stack::{LayerForward, So2Stack};
use crate::graph::Graph;
use crate::math::spherical::Generators;
use crate::math::wigner::{Wigner, edge_frame};
use crate::model::config::{BlockDegrees, Config};
use crate::model::merge::radial_kernel;
use crate::model::parameters::Matrix;
use crate::model::{Model, Parameters};
use std::ops::Range;

/// What every block reads about the edges.
pub struct Edges<'a, T> {
    pub graph: &'a Graph,
    pub geometry: &'a EdgeGeometry,
    pub radial: &'a RadialStage<T>,
    pub basis: &'a BasisTable<T>,
    pub profile: &'a Profile,
}

/// Node features of a block: `rows` `[node][(l, m)][W]`, `query` and `key` `[node][W]` (empty without attention).
pub struct NodeFeatures<'a, T> {
    pub rows: &'a [T],
    pub query: &'a [T],
    pub key: &'a [T],
}

/// The edge part of one block.
pub struct MessageStage<T> {
    /// Packed rows times hidden width of a node.
    node_len: usize,
    width: usize,
    focuses: usize,
    /// Heads of a focus; 1 without attention.
    heads: usize,
    kernel: Matrix<T>,
    kernel_types: Matrix<T>,
    mixing: usize,
    /// Whether radial features carry the envelope (descriptor version 1.1 on).
    weighted: bool,
    wigner: Wigner,
    /// Each pair of rows that a generator couples, by axis: (value, first value of one row, of the other).
    couplings: [Vec<(T, usize, usize)>; 3],
    rotate_mix: RotateMix<T>,
    stack: So2Stack<T>,
    competition: Option<FocusCompetition<T>>,
}

/// One evaluated chunk.
struct Chunk<T: Real> {
    radial: RadialForward<T>,
    /// `[edge][mixing + logits]` without and with envelope and type part.
    raw_kernel: Buffer<T>,
    kernel: Buffer<T>,
    /// Wigner-D records.
    records: Buffer<T>,
    /// Before the mixing.
    rotated: Buffer<T>,
    captured: Buffer<T>,
    layers: Vec<LayerForward<T>>,
    /// After the stack.
    y: Buffer<T>,
    /// Focus competition `[edge][focus]`; empty for one focus.
    share: Vec<T>,
}

/// Gradients that enter the adjoint of a chunk, by destination.
pub struct OutputGradient<'a, T> {
    /// dE/d(aggregated) `[node][(l, m)][W]`.
    pub rows: &'a [T],
    /// `<aggregated, dE/d(aggregated)>` of each head, `[node][focus][head]`.
    pub along: &'a [T],
    /// Attention weights `[edge][focus][head]`.
    pub alpha: &'a [T],
}

/// Gradients that leave it, for the chunk's sources and edges.
pub struct ChunkGradient<'a, T> {
    /// `[source][(l, m)][W]`.
    pub rows: &'a mut [T],
    /// `[source][W]`; empty without attention.
    pub key: &'a mut [T],
    /// dE/d(logit) `[edge][focus][head]`, edges in the order of their sources; empty without attention.
    pub logits: &'a mut [T],
    /// Per edge, in the same order; added to.
    pub edges: &'a mut [EdgeGradient],
}

impl<T: Real> MessageStage<T> {
    pub fn new(model: &Model, weights: &Parameters<f64>, b: usize) -> Self {
        let config: &Config = model.config();
        let BlockDegrees { l, m, .. } = config.blocks[b];
        let convolution = &weights.blocks[b].convolution;
        let shape = (config.n_focus, config.focus_dim);
        let merged = radial_kernel(weights, convolution, l);
        let wigner = Wigner::new(l);
        MessageStage {
            node_len: (l + 1) * (l + 1) * config.hidden(),
            width: config.hidden(),
            focuses: config.n_focus,
            heads: config.n_atten_head.max(1),
            kernel: merged.edge.cast(&T::of),
            kernel_types: merged.types.cast(&T::of),
            mixing: merged.mixing,
            weighted: config.version >= 1.1,
            rotate_mix: RotateMix::new(convolution, config.radial_mode, &wigner, (l, m), shape),
            stack: So2Stack::new(&convolution.layers, (l, m), shape, config.activation),
            competition: convolution.competition.as_ref().map(|c| FocusCompetition::new(c, config.eps)),
            couplings: Generators::new(l).axis.map(|entries| {
                let upper = entries.into_iter().filter(|e| e.0 < e.1);
                upper.map(|(r, c, v)| (T::of(v), r as usize * config.hidden(), c as usize * config.hidden())).collect()
            }),
            wigner,
        }
    }

    /// Attention columns of an edge.
    pub fn columns(&self) -> usize {
        self.focuses * self.heads
    }
    /// Values of a node's rows.
    pub fn node_len(&self) -> usize {
        self.node_len
    }

    fn evaluate(&self, e: &Edges<T>, nodes: &NodeFeatures<T>, edges: &[u32]) -> Chunk<T> {
        let n = edges.len();
        let mut time = e.profile.start();
        let radial = e.radial.forward(e.basis, edges.iter().map(|&i| i as usize));
        let (raw_kernel, kernel) = self.radial_kernel(e, &radial, edges);
        time.stage(Stage::Radial);
        let record_len = self.wigner.record_len();
        let mut records = Buffer::stale(n * record_len);
        let mut record = vec![0.0; record_len];
        for (&i, out) in edges.iter().zip(records.chunks_exact_mut(record_len)) {
            self.wigner.assemble(&edge_frame(e.geometry.direction[i as usize]), &mut record);
            out.iter_mut().zip(&record).for_each(|(o, &x)| *o = T::of(x));
        }
        time.stage(Stage::Wigner);
        let len = self.rotate_mix.len();
        let mut rotated = Buffer::stale(n * len);
        let mut y = Buffer::stale(n * len);
        let mut captured = Buffer::stale(n * self.width);
        vectorised!(for (k, &i) in edges.iter().enumerate() {
            let source = e.graph.src[i as usize] as usize;
            let x = &nodes.rows[source * self.node_len..(source + 1) * self.node_len];
            let rotated = &mut rotated[k * len..(k + 1) * len];
            self.rotate_mix.rotate(&records[k * record_len..(k + 1) * record_len], x, rotated);
            self.rotate_mix.mix(
                &kernel[k * self.kernel.cols..][..self.mixing],
                rotated,
                &mut y[k * len..(k + 1) * len],
                &mut captured[k * self.width..(k + 1) * self.width],
            );
        });
        time.stage(Stage::RotateMix);
        let layers = self.stack.forward(n, &mut y);
        time.stage(Stage::So2Stack);
        let share = self.competition.as_ref().map_or_else(Vec::new, |c| c.forward(&captured));
        time.stage(Stage::FocusCompetition);
        Chunk { radial, raw_kernel, kernel, records, rotated, captured, layers, y, share }
    }

    /// `w (h K) + types[src] + types[dst]`, and `h K` alone.
    fn radial_kernel(&self, e: &Edges<T>, radial: &RadialForward<T>, edges: &[u32]) -> (Buffer<T>, Buffer<T>) {
        let cols = self.kernel.cols;
        let mut raw = Buffer::stale(edges.len() * cols);
        let hidden = dense(&radial.hidden, edges.len(), self.kernel.rows);
        matmul(hidden, (&self.kernel).into(), &mut raw, cols, Into::Set);
        let mut kernel = Buffer::stale(raw.len());
        for ((&i, raw), out) in edges.iter().zip(raw.chunks_exact(cols)).zip(kernel.chunks_exact_mut(cols)) {
            let i = i as usize;
            let [src, dst] = [e.graph.src[i], e.graph.dst[i]].map(|n| self.type_row(e.graph.types[n as usize]));
            let w = if self.weighted { T::of(e.geometry.weight[i]) } else { T::one() };
            for (((out, &raw), &s), &d) in out.iter_mut().zip(raw).zip(src).zip(dst) {
                *out = w * raw + (s + d);
            }
        }
        (raw, kernel)
    }
    fn type_row(&self, kind: i32) -> &[T] {
        self.kernel_types.row(kind.max(0) as usize)
    }

    /// Focus competition of an edge of a chunk; empty for one focus.
    #[inline(always)]
    fn share<'a>(&self, chunk: &'a Chunk<T>, k: usize) -> &'a [T] {
        if chunk.share.is_empty() { &[] } else { &chunk.share[k * self.focuses..(k + 1) * self.focuses] }
    }

    /// Factor of each hidden channel of an edge on its way to the destination: attention times competition.
    #[inline(always)]
    fn channel_factors(&self, alpha: &[T], share: &[T], out: &mut [T]) {
        let per_head = self.width / self.columns();
        for (column, out) in out.chunks_exact_mut(per_head).enumerate() {
            let share = if share.is_empty() { T::one() } else { share[column / self.heads] };
            out.fill(alpha[column] * share);
        }
    }

    /// Messages of the edges of the atoms in `range`, summed: `out` `[atom][(l, m)][W]`, `alpha` `[edge][focus][head]`.
    pub fn forward(
        &self,
        e: &Edges<T>,
        attention: Option<&AttentionStage<T>>,
        nodes: &NodeFeatures<T>,
        range: Range<usize>,
        out: &mut [T],
        alpha: &mut [T],
    ) {
        let first = e.graph.dst_start[range.start];
        let edges: Vec<u32> = (first as u32..e.graph.dst_start[range.end] as u32).collect();
        let chunk = self.evaluate(e, nodes, &edges);
        let mut time = e.profile.start();
        let columns = self.columns();
        for i in range.clone() {
            let rows = e.graph.dst_start[i]..e.graph.dst_start[i + 1];
            let alpha = &mut alpha[(rows.start - first) * columns..(rows.end - first) * columns];
            let Some(attention) = attention else {
                for (alpha, edge) in alpha.chunks_exact_mut(columns).zip(rows) {
                    alpha.fill(T::of(e.geometry.normaliser[i] * e.geometry.weight[edge]));
                }
                continue;
            };
            for (alpha, edge) in alpha.chunks_exact_mut(columns).zip(rows.clone()) {
                alpha.copy_from_slice(&chunk.kernel[(edge - first) * self.kernel.cols + self.mixing..][..columns]);
                let (query, key) = (self.row(nodes.query, i), self.row(nodes.key, e.graph.src[edge] as usize));
                attention.add_logits(query, key, alpha);
            }
            attention.softmax(&e.geometry.weight[rows], alpha);
        }
        let (len, record_len) = (self.rotate_mix.len(), self.wigner.record_len());
        let mut factor = vec![T::zero(); self.width];
        out.fill(T::zero());
        vectorised!(for (k, y) in chunk.y.chunks_exact(len).enumerate() {
            self.channel_factors(&alpha[k * columns..(k + 1) * columns], self.share(&chunk, k), &mut factor);
            let atom = e.graph.dst[first + k] as usize - range.start;
            let out = &mut out[atom * self.node_len..(atom + 1) * self.node_len];
            let record = &chunk.records[k * record_len..(k + 1) * record_len];
            self.rotate_mix.rotate_back(record, y, &factor, out, Into::Add);
        });
        time.stage(Stage::Attention);
    }

    fn row<'a>(&self, x: &'a [T], node: usize) -> &'a [T] {
        &x[node * self.width..(node + 1) * self.width]
    }

    /// Adjoint for the edges that leave the nodes in `range`.
    pub fn adjoint(
        &self,
        e: &Edges<T>,
        attention: Option<&AttentionStage<T>>,
        nodes: &NodeFeatures<T>,
        grad: &OutputGradient<T>,
        range: Range<usize>,
        out: ChunkGradient<T>,
    ) {
        let first = e.graph.src_start[range.start];
        let edges = &e.graph.src_edges[first..e.graph.src_start[range.end]];
        let chunk = self.evaluate(e, nodes, edges);
        let n = edges.len();
        let mut time = e.profile.start();
        let (columns, len, cols) = (self.columns(), self.rotate_mix.len(), self.kernel.cols);
        let mut grad_y = Buffer::stale(n * len);
        let mut grad_captured = vec![T::zero(); if chunk.share.is_empty() { 0 } else { n * self.width }];
        let mut grad_kernel = Buffer::zeros(n * cols);
        let mut grad_weight = vec![0.0; n];
        let mut products = vec![T::zero(); n * columns];
        let mut scratch = (vec![T::zero(); self.width], vec![T::zero(); self.node_len]);
        vectorised!(for (k, &edge) in edges.iter().enumerate() {
            self.aggregation_adjoint(
                e,
                &chunk,
                (k, edge as usize),
                grad,
                &mut grad_y[k * len..(k + 1) * len],
                &mut products[k * columns..(k + 1) * columns],
                &mut scratch,
                &mut out.edges[k],
            );
        });
        for (k, (&edge, products)) in edges.iter().zip(products.chunks_exact(columns)).enumerate() {
            let grad_logits = &mut grad_kernel[k * cols + self.mixing..(k + 1) * cols];
            let grad_captured =
                if chunk.share.is_empty() { &mut [][..] } else { &mut grad_captured[k * self.width..][..self.width] };
            grad_weight[k] = self.factors_adjoint(
                e,
                attention.is_some(),
                &chunk,
                (k, edge as usize),
                grad,
                products,
                (grad_captured, grad_logits),
            );
        }
        if let Some(attention) = attention {
            let scale = attention.logit_scale();
            for (k, &edge) in edges.iter().enumerate() {
                let grad_logits = &grad_kernel[k * cols + self.mixing..(k + 1) * cols];
                out.logits[k * columns..(k + 1) * columns].copy_from_slice(grad_logits);
                let source = e.graph.src[edge as usize] as usize - range.start;
                let query = self.row(nodes.query, e.graph.dst[edge as usize] as usize);
                let key = &mut out.key[source * self.width..(source + 1) * self.width];
                self.add_head_products(scale, grad_logits, query, key);
            }
        }
        time.stage(Stage::Attention);
        self.stack.adjoint(n, &chunk.layers, &mut grad_y);
        time.stage(Stage::So2Stack);
        self.rotation_adjoint(
            e,
            nodes,
            &chunk,
            edges,
            (&mut grad_y, &grad_captured),
            &mut grad_kernel,
            out.rows,
            out.edges,
            range.start,
        );
        time.stage(Stage::RotateMix);
        self.radial_adjoint(e, &chunk, edges, &mut grad_kernel, &mut grad_weight, out.edges);
        time.stage(Stage::Radial);
    }

    /// `out[channels of a head] += scale grad[head] other[..]`.
    #[inline(always)]
    pub fn add_head_products(&self, scale: T, grad: &[T], other: &[T], out: &mut [T]) {
        let per_head = self.width / self.columns();
        for ((&g, other), out) in grad.iter().zip(other.chunks_exact(per_head)).zip(out.chunks_exact_mut(per_head)) {
            axpy(scale * g, other, out);
        }
    }

    /// One edge from the destination back to the end of the stack: sets `grad_y` and adds to `products` what the
    /// gradient of each head's factor is made of. `factor`, `message`: room for W and for a node's rows.
    #[allow(clippy::too_many_arguments)]
    #[inline(always)]
    fn aggregation_adjoint(
        &self,
        e: &Edges<T>,
        chunk: &Chunk<T>,
        (k, edge): (usize, usize),
        grad: &OutputGradient<T>,
        grad_y: &mut [T],
        products: &mut [T],
        (factor, message): &mut (Vec<T>, Vec<T>),
        gradient: &mut EdgeGradient,
    ) {
        let (len, record_len, columns) = (self.rotate_mix.len(), self.wigner.record_len(), self.columns());
        let dst = e.graph.dst[edge] as usize;
        let record = &chunk.records[k * record_len..(k + 1) * record_len];
        let (y, grad_out) = (&chunk.y[k * len..(k + 1) * len], &grad.rows[dst * self.node_len..][..self.node_len]);
        self.channel_factors(&grad.alpha[edge * columns..(edge + 1) * columns], self.share(chunk, k), factor);

        // The message as it arrived turns against its gradient (SPEC 22.5).
        self.rotate_mix.rotate_back(record, y, factor, message, Into::Set);
        self.add_torque(grad_out, message, 1.0, gradient);

        // grad_y = alpha share D (back dOut); its product with y, head by head, is the gradient of alpha.
        self.rotate_mix.rotate_rescaled(record, grad_out, grad_y);
        let (per_head, focus_len) = (self.width / columns, len / self.focuses);
        for (column, product) in products.iter_mut().enumerate() {
            let (focus, head) = (column / self.heads, column % self.heads);
            let factor = factor[column * per_head];
            for first in (focus * focus_len + head * per_head..(focus + 1) * focus_len).step_by(self.heads * per_head) {
                let (y, grad_y) = (&y[first..first + per_head], &mut grad_y[first..first + per_head]);
                *product += dot(y, grad_y);
                grad_y.iter_mut().for_each(|g| *g *= factor);
            }
        }
    }

    /// One edge from its heads' factors back to logits and captured scalars. Returns dE/dw.
    #[allow(clippy::too_many_arguments)]
    fn factors_adjoint(
        &self,
        e: &Edges<T>,
        attention: bool,
        chunk: &Chunk<T>,
        (k, edge): (usize, usize),
        grad: &OutputGradient<T>,
        products: &[T],
        (grad_captured, grad_logits): (&mut [T], &mut [T]),
    ) -> f64 {
        let (columns, dst, share) = (self.columns(), e.graph.dst[edge] as usize, self.share(chunk, k));
        let alpha = &grad.alpha[edge * columns..(edge + 1) * columns];
        if let Some(competition) = &self.competition {
            let grad_share: Vec<T> = (0..self.focuses)
                .map(|f| (0..self.heads).map(|h| alpha[f * self.heads + h] * products[f * self.heads + h]).sum())
                .collect();
            let captured = &chunk.captured[k * self.width..(k + 1) * self.width];
            competition.adjoint(captured, &grad_share, grad_captured);
        }
        let grad_alpha = |column: usize| {
            let share = if share.is_empty() { T::one() } else { share[column / self.heads] };
            share * products[column]
        };
        let weight = e.geometry.weight[edge];
        if !attention {
            let sum: f64 = (0..columns).map(|c| grad_alpha(c).wide()).sum();
            return e.geometry.normaliser[dst] * sum;
        }
        let mut sum = 0.0;
        for (column, out) in grad_logits.iter_mut().enumerate() {
            *out = alpha[column] * (grad_alpha(column) - grad.along[dst * columns + column]);
            sum += out.wide();
        }
        // alpha depends on w through log(w^2); an edge whose envelope vanishes has alpha 0.
        if weight > 0.0 { 2.0 * sum / weight } else { 0.0 }
    }

    /// `T_a += sign <grad, J_a x>` over the packed rows.
    #[inline(always)]
    fn add_torque(&self, grad: &[T], x: &[T], sign: f64, gradient: &mut EdgeGradient) {
        for (torque, couplings) in gradient.torque.iter_mut().zip(&self.couplings) {
            *torque += sign * antisymmetric(couplings, self.width, grad, x).wide();
        }
    }

    /// From the start of the stack back to the source rows and the degree kernel.
    #[allow(clippy::too_many_arguments)]
    fn rotation_adjoint(
        &self,
        e: &Edges<T>,
        nodes: &NodeFeatures<T>,
        chunk: &Chunk<T>,
        edges: &[u32],
        (grad_y, grad_captured): (&mut [T], &[T]),
        grad_kernel: &mut [T],
        grad_rows: &mut [T],
        gradients: &mut [EdgeGradient],
        first_node: usize,
    ) {
        let (len, record_len, cols) = (self.rotate_mix.len(), self.wigner.record_len(), self.kernel.cols);
        let channels = self.width / self.focuses;
        let mut grad_rotated = vec![T::zero(); len];
        let mut weighted = vec![T::zero(); len];
        let mut grad_x = vec![T::zero(); self.node_len];
        vectorised!(for (k, &edge) in edges.iter().enumerate() {
            let grad = &mut grad_y[k * len..(k + 1) * len];
            if !grad_captured.is_empty() {
                let captured = grad_captured[k * self.width..(k + 1) * self.width].chunks_exact(channels);
                for (scalars, g) in grad.chunks_exact_mut(len / self.focuses).zip(captured) {
                    axpy(T::one(), g, &mut scalars[..channels]);
                }
            }
            self.rotate_mix.mix_adjoint(
                &chunk.kernel[k * cols..][..self.mixing],
                &chunk.rotated[k * len..(k + 1) * len],
                grad,
                &mut grad_rotated,
                &mut grad_kernel[k * cols..][..self.mixing],
                &mut weighted,
            );
            let record = &chunk.records[k * record_len..(k + 1) * record_len];
            self.rotate_mix.rotate_transposed(record, &grad_rotated, &mut grad_x);
            let source = e.graph.src[edge as usize] as usize;
            let x = &nodes.rows[source * self.node_len..(source + 1) * self.node_len];
            self.add_torque(&grad_x, x, -1.0, &mut gradients[k]);
            let at = source - first_node;
            axpy(T::one(), &grad_x, &mut grad_rows[at * self.node_len..(at + 1) * self.node_len]);
        });
    }

    /// From the radial kernel back to the edge length.
    fn radial_adjoint(
        &self,
        e: &Edges<T>,
        chunk: &Chunk<T>,
        edges: &[u32],
        grad_kernel: &mut [T],
        grad_weight: &mut [f64],
        gradients: &mut [EdgeGradient],
    ) {
        let cols = self.kernel.cols;
        if self.weighted {
            for (k, &edge) in edges.iter().enumerate() {
                let at = k * cols..(k + 1) * cols;
                grad_weight[k] += dot(&grad_kernel[at.clone()], &chunk.raw_kernel[at.clone()]).wide();
                let w = T::of(e.geometry.weight[edge as usize]);
                grad_kernel[at].iter_mut().for_each(|g| *g *= w);
            }
        }
        let mut grad_hidden = Buffer::stale(edges.len() * self.kernel.rows);
        let grad_kernel = dense(grad_kernel, edges.len(), cols);
        matmul_transposed(grad_kernel, (&self.kernel).into(), &mut grad_hidden, self.kernel.rows, Into::Set);
        let grad_rbf = e.radial.adjoint(&chunk.radial, grad_hidden);
        let rows = gradients.iter_mut().zip(grad_rbf.chunks_exact(e.basis.len));
        for (((out, grad_rbf), &grad_weight), &edge) in rows.zip(&*grad_weight).zip(edges) {
            out.radial += e.basis.slope_along_edge(edge as usize, grad_rbf)
                + grad_weight * e.geometry.weight_slope[edge as usize];
        }
    }
}
