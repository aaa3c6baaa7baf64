//! Kernel text to machine code: NVRTC, or nvcc where there is none. Neither needs a GPU or a driver.

use super::nvrtc::Nvrtc;
use super::program::Program;
use super::sources::HEADERS;
use super::{CudaError, Result};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

/// A CUDA version, for example 13.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub i32, pub i32);

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// A compute capability, for example 9.0: which machine code a GPU runs. Displayed as `sm_90`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Capability(pub i32, pub i32);

impl Capability {
    /// Whether it runs Hopper's warpgroup products (`kernels/wgmma.cuh`). Compute capability 10 has others.
    pub fn has_wgmma(self) -> bool {
        self == Capability(9, 0)
    }
}

impl std::fmt::Display for Capability {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "sm_{}{}", self.0, self.1)
    }
}

impl std::str::FromStr for Capability {
    type Err = String;
    /// Reads `sm_90`, `sm_90a` or `90`.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let digits = text.strip_prefix("sm_").unwrap_or(text).trim_end_matches(['a', 'f']);
        match digits.parse::<i32>() {
            Ok(n) if (10..1000).contains(&n) => Ok(Capability(n / 10, n % 10)),
            _ => Err(format!("'{text}' is no GPU architecture: expected for example sm_90")),
        }
    }
}

/// The architecture to compile for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    /// `sm_90a` (machine code) or `compute_90` (PTX, which the driver compiles).
    pub name: String,
}

impl Target {
    /// The best target among the `known` architectures (10 x major + minor) for a device: its own; else the newest
    /// of its generation, whose machine code it runs; else PTX of the newest below it.
    fn choose(known: &[i32], device: Capability) -> Option<Target> {
        let Capability(major, minor) = device;
        let own = 10 * major + minor;
        let newest = |found: &dyn Fn(i32) -> bool| known.iter().copied().filter(|&a| a <= own && found(a)).max();
        if device.has_wgmma() && known.contains(&own) {
            return Some(Target { name: "sm_90a".into() });
        }
        newest(&|a| a / 10 == major)
            .map(|a| format!("sm_{a}"))
            .or_else(|| newest(&|_| true).map(|a| format!("compute_{a}")))
            .map(|name| Target { name })
    }
    pub(super) fn is_machine_code(&self) -> bool {
        self.name.starts_with("sm_")
    }
}

/// A compiled program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// A cubin, or PTX ending in a zero byte.
    pub image: Vec<u8>,
    /// What the compiler said: warnings, and the resources of each kernel.
    pub log: String,
    /// The architecture, for example `sm_90a`.
    pub target: String,
}

impl Compiled {
    /// The lines of the log that warn.
    pub fn warnings(&self) -> Vec<&str> {
        self.log.lines().filter(|l| l.to_ascii_lowercase().contains("warning")).collect()
    }
    /// What each kernel uses; empty for PTX, whose registers the driver assigns.
    pub fn resources(&self) -> Vec<Resources> {
        Resources::parse(&self.log)
    }
}

/// What a kernel takes from a multiprocessor, as ptxas reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resources {
    /// Kernel name.
    pub kernel: String,
    /// Registers a thread.
    pub registers: u32,
    /// Static shared memory a block, bytes.
    pub shared_bytes: u32,
    /// Local memory a thread, bytes: arrays indexed at run time, and spills.
    pub stack_bytes: u32,
    /// Registers that did not fit: bytes stored and loaded.
    pub spill_bytes: u32,
}

impl Resources {
    fn parse(log: &str) -> Vec<Resources> {
        // The number before `unit`, as in "0 bytes stack frame, 8 bytes spill stores".
        let before = |line: &str, unit: &str| -> u32 {
            let number = line.find(unit).and_then(|i| line[..i].split_whitespace().next_back());
            number.and_then(|n| n.parse().ok()).unwrap_or(0)
        };
        let mut all: Vec<Resources> = Vec::new();
        for line in log.lines() {
            if let Some((_, rest)) = line.split_once("Compiling entry function '") {
                let kernel = rest.split('\'').next().unwrap_or_default().to_string();
                all.push(Resources { kernel, ..Resources::default() });
            } else if let Some(last) = all.last_mut() {
                if line.contains("bytes stack frame") {
                    last.stack_bytes += before(line, " bytes stack frame");
                    last.spill_bytes += before(line, " bytes spill stores") + before(line, " bytes spill loads");
                } else if line.contains(" registers") {
                    last.registers = before(line, " registers");
                    last.shared_bytes = before(line, " bytes smem");
                }
            }
        }
        all
    }
}

