//! `environment_seed`: FiLM on the scalar start value from a matrix of each atom's environment (SPEC 6).

use super::edge_geometry::{EdgeGeometry, EdgeGradient};
use super::equivariant_norm::{scalar_norm, scalar_norm_adjoint};
use super::radial::RadialForward;
use super::real::{Into, Real, activated, axpy, dense, dot, matmul, matmul_transposed, multiply_slopes};
use super::scratch::Buffer;
use crate::graph::Graph;
use crate::model::config::{Activation, Config, EnvWidths};
use crate::model::merge::seed_maps;
use crate::model::parameters::{EnvSeed, Matrix};

/// Coordinates of an edge in the environment matrix: `[s, s n]`.
pub const COORDINATES: usize = 4;

/// Weights of the environment seed. The second radial layer and the radial rows of the first layer of `g` are one
/// matrix, and the type rows of that layer are summed once a type: nothing stands between them.
pub struct EnvironmentSeed<T> {
    widths: EnvWidths,
    channels: usize,
    rbf: Matrix<T>,
    merged: Matrix<T>,
    source_types: Matrix<T>,
    destination_types: Matrix<T>,
    g2: Matrix<T>,
    output: Matrix<T>,
    film_norm: Option<[Vec<T>; 2]>,
    film_strength: [T; 2],
    activation: Activation,
    eps: f64,
}

/// A chunk's edge features.
pub struct SeedForward<T: Real> {
    first: Buffer<T>,
    second: Buffer<T>,
    /// `[edge][de]`.
    g: Buffer<T>,
}

impl<T: Real> EnvironmentSeed<T> {
    pub fn new(config: &Config, seed: &EnvSeed<f64>) -> Self {
        let widths = config.env_widths();
        let maps = seed_maps(seed);
        EnvironmentSeed {
            widths,
            channels: config.channels,
            rbf: seed.rbf1.cast(&T::of),
            merged: maps.radial.cast(&T::of),
            source_types: maps.source_types.cast(&T::of),
            destination_types: maps.destination_types.cast(&T::of),
            g2: seed.g2.cast(&T::of),
            output: seed.output.cast(&T::of),
            film_norm: seed.film_norm.as_ref().map(|n| n.each_ref().map(|v| v.iter().map(|&x| T::of(x)).collect())),
            film_strength: seed.film_strength.map(T::of),
            activation: config.activation,
            eps: config.eps,
        }
    }

    /// Values of an atom's environment matrix.
    pub fn matrix_len(&self) -> usize {
        COORDINATES * self.widths.embed
    }

    /// Edge features of a chunk of edges.
    pub fn edges(&self, graph: &Graph, radial: &RadialForward<T>, edges: std::ops::Range<usize>) -> SeedForward<T> {
        let (n, hidden) = (edges.len(), self.merged.cols);
        let mut first = Buffer::stale(n * self.rbf.cols);
        matmul(dense(&radial.rbf, n, self.rbf.rows), (&self.rbf).into(), &mut first, self.rbf.cols, Into::Set);
        let hidden_values = activated(self.activation, &first);
        let mut second = Buffer::stale(n * hidden);
        for (e, out) in edges.zip(second.chunks_exact_mut(hidden)) {
            let row = |table: &'_ Matrix<T>, node: u32| graph.types[node as usize].max(0) as usize * table.cols;
            let source = &self.source_types.data[row(&self.source_types, graph.src[e])..][..hidden];
            let destination = &self.destination_types.data[row(&self.destination_types, graph.dst[e])..][..hidden];
            out.iter_mut().zip(source).zip(destination).for_each(|((o, &a), &b)| *o = a + b);
        }
        matmul(dense(&hidden_values, n, self.merged.rows), (&self.merged).into(), &mut second, hidden, Into::Add);
        let hidden_values = activated(self.activation, &second);
        let mut g = Buffer::stale(n * self.g2.cols);
        matmul(dense(&hidden_values, n, hidden), (&self.g2).into(), &mut g, self.g2.cols, Into::Set);
        SeedForward { first, second, g }
    }

    /// Gradient of the basis `[edge][n_radial]` from that of `g`.
    pub fn edges_adjoint(&self, forward: &SeedForward<T>, grad_g: &[T]) -> Buffer<T> {
        let n = grad_g.len() / self.g2.cols;
        let mut second = Buffer::stale(forward.second.len());
        let grad_g = dense(grad_g, n, self.g2.cols);
        matmul_transposed(grad_g, (&self.g2).into(), &mut second, self.g2.rows, Into::Set);
        multiply_slopes(self.activation, &forward.second, &mut second);
        let mut first = Buffer::stale(forward.first.len());
        let grad = dense(&second, n, self.merged.cols);
        matmul_transposed(grad, (&self.merged).into(), &mut first, self.merged.rows, Into::Set);
        multiply_slopes(self.activation, &forward.first, &mut first);
        let mut rbf = Buffer::stale(n * self.rbf.rows);
        let grad = dense(&first, n, self.rbf.cols);
        matmul_transposed(grad, (&self.rbf).into(), &mut rbf, self.rbf.rows, Into::Set);
        rbf
    }

