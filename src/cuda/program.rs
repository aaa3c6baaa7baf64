//! Programs (a kernel file and its `-D` constants), their images, and the kernels in them.

use super::cache::{Cache, Key};
use super::compiler::{Capability, Compiler, Version};
use super::driver::{Device, check};
use super::memory::{Buffer, Plain, Real};
use super::sources::{HEADERS, Source};
use super::{CudaError, Result};
use cudarc::driver::{CudaContext, result, sys};
use rayon::prelude::*;
use std::ffi::{CString, c_void};
use std::fmt::Display;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

/// A kernel file specialised for a model: one translation unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    source: &'static Source,
    options: Vec<String>,
}

impl Program {
    /// The file as it is, in single precision.
    pub fn new(source: &'static Source) -> Self {
        Program { source, options: vec!["--std=c++17".into()] }
    }
    /// With `real` = `T`.
    pub fn real<T: Real>(self) -> Self {
        self.define("REAL", T::NAME)
    }
    /// With `-Dname=value`.
    pub fn define(mut self, name: &str, value: impl Display) -> Self {
        self.options.push(format!("-D{name}={value}"));
        self
    }
    /// With Hopper's warpgroup products (`SEZM_WGMMA`), for devices that have them.
    pub fn wgmma(self) -> Self {
        self.define("SEZM_WGMMA", 1)
    }
    /// Whether it is for such devices only.
    pub fn needs_wgmma(&self) -> bool {
        self.options.iter().any(|o| o == "-DSEZM_WGMMA=1")
    }
    /// The file's name, which is the stage's.
    pub fn name(&self) -> &'static str {
        self.source.name
    }
    /// The file's text.
    pub fn text(&self) -> &'static str {
        self.source.text
    }
    /// The kernels in it.
    pub fn kernels(&self) -> &'static [&'static str] {
        self.source.kernels
    }
    /// Compiler options, the constants among them.
    pub fn options(&self) -> Vec<String> {
        self.options.clone()
    }
    fn key(&self, device: Capability) -> Key {
        let mut text = format!("{device}\n{}\n", self.options.join(" "));
        for (name, header) in HEADERS.iter().chain(&[(self.name(), self.text())]) {
            text.push_str(&format!("==== {name}\n{header}"));
        }
        Key::new(format!("{}-{device}", self.name()), text)
    }
}

/// The images of `programs` for a GPU, from the cache or compiled now, in parallel. Needs no GPU: this is how a
/// login node fills a cache. `driver` limits which compiler is taken.
///
/// Errors: `NoCompiler` or `CompilerTooNew` (only when something is missing in the cache), `Compile`, `NoImage`.
pub fn images(
    programs: &[Program],
    device: Capability,
    cache: &Cache,
    driver: Option<Version>,
) -> Result<Vec<Vec<u8>>> {
    let compiler = OnceLock::new();
    programs.par_iter().map(|program| Builder { device, cache, driver, compiler: &compiler }.image(program)).collect()
}

/// What building images for one device takes; the compiler is looked for when the first image is missing.
struct Builder<'a> {
    device: Capability,
    cache: &'a Cache,
    driver: Option<Version>,
    compiler: &'a OnceLock<Result<Compiler>>,
}

impl Builder<'_> {
    fn image(&self, program: &Program) -> Result<Vec<u8>> {
        self.cache.load(&program.key(self.device)).map_or_else(|| self.compile(program), Ok)
    }
    fn compile(&self, program: &Program) -> Result<Vec<u8>> {
        let compiler = self.compiler.get_or_init(|| Compiler::find(self.driver)).as_ref().map_err(Clone::clone)?;
        let start = std::time::Instant::now();
        let compiled = compiler.compile(program, self.device)?;
        log::debug!(
            "kernel program {} compiled for {} in {:.2} s: {:?}",
            program.name(),
            compiled.target,
            start.elapsed().as_secs_f64(),
            compiled.resources()
        );
        for warning in compiled.warnings() {
            log::debug!("{warning}");
        }
        self.cache.store(&program.key(self.device), &compiled.image);
        Ok(compiled.image)
    }
}

impl Device {
    /// The modules of `programs`, in their order. Errors: as [`images`], and `NoImage` when the driver refuses one.
    pub fn load(&self, programs: &[Program], cache: &Cache) -> Result<Vec<Module>> {
        let capability = self.info().capability;
        let compiler = OnceLock::new();
        let builder = Builder { device: capability, cache, driver: Some(self.driver()), compiler: &compiler };
        let images: Result<Vec<_>> = programs.par_iter().map(|program| builder.image(program)).collect();
        programs.iter().zip(images?).map(|(program, image)| self.load_image(program, image, &builder)).collect()
    }

