//! Intermediate values of an evaluation in f64, for comparison with another implementation.

use super::edge_geometry::EdgeGeometry;
use super::{CpuEngine, Step};
use crate::graph::Graph;
use crate::model::Model;

/// What the engine's own stages give on the way to the descriptor.
pub struct Stages {
    /// Distances, directions and envelopes of the edges, normalisers of the nodes (SPEC 3).
    pub geometry: EdgeGeometry,
    /// `[edge][n_radial]`: the radial basis times its envelope (SPEC 3).
    pub radial_basis: Vec<f64>,
    /// `[edge][width]`: the last hidden layer of the radial network (SPEC 5).
    pub radial_hidden: Vec<f64>,
    /// Node states `[node][(l, m)][C]`: at the start, then after each block (SPEC 6 to 8).
    pub states: Vec<Vec<f64>>,
}

/// Runs the forward stages on one rank.
pub fn stages(model: &Model, graph: &Graph) -> Stages {
    let engine = CpuEngine::<f64>::new(model);
    let step = Step::new(&engine, graph);
    let radial = engine.radial.forward(&step.basis, 0..graph.n_edges());
    let mut states = vec![step.start().0];
    for b in 0..engine.blocks.len() {
        let next = step.block(b, &states[b]).2;
        states.push(next);
    }
    Stages { geometry: step.geometry, radial_basis: radial.rbf.to_vec(), radial_hidden: radial.hidden.to_vec(), states }
}