    /// `[s, s n]` of an edge, `s = w / r`.
    #[inline(always)]
    pub fn coordinates(geometry: &EdgeGeometry, e: usize) -> [f64; COORDINATES] {
        let s = geometry.weight[e] / geometry.distance[e];
        let n = geometry.direction[e];
        [s, s * n[0], s * n[1], s * n[2]]
    }

    /// Adds an edge to its atom's matrix `[coordinate][de]`.
    #[inline(always)]
    pub fn add_edge(&self, coordinates: [f64; COORDINATES], g: &[T], matrix: &mut [T]) {
        for (row, a) in matrix.chunks_exact_mut(self.widths.embed).zip(coordinates) {
            axpy(T::of(a), g, row);
        }
    }

    /// Features of one edge in a chunk.
    #[inline(always)]
    pub fn row<'a>(&self, forward: &'a SeedForward<T>, k: usize) -> &'a [T] {
        &forward.g[k * self.widths.embed..(k + 1) * self.widths.embed]
    }

    /// Adjoint of [`Self::add_edge`]: sets `grad_g`, adds direction to `gradient`, returns (dE/dw, dE/dr).
    #[inline(always)]
    pub fn add_edge_adjoint(
        &self,
        geometry: &EdgeGeometry,
        e: usize,
        g: &[T],
        grad_matrix: &[T],
        grad_g: &mut [T],
        gradient: &mut EdgeGradient,
    ) -> (f64, f64) {
        let coordinates = Self::coordinates(geometry, e);
        grad_g.fill(T::zero());
        let mut grad = [0.0; COORDINATES];
        for ((row, a), grad) in grad_matrix.chunks_exact(self.widths.embed).zip(coordinates).zip(&mut grad) {
            *grad = dot(row, g).wide();
            axpy(T::of(a), row, grad_g);
        }
        let (w, r, n) = (geometry.weight[e], geometry.distance[e], geometry.direction[e]);
        let s = w / r;
        gradient.add_direction(n, [s * grad[1], s * grad[2], s * grad[3]]);
        let grad_s = grad[0] + (0..3).map(|i| grad[i + 1] * n[i]).sum::<f64>();
        (grad_s / r, -grad_s * s / r)
    }

    /// Start values `[node][C]` from the environment matrices `[node][coordinate][de]` and the type features.
    pub fn film(&self, nodes: usize, matrices: &[T], types: &[&[T]], out: &mut [T]) {
        let logits = self.film_logits(nodes, matrices);
        let c = self.channels;
        let mut normed = vec![T::zero(); c];
        for (node, out) in out.chunks_exact_mut(c).enumerate() {
            let mut halves = [vec![], vec![]];
            for (half, values) in halves.iter_mut().enumerate() {
                let v = &logits[(2 * node + half) * c..][..c];
                *values = self.normalise(half, v, &mut normed).0.iter().map(|x| x.tanh()).collect::<Vec<T>>();
            }
            for i in 0..c {
                out[i] = types[node][i] * (T::one() + self.film_strength[0] * halves[0][i])
                    + self.film_strength[1] * halves[1][i];
            }
        }
    }

    fn normalise<'a>(&self, half: usize, v: &'a [T], normed: &'a mut [T]) -> (&'a [T], T) {
        match &self.film_norm {
            Some(scale) => {
                let inverse = scalar_norm(&scale[half], self.eps, v, normed);
                (normed, inverse)
            }
            None => (v, T::one()),
        }
    }

    /// `B output`, `B[k][q] = sum_a A[a][k] A[a][q]`.
    fn film_logits(&self, nodes: usize, matrices: &[T]) -> Vec<T> {
        let EnvWidths { embed, axis, .. } = self.widths;
        let mut b = vec![T::zero(); nodes * embed * axis];
        for (a, b) in matrices.chunks_exact(self.matrix_len()).zip(b.chunks_exact_mut(embed * axis)) {
            for row in a.chunks_exact(embed) {
                for (k, out) in b.chunks_exact_mut(axis).enumerate() {
                    out.iter_mut().zip(row).for_each(|(o, &q)| *o += row[k] * q);
                }
            }
        }
        let mut logits = vec![T::zero(); nodes * self.output.cols];
        matmul(dense(&b, nodes, embed * axis), (&self.output).into(), &mut logits, self.output.cols, Into::Set);
        logits
    }

    /// Gradient of the environment matrices from that of the start values.
    pub fn film_adjoint(&self, nodes: usize, matrices: &[T], types: &[&[T]], grad: &[T]) -> Vec<T> {
        let (c, EnvWidths { embed, axis, .. }) = (self.channels, self.widths);
        let logits = self.film_logits(nodes, matrices);
        let mut grad_logits = vec![T::zero(); logits.len()];
        let mut normed = vec![T::zero(); c];
        for node in 0..nodes {
            for half in 0..2 {
                let at = (2 * node + half) * c..(2 * node + half + 1) * c;
                let v = &logits[at.clone()];
                let (u, inverse) = self.normalise(half, v, &mut normed);
                let slope = |i: usize| {
                    let t = u[i].tanh();
                    let factor = if half == 0 { types[node][i] } else { T::one() };
                    grad[node * c + i] * factor * self.film_strength[half] * (T::one() - t * t)
                };
                let grad_u: Vec<T> = (0..c).map(slope).collect();
                match &self.film_norm {
                    Some(scale) => scalar_norm_adjoint(&scale[half], inverse, v, &grad_u, &mut grad_logits[at]),
                    None => grad_logits[at].copy_from_slice(&grad_u),
                }
            }
        }
        let mut grad_b = vec![T::zero(); nodes * embed * axis];
        let grad_logits = dense(&grad_logits, nodes, self.output.cols);
        matmul_transposed(grad_logits, (&self.output).into(), &mut grad_b, self.output.rows, Into::Set);
        let mut grad_matrices = vec![T::zero(); matrices.len()];
        let rows = matrices.chunks_exact(embed).zip(grad_matrices.chunks_exact_mut(embed));
        for (i, (a, grad_a)) in rows.enumerate() {
            let grad_b = &grad_b[i / COORDINATES * embed * axis..][..embed * axis];
            for k in 0..embed {
                for q in 0..axis {
                    let g = grad_b[k * axis + q];
                    grad_a[k] += g * a[q];
                    grad_a[q] += g * a[k];
                }
            }
        }
        grad_matrices
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::radial::RadialStage;
    use crate::cpu::testing::{check_adjoint, committed_model, random};
    use crate::model::Model;

    /// With the norms of the FiLM halves, and without.
    fn for_each_model(check: impl Fn(&Model, &EnvironmentSeed<f64>)) {
        for name in ["base", "edge_norm_off"] {
            let model = committed_model(name);
            let seed = model.weights().env_seed.as_ref().unwrap();
            check(&model, &EnvironmentSeed::new(model.config(), seed));
        }
    }

    #[test]
    fn adjoint_of_the_film_matches_differences() {
        for_each_model(|model, stage| {
            let nodes = 2;
            let table = &model.weights().type_embedding;
            let types = [table.row(1), table.row(0)];
            let forward = |x: &[f64]| {
                let mut out = vec![0.0; nodes * model.config().channels];
                stage.film(nodes, x, &types, &mut out);
                out
            };
            check_adjoint(&random(1, nodes * stage.matrix_len()), forward, |x, grad| {
                stage.film_adjoint(nodes, x, &types, grad)
            });
        });
    }

    #[test]
    fn adjoint_of_the_edge_features_matches_differences() {
        for_each_model(|model, stage| {
            let graph = Graph { types: vec![0, 1], src: vec![1, 0], dst: vec![0, 1], ..Graph::default() };
            let features = |rbf: &[f64]| {
                let radial = RadialStage::<f64>::new(model.config(), model.weights());
                let mut forward = radial.forward(&radial.basis(&[1.0, 2.0]), 0..2);
                forward.rbf.copy_from_slice(rbf);
                stage.edges(&graph, &forward, 0..2)
            };
            check_adjoint(
                &random(2, 2 * model.config().n_radial),
                |x| features(x).g.to_vec(),
                |x, grad| stage.edges_adjoint(&features(x), grad).to_vec(),
            );
        });
    }

    #[test]
    fn adjoint_of_an_edge_in_the_matrix_matches_differences() {
        for_each_model(|_, stage| {
            let width = stage.widths.embed;
            // Weight, distance, rotation vector about a direction; then the features of the edge.
            let direction = [2.0 / 7.0, -3.0 / 7.0, 6.0 / 7.0];
            let geometry = |x: &[f64]| {
                let turned = crate::math::testing::apply(&rotation([x[2], x[3], x[4]]), direction);
                EdgeGeometry {
                    distance: vec![x[1]],
                    direction: vec![turned],
                    weight: vec![x[0]],
                    weight_slope: vec![0.0],
                    normaliser: vec![1.0],
                }
            };
            let x = [vec![0.7, 1.9, 0.0, 0.0, 0.0], random(3, width)].concat();
            let forward = |x: &[f64]| {
                let mut matrix = vec![0.0; stage.matrix_len()];
                stage.add_edge(EnvironmentSeed::<f64>::coordinates(&geometry(x), 0), &x[5..], &mut matrix);
                matrix
            };
            check_adjoint(&x, forward, |x, grad| {
                let (mut grad_g, mut edge) = (vec![0.0; width], EdgeGradient::default());
                let (dw, dr) = stage.add_edge_adjoint(&geometry(x), 0, &x[5..], grad, &mut grad_g, &mut edge);
                [vec![dw, dr], edge.torque.to_vec(), grad_g].concat()
            });
        });
    }

    /// The rotation about a vector by its length.
    fn rotation(v: [f64; 3]) -> crate::math::Matrix3 {
        let angle = v.iter().map(|x| x * x).sum::<f64>().sqrt();
        let axis = if angle == 0.0 { [0.0, 0.0, 1.0] } else { v.map(|x| x / angle) };
        crate::math::testing::rotation_about(axis, angle)
    }
}
