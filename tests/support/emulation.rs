//! Kernels on the CPU: g++ makes a shared object of a program and `kernels/emu`, which is loaded and launched.
//!
//! SEZM_EMU_ASAN=1 builds with the address sanitizer; run the tests with its library loaded first:
//! `SEZM_EMU_ASAN=1 ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD=$(g++ -print-file-name=libasan.so) cargo test --test kernels`.

use super::{Argument, Case, pack};
use libloading::{Library, Symbol};
use sezm::cuda::{Args, Launch, Program};
use sha2::{Digest, Sha256};
use std::ffi::{CStr, c_char, c_void};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Thread orders: ascending, descending, and two shuffles.
pub const SEEDS: [u32; 4] = [0, 1, 2, 3];

/// A program compiled for the CPU.
pub struct Emulated {
    library: Library,
}

/// `emu::Geometry`.
#[repr(C)]
struct Geometry {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u64,
    seed: u32,
    tensor_model: i32,
}

impl Emulated {
    /// Compiles, unless the same text was compiled before.
    pub fn build(program: &Program) -> Emulated {
        let path = compile(program).unwrap_or_else(|log| panic!("{} does not compile:\n{log}", program.name()));
        // SAFETY: made by us from the kernels; its constructors only initialise the emulator.
        let library = unsafe { Library::new(&path) }.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Emulated { library }
    }

    /// Runs a kernel; the error is what the emulator saw go wrong. Panics when the arguments do not match the
    /// kernel's parameters in number and size.
    pub fn launch(&self, kernel: &str, launch: Launch, args: &mut Args, seed: u32) -> Result<(), String> {
        if launch.is_empty() {
            return Ok(());
        }
        assert_eq!(args.sizes(), self.parameter_sizes(kernel), "sizes of the arguments of {kernel}");
        let geometry = Geometry {
            grid: launch.grid,
            block: launch.block,
            shared_bytes: u64::from(launch.shared),
            seed,
            tensor_model: 1,
        };
        // SAFETY: the entry has this signature (EMU_EXPORT), the arguments were compared with the parameters, and
        // its buffers are live host memory.
        unsafe {
            let name = format!("emu_launch_{kernel}");
            let entry: Symbol<unsafe extern "C" fn(*const Geometry, *mut *mut c_void) -> *const c_char> =
                self.library.get(name.as_bytes()).unwrap_or_else(|e| panic!("{e}"));
            let failure = entry(&geometry, args.addresses().as_mut_ptr());
            if failure.is_null() {
                return Ok(());
            }
            Err(CStr::from_ptr(failure).to_string_lossy().into_owned())
        }
    }

    fn parameter_sizes(&self, kernel: &str) -> Vec<usize> {
        let mut sizes = vec![0usize; 64];
        // SAFETY: the entry has this signature (EMU_EXPORT) and writes at most `sizes.len()` values.
        let count = unsafe {
            let name = format!("emu_arguments_{kernel}");
            let entry: Symbol<unsafe extern "C" fn(*mut usize, usize) -> usize> =
                self.library.get(name.as_bytes()).unwrap_or_else(|e| panic!("{e}"));
            entry(sizes.as_mut_ptr(), sizes.len())
        };
        sizes.truncate(count);
        sizes
    }

    /// Runs a case in every thread order: the results must be right, the same bits each time, and nothing may be
    /// written outside the buffers.
    pub fn run(&self, case: &Case) -> Result<(), String> {
        let mut first: Option<Vec<Argument>> = None;
        for seed in SEEDS {
            let mut arguments = case.arguments.clone();
            let places: Vec<u64> = arguments.iter_mut().map(address).collect();
            let mut args = pack(&arguments, |i| places[i]);
            self.launch(case.kernel, case.launch, &mut args, seed).map_err(|e| format!("seed {seed}: {e}"))?;
            if let Some(i) = arguments.iter().position(|a| matches!(a, Argument::Buffer(m) if !m.guards_hold())) {
                return Err(format!("seed {seed}: write outside argument {i}"));
            }
            (case.check)(&arguments).map_err(|e| format!("seed {seed}: {e}"))?;
            match &first {
                None => first = Some(arguments),
                Some(first) => same_bits(first, &arguments).map_err(|e| format!("seed {seed} against 0: {e}"))?,
            }
        }
        Ok(())
    }
}

fn address(argument: &mut Argument) -> u64 {
    match argument {
        Argument::Buffer(memory) => memory.bytes_mut().as_mut_ptr() as u64,
        Argument::Value(_) => 0,
    }
}

/// Whether all buffers hold the same bytes.
pub fn same_bits(a: &[Argument], b: &[Argument]) -> Result<(), String> {
    for (i, pair) in a.iter().zip(b).enumerate() {
        if let (Argument::Buffer(a), Argument::Buffer(b)) = pair
            && a.bytes() != b.bytes()
        {
            return Err(format!("argument {i} differs in bits"));
        }
    }
    Ok(())
}

/// The path of the shared object, or what the compiler said.
fn compile(program: &Program) -> Result<PathBuf, String> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let kernels = manifest.join("kernels");
    let mut flags: Vec<String> =
        ["-O2", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-attributes"]
            .map(String::from)
            .into();
    if std::env::var_os("SEZM_EMU_ASAN").is_some() {
        flags.extend(["-fsanitize=address", "-fsanitize-sections=emu_shared", "-O1", "-g1"].map(String::from));
    }
    flags.extend(program.options());
    let mut text = format!("#include \"emu/emu_cuda.hpp\"\n#line 1 \"{}.cu\"\n{}\n", program.name(), program.text());
    for kernel in program.kernels() {
        let _ = writeln!(text, "EMU_EXPORT({kernel})");
    }

    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated");
    std::fs::create_dir_all(&folder).map_err(|e| e.to_string())?;
    let mut digest = Sha256::new();
    digest.update(&text);
    digest.update(flags.join(" "));
    for name in header_files(&kernels) {
        digest.update(std::fs::read(name).map_err(|e| e.to_string())?);
    }
    let short: String = digest.finalize()[..8].iter().map(|b| format!("{b:02x}")).collect();
    let stem = folder.join(format!("{}-{short}", program.name()));
    let library = stem.with_extension("so");
    if library.is_file() {
        return Ok(library);
    }
    // Other tests may compile the same program now: write under a name of one's own, then rename.
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let own = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let (aside, source) = (stem.with_extension(format!("{own}.tmp")), stem.with_extension(format!("{own}.cpp")));
    std::fs::write(&source, text).map_err(|e| e.to_string())?;
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".into());
    let output = Command::new(&compiler)
        .args(&flags)
        .arg("-I")
        .arg(&kernels)
        .arg("-o")
        .arg(&aside)
        .arg(&source)
        .output()
        .map_err(|e| format!("{compiler}: {e}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let _ = std::fs::remove_file(&source); // kept only when it does not compile
    std::fs::rename(&aside, &library).map_err(|e| e.to_string())?;
    Ok(library)
}

/// Everything that a kernel may include.
fn header_files(kernels: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = [kernels.to_path_buf(), kernels.join("emu")]
        .iter()
        .flat_map(|d| std::fs::read_dir(d).into_iter().flatten().flatten())
        .map(|e| e.path())
        .filter(|p| p.extension().is_some_and(|e| e == "cuh" || e == "hpp"))
        .collect();
    all.sort();
    all
}
