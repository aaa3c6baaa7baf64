//! `equivariant_norm` (SPEC 8.1) on a tile of nodes, and the scalar RMS norm of its end.

use super::real::Real;
use crate::model::parameters::EquivariantNorm;

/// Weight of a row of degree `l` in the mean square.
fn balance<T: Real>(l: usize, degrees: usize, channels: usize) -> T {
    T::of(1.0 / ((2 * l + 1) * degrees * channels) as f64)
}

/// Normalises a tile in place; returns the tile's centred input and `1 / sqrt(mean square + eps)` of each node.
pub struct Normalised<T> {
    /// `[(l, m)][node][channel]`: the input with the channel mean taken from the scalars.
    pub centred: Vec<T>,
    /// `[node]`.
    pub inverse: Vec<T>,
}

/// `out <- norm(x)`, tile `[(l, m)][node][channel]`.
pub fn equivariant_norm<T: Real>(norm: &EquivariantNorm<T>, nodes: usize, x: &[T], out: &mut [T]) -> Normalised<T> {
    let (degrees, channels) = (norm.scale.rows, norm.scale.cols);
    let rows = degrees * degrees;
    let mut centred = x[..rows * nodes * channels].to_vec();
    for scalars in centred[..nodes * channels].chunks_exact_mut(channels) {
        let mean = scalars.iter().copied().sum::<T>() / T::of(channels as f64);
        scalars.iter_mut().for_each(|v| *v -= mean);
    }
    let mut inverse = vec![T::zero(); nodes];
    for (row, tile) in centred.chunks_exact(nodes * channels).enumerate() {
        let weight = balance::<T>(row.isqrt(), degrees, channels);
        for (sum, values) in inverse.iter_mut().zip(tile.chunks_exact(channels)) {
            *sum += weight * values.iter().map(|&v| v * v).sum::<T>();
        }
    }
    let eps = T::of(norm.eps);
    inverse.iter_mut().for_each(|v| *v = T::one() / (*v + eps).sqrt());
    for row in 0..rows {
        let scale = norm.scale.row(row.isqrt());
        for (node, &inverse) in inverse.iter().enumerate() {
            let at = (row * nodes + node) * channels;
            for c in 0..channels {
                let bias = if row == 0 { norm.bias[c] } else { T::zero() };
                out[at + c] = centred[at + c] * inverse * scale[c] + bias;
            }
        }
    }
    Normalised { centred, inverse }
}

/// Adjoint of [`equivariant_norm`]: turns the gradient of the output, in place, into that of the input.
pub fn equivariant_norm_adjoint<T: Real>(
    norm: &EquivariantNorm<T>,
    nodes: usize,
    forward: &Normalised<T>,
    grad: &mut [T],
) {
    let (degrees, channels) = (norm.scale.rows, norm.scale.cols);
    let rows = degrees * degrees;
    let mut along = vec![T::zero(); nodes];
    for row in 0..rows {
        let scale = norm.scale.row(row.isqrt());
        for (node, along) in along.iter_mut().enumerate() {
            let at = (row * nodes + node) * channels;
            for c in 0..channels {
                grad[at + c] *= scale[c];
                *along += grad[at + c] * forward.centred[at + c];
            }
        }
    }
    for row in 0..rows {
        let weight = balance::<T>(row.isqrt(), degrees, channels);
        for (node, &along) in along.iter().enumerate() {
            let inverse = forward.inverse[node];
            let pull = along * inverse * inverse * inverse * weight;
            let at = (row * nodes + node) * channels;
            for c in 0..channels {
                grad[at + c] = grad[at + c] * inverse - pull * forward.centred[at + c];
            }
        }
    }
    for scalars in grad[..nodes * channels].chunks_exact_mut(channels) {
        let mean = scalars.iter().copied().sum::<T>() / T::of(channels as f64);
        scalars.iter_mut().for_each(|v| *v -= mean);
    }
}

/// `out = x / sqrt(mean(x^2) + eps) * scale` for one row of channels; returns `1 / sqrt(...)` (SPEC 8.1, ScalarRMSNorm).
pub fn scalar_norm<T: Real>(scale: &[T], eps: f64, x: &[T], out: &mut [T]) -> T {
    let mean = x.iter().map(|&v| v * v).sum::<T>() / T::of(x.len() as f64);
    let inverse = T::one() / (mean + T::of(eps)).sqrt();
    for ((out, &x), &scale) in out.iter_mut().zip(x).zip(scale) {
        *out = x * inverse * scale;
    }
    inverse
}

/// Adjoint of [`scalar_norm`]: adds to `grad_x`.
pub fn scalar_norm_adjoint<T: Real>(scale: &[T], inverse: T, x: &[T], grad: &[T], grad_x: &mut [T]) {
    let along: T = x.iter().zip(grad).zip(scale).map(|((&x, &g), &s)| x * g * s).sum();
    let pull = along * inverse * inverse * inverse / T::of(x.len() as f64);
    for (((grad_x, &x), &g), &s) in grad_x.iter_mut().zip(x).zip(grad).zip(scale) {
        *grad_x += g * s * inverse - pull * x;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{check_adjoint, random};
    use crate::model::parameters::Matrix;

    #[test]
    fn adjoint_matches_differences() {
        let (degrees, channels, nodes) = (3, 5, 2);
        let norm = EquivariantNorm {
            scale: Matrix { rows: degrees, cols: channels, data: random(1, degrees * channels) },
            bias: random(2, channels),
            eps: 1e-5,
        };
        let x = random(3, degrees * degrees * nodes * channels);
        let forward = |x: &[f64]| {
            let mut out = vec![0.0; x.len()];
            equivariant_norm(&norm, nodes, x, &mut out);
            out
        };
        check_adjoint(&x, forward, |x, grad| {
            let mut grad = grad.to_vec();
            let saved = equivariant_norm(&norm, nodes, x, &mut vec![0.0; x.len()]);
            equivariant_norm_adjoint(&norm, nodes, &saved, &mut grad);
            grad
        });
    }

    #[test]
    fn output_has_unit_mean_square_and_no_scalar_mean() {
        let (degrees, channels) = (4, 6);
        let norm = EquivariantNorm {
            scale: Matrix { rows: degrees, cols: channels, data: vec![1.0; degrees * channels] },
            bias: vec![0.0; channels],
            eps: 0.0,
        };
        let mut out = vec![0.0; degrees * degrees * channels];
        equivariant_norm(&norm, 1, &random(5, degrees * degrees * channels), &mut out);
        assert!(out[..channels].iter().sum::<f64>().abs() < 1e-13);
        let mean: f64 = (0..degrees * degrees)
            .map(|row| {
                let l = row.isqrt();
                let sum: f64 = out[row * channels..(row + 1) * channels].iter().map(|v| v * v).sum();
                sum / ((2 * l + 1) * degrees * channels) as f64
            })
            .sum();
        assert!((mean - 1.0).abs() < 1e-13);
    }

    #[test]
    fn scalar_adjoint_matches_differences() {
        let (scale, x) = (random(6, 7), random(7, 7));
        let forward = |x: &[f64]| {
            let mut out = vec![0.0; 7];
            scalar_norm(&scale, 1e-7, x, &mut out);
            out
        };
        check_adjoint(&x, forward, |x, grad| {
            let inverse = scalar_norm(&scale, 1e-7, x, &mut [0.0; 7]);
            let mut out = vec![0.0; 7];
            scalar_norm_adjoint(&scale, inverse, x, grad, &mut out);
            out
        });
    }
}
