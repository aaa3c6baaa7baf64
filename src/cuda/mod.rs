//! The engine on the GPU: one file a stage, the same names as in `cpu/`, launching the kernels of `kernels/`.
//!
//! The crate builds and starts without CUDA: the driver and NVRTC are opened at run time, and what is missing is a
//! [`CudaError`] with a message of its own.
//!
//! # The layers, from below
//! * `driver`: [`Device::open`] (context, name, capability, memory), [`Stream`] (copies, launches, waits), [`Event`],
//!   [`StageClock`] (time of each stage, from events).
//! * `memory`: [`Buffer`] (device memory with a checked length), [`Pinned`] (page-locked host memory that waits for
//!   its transfer before it is read), [`MemoryPlan`] (what a run needs, checked before the first launch).
//! * `sources`: the text of `kernels/`, embedded. `program`: a [`Program`] is one kernel file specialised by `-D`
//!   constants; [`Device::load`] turns programs into [`Module`]s, compiling in parallel what the cache lacks.
//! * `compiler` and `nvrtc`: NVRTC 12.4 to 13.x through `dlopen`, else `nvcc -cubin`. `cache`: images on disk.
//!
//! # Adding a stage
//! 1. `kernels/NAME.cu` includes `common.cuh` (and `prims.cuh`, `wgmma.cuh` for tensor cores) and defines
//!    `extern "C" __global__` kernels whose pointer arguments come first and whose counts are `i64`. Shapes are `-D`
//!    constants with a default, `real` is the type of the run. Add it to [`sources`].
//! 2. `src/cuda/NAME.rs` has the stage's `program(..)`, its launch geometry as a pure function, and a struct that
//!    holds its [`Kernel`]s and launches them; [`wigner`] is the pattern.
//! 3. A row in `tests/support/cases.rs` runs it: `tests/kernels.rs` on the CPU by emulation with several thread
//!    orders, `tests/gpu.rs` on a GPU where there is one, `tests/nvrtc.rs` compiles it for every architecture and
//!    fails on spills and warnings.
//!
//! ```no_run
//! use sezm::cuda::{Args, Cache, Device, wigner};
//! # fn main() -> sezm::Result<()> {
//! let device = Device::open(0)?;
//! let stream = device.stream()?;
//! let modules = device.load(&[wigner::program::<f32>(3)], &Cache::from_environment())?;
//! let stage = wigner::Wigner::new(&modules[0], 3)?;
//! let vec = device.upload(&[[0.0f64, 0.6, 0.8]].concat())?;
//! let mut record = device.zeros::<f32>(wigner::record_len(3))?;
//! stage.run(&stream, &vec, &mut record, 1)?;
//! let mut host = vec![0.0; record.len()];
//! stream.download(&record, &mut host)?;
//! # Ok(()) }
//! ```
//!
//! # Rules
//! Sums have a fixed order and there are no floating-point atomics, so a run gives the same bits twice. Everything a
//! step needs is allocated when the neighbour list is rebuilt; a step allocates nothing. Work without items (no
//! edges) is not launched: CUDA refuses an empty grid, and [`Stream::launch`] takes it as nothing to do.

mod block;
mod cache;
mod compiler;
mod context;
mod driver;
pub mod engine;
pub mod machine;
mod memory;
mod message;
mod node;
mod nvrtc;
mod products;
mod program;
pub mod sources;
mod start;
pub mod wigner;

pub use cache::Cache;
pub use compiler::{Capability, Compiled, Compiler, Resources, Version};
pub use driver::{Device, DeviceInfo, Event, StageClock, Stream, devices, driver_version};
pub use memory::{Buffer, MemoryPlan, Pinned, Plain, Real};
pub use program::{Args, Kernel, KernelAttributes, Launch, Module, Program, images};

use crate::Error;

/// What can fail on the way to a result from a GPU; converts into [`Error`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CudaError {
    /// There is no libcuda on this machine.
    #[error("no CUDA driver: libcuda.so.1 was not found; install the NVIDIA driver, or use device cpu")]
    NoDriver,
    /// The driver cannot do what this library needs.
    #[error("the NVIDIA driver supports CUDA {found} and {needed} is needed; update the driver, or use device cpu")]
    DriverTooOld { found: Version, needed: Version },
    /// The driver works and finds no GPU.
    #[error("no CUDA device: {reason}; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use device cpu")]
    NoDevice { reason: String },
    /// `gpu:N` beyond the last one.
    #[error("there is no device gpu:{ordinal}: this process sees {count} of them, gpu:0 to gpu:{}", count - 1)]
    NoSuchDevice { ordinal: usize, count: usize },
    /// A GPU from before the instructions that the kernels use.
    #[error("gpu:{ordinal} ({name}) has compute capability {capability}; 8.0 (A100) or newer is needed")]
    DeviceTooOld { ordinal: usize, name: String, capability: Capability },
    /// Neither NVRTC nor nvcc.
    #[error(
        "the kernels must be compiled for this GPU and there is no compiler: {reason}. Load a CUDA module, set \
         CUDA_HOME, or `pip install nvidia-cuda-nvrtc` and set SEZM_NVRTC to the folder of its libnvrtc.so; or fill \
         the kernel cache on a machine that has one"
    )]
    NoCompiler { reason: String },
    /// Compilers there are, all of a newer CUDA than the driver's.
    #[error(
        "{compiler} makes images that the NVIDIA driver (CUDA {driver}) is too old to load; update the driver, or \
         point SEZM_NVRTC at an NVRTC of CUDA {} or older",
        driver.0
    )]
    CompilerTooNew { compiler: String, driver: Version },
    /// A kernel that does not compile.
    #[error("{compiler} did not compile kernel program '{program}' for {target}:\n{log}")]
    Compile { program: String, compiler: String, target: String, log: String },
    /// The compiler has no architecture for the device, or the driver refused the image.
    #[error("no kernel image of '{program}' for {device}: {reason}")]
    NoImage { program: String, device: String, reason: String },
    /// Device or page-locked memory that could not be had.
    #[error("{0}")]
    OutOfMemory(String),
    /// Sizes that do not belong together; a defect of the caller.
    #[error("{0}")]
    Size(String),
    /// Any other driver call.
    #[error("CUDA: {call} failed: {reason}")]
    Call { call: String, reason: String },
}

impl From<CudaError> for Error {
    fn from(e: CudaError) -> Self {
        match e {
            CudaError::OutOfMemory(message) => Error::OutOfMemory(message),
            CudaError::Size(message) => Error::Internal(message),
            other => Error::Device(other.to_string()),
        }
    }
}

/// The result of everything in this module.
pub type Result<T> = std::result::Result<T, CudaError>;
