//! Stage `wigner`: the Wigner-D record of every edge, assembled once and read transposed for the inverse
//! (SPEC sections 4.2 and 4.3, `kernels/wigner.cu`).

use super::memory::{Buffer, Real};
use super::program::{Args, Kernel, Launch, Module, Program};
use super::{CudaError, Result, Stream, sources};

/// Threads of a block, as in the kernel.
const THREADS: u32 = 256;
/// Blocks go on with a stride of the grid, so more than fill a GPU several times bring nothing.
const MOST_BLOCKS: u32 = 1 << 16;

/// Values of one record: the sum of (2l+1)^2 over the degrees up to `lmax`.
pub fn record_len(lmax: usize) -> usize {
    (lmax + 1) * (2 * lmax + 1) * (2 * lmax + 3) / 3
}

/// Edges that a block works on together: as many as fit their two running degrees, in f64, into 24 KB.
fn tile(lmax: usize) -> usize {
    let level = (2 * lmax.max(2) - 1).pow(2);
    let fit = (24 << 10) / (2 * size_of::<f64>() * level);
    1 << fit.clamp(1, 32).ilog2()
}

/// The program for degrees up to `lmax`, records in `T`.
pub fn program<T: Real>(lmax: usize) -> Program {
    Program::new(&sources::WIGNER).real::<T>().define("LMAX", lmax).define("TILE", tile(lmax))
}

/// How `wigner_assemble` is launched.
pub fn launch(lmax: usize, n_edges: usize) -> Launch {
    Launch::over(n_edges, tile(lmax), THREADS, MOST_BLOCKS)
}

/// The stage on a device.
pub struct Wigner {
    assemble: Kernel,
    lmax: usize,
}

impl Wigner {
    /// From the module of [`program`].
    pub fn new(module: &Module, lmax: usize) -> Result<Self> {
        Ok(Wigner { assemble: module.kernel("wigner_assemble")?, lmax })
    }
    /// Writes `record` (`n_edges x record_len(lmax)`, each a row-major block diagonal of D^0, D^1, ...) from `vec`
    /// (`n_edges x 3`, centre to neighbour, Å, none zero). Errors: `Size` when a buffer is too short, `Call`.
    pub fn run<T: Real>(
        &self,
        stream: &Stream,
        vec: &Buffer<f64>,
        record: &mut Buffer<T>,
        n_edges: usize,
    ) -> Result<()> {
        let record_len = record_len(self.lmax);
        if vec.len() / 3 < n_edges || record.len() / record_len < n_edges {
            return Err(CudaError::Size(format!(
                "wigner: {n_edges} edges, {} vector components and {} record values (record of {record_len})",
                vec.len(),
                record.len()
            )));
        }
        let mut args = Args::new().buffer(vec).buffer(record).value(n_edges as i64);
        // SAFETY: the parameters of wigner_assemble are (const double*, real*, i64); the buffers hold n_edges rows
        // (checked above), and `record` is borrowed mutably.
        unsafe { stream.launch(&self.assemble, launch(self.lmax, n_edges), &mut args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_sizes() {
        for lmax in 0..=20 {
            assert_eq!(record_len(lmax), (0..=lmax).map(|l| (2 * l + 1).pow(2)).sum::<usize>());
        }
    }

    #[test]
    fn tiles_fit_shared_memory() {
        assert_eq!([0, 1, 3, 6, 12].map(tile), [32, 32, 32, 8, 2]);
        assert_eq!(launch(3, 33).grid, [2, 1, 1]);
        assert!(launch(3, 0).is_empty());
    }
}
