//! What every engine promises.

use crate::cuda::engine::DeviceEngine;
use crate::cuda::machine::Gpu;
use crate::graph::Graph;
use crate::model::Model;
use crate::{Error, Result};

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
    /// Energy, forces and virial of a graph (whose builders refuse positions that are not finite and atoms on top of
    /// each other). Errors: `Structure` for a non-finite result, `Exchange`, `OutOfMemory`, `Device`.
    fn evaluate(&mut self, graph: &Graph, want: Request, exchange: &mut dyn Exchange) -> Result<Evaluation>;
    /// One line for the banner: engine, precision, device, e.g. `CPU, fp32, 2 threads`.
    fn describe(&self) -> String;
    /// Time of each stage since the engine was made: (stage name, calls, seconds).
    fn profile(&self) -> Vec<(&'static str, u64, f64)>;
    /// Bytes held.
    fn memory_usage(&self) -> usize;
}

/// The engine for `device`: `cpu`, `gpu`, `gpu:N` (or `cuda`, `cuda:N`), or `auto`: the first GPU, else the CPU.
///
/// `auto` says once in the log why it does not take a GPU. Errors: `Argument` for an unknown device, `Device` where a
/// GPU is asked for and cannot be had.
pub fn create(model: &Model, precision: Precision, device: &str) -> Result<Box<dyn Engine>> {
    match device {
        "cpu" => crate::cpu::create(model, precision),
        "auto" => match Gpu::open(0) {
            Ok(gpu) => on_gpu(gpu, model, precision),
            Err(reason) => {
                log::info!("device auto: the CPU, since {reason}");
                crate::cpu::create(model, precision)
            }
        },
        _ => {
            let gpu = Gpu::open(gpu_ordinal(device)?).map_err(|e| Error::Device(format!("device {device}: {e}")))?;
            on_gpu(gpu, model, precision)
        }
    }
}

/// The number in `gpu:N` or `cuda:N`; 0 without one.
fn gpu_ordinal(device: &str) -> Result<usize> {
    let unknown = || Error::Argument(format!("unknown device '{device}': expected auto, cpu, gpu or gpu:N"));
    let (kind, ordinal) = device.split_once(':').unwrap_or((device, "0"));
    if kind != "gpu" && kind != "cuda" {
        return Err(unknown());
    }
    ordinal.parse().map_err(|_| unknown())
}

fn on_gpu(gpu: Gpu, model: &Model, precision: Precision) -> Result<Box<dyn Engine>> {
    Ok(match precision {
        Precision::Fp32 => Box::new(DeviceEngine::<Gpu, f32>::new(gpu, model)?),
        Precision::Fp64 => Box::new(DeviceEngine::<Gpu, f64>::new(gpu, model)?),
    })
}

#[cfg(test)]
mod tests {
    use super::gpu_ordinal;

    #[test]
    fn devices_are_named_as_documented() {
        assert_eq!(gpu_ordinal("gpu").unwrap(), 0);
        assert_eq!(gpu_ordinal("gpu:3").unwrap(), 3);
        assert_eq!(gpu_ordinal("cuda:1").unwrap(), 1);
        for wrong in ["tpu", "gpu:", "gpu:x", "gpu:-1", ""] {
            assert!(gpu_ordinal(wrong).unwrap_err().to_string().contains("auto, cpu, gpu or gpu:N"), "{wrong}");
        }
    }
}
