//! `edge_geometry`: distance, direction and envelope of every edge, and each node's normaliser (SPEC 3), in f64.

use crate::graph::Graph;
use crate::math::envelope::Envelope;
use rayon::prelude::*;

/// Edge scalars in edge order, node scalars of the owned nodes.
pub struct EdgeGeometry {
    /// `sqrt(|vec|^2 + eps^2)`, Å.
    pub distance: Vec<f64>,
    /// Unit vector from destination to source.
    pub direction: Vec<[f64; 3]>,
    /// Envelope `w_e` and its slope, 1/Å.
    pub weight: Vec<f64>,
    pub weight_slope: Vec<f64>,
    /// `1 / sqrt(sum w^2 + floor)`.
    pub normaliser: Vec<f64>,
}

/// What one edge's energy gradient is made of: the slope along the edge and the torque about the centre (SPEC 22.5).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct EdgeGradient {
    /// dE/dr, eV/Å.
    pub radial: f64,
    /// `T_a`: change of E with a rotation of the edge about axis a, eV.
    pub torque: [f64; 3],
}

impl EdgeGradient {
    /// `dE/dvec = dE/dr n + (T x n) / r`, eV/Å.
    pub fn vector(&self, direction: [f64; 3], distance: f64) -> [f64; 3] {
        let [x, y, z] = direction;
        let [a, b, c] = self.torque;
        let turn = [b * z - c * y, c * x - a * z, a * y - b * x];
        std::array::from_fn(|i| self.radial * direction[i] + turn[i] / distance)
    }
    /// Adds the gradient with respect to a unit direction: its torque is `n x g`.
    pub fn add_direction(&mut self, direction: [f64; 3], grad: [f64; 3]) {
        let [x, y, z] = direction;
        let [a, b, c] = grad;
        self.torque[0] += y * c - z * b;
        self.torque[1] += z * a - x * c;
        self.torque[2] += x * b - y * a;
    }
}

impl EdgeGeometry {
    /// `floor`: of the node normaliser (SPEC 3).
    pub fn new(graph: &Graph, envelope: &Envelope, eps: f64, floor: f64) -> Self {
        let scalars: Vec<(f64, [f64; 3], (f64, f64))> = graph
            .vec
            .par_iter()
            .map(|v| {
                let length2 = v.iter().map(|x| x * x).sum::<f64>();
                let distance = (length2 + eps * eps).sqrt();
                (distance, v.map(|x| x / length2.sqrt()), envelope.value_and_slope(distance))
            })
            .collect();
        let normaliser = (0..graph.n_owned)
            .map(|i| {
                let sum: f64 = scalars[graph.dst_start[i]..graph.dst_start[i + 1]].iter().map(|s| s.2.0 * s.2.0).sum();
                1.0 / (sum + floor).sqrt()
            })
            .collect();
        EdgeGeometry {
            distance: scalars.iter().map(|s| s.0).collect(),
            direction: scalars.iter().map(|s| s.1).collect(),
            weight: scalars.iter().map(|s| s.2.0).collect(),
            weight_slope: scalars.iter().map(|s| s.2.1).collect(),
            normaliser,
        }
    }
}
