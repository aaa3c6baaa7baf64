//! `node_linear`: one matrix a degree on a tile of nodes (SPEC 8.2, `pre_focus_mix` and its kind).
//!
//! A tile holds `[(l, m)][node][channel]`: the rows of a degree lie together, so a degree is one matrix product.

use super::real::{Into, Real, View, dense, matmul, matmul_transposed};
use crate::model::parameters::Matrix;

/// Rows of the degrees below `l` in packed order.
pub fn first_row(l: usize) -> usize {
    l * l
}

/// `out[(l,m)][node] = x[(l,m)][node] W_l`, channels `in -> out`.
pub fn degree_linear<T: Real>(weights: &[Matrix<T>], nodes: usize, x: &[T], out: &mut [T], into: Into) {
    for (l, w) in weights.iter().enumerate() {
        let (first, rows) = (first_row(l) * nodes, (2 * l + 1) * nodes);
        let x = dense(&x[first * w.rows..], rows, w.rows);
        matmul(x, w.into(), &mut out[first * w.cols..], w.cols, into);
    }
}

/// Adjoint of [`degree_linear`]: `grad_x[(l,m)][node] = grad[(l,m)][node] W_l^T`.
pub fn degree_linear_adjoint<T: Real>(weights: &[Matrix<T>], nodes: usize, grad: &[T], grad_x: &mut [T], into: Into) {
    for (l, w) in weights.iter().enumerate() {
        let (first, rows) = (first_row(l) * nodes, (2 * l + 1) * nodes);
        let grad = dense(&grad[first * w.cols..], rows, w.cols);
        matmul_transposed(grad, w.into(), &mut grad_x[first * w.rows..], w.rows, into);
    }
}

/// Frames of a grid product: `out[frame][(l,m)][node] = x[(l,m)][node] W_l[.., frame]` for `|k| <= l` (SPEC 10.1).
///
/// `W_l` has `frames * width` columns, frame slow; frames that a degree does not have are left alone.
pub fn expand_frames<T: Real>(weights: &[Matrix<T>], frames: usize, nodes: usize, x: &[T], out: &mut [T]) {
    let (degrees, width) = (weights.len(), weights[0].cols / frames);
    let plane = first_row(degrees) * nodes * width;
    for (l, w) in weights.iter().enumerate() {
        let (first, rows) = (first_row(l) * nodes, (2 * l + 1) * nodes);
        let x = dense(&x[first * w.rows..], rows, w.rows);
        for frame in 0..frames_of_degree(frames, l) {
            let columns = View::from(w).columns(frame * width, width);
            matmul(x, columns, &mut out[frame * plane + first * width..], width, Into::Set);
        }
    }
}

/// Adjoint of [`expand_frames`].
pub fn expand_frames_adjoint<T: Real>(
    weights: &[Matrix<T>],
    frames: usize,
    nodes: usize,
    grad: &[T],
    grad_x: &mut [T],
    into: Into,
) {
    let (degrees, width) = (weights.len(), weights[0].cols / frames);
    let plane = first_row(degrees) * nodes * width;
    for (l, w) in weights.iter().enumerate() {
        let (first, rows) = (first_row(l) * nodes, (2 * l + 1) * nodes);
        for frame in 0..frames_of_degree(frames, l) {
            let columns = View::from(w).columns(frame * width, width);
            let grad = dense(&grad[frame * plane + first * width..], rows, width);
            let into = if frame == 0 { into } else { Into::Add };
            matmul_transposed(grad, columns, &mut grad_x[first * w.rows..], w.rows, into);
        }
    }
}

/// `out[(l,m)][node] = sum_frame x[frame][(l,m)][node] W_l[frame, ..]`; `W_l` has `frames * width` rows.
pub fn contract_frames<T: Real>(
    weights: &[Matrix<T>],
    frames: usize,
    nodes: usize,
    x: &[T],
    out: &mut [T],
    into: Into,
) {
    let (degrees, width) = (weights.len(), weights[0].rows / frames);
    let plane = first_row(degrees) * nodes * width;
    for (l, w) in weights.iter().enumerate() {
        let (first, rows) = (first_row(l) * nodes, (2 * l + 1) * nodes);
        for frame in 0..frames_of_degree(frames, l) {
            let block = View::from(w).rows(frame * width, width);
            let x = dense(&x[frame * plane + first * width..], rows, width);
            let into = if frame == 0 { into } else { Into::Add };
            matmul(x, block, &mut out[first * w.cols..], w.cols, into);
        }
    }
}

/// Adjoint of [`contract_frames`].
pub fn contract_frames_adjoint<T: Real>(
    weights: &[Matrix<T>],
    frames: usize,
    nodes: usize,
    grad: &[T],
    grad_x: &mut [T],
) {
    let (degrees, width) = (weights.len(), weights[0].rows / frames);
    let plane = first_row(degrees) * nodes * width;
    for (l, w) in weights.iter().enumerate() {
        let (first, rows) = (first_row(l) * nodes, (2 * l + 1) * nodes);
        let grad = dense(&grad[first * w.cols..], rows, w.cols);
        for frame in 0..frames_of_degree(frames, l) {
            let block = View::from(w).rows(frame * width, width);
            matmul_transposed(grad, block, &mut grad_x[frame * plane + first * width..], width, Into::Set);
        }
    }
}

/// Frames `[0, -1, +1, -2, +2, ...]` with `|k| <= l`.
pub fn frames_of_degree(frames: usize, l: usize) -> usize {
    frames.min(2 * l + 1)
}
