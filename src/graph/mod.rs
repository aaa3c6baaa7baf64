//! Neighbour lists -> edges in compressed rows (SPEC section 2, DESIGN section 3).

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
}