/// A compiler that was found.
#[derive(Debug, Clone)]
pub struct Compiler(Kind);

#[derive(Debug, Clone)]
enum Kind {
    Nvrtc(Nvrtc),
    Nvcc { path: PathBuf, version: Version, known: Vec<i32> },
}

impl Compiler {
    /// NVRTC from SEZM_NVRTC, the loader's path, a CUDA installation or a Python environment, else nvcc; with a
    /// `driver`, the first whose images it loads (an image of a newer major version is refused).
    ///
    /// Errors: `NoCompiler`, `CompilerTooNew`.
    pub fn find(driver: Option<Version>) -> Result<Compiler> {
        let suits = |version: Version| driver.is_none_or(|d| version.0 <= d.0);
        let mut too_new = None;
        let (found, reason) = Nvrtc::candidates();
        for nvrtc in found {
            if suits(nvrtc.version) {
                return Ok(Compiler(Kind::Nvrtc(nvrtc)));
            }
            too_new.get_or_insert(Compiler(Kind::Nvrtc(nvrtc)));
        }
        if let Some(nvcc) = Self::nvcc() {
            if suits(nvcc.version()) {
                return Ok(nvcc);
            }
            too_new.get_or_insert(nvcc);
        }
        match (too_new, driver) {
            (Some(compiler), Some(driver)) => Err(CudaError::CompilerTooNew { compiler: compiler.describe(), driver }),
            _ => Err(CudaError::NoCompiler { reason }),
        }
    }
    /// nvcc from SEZM_NVCC, the path or a CUDA installation.
    pub fn nvcc() -> Option<Compiler> {
        let named = std::env::var_os("SEZM_NVCC").map(PathBuf::from);
        let on_path = std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
            .map(|d| d.join("nvcc"))
            .collect::<Vec<_>>();
        let installed = super::nvrtc::toolkit_roots().into_iter().map(|r| r.join("bin/nvcc"));
        let path = named.into_iter().chain(on_path).chain(installed).find(|p| p.is_file())?;
        let version = parse_release(&output(Command::new(&path).arg("--version"))?)?;
        let known = output(Command::new(&path).arg("--list-gpu-code"))?
            .lines()
            .filter_map(|l| l.trim().strip_prefix("sm_")?.parse().ok())
            .collect();
        Some(Compiler(Kind::Nvcc { path, version, known }))
    }
    /// Its CUDA version.
    pub fn version(&self) -> Version {
        match &self.0 {
            Kind::Nvrtc(n) => n.version,
            Kind::Nvcc { version, .. } => *version,
        }
    }
    /// For messages: kind, version and path.
    pub fn describe(&self) -> String {
        match &self.0 {
            Kind::Nvrtc(n) => format!("NVRTC {} ({})", n.version, n.path),
            Kind::Nvcc { path, version, .. } => format!("nvcc {version} ({})", path.display()),
        }
    }
    /// Compiles a program for a device. Errors: `NoImage` when this compiler knows no architecture for it,
    /// `Compile` with the log.
    pub fn compile(&self, program: &Program, device: Capability) -> Result<Compiled> {
        let known = match &self.0 {
            Kind::Nvrtc(n) => &n.known,
            Kind::Nvcc { known, .. } => known,
        };
        let target = Target::choose(known, device).ok_or_else(|| CudaError::NoImage {
            program: program.name().into(),
            device: device.to_string(),
            reason: format!("{} knows no architecture for it; use another CUDA version", self.describe()),
        })?;
        let mut options = program.options();
        options.push("--ptxas-options=-v".into());
        let outcome = match &self.0 {
            Kind::Nvrtc(n) => n.compile(program, &target, &options),
            Kind::Nvcc { path, .. } => compile_by_nvcc(path, program, &target, &options),
        };
        match outcome {
            Ok((image, log)) => Ok(Compiled { image, log, target: target.name }),
            Err(log) => Err(CudaError::Compile {
                program: program.name().into(),
                compiler: self.describe(),
                target: target.name,
                log,
            }),
        }
    }
}

fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|o| o.status.success())?;
    String::from_utf8(output.stdout).ok()
}

/// The version in `nvcc --version`: "... release 13.0, V13.0.88".
fn parse_release(text: &str) -> Option<Version> {
    let (major, minor) = text.split("release ").nth(1)?.split(',').next()?.trim().split_once('.')?;
    Some(Version(major.parse().ok()?, minor.parse().ok()?))
}

/// A folder that goes when this does.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> std::io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("sezm-nvcc-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path)?;
        Ok(Scratch(path))
    }
    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0); // a left-over in the temporary folder harms nobody
    }
}

/// (image, log), or the log.
fn compile_by_nvcc(
    nvcc: &Path,
    program: &Program,
    target: &Target,
    options: &[String],
) -> std::result::Result<(Vec<u8>, String), String> {
    let run = || -> std::io::Result<std::result::Result<(Vec<u8>, String), String>> {
        let scratch = Scratch::new()?;
        for (name, text) in HEADERS {
            std::fs::write(scratch.file(name), text)?;
        }
        let source = scratch.file(&format!("{}.cu", program.name()));
        std::fs::write(&source, program.text())?;
        let out = scratch.file("image");
        let kind = if target.is_machine_code() { "-cubin" } else { "-ptx" };
        let output = Command::new(nvcc)
            .args([kind, "-arch", &target.name])
            .args(options)
            .arg("-o")
            .arg(&out)
            .arg(&source)
            .output()?;
        let log = [output.stdout, output.stderr].map(|b| String::from_utf8_lossy(&b).into_owned()).concat();
        if !output.status.success() {
            return Ok(Err(log));
        }
        let mut image = std::fs::read(&out)?;
        if !target.is_machine_code() {
            image.push(0);
        }
        Ok(Ok((image, log)))
    };
    run().unwrap_or_else(|e| Err(format!("{}: {e}", nvcc.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(known: &[i32], device: Capability) -> Option<String> {
        Target::choose(known, device).map(|t| t.name)
    }

    #[test]
    fn targets() {
        let known = [75, 80, 86, 89, 90, 100, 120];
        assert_eq!(target(&known, Capability(9, 0)).as_deref(), Some("sm_90a"));
        assert_eq!(target(&known, Capability(8, 0)).as_deref(), Some("sm_80"));
        // Machine code runs on later devices of its generation only, PTX on all later ones.
        assert_eq!(target(&known, Capability(8, 7)).as_deref(), Some("sm_86"));
        assert_eq!(target(&known, Capability(10, 3)).as_deref(), Some("sm_100"));
        assert_eq!(target(&known, Capability(11, 0)).as_deref(), Some("compute_100"));
        assert_eq!(target(&[80, 86], Capability(9, 0)).as_deref(), Some("compute_86"));
        assert_eq!(target(&known, Capability(7, 0)), None);
    }

    #[test]
    fn capabilities_read_and_write() {
        assert_eq!("sm_90a".parse(), Ok(Capability(9, 0)));
        assert_eq!("120".parse(), Ok(Capability(12, 0)));
        assert_eq!(Capability(8, 6).to_string(), "sm_86");
        assert!("hopper".parse::<Capability>().is_err());
    }

    #[test]
    fn resources_from_the_log_of_ptxas() {
        let log = "ptxas info    : 12 bytes gmem, 24 bytes cmem[4]\n\
                   ptxas info    : Compiling entry function 'a' for 'sm_80'\n\
                   ptxas info    : Function properties for a\n\
                   ptxas         .     8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads\n\
                   ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, 3888 bytes smem\n\
                   ptxas info    : Compiling entry function 'b' for 'sm_80'\n\
                   \x20   0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                   ptxas info    : Used 17 registers\n";
        let b = Resources { kernel: "b".into(), registers: 17, ..Resources::default() };
        let a = Resources { kernel: "a".into(), registers: 40, shared_bytes: 3888, stack_bytes: 8, spill_bytes: 16 };
        assert_eq!(Resources::parse(log), [a, b]);
    }

    #[test]
    fn nvcc_release() {
        let text = "Cuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0.r13.0";
        assert_eq!(parse_release(text), Some(Version(13, 0)));
        assert_eq!(parse_release("something else"), None);
    }
}
