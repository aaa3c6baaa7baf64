//! Neighbour lists -> edges in compressed rows (SPEC section 2, DESIGN section 3).

mod cell;
mod lammps;
mod order;
mod rows;

pub use cell::{Structure, build};
pub use lammps::{LammpsList, NeighbourList};

use crate::{Error, Result};

/// Edges shorter than this, Å, are atoms on top of each other.
const SHORTEST_EDGE: f64 = 1e-6;

/// The edges of one configuration, compressed rows by destination and, as an index, by source.
///
/// Nodes are the atoms that carry features: first the `n_owned` atoms of this rank, then one node for each
/// remote owner (none on one rank). Periodic images are folded onto their owners. Only owned nodes are
/// destinations. Edges are ordered by (destination, source, image), whichever list they came from.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Graph {
    /// Owned nodes: the destinations.
    pub n_owned: usize,
    /// Model type of each node, owned first; -1 = not an atom of this model (no edges, no energy).
    pub types: Vec<i32>,
    /// `n_owned + 1` offsets into the edge arrays.
    pub dst_start: Vec<usize>,
    /// Destination (centre, receiver) of each edge.
    pub dst: Vec<u32>,
    /// Source (neighbour, sender) of each edge.
    pub src: Vec<u32>,
    /// `r_src + T - r_dst`, Å, in f64.
    pub vec: Vec<[f64; 3]>,
    /// `n_nodes + 1` offsets into `src_edges`.
    pub src_start: Vec<usize>,
    /// Edge numbers grouped by source, ascending in each group.
    pub src_edges: Vec<u32>,
}

impl Graph {
    /// Owned and remote nodes.
    pub fn n_nodes(&self) -> usize {
        self.types.len()
    }
    /// Directed edges.
    pub fn n_edges(&self) -> usize {
        self.src.len()
    }

    /// Fills `src_start` and `src_edges` from `src` by a counting sort.
    fn index_sources(&mut self) {
        self.src_start.clear();
        self.src_start.resize(self.n_nodes() + 1, 0);
        for &s in &self.src {
            self.src_start[s as usize + 1] += 1;
        }
        for node in 0..self.n_nodes() {
            self.src_start[node + 1] += self.src_start[node];
        }
        self.src_edges.clear();
        self.src_edges.resize(self.n_edges(), 0);
        // While filling, src_start[s] is where the next edge of s goes: in the end, where s + 1 begins.
        for (edge, &s) in (0..).zip(&self.src) {
            let next = &mut self.src_start[s as usize];
            self.src_edges[*next] = edge;
            *next += 1;
        }
        self.src_start.rotate_right(1);
        self.src_start[0] = 0;
    }

    /// The first edge that is shorter than [`SHORTEST_EDGE`], and its length.
    fn too_short_edge(&self) -> Option<(usize, f64)> {
        let squared = |v: &[f64; 3]| v.iter().map(|c| c * c).sum::<f64>();
        let edge = self.vec.iter().position(|v| squared(v) < SHORTEST_EDGE * SHORTEST_EDGE)?;
        Some((edge, squared(&self.vec[edge]).sqrt()))
    }

    /// Checks that the arrays fit together as their documentation says; the error names the first that does not.
    pub fn validate(&self) -> Result<()> {
        let (nodes, edges) = (self.n_nodes(), self.n_edges());
        let fail = |what: String| Err(Error::Internal(format!("graph: {what}")));
        if self.n_owned > nodes {
            return fail(format!("{} owned nodes of {nodes}", self.n_owned));
        }
        for (name, found) in [("dst", self.dst.len()), ("vec", self.vec.len()), ("src_edges", self.src_edges.len())] {
            if found != edges {
                return fail(format!("{name} has {found} entries for {edges} edges"));
            }
        }
        for (name, start, rows) in [("dst_start", &self.dst_start, self.n_owned), ("src_start", &self.src_start, nodes)]
        {
            let ascending = start.windows(2).all(|w| w[0] <= w[1]);
            if start.len() != rows + 1 || start[0] != 0 || start[rows] != edges || !ascending {
                return fail(format!("{name} does not divide {edges} edges into {rows} rows"));
            }
        }
        for node in 0..self.n_owned {
            let row = self.dst_start[node]..self.dst_start[node + 1];
            if self.dst[row.clone()].iter().any(|&d| d as usize != node) {
                return fail(format!("row {node} holds edges of another destination"));
            }
            if self.src[row].windows(2).any(|w| w[0] > w[1]) {
                return fail(format!("row {node} is not ordered by source"));
            }
        }
        if let Some(edge) = (0..edges).find(|&e| {
            let source = self.src[e] as usize;
            source >= nodes || self.types[source] < 0 || self.types[self.dst[e] as usize] < 0
        }) {
            return fail(format!("edge {edge} does not join two atoms of the model"));
        }
        for node in 0..nodes {
            let group = &self.src_edges[self.src_start[node]..self.src_start[node + 1]];
            let ascending = group.windows(2).all(|w| w[0] < w[1]);
            if !ascending || group.iter().any(|&e| self.src.get(e as usize) != Some(&(node as u32))) {
                return fail(format!("the edges of source {node} are not its own in ascending order"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
