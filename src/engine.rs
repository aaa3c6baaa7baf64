//! What every engine promises.

use crate::Result;
use crate::graph::Graph;
use crate::model::Model;

/// Arithmetic of a run (DESIGN section 5). Geometry, energy sums, forces and virials accumulate in f64 in all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    Fp32,
    Fp64,
}

/// Which optional outputs an evaluation makes. Energies and forces are always made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Request {
    /// 9-component virial of every node.
    pub atom_virial: bool,
    /// The descriptor of every owned atom.
    pub descriptor: bool,
}

/// The answer for one configuration.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Evaluation {
    /// Total energy of the owned atoms, eV.
    pub energy: f64,
    /// Energy of each owned atom, eV.
    pub atom_energy: Vec<f64>,
    /// Force on each node, eV/Å; what owned edges exert on remote nodes is theirs to add (SPEC section 17).
    pub forces: Vec<[f64; 3]>,
    /// Global virial `-sum g_e[a] vec_e[b]`, row-major (force component a, coordinate component b), eV.
    pub virial: [f64; 9],
    /// Per-node virial, half of each edge term to either end, eV; empty unless asked for.
    pub atom_virial: Vec<[f64; 9]>,
    /// `n_owned x channels`; empty unless asked for.
    pub descriptor: Vec<f64>,
}

/// Rows of node features travelling between ranks: owner to remote copies, and gradients back (DESIGN section 3).
pub trait Exchange {
    /// Overwrites the rows of remote nodes with their owners' values; `rows` is `n_nodes x width`.
    fn forward(&mut self, rows: Rows<'_>, width: usize) -> Result<()>;
    /// Adds the rows of remote nodes at their owners; `rows` is `n_nodes x width`.
    fn reverse(&mut self, rows: Rows<'_>, width: usize) -> Result<()>;
}

/// Node rows in the precision of the run.
pub enum Rows<'a> {
    F32(&'a mut [f32]),
    F64(&'a mut [f64]),
}

/// One rank: there are no remote nodes, nothing travels.
pub struct OneRank;

impl Exchange for OneRank {
    fn forward(&mut self, _: Rows<'_>, _: usize) -> Result<()> {
        Ok(())
    }
    fn reverse(&mut self, _: Rows<'_>, _: usize) -> Result<()> {
        Ok(())
    }
}

/// Evaluates a model. Deterministic: the same graph gives the same bits, whatever the thread count.
pub trait Engine: Send {
    /// Energy, forces and virial of a graph. Errors: `Structure` for a non-finite result or an edge shorter
    /// than 1e-6 Å, `Exchange`, `OutOfMemory`, `Device`.
    fn evaluate(&mut self, graph: &Graph, want: Request, exchange: &mut dyn Exchange) -> Result<Evaluation>;
    /// One line for the banner: engine, precision, device, e.g. `CPU, fp32, 2 threads`.
    fn describe(&self) -> String;
    /// Time of each stage since the engine was made: (stage name, calls, seconds).
    fn profile(&self) -> Vec<(&'static str, u64, f64)>;
    /// Bytes held.
    fn memory_usage(&self) -> usize;
}

/// The engine for `device` (`auto`, `cpu`, `gpu`, `gpu:N` or `cuda:N`).
///
/// Errors: `Argument` for an unknown device, `Device` where `gpu` is asked for and there is none.
pub fn create(model: &Model, precision: Precision, device: &str) -> Result<Box<dyn Engine>> {
    use crate::Error;
    match device {
        "auto" | "cpu" => crate::cpu::create(model, precision),
        d if d == "gpu" || d.starts_with("gpu:") || d.starts_with("cuda:") || d == "cuda" => {
            Err(Error::Device(format!("device {d}: this version has no GPU engine; use device cpu")))
        }
        d => Err(Error::Argument(format!("unknown device '{d}': expected auto, cpu, gpu or gpu:N"))),
    }
}
