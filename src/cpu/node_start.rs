//! Start values of the node state: `environment_seed` for the scalars, `geometric_embedding` for the other degrees
//! (SPEC 6 and 7), by chunks of destination atoms.

use super::edge_geometry::{EdgeGeometry, EdgeGradient};
use super::environment_seed::EnvironmentSeed;
use super::profile::{Profile, Stage};
use super::radial::{BasisTable, RadialStage};
use super::real::{Into, Real, View, axpy, dense, dot, matmul, matmul_transposed, vectorised};
use super::scratch::Buffer;
use crate::graph::Graph;
use crate::math::spherical::{Generators, zonal};
use crate::model::Parameters;
use crate::model::config::Config;
use crate::model::parameters::Matrix;
use std::ops::Range;

/// Weights and shapes of the start values.
pub struct NodeStart<T> {
    channels: usize,
    degree: usize,
    type_embedding: Matrix<T>,
    seed: Option<EnvironmentSeed<T>>,
    /// Last radial layer without degree 0: width x (Nmax C).
    radial_last: Matrix<T>,
    weighted: bool,
    generators: Generators,
}

/// What a chunk reads.
pub struct StartInput<'a, T> {
    pub graph: &'a Graph,
    pub geometry: &'a EdgeGeometry,
    pub radial: &'a RadialStage<T>,
    pub basis: &'a BasisTable<T>,
    pub profile: &'a Profile,
}

impl<T: Real> NodeStart<T> {
    pub fn new(config: &Config, weights: &Parameters<f64>) -> Self {
        let (c, degree) = (config.channels, config.node_lmax());
        NodeStart {
            channels: c,
            degree,
            type_embedding: weights.type_embedding.cast(&T::of),
            seed: weights.env_seed.as_ref().map(|s| EnvironmentSeed::new(config, s)),
            radial_last: weights.radial.last.columns(c, degree * c).cast(&T::of),
            weighted: config.version >= 1.1,
            generators: Generators::new(degree),
        }
    }

    /// Values of a node.
    pub fn node_len(&self) -> usize {
        (self.degree + 1) * (self.degree + 1) * self.channels
    }
    /// Values of an atom's environment sums, kept for the adjoint; 0 without an environment seed.
    pub fn saved_len(&self) -> usize {
        self.seed.as_ref().map_or(0, |s| s.matrix_len())
    }
    fn type_row(&self, kind: i32) -> &[T] {
        self.type_embedding.row(kind.max(0) as usize)
    }

    /// Start values `[atom][(l, m)][C]` and normalised environment matrices of the atoms in `range`.
    pub fn forward(&self, input: &StartInput<T>, range: Range<usize>, out: &mut [T], saved: &mut [T]) {
        let StartInput { graph, geometry, radial, basis, profile } = input;
        let (c, len) = (self.channels, self.node_len());
        out.fill(T::zero());
        let Some(seed) = &self.seed else {
            for (i, out) in range.zip(out.chunks_exact_mut(len)) {
                out[..c].copy_from_slice(self.type_row(graph.types[i]));
            }
            return;
        };
        let mut time = profile.start();
        let first = graph.dst_start[range.start];
        let edges = first..graph.dst_start[range.end];
        let features = radial.forward(basis, edges.clone());
        let rho = self.radial_features(geometry, &features.hidden, edges.clone());
        time.stage(Stage::Radial);
        let forward = seed.edges(graph, &features, edges.clone());
        saved.fill(T::zero());
        vectorised!(for e in edges.clone() {
            let matrix = &mut saved[(graph.dst[e] as usize - range.start) * seed.matrix_len()..][..seed.matrix_len()];
            seed.add_edge(EnvironmentSeed::<T>::coordinates(geometry, e), seed.row(&forward, e - first), matrix);
        });
        for (i, matrix) in range.clone().zip(saved.chunks_exact_mut(seed.matrix_len())) {
            let n = T::of(geometry.normaliser[i]);
            matrix.iter_mut().for_each(|x| *x *= n);
        }
        let types: Vec<&[T]> = range.clone().map(|i| self.type_row(graph.types[i])).collect();
        let mut scalars = vec![T::zero(); range.len() * c];
        seed.film(range.len(), saved, &types, &mut scalars);
        time.stage(Stage::EnvironmentSeed);
        let mut z = vec![0.0; (self.degree + 1) * (self.degree + 1)];
        vectorised!(for e in edges.clone() {
            zonal(self.degree, geometry.direction[e], &mut z);
            let out = &mut out[(graph.dst[e] as usize - range.start) * len..][..len];
            let rho = &rho[(e - first) * self.degree * c..][..self.degree * c];
            for (row, &z) in z.iter().enumerate().skip(1) {
                axpy(T::of(z), &rho[(row.isqrt() - 1) * c..][..c], &mut out[row * c..(row + 1) * c]);
            }
        });
        for ((i, out), scalars) in range.zip(out.chunks_exact_mut(len)).zip(scalars.chunks_exact(c)) {
            let n = T::of(geometry.normaliser[i]);
            out.iter_mut().for_each(|x| *x *= n);
            out[..c].copy_from_slice(scalars);
        }
        time.stage(Stage::GeometricEmbedding);
    }

