//! The graph of one LAMMPS process: a full neighbour list with skin and ghosts, kept between rebuilds.

use super::Graph;
use super::cell::is_excluded;
use super::order::sort_row;
use super::rows::{self, Block};
use crate::{Error, Result};
use rayon::prelude::*;

/// The bits of a LAMMPS neighbour that number the atom; those above flag bonded pairs and contact history.
const NEIGHMASK: u32 = 0x1FFF_FFFF;

/// What LAMMPS knows after it has rebuilt its neighbour list.
#[derive(Debug, Clone, Copy)]
pub struct LammpsList<'a> {
    /// Owned atoms: the first of all.
    pub n_local: usize,
    /// Positions of owned atoms and ghosts at this rebuild, Å.
    pub positions: &'a [[f64; 3]],
    /// Model type of owned atoms and ghosts; negative: not an atom of the model.
    pub types: &'a [i32],
    /// Node of each atom: its own number for an owned one, the number of its owner for a ghost whose owner is here,
    /// `n_local`, `n_local + 1`, ... for ghosts of other processes, the same number for all images of one atom.
    pub node: &'a [u32],
    /// For owned atoms in any order (`ilist`): number, neighbours (`firstneigh[i]`, flag bits included). Both
    /// directions of each pair must be there. Atoms without an entry have no neighbours.
    pub rows: &'a [(u32, &'a [i32])],
}

/// Candidate edges of one process in their final order; each step picks those within the cutoff.
#[derive(Debug, Clone)]
pub struct NeighbourList {
    rcut: f64,
    n_all: usize,
    /// `n_local + 1` offsets into `candidates`.
    start: Vec<usize>,
    /// (source node, number of the atom or ghost), ordered within each destination.
    candidates: Vec<(u32, u32)>,
    graph: Graph,
    blocks: Vec<Block>,
}

impl NeighbourList {
    /// Takes over a rebuilt list for a cutoff in Å; pairs of `excluded` types (unordered) have no edges.
    ///
    /// Errors: `Argument` for lists that do not fit together, `Structure` for positions that are not finite.
    pub fn new(list: &LammpsList, rcut: f64, excluded: &[(u32, u32)]) -> Result<Self> {
        let (n_local, types, positions) = (list.n_local, list.types, list.positions);
        let node_types = node_types(list)?;
        check_finite(positions)?;
        let neighbours = by_atom(list)?;
        let rows: Vec<Vec<(u32, u32)>> = (0..n_local)
            .into_par_iter()
            .map(|i| {
                let wanted = |j: usize| types[i] >= 0 && types[j] >= 0 && !is_excluded(excluded, types[i], types[j]);
                let mut row: Vec<(u32, u32)> = neighbours[i]
                    .iter()
                    .map(|&j| j as u32 & NEIGHMASK)
                    .filter(|&j| wanted(j as usize))
                    .map(|j| (list.node[j as usize], j))
                    .collect();
                sort_row(&mut row, |e| e.0, |e| difference(positions[e.1 as usize], positions[i]));
                row
            })
            .collect();
        let mut start = vec![0];
        start.extend(rows.iter().scan(0, |end, row| {
            *end += row.len();
            Some(*end)
        }));
        Ok(NeighbourList {
            rcut,
            n_all: types.len(),
            start,
            candidates: rows.concat(),
            graph: Graph { n_owned: n_local, types: node_types, ..Graph::default() },
            blocks: Vec::new(),
        })
    }

