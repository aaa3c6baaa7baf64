//! Time of each stage, summed over threads; the names are those of DESIGN, kernels and docs.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// Stages in the order in which a step runs them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    EdgeGeometry,
    Wigner,
    Radial,
    EnvironmentSeed,
    GeometricEmbedding,
    NodeLinear,
    RotateMix,
    So2Stack,
    FocusCompetition,
    Attention,
    GridProduct,
    Ffn,
    Readout,
    ForceVirial,
}

const NAMES: [&str; 14] = [
    "edge_geometry",
    "wigner",
    "radial",
    "environment_seed",
    "geometric_embedding",
    "node_linear",
    "rotate_mix",
    "so2_stack",
    "focus_competition",
    "attention",
    "grid_product",
    "ffn",
    "readout",
    "force_virial",
];

/// Calls and nanoseconds of every stage.
#[derive(Default)]
pub struct Profile {
    calls: [AtomicU64; NAMES.len()],
    nanoseconds: [AtomicU64; NAMES.len()],
}

/// A running clock: each [`Clock::stage`] books the time since the last one.
pub struct Clock<'a> {
    profile: &'a Profile,
    since: Instant,
}

impl Profile {
    /// Starts a clock.
    pub fn start(&self) -> Clock<'_> {
        Clock { profile: self, since: Instant::now() }
    }
    /// (stage, calls, seconds) of the stages that ran.
    pub fn table(&self) -> Vec<(&'static str, u64, f64)> {
        let row = |i: usize| (NAMES[i], self.calls[i].load(Relaxed), self.nanoseconds[i].load(Relaxed) as f64 * 1e-9);
        (0..NAMES.len()).map(row).filter(|r| r.1 > 0).collect()
    }
}

impl Clock<'_> {
    /// Books the time since the last call to a stage.
    pub fn stage(&mut self, stage: Stage) {
        let now = Instant::now();
        let i = stage as usize;
        self.profile.calls[i].fetch_add(1, Relaxed);
        self.profile.nanoseconds[i].fetch_add((now - self.since).as_nanos() as u64, Relaxed);
        self.since = now;
    }
}
