//! How work is cut: chunks of edges, tiles of nodes, and the parts of an array that each of them owns.

use super::real::Real;
use std::ops::Range;

/// Edges that a chunk aims at: enough rows for a fast product, few enough for the second-level cache.
const EDGE_CHUNK: usize = 192;
/// Nodes of a tile.
pub const NODE_TILE: usize = 16;

/// Ranges of whole rows with about [`EDGE_CHUNK`] edges each, from the offsets of compressed rows.
pub fn chunk_rows(starts: &[usize]) -> Vec<Range<usize>> {
    let rows = starts.len().saturating_sub(1);
    let mut chunks = Vec::new();
    let mut first = 0;
    for row in 0..rows {
        if row > first && starts[row + 1] - starts[first] > EDGE_CHUNK {
            chunks.push(first..row);
            first = row;
        }
    }
    if first < rows {
        chunks.push(first..rows);
    }
    chunks
}

/// Tiles of [`NODE_TILE`] nodes.
pub fn node_tiles(nodes: usize) -> Vec<Range<usize>> {
    (0..nodes).step_by(NODE_TILE).map(|first| first..(first + NODE_TILE).min(nodes)).collect()
}

/// Parts of the given lengths, one after another; what is left over belongs to nobody.
pub fn split<T>(mut values: &mut [T], lengths: impl Iterator<Item = usize>) -> Vec<&mut [T]> {
    lengths
        .map(|n| {
            let (part, rest) = std::mem::take(&mut values).split_at_mut(n);
            values = rest;
            part
        })
        .collect()
}

/// The rows of consecutive ranges, `len` values a row.
pub fn split_rows<'a, T>(values: &'a mut [T], ranges: &[Range<usize>], len: usize) -> Vec<&'a mut [T]> {
    split(values, ranges.iter().map(|r| r.len() * len))
}

/// `[node][row][channel]` -> the tile `[row][node][channel]` of the nodes in `range`.
pub fn gather<T: Real>(values: &[T], range: &Range<usize>, node_len: usize, channels: usize) -> Vec<T> {
    let n = range.len();
    let mut tile = vec![T::zero(); n * node_len];
    for (k, node) in range.clone().enumerate() {
        for (row, x) in values[node * node_len..(node + 1) * node_len].chunks_exact(channels).enumerate() {
            tile[(row * n + k) * channels..][..channels].copy_from_slice(x);
        }
    }
    tile
}

/// The tile `[row][node][channel]` -> `[node][row][channel]`; rows that `out` has no room for are dropped.
pub fn scatter<T: Real>(tile: &[T], nodes: usize, channels: usize, out: &mut [T]) {
    if nodes == 0 {
        return;
    }
    let node_len = out.len() / nodes;
    for (node, out) in out.chunks_exact_mut(node_len).enumerate() {
        for (row, x) in out.chunks_exact_mut(channels).enumerate() {
            x.copy_from_slice(&tile[(row * nodes + node) * channels..][..channels]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_hold_whole_rows_and_cover_all() {
        for starts in [vec![0], vec![0, 0], vec![0, 500, 500, 600, 700, 790, 1000]] {
            let chunks = chunk_rows(&starts);
            assert_eq!(chunks.iter().map(|r| r.len()).sum::<usize>(), starts.len() - 1);
            for chunk in &chunks {
                assert!(chunk.len() == 1 || starts[chunk.end] - starts[chunk.start] <= EDGE_CHUNK);
            }
        }
    }

    #[test]
    fn scatter_undoes_gather() {
        let x: Vec<f64> = (0..5 * 6).map(f64::from).collect();
        let tile = gather(&x, &(1..4), 6, 2);
        let mut back = vec![0.0; 18];
        scatter(&tile, 3, 2, &mut back);
        assert_eq!(back, x[6..24]);
    }
}
