//! What the engine asks of a device: memory by address, copies, launches. A GPU answers ([`Gpu`]); in tests the
//! emulation does, with host memory, so that the whole engine runs without a GPU.

use super::{Args, Buffer, Cache, CudaError, Device, Kernel, Launch, Module, Plain, Program, Result, Stream};
use std::collections::HashMap;

/// Runs kernels on memory that it owns. Addresses are device pointers; work is done in the order in which it is given.
pub trait Machine: Send {
    /// Loads programs; launches name them by their place in this list.
    fn load(&mut self, programs: Vec<Program>) -> Result<()>;
    /// Memory of `bytes` bytes, kept until [`Self::free`]; aligned to 256.
    fn allocate(&mut self, bytes: usize) -> Result<u64>;
    /// Gives memory back.
    fn free(&mut self, address: u64);
    /// Bytes that could still be allocated; `None` where it is not known.
    fn available(&self) -> Option<usize>;
    /// Host to device.
    fn upload(&mut self, address: u64, bytes: &[u8]) -> Result<()>;
    /// Device to host, after all work given before.
    fn download(&mut self, address: u64, bytes: &mut [u8]) -> Result<()>;
    /// Sets bytes to zero.
    fn zero(&mut self, address: u64, bytes: usize) -> Result<()>;
    /// Runs `kernel` of program `program`.
    fn launch(&mut self, program: usize, kernel: &'static str, launch: Launch, args: Args) -> Result<()>;
    /// Waits for all work.
    fn synchronize(&mut self) -> Result<()>;
    /// For the banner.
    fn describe(&self) -> String;
}

/// A CUDA device.
pub struct Gpu {
    device: Device,
    stream: Stream,
    modules: Vec<Module>,
    kernels: HashMap<(usize, &'static str), Kernel>,
    memory: HashMap<u64, Buffer<u8>>,
}

impl Gpu {
    /// Opens device `ordinal`. Errors as [`Device::open`].
    pub fn open(ordinal: usize) -> Result<Self> {
        let device = Device::open(ordinal)?;
        let stream = device.stream()?;
        Ok(Gpu { device, stream, modules: Vec::new(), kernels: HashMap::new(), memory: HashMap::new() })
    }
    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }
    /// The buffer that holds `address`, and how far into it.
    fn place(&self, address: u64) -> Result<(&Buffer<u8>, usize)> {
        let found = self.memory.iter().find(|(start, b)| (**start..**start + b.bytes() as u64).contains(&address));
        found
            .map(|(start, b)| (b, (address - start) as usize))
            .ok_or_else(|| CudaError::Size(format!("address {address:#x} belongs to no buffer")))
    }
}

impl Machine for Gpu {
    fn load(&mut self, programs: Vec<Program>) -> Result<()> {
        self.modules = self.device.load(&programs, &Cache::from_environment())?;
        self.kernels.clear();
        for (i, (program, module)) in programs.iter().zip(&self.modules).enumerate() {
            for &name in program.kernels() {
                self.kernels.insert((i, name), module.kernel(name)?);
            }
        }
        Ok(())
    }
    fn allocate(&mut self, bytes: usize) -> Result<u64> {
        let buffer = self.device.allocate::<u8>(bytes.max(256))?;
        let address = buffer.address();
        self.memory.insert(address, buffer);
        Ok(address)
    }
    fn free(&mut self, address: u64) {
        self.memory.remove(&address);
    }
    fn available(&self) -> Option<usize> {
        self.device.free_memory().ok()
    }
    fn upload(&mut self, address: u64, bytes: &[u8]) -> Result<()> {
        let (buffer, at) = self.place(address)?;
        self.stream.upload_at(bytes, buffer, at)
    }
    fn download(&mut self, address: u64, bytes: &mut [u8]) -> Result<()> {
        let (buffer, at) = self.place(address)?;
        self.stream.download_at(buffer, at, bytes)
    }
    fn zero(&mut self, address: u64, bytes: usize) -> Result<()> {
        let (buffer, at) = self.place(address)?;
        self.stream.zero_at(buffer, at, bytes)
    }
    fn launch(&mut self, program: usize, kernel: &'static str, launch: Launch, mut args: Args) -> Result<()> {
        let kernel = self
            .kernels
            .get(&(program, kernel))
            .ok_or_else(|| CudaError::Size(format!("program {program} has no kernel {kernel}")))?;
        // SAFETY: the engine passes each kernel its parameters in order, with addresses inside buffers that this
        // machine holds and sizes from the same plan that allocated them; the emulated runs of the same calls check
        // the number and sizes of the arguments against the kernels.
        unsafe { self.stream.launch(kernel, launch, &mut args) }
    }
    fn synchronize(&mut self) -> Result<()> {
        self.stream.synchronize()
    }
    fn describe(&self) -> String {
        self.device.describe()
    }
}

/// The bytes of plain values.
pub fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: `Plain` types are numbers without padding; any byte of them may be read.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}
/// The bytes of plain values, to be written.
pub fn bytes_of_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and every bit pattern is a value of a `Plain` type.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}