    fn load_image(&self, program: &Program, image: Vec<u8>, builder: &Builder<'_>) -> Result<Module> {
        match Module::new(self.context(), program, &image) {
            Err(CudaError::NoImage { reason, .. }) if builder.compiler.get().is_none() => {
                // From the cache, perhaps made by a newer CUDA than this driver's: make one that suits.
                log::debug!("cached image of {}: {reason}; compiling anew", program.name());
                Module::new(self.context(), program, &builder.compile(program)?)
            }
            other => other,
        }
    }
}

/// The kernels of a program, loaded on a device.
#[derive(Clone)]
pub struct Module {
    loaded: Arc<Loaded>,
}

struct Loaded {
    context: Arc<CudaContext>,
    raw: sys::CUmodule,
    program: &'static str,
}

// SAFETY: module handles may be used from any thread; every use binds the context first.
unsafe impl Send for Loaded {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Loaded {}

impl Drop for Loaded {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: loaded by `Module::new`, unloaded once; kernels hold the module.
            if let Err(e) = unsafe { result::module::unload(self.raw) } {
                log::warn!("CUDA: cuModuleUnload failed: {e}");
            }
        }
    }
}

impl Module {
    fn new(context: &Arc<CudaContext>, program: &Program, image: &[u8]) -> Result<Module> {
        check("cuCtxSetCurrent", context.bind_to_thread())?;
        // SAFETY: a cubin holds its own size; PTX ends in zero (`Compiled::image`).
        let raw = unsafe { result::module::load_data(image.as_ptr().cast::<c_void>()) };
        let raw = raw.map_err(|e| load_error(context, program, e))?;
        Ok(Module { loaded: Arc::new(Loaded { context: context.clone(), raw, program: program.name() }) })
    }
    /// The kernel of this name. Errors: `Call` when the program has none.
    pub fn kernel(&self, name: &'static str) -> Result<Kernel> {
        check("cuCtxSetCurrent", self.loaded.context.bind_to_thread())?;
        let call = || format!("cuModuleGetFunction '{name}' in program '{}'", self.loaded.program);
        let symbol = CString::new(name).map_err(|e| CudaError::Call { call: call(), reason: e.to_string() })?;
        // SAFETY: the module is loaded.
        let function = unsafe { result::module::get_function(self.loaded.raw, symbol) };
        Ok(Kernel { function: check(&call(), function)?, name, module: self.clone(), shared: AtomicU32::new(0) })
    }
}

fn load_error(context: &CudaContext, program: &Program, e: result::DriverError) -> CudaError {
    use sys::CUresult as R;
    let refused = [
        R::CUDA_ERROR_NO_BINARY_FOR_GPU,
        R::CUDA_ERROR_INVALID_IMAGE,
        R::CUDA_ERROR_INVALID_SOURCE,
        R::CUDA_ERROR_INVALID_PTX,
        R::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
        R::CUDA_ERROR_JIT_COMPILER_NOT_FOUND,
    ];
    if !refused.contains(&e.0) {
        return CudaError::Call { call: format!("loading program '{}'", program.name()), reason: e.to_string() };
    }
    CudaError::NoImage {
        program: program.name().into(),
        device: context.name().unwrap_or_else(|_| "this device".into()),
        reason: format!("{e}; the driver may be older than the CUDA that compiled it: update the driver"),
    }
}

/// A kernel that can be launched.
pub struct Kernel {
    function: sys::CUfunction,
    name: &'static str,
    module: Module,
    /// Dynamic shared memory that the driver was told of, bytes.
    shared: AtomicU32,
}

// SAFETY: function handles may be used from any thread; every use binds the context first.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// What the driver gives a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelAttributes {
    /// Registers a thread.
    pub registers: u32,
    /// Local memory a thread, bytes.
    pub local_bytes: u32,
    /// Static shared memory a block, bytes.
    pub shared_bytes: u32,
    /// The largest block.
    pub max_threads: u32,
}