    /// The edges shorter than the cutoff at these positions (Å, owned atoms and ghosts as at the rebuild).
    ///
    /// Errors: `Argument` for another number of atoms, `Structure` for positions that are not finite and for atoms on
    /// top of each other.
    pub fn graph(&mut self, positions: &[[f64; 3]]) -> Result<&Graph> {
        if positions.len() != self.n_all {
            return Err(Error::Argument(format!(
                "{} positions for a neighbour list of {} atoms and ghosts: hand over the list after each rebuild",
                positions.len(),
                self.n_all
            )));
        }
        check_finite(positions)?;
        let Self { rcut, start, candidates, graph, blocks, .. } = self;
        let cutoff2 = *rcut * *rcut;
        rows::fill(graph, blocks, |i, edges| {
            let centre = positions[i];
            for &(source, j) in &candidates[start[i]..start[i + 1]] {
                let vec = difference(positions[j as usize], centre);
                if vec[0] * vec[0] + vec[1] * vec[1] + vec[2] * vec[2] < cutoff2 {
                    edges.push((source, vec));
                }
            }
        })?;
        if let Some((edge, length)) = graph.too_short_edge() {
            let (i, source) = (graph.dst[edge] as usize, graph.src[edge]);
            let p = positions[i];
            return Err(Error::Structure(format!(
                "two atoms at ({}, {}, {}) Å are {length:.1e} Å apart (owned atom {}, node {} of this process), closer \
                 than {:.0e} Å: remove one of them, or check whether the run blew up",
                p[0],
                p[1],
                p[2],
                i + 1,
                source + 1,
                super::SHORTEST_EDGE,
            )));
        }
        Ok(graph)
    }
}

#[inline]
fn difference(a: [f64; 3], b: [f64; 3]) -> [f64; 3] {
    [a[0] - b[0], a[1] - b[1], a[2] - b[2]]
}

fn check_finite(positions: &[[f64; 3]]) -> Result<()> {
    match positions.iter().position(|p| !p.iter().all(|c| c.is_finite())) {
        None => Ok(()),
        Some(i) => Err(Error::Structure(format!(
            "position of atom {} of this process is not finite: {:?}; the run has become unstable",
            i + 1,
            positions[i]
        ))),
    }
}

/// The type of each node; checks that atoms and nodes agree.
fn node_types(list: &LammpsList) -> Result<Vec<i32>> {
    let LammpsList { n_local, positions, types, node, .. } = *list;
    let fail = |what: String| Err(Error::Argument(format!("neighbour list: {what}")));
    let n_all = types.len();
    if positions.len() != n_all || node.len() != n_all || n_local > n_all {
        let (p, n) = (positions.len(), node.len());
        return fail(format!("{p} positions, {n_all} types and {n} nodes for {n_local} owned atoms and their ghosts"));
    }
    // Ghosts number the remote nodes, so there cannot be more nodes than atoms.
    let n_nodes = node.iter().map(|&n| n as usize + 1).max().unwrap_or(0).max(n_local);
    if n_nodes > n_all {
        return fail(format!("node {} for {n_all} atoms: remote owners are numbered from {n_local} up", n_nodes - 1));
    }
    let mut found: Vec<Option<i32>> = vec![None; n_nodes];
    for (i, (&node, &kind)) in node.iter().zip(types).enumerate() {
        if i < n_local && node as usize != i {
            return fail(format!("owned atom {i} is given node {node}, not its own number"));
        }
        let known = *found[node as usize].get_or_insert(kind);
        if known != kind {
            return fail(format!("ghost {i} has type {kind}, but node {node}, its owner, has type {known}"));
        }
    }
    match found.iter().position(Option::is_none) {
        Some(node) => fail(format!("no ghost belongs to node {node}: remote owners must be numbered without gaps")),
        None => Ok(found.into_iter().flatten().collect()),
    }
}

/// The neighbours of each owned atom; checks that they are there.
fn by_atom<'a>(list: &LammpsList<'a>) -> Result<Vec<&'a [i32]>> {
    let fail = |what: String| Err(Error::Argument(format!("neighbour list: {what}")));
    let mut neighbours: Vec<Option<&[i32]>> = vec![None; list.n_local];
    for &(i, row) in list.rows {
        match neighbours.get_mut(i as usize) {
            None => return fail(format!("entry for atom {i}, but this process owns {}", list.n_local)),
            Some(Some(_)) => return fail(format!("two entries for atom {i}")),
            Some(entry) => *entry = Some(row),
        }
        let n_all = list.types.len();
        if let Some(&j) = row.iter().find(|&&j| (j as u32 & NEIGHMASK) as usize >= n_all || j as u32 & NEIGHMASK == i) {
            return fail(format!("atom {i} has neighbour {} among {n_all} atoms and ghosts", j as u32 & NEIGHMASK));
        }
    }
    Ok(neighbours.into_iter().map(Option::unwrap_or_default).collect())
}
