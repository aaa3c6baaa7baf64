//! Fills a graph row by row, in parallel over destinations.

use super::Graph;
use crate::{Error, Result};
use rayon::prelude::*;

/// Destinations a task handles; fixed, so nothing depends on the number of threads.
const BLOCK: usize = 128;

/// An edge on its way into a row: source node and displacement in Å.
pub(super) type Edge = (u32, [f64; 3]);

/// Edges of consecutive destinations; kept between steps for its memory.
#[derive(Debug, Clone, Default)]
pub(super) struct Block {
    edges: Vec<Edge>,
    /// Length of `edges` after each destination.
    ends: Vec<usize>,
}

/// Replaces all edges of `graph`: `row(i, edges)` appends those of owned node i, ordered.
///
/// Errors: `Structure` for more edges than their 32-bit numbers can tell apart.
pub(super) fn fill(
    graph: &mut Graph,
    blocks: &mut Vec<Block>,
    row: impl Fn(usize, &mut Vec<Edge>) + Sync,
) -> Result<()> {
    let n_owned = graph.n_owned;
    blocks.resize_with(n_owned.div_ceil(BLOCK), Block::default);
    blocks.par_iter_mut().enumerate().for_each(|(b, block)| {
        block.edges.clear();
        block.ends.clear();
        for i in b * BLOCK..n_owned.min((b + 1) * BLOCK) {
            row(i, &mut block.edges);
            block.ends.push(block.edges.len());
        }
    });
    let total: usize = blocks.iter().map(|b| b.edges.len()).sum();
    if total > u32::MAX as usize {
        return Err(Error::Structure(format!(
            "{n_owned} atoms have {total} neighbours in all, more than the {} that one process can number: \
             use more processes, or check the units of positions and cell (Å)",
            u32::MAX
        )));
    }
    graph.dst_start.clear();
    graph.dst_start.push(0);
    graph.dst.clear();
    graph.src.clear();
    graph.vec.clear();
    for block in blocks.iter() {
        let first = graph.src.len();
        graph.src.extend(block.edges.iter().map(|e| e.0));
        graph.vec.extend(block.edges.iter().map(|e| e.1));
        for &end in &block.ends {
            let node = graph.dst_start.len() as u32 - 1;
            graph.dst.resize(first + end, node);
            graph.dst_start.push(first + end);
        }
    }
    graph.index_sources();
    debug_assert!(graph.validate().is_ok(), "{:?}", graph.validate());
    Ok(())
}
