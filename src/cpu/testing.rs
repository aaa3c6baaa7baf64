//! What the stage tests share: reproducible numbers and the check of an adjoint against differences.

use crate::model::Model;
use std::path::Path;

/// A model of the committed references, `tests/data/refs`: weights for the stages of its options.
pub fn committed_model(name: &str) -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/refs");
    Model::open(&folder.join(format!("{name}.pt")), None).unwrap()
}

/// `n` values in (-1, 1), the same for the same seed.
pub fn random(seed: u64, n: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        })
        .collect()
}

/// Compares `adjoint(x, g)` with central differences of `<g, forward(x)>` in every component: 1e-7 relative to the
/// largest component.
pub fn check_adjoint(x: &[f64], forward: impl Fn(&[f64]) -> Vec<f64>, adjoint: impl Fn(&[f64], &[f64]) -> Vec<f64>) {
    let weight = random(99, forward(x).len());
    let value = |x: &[f64]| -> f64 { forward(x).iter().zip(&weight).map(|(a, b)| a * b).sum() };
    let grad = adjoint(x, &weight);
    assert_eq!(grad.len(), x.len());
    let size = grad.iter().fold(1e-3f64, |m, g| m.max(g.abs()));
    let mut moved = x.to_vec();
    for i in 0..x.len() {
        // Fourth-order differences.
        let mut at = |step: f64| {
            moved[i] = x[i] + step;
            value(&moved)
        };
        let h = 1e-3;
        let numeric = (8.0 * (at(h) - at(-h)) - (at(2.0 * h) - at(-2.0 * h))) / (12.0 * h);
        moved[i] = x[i];
        assert!((grad[i] - numeric).abs() <= 1e-7 * size, "component {i}: adjoint {} differences {numeric}", grad[i]);
    }
}