    /// `rho` of degrees 1 to Nmax, `[edge][l - 1][C]`, without type features.
    fn radial_features(&self, geometry: &EdgeGeometry, hidden: &[T], edges: Range<usize>) -> Buffer<T> {
        let cols = self.radial_last.cols;
        let mut rho = Buffer::stale(edges.len() * cols);
        matmul(
            dense(hidden, edges.len(), self.radial_last.rows),
            View::from(&self.radial_last),
            &mut rho,
            cols,
            Into::Set,
        );
        if self.weighted && cols > 0 {
            for (e, rho) in edges.zip(rho.chunks_exact_mut(cols)) {
                let w = T::of(geometry.weight[e]);
                rho.iter_mut().for_each(|x| *x *= w);
            }
        }
        rho
    }

    /// Adjoint for the atoms in `range`: `grad` `[atom][(l, m)][C]` of the start values that `start` holds; edge
    /// gradients of the chunk's edges are added. `grad_normaliser`: what the blocks found for each atom's normaliser.
    #[allow(clippy::too_many_arguments)]
    pub fn adjoint(
        &self,
        input: &StartInput<T>,
        range: Range<usize>,
        start: &[T],
        saved: &[T],
        grad: &[T],
        grad_normaliser: &[f64],
        gradients: &mut [EdgeGradient],
    ) {
        let StartInput { graph, geometry, radial, basis, profile } = input;
        let (c, len) = (self.channels, self.node_len());
        let mut time = profile.start();
        let first = graph.dst_start[range.start];
        let edges = first..graph.dst_start[range.end];
        // Sums that were multiplied with the normaliser: dE/dn = <sum, dE> = <value, dE> / n.
        let mut grad_n: Vec<f64> = grad_normaliser.to_vec();
        let Some(seed) = &self.seed else {
            self.normaliser_adjoint(geometry, graph, range, &grad_n, gradients);
            return;
        };
        let types: Vec<&[T]> = range.clone().map(|i| self.type_row(graph.types[i])).collect();
        let scalars: Vec<T> = grad.chunks_exact(len).flat_map(|g| g[..c].iter().copied()).collect();
        let mut grad_matrix = seed.film_adjoint(range.len(), saved, &types, &scalars);
        for (k, i) in range.clone().enumerate() {
            let n = geometry.normaliser[i];
            let matrix = k * seed.matrix_len()..(k + 1) * seed.matrix_len();
            let rows = k * len + c..(k + 1) * len;
            grad_n[k] += (dot(&saved[matrix.clone()], &grad_matrix[matrix.clone()]).wide()
                + dot(&start[rows.clone()], &grad[rows]).wide())
                / n;
            grad_matrix[matrix].iter_mut().for_each(|x| *x *= T::of(n));
        }
        let features = radial.forward(basis, edges.clone());
        let rho = self.radial_features(geometry, &features.hidden, edges.clone());
        let forward = seed.edges(graph, &features, edges.clone());
        let width = seed.matrix_len() / super::environment_seed::COORDINATES;
        let mut grad_g = Buffer::stale(edges.len() * width);
        let mut grad_rho = Buffer::zeros(rho.len());
        let mut grad_weight = vec![0.0; edges.len()];
        let rows = (self.degree + 1) * (self.degree + 1);
        let (mut z, mut grad_z) = (vec![0.0; rows], vec![0.0; rows]);
        vectorised!(for (k, e) in edges.clone().enumerate() {
            let atom = graph.dst[e] as usize - range.start;
            let matrix = &grad_matrix[atom * seed.matrix_len()..(atom + 1) * seed.matrix_len()];
            let g = &mut grad_g[k * width..(k + 1) * width];
            let (dw, dr) = seed.add_edge_adjoint(geometry, e, seed.row(&forward, k), matrix, g, &mut gradients[k]);
            grad_weight[k] += dw;
            gradients[k].radial += dr;
            // GIE: n z_lm rho_l.
            let n = geometry.normaliser[graph.dst[e] as usize];
            zonal(self.degree, geometry.direction[e], &mut z);
            let rho_len = self.degree * c;
            for row in 1..rows {
                let l = row.isqrt() - 1;
                let grad = &grad[atom * len + row * c..][..c];
                let at = k * rho_len + l * c;
                grad_z[row] = n * dot(grad, &rho[at..at + c]).wide();
                axpy(T::of(n * z[row]), grad, &mut grad_rho[at..at + c]);
            }
            for (torque, entries) in gradients[k].torque.iter_mut().zip(&self.generators.axis) {
                *torque += entries.iter().map(|&(r, q, v)| grad_z[r as usize] * v * z[q as usize]).sum::<f64>();
            }
            if self.weighted {
                let w = geometry.weight[e];
                let at = k * rho_len..(k + 1) * rho_len;
                if w > 0.0 {
                    grad_weight[k] += dot(&grad_rho[at.clone()], &rho[at.clone()]).wide() / w;
                }
                for x in &mut grad_rho[at] {
                    *x *= T::of(w);
                }
            }
        });
        time.stage(Stage::GeometricEmbedding);
        let mut grad_hidden = Buffer::stale(edges.len() * self.radial_last.rows);
        let grad_rho = dense(&grad_rho, edges.len(), self.radial_last.cols);
        matmul_transposed(grad_rho, View::from(&self.radial_last), &mut grad_hidden, self.radial_last.rows, Into::Set);
        let mut grad_rbf = radial.adjoint(&features, grad_hidden);
        time.stage(Stage::Radial);
        axpy(T::one(), &seed.edges_adjoint(&forward, &grad_g), &mut grad_rbf);
        let rows = gradients.iter_mut().zip(grad_rbf.chunks_exact(basis.len));
        for ((gradient, grad_rbf), (e, dw)) in rows.zip(edges.zip(grad_weight)) {
            gradient.radial += basis.slope_along_edge(e, grad_rbf) + dw * geometry.weight_slope[e];
        }
        self.normaliser_adjoint(geometry, graph, range, &grad_n, gradients);
        time.stage(Stage::EnvironmentSeed);
    }

    /// `n = (sum w^2 + floor)^(-1/2)`.
    fn normaliser_adjoint(
        &self,
        geometry: &EdgeGeometry,
        graph: &Graph,
        range: Range<usize>,
        grad: &[f64],
        gradients: &mut [EdgeGradient],
    ) {
        let first = graph.dst_start[range.start];
        for (i, grad) in range.zip(grad) {
            let factor = -grad * geometry.normaliser[i].powi(3);
            for e in graph.dst_start[i]..graph.dst_start[i + 1] {
                gradients[e - first].radial += factor * geometry.weight[e] * geometry.weight_slope[e];
            }
        }
    }
}