impl Kernel {
    /// Its name.
    pub fn name(&self) -> &'static str {
        self.name
    }
    pub(super) fn function(&self) -> sys::CUfunction {
        self.function
    }
    fn context(&self) -> &Arc<CudaContext> {
        &self.module.loaded.context
    }
    /// Allows blocks with more dynamic shared memory than the 48 KB that need no asking.
    pub(super) fn allow_shared(&self, bytes: u32) -> Result<()> {
        const UNASKED: u32 = 48 << 10;
        if bytes <= UNASKED.max(self.shared.load(Ordering::Relaxed)) {
            return Ok(());
        }
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded and its context current.
        let outcome = unsafe { result::function::set_function_attribute(self.function, attribute, bytes as i32) };
        check(&format!("{bytes} bytes of shared memory for {}", self.name), outcome)?;
        self.shared.store(bytes, Ordering::Relaxed);
        Ok(())
    }
    /// What the driver gives it.
    pub fn attributes(&self) -> Result<KernelAttributes> {
        use sys::CUfunction_attribute as A;
        check("cuCtxSetCurrent", self.context().bind_to_thread())?;
        let get = |a| {
            // SAFETY: the function is loaded and its context current.
            let value = unsafe { result::function::get_function_attribute(self.function, a) };
            check("cuFuncGetAttribute", value).map(|v| v as u32)
        };
        Ok(KernelAttributes {
            registers: get(A::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: get(A::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            shared_bytes: get(A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            max_threads: get(A::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        })
    }
}

/// How many threads run a kernel, and their dynamic shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block, bytes.
    pub shared: u32,
}

impl Launch {
    /// `blocks` blocks of `threads` threads.
    pub fn new(blocks: u32, threads: u32) -> Self {
        Launch { grid: [blocks, 1, 1], block: [threads, 1, 1], shared: 0 }
    }
    /// Blocks of `threads` threads for `items`, `per_block` of them each, at most `limit` blocks (for kernels that
    /// go on with a stride of the grid).
    pub fn over(items: usize, per_block: usize, threads: u32, limit: u32) -> Self {
        Self::new(items.div_ceil(per_block.max(1)).min(limit as usize) as u32, threads)
    }
    /// With dynamic shared memory.
    pub fn shared(self, bytes: u32) -> Self {
        Launch { shared: bytes, ..self }
    }
    /// Whether there is nothing to run.
    pub fn is_empty(&self) -> bool {
        self.grid.iter().chain(&self.block).any(|&n| n == 0)
    }
}

/// The arguments of one launch, in the order of the kernel's parameters.
#[derive(Debug, Clone, Default)]
pub struct Args {
    /// 16-byte aligned storage; each argument starts a new element.
    storage: Vec<u128>,
    starts: Vec<usize>,
    sizes: Vec<usize>,
}

impl Args {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }
    /// A device pointer to the start of a buffer.
    pub fn buffer<T: Plain>(self, buffer: &Buffer<T>) -> Self {
        self.address(buffer.address())
    }
    /// A pointer by address: [`Buffer::address_at`], or host memory in emulation.
    pub fn address(self, address: u64) -> Self {
        self.value(address)
    }
    /// A number.
    pub fn value<T: Plain>(self, value: T) -> Self {
        // SAFETY: `value` is a primitive number of that many bytes.
        let bytes = unsafe { std::slice::from_raw_parts((&raw const value).cast::<u8>(), size_of::<T>()) };
        self.bytes(bytes)
    }
    /// A structure by its bytes, aligned to 16.
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self.starts.push(self.storage.len());
        self.sizes.push(bytes.len());
        for chunk in bytes.chunks(16) {
            let mut padded = [0; 16];
            padded[..chunk.len()].copy_from_slice(chunk);
            self.storage.push(u128::from_ne_bytes(padded));
        }
        self
    }
    /// The size of each argument, bytes.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }
    /// The address of each argument, as cuLaunchKernel takes them; valid while `self` is not changed.
    pub fn addresses(&mut self) -> Vec<*mut c_void> {
        let storage = &mut self.storage;
        self.starts.iter().map(|&i| storage.get_mut(i).map_or(std::ptr::null_mut(), |v| (&raw mut *v).cast())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::sources::WIGNER;

    #[test]
    fn arguments_keep_their_values_and_sizes() {
        let mut args = Args::new().address(0x1234_5678_9abc).value(7i32).value(2.5f64).bytes(&[9; 20]);
        assert_eq!(args.sizes(), [8, 4, 8, 20]);
        let addresses = args.addresses();
        // SAFETY: each address holds an argument of that type.
        unsafe {
            assert_eq!(*addresses[0].cast::<u64>(), 0x1234_5678_9abc);
            assert_eq!(*addresses[1].cast::<i32>(), 7);
            assert_eq!(*addresses[2].cast::<f64>(), 2.5);
            assert_eq!(*addresses[3].cast::<[u8; 20]>(), [9; 20]);
            assert_eq!(addresses[3] as usize % 16, 0);
        }
    }

    #[test]
    fn launches_cover_their_items() {
        assert_eq!(Launch::over(65, 32, 128, 1000), Launch::new(3, 128));
        assert_eq!(Launch::over(1 << 40, 32, 128, 1000), Launch::new(1000, 128));
        assert!(Launch::over(0, 32, 128, 1000).is_empty());
    }

    #[test]
    fn keys_differ_by_constant_precision_and_device() {
        let base = Program::new(&WIGNER).define("LMAX", 3).real::<f32>();
        let key = base.key(Capability(9, 0));
        assert_eq!(key, base.clone().key(Capability(9, 0)));
        assert_ne!(key, base.key(Capability(8, 0)));
        assert_ne!(key, Program::new(&WIGNER).define("LMAX", 3).real::<f64>().key(Capability(9, 0)));
        assert_ne!(key, Program::new(&WIGNER).define("LMAX", 4).real::<f32>().key(Capability(9, 0)));
    }
}
